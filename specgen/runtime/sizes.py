"""The one formula for grids and scratch: read by allocator, kernels' templates, dispatch, manifest and tests.

A grid is a constant of device and variant, never of the batch; so is the workspace. Pure integers: imports
nothing but arguments.py and the standard library.
"""

from collections.abc import Iterable, Mapping
from math import gcd
from typing import NamedTuple

from .arguments import ROLES

MIN_BLOCK_V = 16
TICKETS = 2  # work items handed out and programs that are done, of a family whose programs take items in turn
POINTER_ALIGNMENT = 16

class WorkspaceSize(NamedTuple):
    """Elements of each scratch array of a workspace: float32, float32, int32 and int32."""

    partial_acc: int
    partial_ml: int
    counters: int
    tickets: int

    @property
    def nbytes(self) -> int:
        """Bytes of the four arrays together."""
        return 4 * sum(self)


def grid(multiprocessors: int, ctas_per_multiprocessor: int) -> int:
    """Programs of one launch."""
    return multiprocessors * ctas_per_multiprocessor


def block_v(v_dim: int) -> int:
    """Columns of an accumulator tile: the next power of two that holds v_dim, at least 16."""
    return max(MIN_BLOCK_V, 1 << (v_dim - 1).bit_length())


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
        tickets=TICKETS,
    )


def workspace_size(multiprocessors: int, variants: Iterable[Mapping]) -> WorkspaceSize:
    """Scratch that serves every given variant on a device: the elementwise maximum over its decode variants.

    `variants` are manifest entries with `family`, `ctas_per_multiprocessor`, `block_m` and `v_dim`; others
    than decode need none but the tickets. No array is empty, so that each has an address.
    """
    size = WorkspaceSize(1, 1, 1, TICKETS)
    for variant in variants:
        if ROLES.get(variant["family"]) == "decode":
            programs = grid(multiprocessors, variant["ctas_per_multiprocessor"])
            need = decode_workspace(programs, variant["block_m"], variant["v_dim"])
            size = WorkspaceSize(*map(max, size, need))
    return size


def alignment(qk_dim: int, v_dim: int, itemsize: int) -> int:
    """Bytes that an aligned variant promises of every stride but the last: a power of two, at most 16.

    Its pointers are multiples of 16 bytes whatever this is.
    """
    return gcd(POINTER_ALIGNMENT, qk_dim * itemsize, v_dim * itemsize)
