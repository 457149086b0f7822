"""Runs a compiled kernel's PTX on the CPU: Gluon has no interpreter, and the kernels' protocols are worth a test without a GPU.

A model of the parts of sm_90 that warp-specialized kernels use: warps in units that run together (the partitions), shared
memory and barriers, tensor-map copies that arrive late and in any order, matrix products that read their operands as late as
the program allows. Units run in random turns, so that a missing wait shows. What is not modelled: time, caches, the memory
model of ordinary loads and stores, and what ptxas makes of the PTX. Arithmetic is numpy's, in float32.
"""

import importlib.util
import random
import re
import struct
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specgen.ptx import rewritten, taken

SHARED_BYTES = 232448
_FLOATS = {"f32": np.float32, "f64": np.float64}
_WIDTHS = {"pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
_VIEWS = {
    "s8": np.int8, "u8": np.uint8, "b8": np.uint8, "s16": np.int16, "u16": np.uint16, "b16": np.uint16, "s32": np.int32,
    "u32": np.uint32, "b32": np.uint32, "s64": np.int64, "u64": np.uint64, "b64": np.uint64, **_FLOATS,
    "f16": np.uint16, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "pred": np.bool_,
}  # fmt: skip


def compiled_ptx(source: str, variant) -> str:
    """PTX of a Gluon variant's module, compiled for sm_90 as a build compiles it."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    with tempfile.TemporaryDirectory() as folder, knobs.compilation.scope(), knobs.cache.scope():
        knobs.compilation.disable_line_info, knobs.cache.dir = True, folder
        path = Path(folder) / f"{variant.symbol}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(variant.symbol, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        attributes = {(index,): [["tt.divisibility", divisor]] for index, divisor in variant.divisibility}
        kernel = GluonASTSource(getattr(module, variant.symbol), dict(variant.signature), {}, attributes)
        options = {"num_warps": variant.config.num_warps, **dict(variant.compiler_options)}
        rewritings = taken(options)
        text = triton.compile(kernel, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        return rewritten(text, rewritings)


class Fault(AssertionError):
    """What the program does and no GPU would forgive: a deadlock, an access outside of every allocation."""


class Heap:
    """Global memory: allocations with room between them, so that an access outside is seen."""

    def __init__(self, size: int = 1 << 26):
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.owned = np.zeros(size, np.bool_)
        self.next = 4096

    def put(self, array: np.ndarray) -> int:
        """Copy an array in and return its address, a multiple of 256."""
        data = np.frombuffer(array.tobytes(), np.uint8)
        address = self.next
        self.bytes[address : address + len(data)] = data
        self.owned[address : address + len(data)] = True
        self.next = (address + len(data) + 4096 + 255) // 256 * 256
        return address

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        """What lies at an address now, in the shape and dtype of `like`."""
        return np.frombuffer(self.bytes[address : address + like.nbytes].tobytes(), like.dtype).reshape(like.shape)

    def check(self, addresses: np.ndarray, size: int) -> None:
        if len(addresses) and not (self.owned[addresses].all() and self.owned[addresses + size - 1].all()):
            bad = addresses[~self.owned[addresses]]
            raise Fault(f"global access of {size} bytes outside of every allocation: {[hex(int(a)) for a in bad[:4]]}")


@dataclass
class TensorMap:
    """A map as the driver would encode it: sizes and box from the fastest dimension on, strides in bytes, 128-byte swizzle."""

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # of all but the fastest
    box: tuple[int, ...]
    itemsize: int = 2

    @classmethod
    def of(cls, made, values: dict[str, int]) -> "TensorMap":
        """The map that a launch would make of a specgen TensorMap and of the call's arguments by name."""
        extents = tuple(values[size] if isinstance(size, str) else size for size in reversed(made.extents))
        strides = tuple(values[name] * cls.itemsize for name in reversed(made.strides))
        return cls(values[made.tensor], extents, strides, tuple(reversed(made.box)))


@dataclass
class Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending < 0:
            raise Fault("more arrivals at a barrier than it expects in one phase")
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


@dataclass
class Unit:
    """Warps that run together: of one partition, or of a group that does not wait for the others."""

    first: int
    lanes: int
    registers: list = field(default_factory=list)
    pc: int = 0
    done: bool = False
    mask: np.ndarray | None = None
    resume: list = field(default_factory=list)  # (pc, lanes that wait there)
    waiting: tuple | None = None
    open_group: list = field(default_factory=list)
    groups: deque = field(default_factory=deque)


class Block:
    """One CTA: its shared memory, barriers, copies under way and units."""

    def __init__(self, machine: "Machine", number: int, seed: int):
        self.machine, self.number = machine, number
        self.random = random.Random(seed)
        self.shared = np.full(SHARED_BYTES + 1024, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, list[int]] = {}
        self.copies: list = []
        self.units = []
        first = 0
        for warps in machine.partitions:
            unit = Unit(first * 32, warps * 32)
            unit.registers = [np.zeros(unit.lanes, kind) for kind in machine.program.kinds]
            self.units.append(unit)
            first += warps

    @property
    def done(self) -> bool:
        return all(unit.done for unit in self.units)

    def turn(self) -> bool:
        """Let one unit run for a while, or a copy arrive. False if nothing could happen."""
        if self.copies and self.random.random() < 0.3:
            self._arrive()
            return True
        order = [unit for unit in self.units if not unit.done]
        self.random.shuffle(order)
        for unit in order:
            if self._run(unit, self.random.choice((20, 200, 2000))):
                return True
        if self.copies:
            self._arrive()
            return True
        return self.done

    def _arrive(self) -> None:
        copy = self.copies.pop(self.random.randrange(len(self.copies)))
        copy()

    def _run(self, unit: Unit, budget: int) -> int:
        steps = self.machine.program.steps
        ran = 0
        while ran < budget and not unit.done:
            if unit.resume:
                self._reconverge(unit)
            if steps[unit.pc](self, unit):
                break
            ran += 1
        return ran

    def _reconverge(self, unit: Unit) -> None:
        for entry in [entry for entry in unit.resume if entry[0] == unit.pc]:
            unit.resume.remove(entry)
            unit.mask = unit.mask | entry[1]
        if unit.mask is not None and unit.mask.all():
            unit.mask = None


class Machine:
    """A grid of blocks of one kernel. `params`: an int or a TensorMap for each parameter; `partitions`: warps of each unit."""

    def __init__(self, ptx: str, heap: Heap, params: list, partitions: list[int], grid: int, seed: int = 0):
        self.program = _program(ptx)
        self.heap, self.params, self.partitions, self.grid = heap, params, partitions, grid
        self.random = random.Random(seed)
        self.copied: list[tuple[int, int, list[int]]] = []  # block, parameter of the map, coordinates of every copy as issued
        self.blocks = [Block(self, number, seed * 1000 + number) for number in range(grid)]

    def run(self) -> None:
        """Run the grid to its end; Fault if it cannot get there."""
        alive = list(self.blocks)
        with np.errstate(all="ignore"):  # lanes that are masked off, and bytes that do not count
            while alive:
                block = self.random.choice(alive)
                if not block.turn():
                    where = [(u.first // 32, self.program.texts[u.pc][:100]) for u in block.units if not u.done]
                    raise Fault(f"deadlock in block {block.number}: {where}")
                if block.done:
                    alive.remove(block)
                    if block.copies:
                        raise Fault(f"block {block.number} ended with {len(block.copies)} copies under way")


# ------------------------------------------------------------------------------------------------------------------ parsing


@dataclass
class Program:
    steps: list
    texts: list[str]
    kinds: list  # numpy type of every register


_cache: dict[str, Program] = {}


def _program(ptx: str) -> Program:
    if ptx not in _cache:
        _cache[ptx] = _Parser(ptx).program
    return _cache[ptx]


class _Parser:
    def __init__(self, ptx: str):
        text = re.sub(r"//[^\n]*", "", ptx)
        entry = text.index(".entry")
        header = text[entry : text.index(")", entry)]
        self.parameters = re.findall(r"(\w+_param_\d+)", header)
        body = text[text.index("{", text.index(")", entry)) + 1 : text.rindex("}")]
        self.registers: dict[str, int] = {}
        self.kinds: list = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self.scopes: list[dict[str, str]] = []
        self.numbers = 0
        statements = self._statements(body)
        steps = [self._step(*statement, pc) for pc, statement in enumerate(statements)]
        self.program = Program(steps, [text for text, _ in statements], self.kinds)

    def _statements(self, body: str) -> list[tuple[str, list[dict[str, str]]]]:
        """(text, its scopes); labels and declarations are taken out."""
        found = []
        at = 0
        while True:
            while at < len(body) and body[at].isspace():
                at += 1
            if at >= len(body):
                return found
            if body[at] == "{":
                self.scopes.append({})
                at += 1
            elif body[at] == "}":
                self.scopes.pop()
                at += 1
            elif label := re.match(r"([$\w]+):", body[at:]):
                self.labels[self._local(label[1], define=True)] = len(found)
                at += label.end()
                if branches := re.match(r"\s*\.branchtargets\s+([^;]*);", body[at:]):
                    self.tables[label[1]] = [name.strip() for name in branches[1].split(",")]
                    at += branches.end()
            else:
                end = body.index(";", at)
                text = " ".join(body[at:end].split())
                at = end + 1
                if text.startswith(".reg"):
                    self._declare(text)
                elif text and not text.startswith("."):
                    found.append((text, list(self.scopes)))

    def _local(self, name: str, define: bool = False) -> str:
        if define and self.scopes:
            self.numbers += 1
            self.scopes[-1][name] = f"{name}@{self.numbers}"
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _declare(self, text: str) -> None:
        _, kind, names = text.split(maxsplit=2)
        kind = _WIDTHS.get(kind[1:]) or _WIDTHS["b" + kind[2:]]
        for name in names.split(","):
            many = re.match(r"(%?\w+)<(\d+)>", name.strip())
            each = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]
            for register in (one if one.startswith("%") else self._local(one, define=True) for one in each):
                self.registers[register] = len(self.kinds)
                self.kinds.append(kind)

    def _step(self, text: str, scopes: list[dict[str, str]], pc: int):
        self.names = {name: local for scope in scopes for name, local in scope.items()}
        guard = re.match(r"@(!?)([%\w]+)\s+(.*)", text)
        opcode, _, rest = (guard[3] if guard else text).partition(" ")
        operands = _split(rest)
        name, *suffixes = opcode.split(".")
        make = getattr(self, f"_op_{name}", None)
        if make is None:
            raise NotImplementedError(text)
        if name in ("bra", "brx"):
            return make(suffixes, operands, pc, self._register(guard[2]) if guard else None, bool(guard and guard[1]))
        action = make(suffixes, operands)
        if guard is None:
            return _sequential(action)
        return _guarded(action, self._register(guard[2]), bool(guard[1]))

    # operands

    def _register(self, name: str) -> int:
        return self.registers[self.names.get(name, name)]

    def _is_register(self, operand: str) -> bool:
        return self.names.get(operand, operand) in self.registers

    def _read(self, operand: str, kind: str):
        """unit -> array of the operand seen as `kind`."""
        view = _VIEWS[kind]
        if self._is_register(operand):
            index = self._register(operand)
            if np.dtype(self.kinds[index]).itemsize == np.dtype(view).itemsize:
                return lambda block, unit: unit.registers[index].view(view)
            return lambda block, unit: unit.registers[index].astype(view)
        if operand == "%tid.x":
            return lambda block, unit: (np.arange(unit.lanes, dtype=np.uint32) + np.uint32(unit.first)).view(view)
        if operand in ("%ctaid.x", "%nctaid.x"):
            which = "number" if operand == "%ctaid.x" else None
            return lambda block, unit: np.full(unit.lanes, getattr(block, which) if which else block.machine.grid, np.uint32).view(view)
        if operand in self.parameters:
            number = self.parameters.index(operand)
            return lambda block, unit: np.full(unit.lanes, number, view)
        value = _immediate(operand, kind)
        return lambda block, unit: np.full(unit.lanes, value)

    def _address(self, operand: str):
        """unit -> int64 addresses of "[base+offset]"."""
        inner = operand.strip()[1:-1].strip()
        found = re.match(r"([%\w$]+)\s*(?:\+\s*(-?\d+))?$", inner)
        base, offset = found[1], int(found[2] or 0)
        if base == "global_smem":
            return lambda block, unit: np.full(unit.lanes, offset, np.int64)
        kind = "u64" if self._is_register(base) and self.kinds[self._register(base)] == np.uint64 else "s32"
        read = self._read(base, kind)
        return lambda block, unit: read(block, unit).astype(np.int64) + offset

    def _write(self, operand: str):
        """(block, unit, value): write lanes under the unit's mask; "_" discards."""
        if operand == "_":
            return lambda unit, value: None
        index = self._register(operand)
        kind = self.kinds[index]
        width = np.dtype(kind).itemsize

        def write(unit: Unit, value: np.ndarray) -> None:
            value = value.view(kind) if value.dtype.itemsize == width else value.astype(kind)
            if unit.mask is not None:
                value = np.where(unit.mask, value, unit.registers[index])
            unit.registers[index] = value

        return write

    def _map(self, operands: list[str], kinds: list[str], function):
        write = self._write(operands[0])
        reads = [self._read(operand, kind) for operand, kind in zip(operands[1:], kinds, strict=True)]

        def action(block, unit):
            write(unit, function(*(read(block, unit) for read in reads)))

        return action

    # control

    def _op_bra(self, suffixes, operands, pc, guard, negated):
        labels = self.labels
        label = self.names.get(operands[0], operands[0])

        def step(block, unit):
            target = labels[label]
            if guard is None:
                unit.pc = target
                return False
            taken = unit.registers[guard] ^ negated
            active = taken if unit.mask is None else taken[unit.mask]
            if active.all():
                unit.pc = target
            elif not active.any():
                unit.pc += 1
            else:  # lanes that jump ahead wait there
                if target <= unit.pc:
                    raise Fault(f"a backward branch that divides a unit: {self.program.texts[pc]}")
                leaving = taken if unit.mask is None else taken & unit.mask
                unit.mask = ~leaving if unit.mask is None else unit.mask & ~leaving
                unit.resume.append((target, leaving))
                unit.pc += 1
            return False

        return step

    def _op_brx(self, suffixes, operands, pc, guard, negated):
        read = self._read(operands[0], "u32")
        table, labels = operands[1], self.labels

        def step(block, unit):
            value = read(block, unit)
            if (value != value[0]).any():
                raise Fault("an indexed branch that divides a unit")
            unit.pc = labels[self.tables[table][int(value[0])]]
            return False

        return step

    def _op_ret(self, suffixes, operands):
        def action(block, unit):
            if unit.open_group or unit.groups:
                raise Fault("a unit ends with matrix products in flight")
            unit.done = True

        return action

    def _nothing(self, suffixes, operands):
        return lambda block, unit: None

    _op_setmaxnreg = _op_fence = _op_membar = _nothing

    # data movement

    def _op_mov(self, suffixes, operands):
        kind = suffixes[-1]
        target, source = operands
        if source.startswith("{"):
            parts = [self._read(part, "b16" if kind == "b32" else "b32") for part in _split(source[1:-1])]
            wide, bits = (np.uint32, 16) if kind == "b32" else (np.uint64, 32)
            write = self._write(target)
            return lambda b, u: write(u, parts[0](b, u).astype(wide) | parts[1](b, u).astype(wide) << wide(bits))
        if target.startswith("{"):
            writes = [self._write(part) for part in _split(target[1:-1])]
            read = self._read(source, kind)
            narrow, bits = (np.uint16, 16) if kind == "b32" else (np.uint32, 32)

            def action(block, unit):
                value = read(block, unit)
                writes[0](unit, value.astype(narrow))
                writes[1](unit, (value >> value.dtype.type(bits)).astype(narrow))

            return action
        return self._map(operands, [kind], lambda a: a)

    def _op_cvta(self, suffixes, operands):
        return self._map(operands, ["u64"], lambda a: a)

    def _op_ld(self, suffixes, operands):
        kind, count = suffixes[-1], int(next((s[1] for s in suffixes if s in ("v2", "v4")), 1))
        writes = [self._write(part) for part in _split(operands[0].strip("{} "))]
        if suffixes[0] == "param":
            name, offset = re.match(r"\[(\w+)(?:\+(\d+))?\]", operands[1]).groups()
            number = self.parameters.index(name)
            assert not offset
            return lambda b, u: writes[0](u, np.full(u.lanes, _bits(b.machine.params[number], kind)))
        address, view = self._address(operands[1]), np.dtype(_VIEWS[kind])

        def action(block, unit):
            where = address(block, unit)
            active = slice(None) if unit.mask is None else unit.mask
            memory = block.shared
            if suffixes[0] == "global":
                block.machine.heap.check(where[active], view.itemsize * count)
                memory = block.machine.heap.bytes
            for i, write in enumerate(writes):
                value = np.zeros(unit.lanes, view)
                value[active] = _gather(memory, where[active] + i * view.itemsize, view)
                write(unit, value)

        return action

    def _op_st(self, suffixes, operands):
        kind = suffixes[-1]
        address, view = self._address(operands[0]), np.dtype(_VIEWS[kind])
        reads = [self._read(part, kind) for part in _split(operands[1].strip("{} "))]

        def action(block, unit):
            where = address(block, unit)
            active = slice(None) if unit.mask is None else unit.mask
            memory = block.shared
            if suffixes[0] == "global":
                block.machine.heap.check(where[active], view.itemsize * len(reads))
                memory = block.machine.heap.bytes
            for i, read in enumerate(reads):
                _scatter(memory, where[active] + i * view.itemsize, read(block, unit)[active])

        return action

    def _op_atom(self, suffixes, operands):
        write, address, read = self._write(operands[0]), self._address(operands[1]), self._read(operands[2], "u32")

        def action(block, unit):
            where, value, old = address(block, unit), read(block, unit), np.zeros(unit.lanes, np.uint32)
            memory = block.machine.heap.bytes
            for lane in range(unit.lanes) if unit.mask is None else np.flatnonzero(unit.mask):
                block.machine.heap.check(where[lane : lane + 1], 4)
                old[lane] = _gather(memory, where[lane : lane + 1], np.dtype(np.uint32))[0]
                _scatter(memory, where[lane : lane + 1], old[lane : lane + 1] + value[lane])
            write(unit, old)

        return action

    def _op_ldmatrix(self, suffixes, operands):
        writes, address = [self._write(part) for part in _split(operands[0].strip("{} "))], self._address(operands[1])
        transposed = "trans" in suffixes

        def action(block, unit):
            where = address(block, unit).reshape(-1, 4, 8)[:, : len(writes)]  # [warps, matrices, rows]
            lanes = np.arange(32)
            for i, write in enumerate(writes):
                if transposed:
                    rows = where[:, i][:, (lanes % 4 * 2)[:, None] + [0, 1]] + (lanes // 4 * 2)[:, None]
                    pairs = _gather(block.shared, rows.reshape(-1), np.dtype(np.uint16))
                    write(unit, np.ascontiguousarray(pairs).view(np.uint32))
                else:
                    write(unit, _gather(block.shared, _matrix_words(where[:, i]), np.dtype(np.uint32)))

        return action

    def _op_stmatrix(self, suffixes, operands):
        address, reads = self._address(operands[0]), [self._read(part, "u32") for part in _split(operands[1].strip("{} "))]

        def action(block, unit):
            where = address(block, unit).reshape(-1, 4, 8)[:, : len(reads)]  # [warps, matrices, rows]
            for i, read in enumerate(reads):
                _scatter(block.shared, _matrix_words(where[:, i]), read(block, unit))

        return action

    def _op_selp(self, suffixes, operands):
        kind = suffixes[-1]
        return self._map(operands, [kind, kind, "pred"], lambda a, b, p: np.where(p, a, b))

    def _op_cvt(self, suffixes, operands):
        to, source = suffixes[-2:]
        if to in ("bf16x2", "f16x2"):
            narrow = _to_bf16 if to == "bf16x2" else _to_f16
            return self._map(operands, [source] * 2, lambda a, b: narrow(a).astype(np.uint32) << np.uint32(16) | narrow(b))
        if to in ("bf16", "f16"):
            return self._map(operands, [source], _to_bf16 if to == "bf16" else _to_f16)
        if source in ("bf16", "f16"):
            return self._map(operands, ["b16"], _from_bf16 if source == "bf16" else lambda a: a.view(np.float16).astype(np.float32))
        return self._map(operands, [source], lambda a: a.astype(_VIEWS[to]))

    # arithmetic

    def _arithmetic(self, suffixes, operands, function, count):
        kind = suffixes[-1]
        if kind == "bf16x2":
            raise NotImplementedError(kind)
        return self._map(operands, [kind] * count, function)

    def _op_add(self, s, o):
        return self._arithmetic(s, o, lambda a, b: a + b, 2)

    def _op_sub(self, s, o):
        return self._arithmetic(s, o, lambda a, b: a - b, 2)

    def _op_neg(self, s, o):
        return self._arithmetic(s, o, lambda a: -a, 1)

    def _op_abs(self, s, o):
        return self._arithmetic(s, o, np.abs, 1)

    def _op_min(self, s, o):
        return self._clamped(s, o, np.fmin)

    def _op_max(self, s, o):
        return self._clamped(s, o, np.fmax)

    def _clamped(self, s, o, function):
        if s[0] == "relu":
            return self._arithmetic(s[1:], o, lambda a, b: np.fmax(function(a, b), 0).astype(a.dtype), 2)
        return self._arithmetic(s, o, function, 2)

    def _op_fma(self, s, o):
        return self._arithmetic(s, o, lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype), 3)

    def _op_and(self, s, o):
        return self._arithmetic(s, o, lambda a, b: a & b, 2)

    def _op_or(self, s, o):
        return self._arithmetic(s, o, lambda a, b: a | b, 2)

    def _op_xor(self, s, o):
        return self._arithmetic(s, o, lambda a, b: a ^ b, 2)

    def _op_not(self, s, o):
        return self._arithmetic(s, o, lambda a: ~a, 1)

    def _op_popc(self, s, o):
        return self._map(o, ["u32"], lambda a: np.unpackbits(a.view(np.uint8).reshape(*a.shape, 4), axis=-1).sum(-1, dtype=np.uint32))

    def _op_ex2(self, s, o):
        return self._arithmetic(s, o, np.exp2, 1)

    def _op_lg2(self, s, o):
        return self._arithmetic(s, o, np.log2, 1)

    def _op_rcp(self, s, o):
        return self._arithmetic(s, o, lambda a: np.float32(1) / a, 1)

    def _op_div(self, s, o):
        if s[-1] == "f32":
            return self._arithmetic(s, o, lambda a, b: a / b, 2)
        return self._arithmetic(s, o, _quotient, 2)

    def _op_rem(self, s, o):
        return self._arithmetic(s, o, lambda a, b: a - _quotient(a, b) * b, 2)

    def _op_mul(self, s, o):
        if s[0] == "wide":
            return self._map(o, [s[1]] * 2, lambda a, b: a.astype(_wider(a)) * b.astype(_wider(a)))
        if s[0] == "hi":
            bits = 8 * np.dtype(_VIEWS[s[1]]).itemsize
            return self._map(o, [s[1]] * 2, lambda a, b: (a.astype(_wider(a)) * b.astype(_wider(a)) >> bits).astype(a.dtype))
        return self._arithmetic(s, o, lambda a, b: a * b, 2)

    def _op_mad(self, s, o):
        if s[0] == "wide":
            long = {"s32": "s64", "u32": "u64"}[s[1]]
            return self._map(o, [s[1], s[1], long], lambda a, b, c: a.astype(c.dtype) * b.astype(c.dtype) + c)
        return self._arithmetic(s, o, lambda a, b, c: a * b + c, 3)

    def _op_shl(self, s, o):
        return self._map(o, [s[-1], "u32"], lambda a, n: np.where(n < 8 * a.itemsize, a << n.astype(a.dtype), 0).astype(a.dtype))

    def _op_shr(self, s, o):
        return self._map(o, [s[-1], "u32"], lambda a, n: a >> np.minimum(n, 8 * a.itemsize - 1).astype(a.dtype))

    def _op_bfe(self, s, o):
        def extract(a, position, length):
            unsigned = (a.view(np.uint32) >> position) & ((np.uint32(1) << length) - np.uint32(1))
            if s[-1] == "u32":
                return unsigned
            return (unsigned << (np.uint32(32) - length)).view(np.int32) >> (np.uint32(32) - length).view(np.int32)

        return self._map(o, [s[-1], "u32", "u32"], extract)

    def _op_setp(self, s, o):
        compare, kind = s[0], s[-1]
        functions = {
            "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
            "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "neu": lambda a, b: ~(a == b),
            "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b),
            "geu": lambda a, b: ~(a < b), "equ": lambda a, b: (a == b) | (a != a) | (b != b),
        }  # fmt: skip
        return self._map(o, [kind, kind], functions[compare])

    # warps

    def _op_elect(self, s, o):
        write = self._write(o[0].split("|")[1])
        return lambda b, u: write(u, np.arange(u.lanes) % 32 == 0)

    def _op_shfl(self, s, o):
        write, value, amount = self._write(o[0].split("|")[0]), self._read(o[1], "u32"), self._read(o[2], "u32")
        how = s[1]

        def action(block, unit):
            lanes = np.arange(32)
            by = int(amount(block, unit)[0])
            source = {"idx": lanes * 0 + by, "bfly": lanes ^ by, "up": np.where(lanes >= by, lanes - by, lanes)}.get(how)
            if how == "down":
                source = np.where(lanes + by < 32, lanes + by, lanes)
            write(unit, value(block, unit).reshape(-1, 32)[:, source].reshape(-1))

        return action

    def _op_redux(self, s, o):
        function = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}[s[1]]
        write, read = self._write(o[0]), self._read(o[1], s[-1])
        return lambda b, u: write(u, np.repeat(function.reduce(read(b, u).reshape(-1, 32), 1, dtype=_VIEWS[s[-1]]), 32))

    def _op_vote(self, s, o):
        write, read = self._write(o[0]), self._read(o[1], "pred")
        function = {"any": np.any, "all": np.all}[s[1]]
        return lambda b, u: write(u, np.repeat(function(read(b, u).reshape(-1, 32), 1), 32))

    # barriers

    def _op_bar(self, s, o):
        if s[0] == "warp":
            return lambda block, unit: None
        read = self._read(o[0], "u32")
        threads = int(o[1]) if len(o) > 1 else None

        def action(block, unit):
            number, *others = np.unique(read(block, unit)).tolist()
            if others:
                raise Fault(f"warps that run together arrive at barriers {number} and {others[0]}")
            state = block.named.setdefault(number, [0, 0])  # arrived, generation
            if unit.waiting is not None:
                if state[1] == unit.waiting[1]:
                    return True
                unit.waiting = None
                return False
            needed = threads or 32 * sum(block.machine.partitions)
            generation = state[1]
            state[0] += unit.lanes
            if state[0] > needed:
                raise Fault(f"barrier {number}: {state[0]} threads arrived, {needed} expected")
            if state[0] == needed:
                state[0], state[1] = 0, state[1] + 1
                return False
            if s[0] == "arrive":
                return False
            unit.waiting = (number, generation)
            return True

        return action

    _op_barrier = _op_bar

    def _op_mbarrier(self, s, o):
        if s[0] == "try_wait":
            write, address, parity = self._write(o[0]), self._address(o[1]), self._read(o[2], "u32")

            def wait(block, unit):
                barrier = block.barriers[int(address(block, unit)[0])]
                done = barrier.phase != int(parity(block, unit)[0]) & 1
                if not done:
                    return True
                write(unit, np.ones(unit.lanes, np.bool_))
                return False

            return wait
        address = self._address(o[0] if s[0] == "init" else o[1])
        amount = int(o[1]) if s[0] == "init" else int(o[2]) if len(o) > 2 else 1

        def action(block, unit):
            where = address(block, unit)
            for lane in range(unit.lanes) if unit.mask is None else np.flatnonzero(unit.mask):
                if s[0] == "init":
                    block.barriers[int(where[lane])] = Barrier(amount, amount)
                    continue
                barrier = block.barriers[int(where[lane])]
                if "expect_tx" in s:
                    barrier.bytes += amount
                    barrier.pending -= 1
                else:
                    barrier.pending -= amount
                barrier.settle()

        return action

    def _op_cp(self, s, o):
        if "mbarrier" in s and "arrive" in s:
            address = self._address(o[0])

            def arrive(block, unit):
                barrier = block.barriers[int(address(block, unit)[0])]
                barrier.pending -= unit.lanes if unit.mask is None else int(unit.mask.sum())
                barrier.settle()

            return arrive
        target, barrier_at = self._address(o[0]), self._address(o[2])
        inner = o[1].strip()[1:-1]
        map_name, coordinates = inner.split(",", 1)
        which = self._read(map_name.strip(), "u64")
        reads = [self._read(part, "s32") for part in _split(coordinates.strip().strip("{} "))]

        def copy(block, unit):
            for lane in range(unit.lanes) if unit.mask is None else np.flatnonzero(unit.mask):
                number = int(which(block, unit)[lane])
                made, start = block.machine.params[number], [int(read(block, unit)[lane]) for read in reads]
                block.machine.copied.append((block.number, number, start))
                where, barrier = int(target(block, unit)[lane]), int(barrier_at(block, unit)[lane])
                block.copies.append(lambda m=made, c=start, w=where, n=barrier: _copy_box(block, m, c, w, n))

        return copy

    def _op_prefetch(self, s, o):
        if s[0] != "global":
            return lambda block, unit: None
        address = self._address(o[0])

        def action(block, unit):
            where = address(block, unit)
            block.machine.heap.check(where if unit.mask is None else where[unit.mask], 1)  # what it fetches is there to be read

        return action

    def _op_griddepcontrol(self, s, o):
        return lambda block, unit: None  # the machine runs one launch

    # matrix products

    def _op_mma(self, s, o):
        if "m16n8k16" not in s:
            raise NotImplementedError(".".join(s))
        to_float = _from_bf16 if "bf16" in s else (lambda a: a.view(np.float16).astype(np.float32))
        writes = [self._write(part) for part in _split(o[0].strip("{} "))]
        left, right = ([self._read(part, "b32") for part in _split(operand.strip("{} "))] for operand in o[1:3])
        old = [self._read(part, "f32") for part in _split(o[3].strip("{} "))]
        lanes = np.arange(32)
        group, pair = lanes // 4, lanes % 4 * 2

        def halves(read, block, unit):
            both = np.ascontiguousarray(read(block, unit)).view(np.uint16).reshape(-1, 32, 2)
            return to_float(both[:, :, 0]), to_float(both[:, :, 1])

        def multiply(block, unit):
            warps = unit.lanes // 32
            a, b, c = (np.zeros((warps, *shape), np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
            for i, read in enumerate(left):
                row, column = group + i % 2 * 8, pair + i // 2 * 8
                a[:, row, column], a[:, row, column + 1] = halves(read, block, unit)
            for i, read in enumerate(right):
                b[:, pair + i * 8, group], b[:, pair + i * 8 + 1, group] = halves(read, block, unit)
            for i, read in enumerate(old):
                c[:, group + i // 2 * 8, pair + i % 2] = read(block, unit).reshape(-1, 32)
            c += a @ b
            for i, write in enumerate(writes):
                write(unit, np.ascontiguousarray(c[:, group + i // 2 * 8, pair + i % 2]).reshape(-1))

        return multiply

    def _op_wgmma(self, s, o):
        if s[0] == "fence":
            return lambda block, unit: None
        if s[0] == "commit_group":

            def commit(block, unit):
                unit.groups.append(unit.open_group)
                unit.open_group = []
                if block.random.random() < 0.3:
                    _complete(block, unit, 0)

            return commit
        if s[0] == "wait_group":
            keep = int(o[0])
            return lambda block, unit: _complete(block, unit, keep)
        shape = next(x for x in s if x.startswith("m64"))
        columns = int(re.match(r"m64n(\d+)k16", shape)[1])
        to_float = _from_bf16 if s[-1] == "bf16" else (lambda a: a.view(np.float16).astype(np.float32))
        registers = [self._register(part) for part in _split(o[0].strip("{} "))]
        in_registers = o[1].startswith("{")
        left = [self._register(p) for p in _split(o[1].strip("{} "))] if in_registers else self._read(o[1], "u64")
        right, accumulate = self._read(o[2], "u64"), self._read(o[3], "pred")
        transposed = [int(x) for x in o[6:]]

        def issue(block, unit):
            right_at, keep = int(right(block, unit)[0]), bool(accumulate(block, unit)[0])
            left_at = None if in_registers else int(left(block, unit)[0])

            def multiply():
                if in_registers:
                    a = _left_operand([unit.registers[i] for i in left], to_float)
                else:
                    a = to_float(_operand(block.shared, left_at, 64, transposed[0]))
                b = to_float(_operand(block.shared, right_at, columns, transposed[-1]))
                with np.errstate(invalid="ignore"):  # infinities around the keys
                    product = a @ b.T  # [64, columns]
                lanes = np.arange(128)
                for i, register in enumerate(registers):
                    row = lanes // 32 * 16 + lanes % 32 // 4 + 8 * (i // 2 % 2)
                    column = i // 4 * 8 + lanes % 4 * 2 + i % 2
                    value = product[row, column]
                    if keep:
                        value = value + unit.registers[register].view(np.float32)
                    unit.registers[register] = value.astype(np.float32).view(np.uint32)

            unit.open_group.append(multiply)

        return issue


def _sequential(action):
    def step(block, unit):
        if action(block, unit):
            return True
        unit.pc += 1
        return False

    return step


def _guarded(action, guard: int, negated: bool):
    def step(block, unit):
        chosen = unit.registers[guard] ^ negated
        outer = unit.mask
        mask = chosen if outer is None else chosen & outer
        if mask.any():
            unit.mask = None if mask.all() else mask
            blocked = action(block, unit)
            unit.mask = outer
            if blocked:
                return True
        unit.pc += 1
        return False

    return step


def _split(text: str) -> list[str]:
    """Operands, split at commas outside of brackets."""
    parts, depth, last = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
    return [*parts, text[last:].strip()] if text.strip() else []


def _immediate(operand: str, kind: str):
    if operand.startswith("0f"):
        return np.frombuffer(struct.pack("<I", int(operand[2:], 16)), np.float32)[0]
    if operand == "global_smem":
        return np.uint64(0).astype(_VIEWS[kind])
    value = int(operand, 0)
    if kind == "pred":
        return np.bool_(value != 0)
    if kind in _FLOATS:
        return np.float32(value)
    bits = 8 * np.dtype(_VIEWS[kind]).itemsize
    return np.array(value % (1 << bits), dtype=f"u{bits // 8}").view(_VIEWS[kind])[()]


def _bits(value: int, kind: str):
    bits = 8 * np.dtype(_VIEWS[kind]).itemsize
    return np.array(value % (1 << bits), dtype=f"u{bits // 8}")[()]


def _matrix_words(rows: np.ndarray) -> np.ndarray:
    """Addresses of the word that each lane holds of an 8x8 matrix of 16 bits, in [warps x 32]; rows: those of its rows, [warps, 8]."""
    lanes = np.arange(32)
    return (rows[:, lanes // 4] + 4 * (lanes % 4)).reshape(-1)


def _gather(memory: np.ndarray, addresses: np.ndarray, view: np.dtype) -> np.ndarray:
    size = view.itemsize
    if len(addresses) and (addresses % size).any():
        raise Fault(f"a load of {size} bytes that is not aligned")
    return np.ascontiguousarray(memory[addresses[:, None] + np.arange(size)]).view(view)[:, 0]


def _scatter(memory: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
    size = values.dtype.itemsize
    memory[addresses[:, None] + np.arange(size)] = np.ascontiguousarray(values)[:, None].view(np.uint8)


def _to_bf16(a: np.ndarray) -> np.ndarray:
    bits = a.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), 0x7FFF, rounded).astype(np.uint16)


def _to_f16(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float16).view(np.uint16)


def _from_bf16(a: np.ndarray) -> np.ndarray:
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division towards zero; of 0 anything, as lanes that are masked off may divide by it."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    return (np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))).astype(a.dtype)


def _wider(a: np.ndarray):
    return {1: np.int16, 2: np.int32, 4: np.int64}[a.itemsize] if a.dtype.kind == "i" else {2: np.uint32, 4: np.uint64}[a.itemsize]


def _swizzled(addresses: np.ndarray) -> np.ndarray:
    """128-byte swizzle: bits 4 to 6 of an address are xor-ed with bits 7 to 9."""
    return addresses ^ (((addresses >> 7) & 7) << 4)


def _copy_box(block: Block, made: TensorMap, start: list[int], where: int, barrier: int) -> None:
    heap = block.machine.heap
    offsets = np.zeros(made.box[::-1], np.int64)
    inside = np.ones(made.box[::-1], np.bool_)
    for dim, (size, first, extent) in enumerate(zip(made.box, start, made.extents, strict=True)):
        shape = [1] * len(made.box)
        shape[len(made.box) - 1 - dim] = size
        index = (first + np.arange(size)).reshape(shape)
        inside &= (index >= 0) & (index < extent)
        offsets = offsets + index * (made.strides[dim - 1] if dim else made.itemsize)
    source = made.address + offsets.reshape(-1)
    inside = inside.reshape(-1)
    heap.check(source[inside], made.itemsize)
    values = np.zeros(len(source), np.uint16)
    values[inside] = _gather(heap.bytes, source[inside], np.dtype(np.uint16))
    _scatter(block.shared, _swizzled(where + np.arange(len(source)) * made.itemsize), values)
    state = block.barriers[barrier]
    state.bytes -= len(source) * made.itemsize
    state.settle()


def _complete(block: Block, unit: Unit, keep: int) -> None:
    while len(unit.groups) > keep:
        for multiply in unit.groups.popleft():
            multiply()


def _left_operand(registers: list[np.ndarray], to_float) -> np.ndarray:
    """[64, 16] from four registers of pairs: rows and columns of the matrix instruction's first operand."""
    lanes = np.arange(128)
    a = np.zeros((64, 16), np.float32)
    for i, register in enumerate(registers):
        row = lanes // 32 * 16 + lanes % 32 // 4 + 8 * (i % 2)
        column = i // 2 * 8 + lanes % 4 * 2
        a[row, column] = to_float((register & np.uint32(0xFFFF)).astype(np.uint16))
        a[row, column + 1] = to_float((register >> np.uint32(16)).astype(np.uint16))
    return a


def _operand(shared: np.ndarray, descriptor: int, rows: int, transposed: int) -> np.ndarray:
    """[rows, 16] of 16-bit elements that a descriptor names, depth last, in tiles of 128-byte swizzle."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 62 != 1 or descriptor >> 49 & 7:
        raise Fault("a matrix descriptor of another swizzle or with a base offset")
    row, depth = np.arange(rows)[:, None], np.arange(16)[None, :]
    if transposed:
        address = start + row // 64 * leading + row % 64 * 2 + depth // 8 * stride + depth % 8 * 128
    else:
        address = start + row // 8 * stride + row % 8 * 128 + depth * 2
    return _gather(shared, _swizzled(address).reshape(-1), np.dtype(np.uint16)).reshape(rows, 16)
