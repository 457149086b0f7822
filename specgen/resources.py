"""What a compiled kernel uses, read from the binary itself, and the budget that a build holds it to.

NVIDIA: `cuobjdump` (shipped with Triton) lists registers and stack; where there is a stack, the machine code
says what is spilled and where. AMD: the code object's own metadata note lists registers, spills and scratch;
the assembly listing says where. Runs that one tool on a temporary file; touches nothing else.
"""

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from specgen import loops
from specgen.binary import Binary, CompileJob
from specgen.errors import BuildError
from specgen.toolchain import nvidia_tool

_TENSOR_MEMORY_COLUMNS = 512  # per multiprocessor of compute capability 10.0: PTX ISA, "Tensor Memory"


@dataclass(frozen=True)
class ArchLimits:
    """What one multiprocessor (compute unit) of an architecture holds. Memory in bytes, registers of 32 bits.

    Registers are per scheduler (SIMD) and are allocated to a warp (wavefront) in units of `register_unit`.
    """

    warp_size: int
    schedulers: int
    registers: int
    register_unit: int
    warps: int
    blocks: int
    shared: int
    shared_unit: int
    shared_reserved: int = 0  # taken by the system from every block
    lone_warp_blocks: int = 0  # block slots for blocks of one warp, where these are not counted like others


def _nvidia(warps: int, blocks: int, shared_kib: int) -> ArchLimits:
    return ArchLimits(32, 4, 16384, 256, warps, blocks, shared_kib << 10, 128, 1024)


def _amd(shared_kib: int, shared_unit: int) -> ArchLimits:
    return ArchLimits(64, 4, 512 * 64, 8 * 64, 32, 16, shared_kib << 10, shared_unit, lone_warp_blocks=32)


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (resident warps and
# blocks, shared memory and registers per multiprocessor) and the occupancy calculator (allocation units).
# AMD: the CDNA 2, 3 and 4 ISA guides (512 vector registers a lane in units of 8, 8 wavefronts a SIMD, 4
# SIMDs, LDS) and LLVM's AMDGPUBaseInfo (LDS units, 16 workgroups).
ARCH_LIMITS: dict[str, ArchLimits] = {
    "sm_80": _nvidia(warps=64, blocks=32, shared_kib=164),
    "sm_89": _nvidia(warps=48, blocks=24, shared_kib=100),
    "sm_90": _nvidia(warps=64, blocks=32, shared_kib=228),
    "sm_100": _nvidia(warps=64, blocks=32, shared_kib=228),
    "sm_120": _nvidia(warps=48, blocks=24, shared_kib=100),
    "gfx90a": _amd(shared_kib=64, shared_unit=512),
    "gfx942": _amd(shared_kib=64, shared_unit=512),
    "gfx950": _amd(shared_kib=160, shared_unit=1280),
}


@dataclass(frozen=True)
class Usage:
    """Registers and stack bytes per thread, spills as `Binary` defines them."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    main_loop_spills: int
    scalar_spills: int = 0


def read_cubin(data: bytes, function: str, listing: str | None = None) -> Usage:
    """Usage of `function` in an NVIDIA binary, with its `machine_code` if that is known. BuildError if the tools cannot read it."""
    printed = _printed("-res-usage", data)
    found = re.search(rf"Function {re.escape(function)}:\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed)
    if not found:
        raise BuildError(f"cuobjdump -res-usage does not list {function}: {printed.strip()[:200]!r}")
    registers, stack, local = map(int, found.groups())
    if stack + local == 0:  # nothing can be spilled, and disassembling takes most of a second
        return Usage(registers, 0, 0, 0)
    instructions = loops.parse_sass(machine_code(data) if listing is None else listing)
    if not instructions:
        raise BuildError(f"cuobjdump -sass lists no instructions of {function}")
    return Usage(
        registers,
        stack + local,
        loops.spill_bytes(instructions),
        loops.main_loop_spill_bytes(instructions),
    )


def machine_code(data: bytes) -> str:
    """The listing of an NVIDIA binary's instructions. BuildError if the tools cannot read it."""
    return _printed("-sass", data)


def read_hsaco(data: bytes, function: str, listing: str) -> Usage:
    """Usage of `function` in an AMD code object, with its assembly `listing`. BuildError if its metadata
    cannot be read.
    """
    try:
        kernels = _amd_metadata(data)["amdhsa.kernels"]
        (kernel,) = (k for k in kernels if k[".name"] == function)
        stack = kernel[".private_segment_fixed_size"]
        instructions = loops.parse_amdgcn(listing) if stack else []
        return Usage(
            kernel[".vgpr_count"],
            stack,
            loops.spill_bytes(instructions),
            loops.main_loop_spill_bytes(instructions),
            kernel[".sgpr_spill_count"],
        )
    except (KeyError, ValueError, TypeError, IndexError, struct.error, RecursionError) as error:
        raise BuildError(
            f"the metadata of the code object of {function} cannot be read: {error!r}"
        ) from error


def occupancy(
    arch: str, *, num_threads: int, registers: int, shared_bytes: int, tensor_memory_columns: int = 0
) -> int:
    """Blocks that one multiprocessor holds at once, bounded by registers, shared and tensor memory, warps and
    block slots.

    `registers` per thread, the others per block. 0 means that not even one block fits. The rule is that of
    NVIDIA's occupancy calculator, per scheduler; AMD's differs in numbers only. Sources of the numbers: see
    ARCH_LIMITS.
    """
    limits = ARCH_LIMITS[arch]
    warps = -(-num_threads // limits.warp_size)
    per_warp = _round_up(max(1, registers) * limits.warp_size, limits.register_unit)
    resident_warps = min(limits.schedulers * (limits.registers // per_warp), limits.warps)
    blocks = limits.lone_warp_blocks or limits.blocks if warps == 1 else limits.blocks
    shared = _round_up(shared_bytes + limits.shared_reserved, limits.shared_unit)
    return min(
        blocks,
        resident_warps // warps,
        limits.shared // shared if shared else blocks,
        _TENSOR_MEMORY_COLUMNS // tensor_memory_columns if tensor_memory_columns else blocks,
    )


def budget_problems(job: CompileJob, binary: Binary) -> list[str]:
    """Why `binary` may not ship, one text a reason. Spills outside the main loops are allowed."""
    problems = []
    if binary.shared_bytes > job.shared_limit:
        problems.append(shared_message(job, binary.shared_bytes))
    if binary.main_loop_spills:
        problems.append(
            f"spills registers in a main loop: {binary.main_loop_spills} bytes moved per thread and pass "
            f"({binary.registers} registers, {binary.num_threads} threads); 0 are allowed"
        )
    if binary.tensor_memory_columns > _TENSOR_MEMORY_COLUMNS:
        columns = binary.tensor_memory_columns
        problems.append(f"needs {columns} columns of tensor memory, {_TENSOR_MEMORY_COLUMNS} are available")
    if binary.scratch_bytes:
        problems.append(f"needs {binary.scratch_bytes} bytes of global scratch, and the launcher gives none")
    if binary.occupancy < 1 and binary.shared_bytes <= job.shared_limit:
        problems.append(f"{binary.num_threads} threads of {binary.registers} registers do not fit a multiprocessor")
    return problems


def shared_message(job: CompileJob, needed: int) -> str:
    """The reason for a kernel which needs `needed` bytes of shared memory per block."""
    return f"needs {needed} bytes of shared memory per block, {job.shared_limit} are available on {', '.join(job.targets) or job.arch}"


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _printed(option: str, data: bytes) -> str:
    """What cuobjdump prints of a binary."""
    tool = nvidia_tool("cuobjdump")
    with tempfile.TemporaryDirectory(prefix="specgen-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(data)
        # It calls nvdisasm, which lies beside it: its own folder must be on PATH.
        done = subprocess.run(
            [tool, option, path.name],
            cwd=folder,
            env={"PATH": f"{tool.parent}:/usr/bin:/bin", "TMPDIR": folder},
            capture_output=True,
            text=True,
            errors="replace",
        )
    if done.returncode:
        raise BuildError(f"cuobjdump {option} failed: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout


def _amd_metadata(data: bytes) -> dict:
    """The map in the ELF note of an AMD code object (version 3 and later), in MessagePack."""
    if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    for section in range(count):
        kind, _, _, offset, length = struct.unpack_from("<IQQQQ", data, table + section * size + 4)
        end = offset + length
        while kind == 7 and offset + 12 <= end:  # 7: a note section
            name_size, value_size, note = struct.unpack_from("<III", data, offset)
            name = data[offset + 12 : offset + 12 + name_size]
            start = offset + 12 + _round_up(name_size, 4)
            if name.rstrip(b"\0") == b"AMDGPU" and note == 32:  # 32: NT_AMDGPU_METADATA
                return _unpack(data[start : start + value_size], 0)[0]
            offset = start + _round_up(value_size, 4)
    raise ValueError("no AMDGPU metadata note")


def _unpack(data: bytes, at: int) -> tuple:
    """One MessagePack value at `at`, and where the next begins."""
    kind = data[at]
    at += 1
    if kind < 0x80:
        return kind, at
    if kind >= 0xE0:
        return kind - 0x100, at
    if kind < 0x90:
        return _unpack_map(data, at, kind & 0x0F)
    if kind < 0xA0:
        return _unpack_list(data, at, kind & 0x0F)
    if kind < 0xC0:
        return data[at : at + (kind & 0x1F)].decode(), at + (kind & 0x1F)
    if kind in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at
    formats = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
    formats |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if kind in formats:
        return struct.unpack_from(formats[kind], data, at)[0], at + struct.calcsize(formats[kind])
    lengths = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
    lengths |= {0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}
    (length,) = struct.unpack_from(lengths[kind], data, at)
    at += struct.calcsize(lengths[kind])
    if kind in (0xDC, 0xDD):
        return _unpack_list(data, at, length)
    if kind in (0xDE, 0xDF):
        return _unpack_map(data, at, length)
    value = data[at : at + length]
    return (value.decode() if kind >= 0xD9 else value), at + length


def _unpack_list(data: bytes, at: int, length: int) -> tuple[list, int]:
    values = []
    for _ in range(length):
        value, at = _unpack(data, at)
        values.append(value)
    return values, at


def _unpack_map(data: bytes, at: int, length: int) -> tuple[dict, int]:
    values = {}
    for _ in range(length):
        key, at = _unpack(data, at)
        values[key], at = _unpack(data, at)
    return values, at
