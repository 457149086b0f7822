"""A job for the ahead-of-time compiler, and the binary that it makes, with facts. Frozen data; imports nothing."""

from dataclasses import asdict, dataclass
from hashlib import sha256


@dataclass(frozen=True)
class CompileJob:
    """One kernel for one architecture.

    `source` is the text of a module that defines the `@triton.jit` function `symbol`; `signature` its
    arguments in order as (name, Triton type), such as ("q_ptr", "*bf16"), ("num_seqs", "i32") or, where the
    function is Gluon's, ("k_map", "tensordesc<...>");
    `divisibility` promises (argument index, divisor). `parameters` are the bytes of each parameter that the
    launcher will pass, in order; empty: not checked. `options` are further compiler options of the vendor,
    such as ("waves_per_eu", 2) or ("maxnreg", 128); those of ptx.REWRITINGS are not Triton's.
    `shared_limit` is the shared memory in bytes that one
    block may use on the smallest of the GPUs `targets` (ids, used in messages).
    """

    symbol: str
    arch: str
    source: str
    signature: tuple[tuple[str, str], ...]
    divisibility: tuple[tuple[int, int], ...] = ()
    parameters: tuple[int, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    options: tuple[tuple[str, int | str | bool], ...] = ()
    shared_limit: int = 0
    targets: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """How messages name the job: "SYMBOL for sm_90 (h200, h100_sxm)"."""
        return f"{self.symbol} for {self.arch}" + (f" ({', '.join(self.targets)})" if self.targets else "")


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and the facts read from it.

    Sizes are in bytes: `shared_bytes` per block (dynamic: what a launch asks for), `stack_bytes` per thread.
    `registers` per thread (AMD: vector registers, accumulation registers included). `spill_bytes` are the
    bytes that the spill stores of one thread write, as `ptxas -v` counts them: each store in the code once.
    `main_loop_spills` are the bytes that spill loads and stores move in one pass of a main loop (see
    `loops.main_loops`). `scalar_spills` are the scalar registers that AMD's compiler spilled (to lanes of
    vector registers, mostly). `occupancy` is how many blocks registers, shared memory and threads let one
    multiprocessor hold. `scratch_bytes` and `tensor_memory_columns` are what a launch would have to provide.
    """

    data: bytes
    extension: str  # "cubin" or "hsaco"
    function: str  # entry name inside the binary
    num_threads: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    main_loop_spills: int
    occupancy: int
    stack_bytes: int = 0
    scalar_spills: int = 0
    scratch_bytes: int = 0
    tensor_memory_columns: int = 0
    assembler: str = ""  # "ptxas 12.8.93", or "LLVM of Triton 3.7.1"

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of `data`."""
        return sha256(self.data).hexdigest()

    def facts(self) -> dict[str, int | str]:
        """Every field but `data`, as JSON values."""
        facts = asdict(self)
        del facts["data"]
        return facts


@dataclass(frozen=True)
class Refused:
    """A kernel that the compiler finds too large for the GPU, and why."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A kernel that does not compile, or whose compiler process died or took too long; the reason names the kernel."""

    reason: str
