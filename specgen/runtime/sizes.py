"""The one formula for grids and scratch: read by allocator, kernels' templates, dispatch, manifest and tests.

A grid is a constant of device and variant, never of the batch; so is the workspace. Pure integers: imports
nothing but the standard library.
"""

from collections.abc import Iterable, Mapping
from math import gcd
from typing import NamedTuple

MIN_TILE = 16
POINTER_ALIGNMENT = 16


class WorkspaceSize(NamedTuple):
    """Elements of each scratch array of a workspace: float32, float32 and int32."""

    partial_acc: int
    partial_ml: int
    counters: int

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays together."""
        return 4 * (self.partial_acc + self.partial_ml + self.counters)


def grid(multiprocessors: int, ctas_per_multiprocessor: int) -> int:
    """Programs of one launch."""
    return multiprocessors * ctas_per_multiprocessor


def head_tiles(dim: int) -> tuple[int, ...]:
    """Widths of the tiles that hold `dim` elements of a head: powers of two of at least 16 (the depth of a matrix
    instruction), one, or two where those need less room than one: 128 -> (128,), 96 -> (64, 32), 80 -> (64, 16).
    """
    whole = _power_of_two(dim)
    first = whole // 2
    if first >= MIN_TILE and dim > first:
        rest = _power_of_two(dim - first)
        if first + rest < whole:
            return first, rest
    return (whole,)


def _power_of_two(dim: int) -> int:
    return max(MIN_TILE, 1 << (dim - 1).bit_length())


def block_v(v_dim: int) -> int:
    """Columns of an accumulator: those of its tiles together."""
    return sum(head_tiles(v_dim))


def decode_workspace(programs: int, block_m: int, v_dim: int) -> WorkspaceSize:
    """Scratch of one decode launch of `programs` programs.

    Each program leaves at most two partial states (its first and its last item): partial_acc [2 * programs,
    block_m, block_v], partial_ml [2 * programs, 2, block_m] (running max and sum), counters [programs], zero
    between launches.
    """
    return WorkspaceSize(
        partial_acc=2 * programs * block_m * block_v(v_dim),
        partial_ml=2 * programs * 2 * block_m,
        counters=programs,
    )


def workspace_size(multiprocessors: int, variants: Iterable[Mapping]) -> WorkspaceSize:
    """Scratch that serves every given variant on a device: the elementwise maximum over its decode variants.

    `variants` are manifest entries with `family`, `ctas_per_multiprocessor`, `block_m` and `v_dim`; others
    than decode need none. No array is empty, so that each has an address.
    """
    size = WorkspaceSize(1, 1, 1)
    for variant in variants:
        if variant["family"] == "decode":
            programs = grid(multiprocessors, variant["ctas_per_multiprocessor"])
            need = decode_workspace(programs, variant["block_m"], variant["v_dim"])
            size = WorkspaceSize(*map(max, size, need))
    return size


def alignment(qk_dim: int, v_dim: int, itemsize: int) -> int:
    """Bytes that an aligned variant promises of every stride but the last: a power of two, at most 16.

    Its pointers are multiples of 16 bytes whatever this is.
    """
    return gcd(POINTER_ALIGNMENT, qk_dim * itemsize, v_dim * itemsize)
