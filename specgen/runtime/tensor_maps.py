"""Tensor maps: how the copy unit of Hopper GPUs (TMA) sees a tensor, and where a launch finds what they are made of.

A kernel that takes a map takes a CUtensorMap by value, 128 bytes that the driver encodes from address, sizes and strides.
A variant's manifest entry states each of its maps once; compiler, launcher and kernel read that, and know no family.
Nouns only: imports nothing but arguments.py and the standard library.
"""

from typing import NamedTuple

from .arguments import LATE_PROGRAMS, Argument

MAP_BYTES = 128
# Values of the driver's enumerations CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
_DATA_TYPES = {"float16": (6, 2), "bfloat16": (9, 2)}  # with bytes per element
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_FETCHES = {0: 0, 64: 1, 128: 2, 256: 3}

# Of a kernel's parameter: not an argument of the call.
ZERO = -1
LATE = -2  # the launch's LATE_PROGRAMS
FIRST_MAP = -3


class TensorMap(NamedTuple):
    """What one map is made of. Dimensions run from the slowest to the one of stride 1, which has no entry in `strides`.

    `name`: the kernel's argument. `tensor`: the argument of the call whose address it takes. `extents`: size of each
    dimension in elements, a number or the name of an argument; what a box holds beyond them arrives as zeros. `strides`: names of
    arguments, in elements, all but the last dimension's. `box`: elements of each dimension that one copy moves. `swizzle`:
    bytes of a row of the box over which 16-byte pieces are permuted in shared memory. `fetch`: bytes that L2 reads from memory
    for a piece that it misses, 0 (no more than is asked for), 64, 128 or 256.
    """

    name: str
    tensor: str
    dtype: str
    extents: tuple[int | str, ...]
    strides: tuple[str, ...]
    box: tuple[int, ...]
    swizzle: int
    fetch: int = 128

    @property
    def triton_type(self) -> str:
        """The type of the argument in a Gluon kernel's signature."""
        short = {"float16": "fp16", "bfloat16": "bf16"}[self.dtype]
        layout = f"NVMMASharedLayout(swizzle_byte_width={self.swizzle}, element_bitwidth=16, rank={len(self.box)})"
        return f"tensordesc<{short}[{', '.join(map(str, self.box))}],{layout}>"


def variant_maps(variant: dict) -> tuple[TensorMap, ...]:
    """The maps of a manifest entry."""
    lists = ("extents", "strides", "box")
    return tuple(
        TensorMap(**{name: tuple(value) if name in lists else value for name, value in entry.items()})
        for entry in variant.get("tensor_maps", ())
    )


def parameters(arguments: tuple[Argument, ...], maps: tuple[TensorMap, ...]) -> tuple[tuple[str | None, int], ...]:
    """(argument's name, bytes) of every parameter of a compiled kernel, in order; None for one that is always zero.

    Triton's kernels take the sizes (i32) and strides (i64) of a map after it, though the copy unit reads the map alone, and two
    pointers at the end: global and profile scratch.
    """
    sizes = {"pointer": 8, "i32": 4, "i64": 8, "tensor_map": MAP_BYTES}
    ranks = {each.name: len(each.box) for each in maps}
    found: list[tuple[str | None, int]] = []
    for argument in arguments:
        found.append((argument.name, sizes[argument.kind]))
        rank = ranks.get(argument.name, 0)
        found += [(None, 4)] * rank + [(None, 8)] * rank
    return (*found, (None, 8), (None, 8))


def resolve(
    call: tuple[Argument, ...], arguments: tuple[Argument, ...], maps: tuple[TensorMap, ...]
) -> tuple[tuple[int, ...], tuple[tuple, ...]]:
    """Names to positions, for _launch.c and ctypes_launch.py: (parameters, maps).

    A parameter is the position of an argument of the call, ZERO, LATE, or FIRST_MAP - n for map n. A map is (position of the tensor, data
    type, bytes per element, swizzle, L2 promotion, extents, positions of strides, box), dimensions from the one of stride 1 to the slowest,
    as the driver counts them; an extent is a number, or -1 - position.
    """
    position = {argument.name: i for i, argument in enumerate(call)}
    number = {each.name: FIRST_MAP - n for n, each in enumerate(maps)}
    where = position | number | {None: ZERO, LATE_PROGRAMS: LATE}
    resolved = tuple(
        (
            position[each.tensor],
            *_DATA_TYPES[each.dtype],
            _SWIZZLES[each.swizzle],
            _FETCHES[each.fetch],
            tuple(-1 - position[size] if isinstance(size, str) else size for size in reversed(each.extents)),
            tuple(position[name] for name in reversed(each.strides)),
            tuple(reversed(each.box)),
        )
        for each in maps
    )
    return tuple(where[name] for name, _ in parameters(arguments, maps)), resolved


def needed(parameters: tuple[int, ...], maps: tuple[tuple, ...]) -> set[int]:
    """Positions of the arguments of the call that `resolve`'s parameters and maps read."""
    found = {position for position in parameters if position >= 0}
    for tensor, _, _, _, _, extents, strides, _ in maps:
        found |= {tensor, *strides, *(-1 - extent for extent in extents if extent < 0)}
    return found
