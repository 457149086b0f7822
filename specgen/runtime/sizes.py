"""The one formula for grids and scratch: read by allocator, kernels' templates, dispatch, manifest and tests.

A grid is a constant of device and variant, never of the batch; so is the workspace. Pure integers: imports
nothing but arguments.py and the standard library.
"""

from collections.abc import Iterable, Mapping
from math import gcd
from typing import NamedTuple

from .arguments import ROLES, cuts_keys

MIN_TILE = 16
MERGE_GROUP = 32  # partial states that one program of decode_ws merges; longer items are merged in two levels
# Batch-invariant decode: splits of a sequence over all its key/value heads that are enough to fill a GPU, bounds of those of one
# head, and keys that are worth a split of their own.
FILLING_SPLITS = 256
SPLITS = (16, 32)
MIN_SPLIT_KEYS = 512
TICKETS = 2  # work items handed out and programs that are done, of a family whose programs take items in turn
MATRIX_ROWS = 64  # query rows of a row block of prefill_ws that each group of 4 warps owns
POINTER_ALIGNMENT = 16


class WorkspaceSize(NamedTuple):
    """Elements of each scratch array of a workspace: float32, float32, int32, int32 and float32. What needs none of an array takes
    the least there is: none is empty, so that each has an address.
    """

    partial_acc: int = 1
    partial_ml: int = 1
    counters: int = 1
    tickets: int = TICKETS
    prefill_partial: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays together."""
        return 4 * sum(self)


def grid(multiprocessors: int, ctas_per_multiprocessor: int) -> int:
    """Programs of one launch."""
    return multiprocessors * ctas_per_multiprocessor


def taken(multiprocessors: int, variant: Mapping) -> int:
    """Multiprocessors that a launch of a variant (manifest entry) takes: all, or of decode_ws the percentage that its option
    `share` says.
    """
    return max(1, multiprocessors * variant.get("options", {}).get("share", 100) // 100)


def programs(multiprocessors: int, variant: Mapping) -> int:
    """Programs of one launch of a variant."""
    return grid(taken(multiprocessors, variant), variant["ctas_per_multiprocessor"])


def head_tiles(dim: int) -> tuple[int, ...]:
    """Widths of the tiles that hold `dim` elements of a head: powers of two of at least 16 (the depth of a matrix
    instruction), one, or two where those need less room than one: 128 -> (128,), 96 -> (64, 32), 80 -> (64, 16).
    """
    whole = head_tile(dim)
    first = whole // 2
    if first >= MIN_TILE and dim > first:
        rest = head_tile(dim - first)
        if first + rest < whole:
            return first, rest
    return (whole,)


def head_tile(dim: int) -> int:
    """Width of the one tile that holds `dim` elements: the next power of two, at least 16."""
    return max(MIN_TILE, 1 << (dim - 1).bit_length())


def max_splits(kv_heads: int) -> int:
    """Splits at most of the keys of one sequence and key/value head in a batch-invariant decode kernel."""
    least, most = SPLITS
    return max(least, min(most, FILLING_SPLITS // kv_heads))


def split_tiles(tile_n: int) -> int:
    """Key tiles at least of a split of such a kernel, but for a sequence's last."""
    return -(-MIN_SPLIT_KEYS // tile_n)


def decode_workspace(programs: int, block_m: int, v_dim: int, states: int = 2) -> WorkspaceSize:
    """Scratch of one decode launch of `programs` programs.

    Each program leaves at most `states` partial states, two (its first and its last item) or, batch-invariant, `max_splits`:
    partial_acc [states * programs, block_m, head_tile(v_dim)] (fewer columns where two tiles hold a head), partial_ml
    [states * programs, 2, block_m] (running max and sum), counters [programs], zero between launches.
    """
    return WorkspaceSize(
        partial_acc=states * programs * block_m * head_tile(v_dim),
        partial_ml=states * programs * 2 * block_m,
        counters=programs,
    )


def partial_rows(block_m: int, group: int, max_query_len: int) -> int:
    """Rows of a tile of `block_m` that can hold a query row of one key/value head: those that decode_ws keeps of it."""
    return min(block_m, 1 << (group * max_query_len - 1).bit_length())


def gluon_columns(v_dim: int) -> int:
    """Columns of the accumulator of a Gluon kernel: the next power of two that holds v_dim, at least 64."""
    return max(64, 1 << (v_dim - 1).bit_length())


def decode_ws_workspace(programs: int, rows: int, v_dim: int) -> WorkspaceSize:
    """Scratch of one decode_ws launch of `programs` programs whose partial states have `rows` rows.

    Each program leaves at most two partial states, and each group of MERGE_GROUP programs two more, each with a counter of
    its own: partial_acc [2 * (programs + groups), rows, columns], partial_ml [2 * (programs + groups), 2, rows],
    counters [programs + 2 * groups], zero between launches.
    """
    groups = -(-programs // MERGE_GROUP)
    states = 2 * (programs + groups)
    return WorkspaceSize(
        partial_acc=states * rows * gluon_columns(v_dim),
        partial_ml=states * 2 * rows,
        counters=programs + 2 * groups,
    )


def prefill_state_words(v_dim: int) -> int:
    """Words of what MATRIX_ROWS query rows keep of a part: as registers hold them, in which four lanes share the maximum and the sum
    of a row, and all elements of the accumulator.
    """
    return MATRIX_ROWS * (4 * 2 + gluon_columns(v_dim))


def prefill_ws_workspace(programs: int, v_dim: int) -> WorkspaceSize:
    """Scratch of one prefill_ws launch of `programs` programs that cuts row blocks into parts.

    There are no more parts than programs, each of MATRIX_ROWS rows: prefill_partial [programs, prefill_state_words], tickets
    [TICKETS + programs], zero between launches.
    """
    return WorkspaceSize(
        tickets=TICKETS + programs,
        prefill_partial=programs * prefill_state_words(v_dim),
    )


def _variant_workspace(multiprocessors: int, variant: Mapping) -> WorkspaceSize:
    launched = programs(multiprocessors, variant)
    if cuts_keys(variant):
        return prefill_ws_workspace(launched, variant["v_dim"])
    if variant["family"] == "decode_ws":
        group = variant["query_heads"] // variant["kv_heads"]
        rows = partial_rows(variant["block_m"], group, variant["max_query_len"]) * variant["options"].get("heads", 1)
        return decode_ws_workspace(launched, rows, variant["v_dim"])
    states = max_splits(variant["kv_heads"]) if variant.get("batch_invariant") else 2
    return decode_workspace(launched, variant["block_m"], variant["v_dim"], states)


def workspace_size(multiprocessors: int, variants: Iterable[Mapping]) -> WorkspaceSize:
    """Scratch that serves every given variant on a device: the elementwise maximum over those that split keys.

    `variants` are manifest entries with `family`, `ctas_per_multiprocessor`, `block_m`, `v_dim`, of batch-invariant ones that and
    `kv_heads`, of decode_ws `query_heads`, `kv_heads`, `max_query_len` and `options`, of prefill_ws `options`; others need the least.
    """
    size = WorkspaceSize()
    for variant in variants:
        if ROLES.get(variant["family"]) == "decode" or cuts_keys(variant):
            size = WorkspaceSize(*map(max, size, _variant_workspace(multiprocessors, variant)))
    return size


def alignment(qk_dim: int, v_dim: int, itemsize: int) -> int:
    """Bytes that an aligned variant promises of every stride but the last: a power of two, at most 16.

    Its pointers are multiples of 16 bytes whatever this is.
    """
    return gcd(POINTER_ALIGNMENT, qk_dim * itemsize, v_dim * itemsize)
