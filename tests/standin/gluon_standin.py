"""Runs a generated Gluon module on a CPU: a stand-in for the part of the language that the kernels use.

Layouts of registers are ignored, for they change no value; shared memory keeps the order of elements that the layouts of TMA
and matrix operands give it, the swizzle apart, which all of them share. The partitions of a warp-specialized kernel are threads
that meet at real barriers, so a stage that is overwritten too early, or a barrier that nobody completes, shows.
Programs run one after another in a given order. Loads through pointers are bounds-checked, and may be refused element by
element (`Memory.forbidden`).
"""

import itertools
import operator
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

WAIT_SECONDS = 20  # for a barrier, before the kernel counts as hung
DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
    "int1": torch.bool, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip


class Hang(Exception):
    """A barrier was not completed in time."""


class Memory:
    """A tensor in global memory, as flat storage. `forbidden`: indices whose load or store raises."""

    def __init__(self, tensor: torch.Tensor):
        self.data = tensor.view(-1)
        self.forbidden = torch.zeros(self.data.numel(), dtype=torch.bool)


class Tensor:
    """A value of a kernel: a torch tensor, or a pointer where `memory` is set and `data` are indices into it."""

    def __init__(self, data: torch.Tensor, memory: Memory | None = None):
        self.data = data
        self.memory = memory
        self.shape = list(data.shape)
        element = None if memory is None else memory.data.dtype
        self.dtype = SimpleNamespace(element_ty=element) if memory else data.dtype
        self.type = SimpleNamespace(layout=None)

    def to(self, dtype):
        return Tensor(self.data.to(dtype))

    def __getitem__(self, index):
        return Tensor(self.data[index], self.memory)

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)

    def __invert__(self):
        return Tensor(~self.data)

    def __neg__(self):
        return Tensor(-self.data)


def raw(value):
    """A torch tensor, or the number, of any operand."""
    return value.data if isinstance(value, Tensor) else value


def _as_tensor(value):
    """An operand as a torch tensor; a Python number becomes int32 or float32, as in the language."""
    value = raw(value)
    if isinstance(value, torch.Tensor):
        return value
    kind = torch.bool if isinstance(value, bool) else torch.int32 if isinstance(value, int) else torch.float32
    return torch.tensor(value, dtype=kind)


def _divide(a, b):
    return torch.div(a, b, rounding_mode="trunc")  # as the hardware: towards zero


def _binary(function, reverse=False):
    def method(self, other):
        a, b = (other, self) if reverse else (self, other)
        memory = self.memory or (other.memory if isinstance(other, Tensor) else None)
        return Tensor(function(_as_tensor(a), _as_tensor(b)), memory)

    return method


for _name, _function in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": _divide, "mod": torch.fmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
    "ne": operator.ne, "rshift": operator.rshift,
}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", _binary(_function))
    if _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or"):
        setattr(Tensor, f"__r{_name}__", _binary(_function, reverse=True))


class Barrier:
    """An mbarrier: a phase completes when `count` arrived and the expected bytes came."""

    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0
        self.condition = threading.Condition()

    def init(self, count):
        self.count = self.pending = count

    def change(self, arrivals=0, expected=0, came=0):
        with self.condition:
            self.pending -= arrivals
            self.bytes += expected - came
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.condition.notify_all()

    def wait(self, parity):
        """Returns once the phase of this parity is complete."""
        with self.condition:
            if not self.condition.wait_for(lambda: self.phase != int(parity), WAIT_SECONDS):
                raise Hang(f"a barrier waited {WAIT_SECONDS} seconds")


class Shared:
    """A piece of shared memory of `shape`; the last `rank` dimensions are a tile in panels of 64 elements."""

    def __init__(self, data, shape, rank):
        self.data, self.shape, self.rank, self.dtype = data, list(shape), rank, data.dtype
        self.order = None

    def index(self, i):
        size = self.data.numel() // self.shape[0]
        assert 0 <= int(i) < self.shape[0], "index outside shared memory"
        return Shared(self.data[int(i) * size : (int(i) + 1) * size], self.shape[1:], self.rank)

    def _reinterpret(self, dtype, shape, layout):
        assert dtype == self.dtype and torch.Size(shape).numel() == self.data.numel()
        return Shared(self.data, shape, layout.rank)

    def permute(self, order):
        other = Shared(self.data, self.shape, self.rank)
        other.order = order
        return other

    def _panels(self):
        assert len(self.shape) == self.rank, "a tile of the layout's own rank"
        rows, columns = torch.Size(self.shape[:-1]).numel(), self.shape[-1]
        return self.data.view(columns // 64, rows, 64), rows, columns

    def load(self, layout):
        if self.rank == 1:
            return Tensor(self.data.clone())
        panels, rows, columns = self._panels()
        value = panels.permute(1, 0, 2).reshape(self.shape).clone()
        return Tensor(value if self.order is None else value.permute(self.order))

    def store(self, value):
        self.data.copy_(raw(value))

    def fill(self, box):
        panels, rows, columns = self._panels()
        panels.copy_(box.reshape(rows, columns // 64, 64).permute(1, 0, 2))


class TensorMap:
    """A tensor [pages, page_size, heads, dim] as TMA sees it, in boxes; `forbidden` pages raise."""

    def __init__(self, tensor, box):
        self.tensor, self.box, self.dtype, self.forbidden = tensor, box, tensor.dtype, set()

    def read(self, corner):
        assert int(corner[0]) not in self.forbidden, f"page {int(corner[0])} was read"
        out = torch.zeros(self.box, dtype=self.dtype)
        inside, place = [], []
        for start, size, extent in zip(map(int, corner), self.box, self.tensor.shape):
            low, high = max(start, 0), min(start + size, extent)
            if low >= high:
                return out
            inside.append(slice(low, high))
            place.append(slice(low - start, high - start))
        out[tuple(place)] = self.tensor[tuple(inside)]
        return out


def _load(pointer, mask=None, other=None, cache_modifier=""):
    data, memory = pointer.data, pointer.memory
    there = torch.ones_like(data, dtype=torch.bool) if mask is None else _as_tensor(mask).expand(data.shape)
    index = data[there].long()
    assert not memory.forbidden[index].any(), "a load of what must not be read"
    assert ((index >= 0) & (index < memory.data.numel())).all(), "a load outside the tensor"
    value = torch.zeros(data.shape, dtype=memory.data.dtype)
    if other is not None:
        value.fill_(other)
    value[there] = memory.data[index]
    return Tensor(value)


def _store(pointer, value, mask=None):
    data, memory = pointer.data, pointer.memory
    there = torch.ones_like(data, dtype=torch.bool) if mask is None else _as_tensor(mask).expand(data.shape)
    index = data[there].long()
    assert ((index >= 0) & (index < memory.data.numel())).all(), "a store outside the tensor"
    memory.data[index] = _as_tensor(value).expand(data.shape)[there].to(memory.data.dtype)


def _atomic_add(pointer, value, sem, scope):
    assert (sem, scope) == ("acq_rel", "gpu")
    old = pointer.memory.data[int(pointer.data)].clone()
    pointer.memory.data[int(pointer.data)] += value
    return Tensor(old)


def _where(condition, a, b):
    a, b = _as_tensor(a), _as_tensor(b)
    return Tensor(torch.where(_as_tensor(condition), a, b))


def _allocate(dtype, shape, layout):
    if layout.kind == "barriers":
        return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
    data = torch.zeros(torch.Size(shape).numel(), dtype=dtype)
    if dtype.is_floating_point:
        data.fill_(float("nan"))  # what was never written must not count
    return Shared(data, shape, layout.rank)


def _asm(text, constraints, arguments, dtype, is_pure, pack):
    assert text == "and.b32 $0, $1, $2;", f"no stand-in for {text}"
    bits, values = map(_as_tensor, arguments)
    return Tensor((bits & values.view(torch.int16)).view(dtype))


def _layout(rank=1, kind="registers", **_):
    return SimpleNamespace(rank=rank, kind=kind)


class Launch:
    """One launch of a module's kernel: `run(order)` runs its programs one after another."""

    def __init__(self, source: Path | str, symbol: str, num_warps: int, programs: int):
        self.num_warps, self.programs = num_warps, programs
        self.program = 0
        self.errors: list[BaseException] = []
        text = source.read_text() if isinstance(source, Path) else source
        # The imports of a generated module are the language; here its names are given.
        lines = itertools.dropwhile(lambda line: "constexpr = " not in line, text.split("\n"))
        space = self._language() | {"__name__": symbol}
        exec(compile("\n".join(lines), f"<{symbol}>", "exec"), space)
        self.kernel = space[symbol]

    def run(self, arguments, order=None):
        for self.program in order or range(self.programs):
            self.kernel(*arguments)
            if self.errors:
                raise self.errors[0]

    def _partitions(self, functions, warps, registers):
        threads = [threading.Thread(target=self._guarded, args=each, daemon=True) for each in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guarded(self, function, arguments):
        try:
            function(*arguments)
        except BaseException as error:  # handed to the caller's thread
            self.errors.append(error)

    def _language(self):
        i32 = torch.int32
        gl = SimpleNamespace(
            constexpr=lambda value: value,
            program_id=lambda axis: Tensor(torch.tensor(self.program, dtype=i32)),
            num_programs=lambda axis: Tensor(torch.tensor(self.programs, dtype=i32)),
            num_warps=lambda: self.num_warps,
            arange=lambda start, end, layout: Tensor(torch.arange(start, end, dtype=i32)),
            zeros=lambda shape, dtype, layout: Tensor(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, layout: Tensor(_as_tensor(value).to(dtype).expand(shape).clone()),
            load=_load, store=_store, atomic_add=_atomic_add, where=_where, barrier=lambda: None,
            maximum=lambda a, b: Tensor(torch.maximum(*torch.broadcast_tensors(_as_tensor(a), _as_tensor(b)))),
            minimum=lambda a, b: Tensor(torch.minimum(*torch.broadcast_tensors(_as_tensor(a), _as_tensor(b)))),
            max=lambda x, axis: Tensor(x.data.amax(axis)),
            min=lambda x, axis: Tensor(x.data.amin(axis)),
            sum=lambda x, axis: Tensor(x.data.sum(axis, dtype=x.data.dtype)),
            cdiv=lambda a, b: (a + b - 1) // b,
            exp2=lambda x: Tensor(torch.exp2(x.data)), log2=lambda x: Tensor(torch.log2(x.data)),
            reshape=lambda x, shape: Tensor(x.data.reshape(shape)),
            broadcast=lambda a, b: tuple(map(Tensor, torch.broadcast_tensors(a.data, b.data))),
            convert_layout=lambda x, layout: x,
            associative_scan=lambda x, axis, combine: Tensor(x.data.cumsum(axis).to(x.data.dtype)),
            static_range=range, inline_asm_elementwise=_asm, allocate_shared_memory=_allocate,
            warp_specialize=self._partitions,
            NVMMASharedLayout=lambda swizzle, bits, rank: _layout(rank, "tile"),
            SwizzledSharedLayout=lambda *_: _layout(),
            **{name: lambda *_: _layout() for name in ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout")},
            **DTYPES,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: _layout(kind="barriers"),
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, phase: barrier.wait(raw(phase)),
            arrive=lambda barrier: barrier.change(arrivals=1),
            expect=lambda barrier, size: barrier.change(arrivals=1, expected=size),
        )

        def copy(tensor_map, corner, barrier, piece):
            box = tensor_map.read(corner)
            piece.fill(box)
            barrier.change(came=box.numel() * box.element_size())

        def release(barrier, increment_count):
            assert increment_count is False
            barrier.change(arrivals=32 * self.num_warps)

        def mma(a, b, acc):
            return Tensor(torch.matmul(a.data.float(), b.data.float()) + acc.data)

        return {
            "gl": gl,
            "tl": gl,
            "gluon": SimpleNamespace(jit=lambda function=None, **_: function or (lambda f: f)),
            "mbarrier": mbarrier,
            "async_copy": SimpleNamespace(mbarrier_arrive=release),
            "tma": SimpleNamespace(async_copy_global_to_shared=copy),
            "fence_async_shared": lambda: None,
            "mma_v2": mma,
        }
