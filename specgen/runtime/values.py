"""checks="full": the checks of values that live on the device. Copies them to the host, so it synchronises;
never writes.
"""

import torch
from torch import Tensor

from .errors import ArgumentError
from .extras import ABSENT
from .geometry import Geometry, Limits
from .refusals import bad
from .visibility import spans


def check_values(
    geometry: Geometry,
    limits: Limits,
    tokens: int,
    pages: int,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    extras: tuple | None,
) -> None:
    """Check lengths, offsets, page ids and feature tensors of one attention call whose shapes are already
    checked.

    Raises ArgumentError naming the sequence; also when a graph is being captured, as nothing can be read
    then. A sequence with more queries than keys is legal: its first rows see no key. Page ids left of every
    row's window or chunk may be anything.
    """
    if seq_lens.is_cuda:
        with torch.cuda.device(seq_lens.device):
            if torch.cuda.is_current_stream_capturing():
                raise ArgumentError(
                    "attention: checks is 'full' while a graph is being captured, and that synchronises; "
                    "needed: 'shapes' or 'none'"
                )
    offsets = cu_seqlens_q.cpu().long()
    keys = seq_lens.cpu().long()
    queries = offsets.diff()
    if offsets[0] != 0:
        bad("attention", "cu_seqlens_q", f"starts at {int(offsets[0])}", "0")
    if (seq := _first(queries < 0)) is not None:
        came = f"falls from {int(offsets[seq])} to {int(offsets[seq + 1])} at sequence {seq}"
        bad("attention", "cu_seqlens_q", came, "offsets that never fall")
    if offsets[-1] > tokens:
        bad("attention", "cu_seqlens_q", f"ends at {int(offsets[-1])}", f"at most {tokens}, the tokens of q")
    if max_seqlen_q is not None and (seq := _first(queries > max_seqlen_q)) is not None:
        came = f"is {max_seqlen_q}, but sequence {seq} has {int(queries[seq])} query rows"
        bad("attention", "max_seqlen_q", came, "a bound of every sequence")
    if (seq := _first(keys < 0)) is not None:
        bad("attention", "seq_lens", f"is {int(keys[seq])} at sequence {seq}", "at least 0")
    capacity = block_table.shape[1] * geometry.page_size
    if (seq := _first(keys > capacity)) is not None:
        columns = f"{block_table.shape[1]} block_table columns of {geometry.page_size} keys"
        need = f"at most {capacity}, what {columns} hold"
        bad("attention", "seq_lens", f"is {int(keys[seq])} at sequence {seq}", need)
    if (seq := _first(keys > limits.max_seq_len)) is not None:
        need = f"at most {limits.max_seq_len}, the spec's limits.max_seq_len"
        bad("attention", "seq_lens", f"is {int(keys[seq])} at sequence {seq}", need)
    if max_seqlen_k is not None and (seq := _first(keys > max_seqlen_k)) is not None:
        came = f"is {max_seqlen_k}, but sequence {seq} has {int(keys[seq])} keys"
        bad("attention", "max_seqlen_k", came, "a bound of every sequence")
    sinks, slopes, ranges = extras or ABSENT
    if ranges is not None:
        ranges = ranges.cpu().long()
        _check_ranges(ranges, keys)
    for name, values in (("sinks", sinks), ("alibi_slopes", slopes)):
        if values is not None and (head := _first(values.cpu().isnan())) is not None:
            bad("attention", name, f"is nan at head {head}", "a number")
    used = torch.where(queries > 0, -(-keys // geometry.page_size), 0)
    unseen = torch.zeros_like(used)
    if geometry.reach is not None:
        for seq in used.nonzero().flatten().tolist():
            own = None if ranges is None else ranges[seq]
            first, end = spans(geometry, int(queries[seq]), int(keys[seq]), own)
            unseen[seq] = first[first < end].min() // geometry.page_size if (first < end).any() else used[seq]
    table = block_table.cpu()
    columns = torch.arange(table.shape[1])
    visible = (columns < used[:, None]) & (columns >= unseen[:, None])
    wrong = (visible & ((table < 0) | (table >= pages))).nonzero()
    if len(wrong):
        seq, column = wrong[0].tolist()
        came = f"has page {int(table[seq, column])} at [{seq}, {column}]"
        need = f"0 to {pages - 1} for the {int(keys[seq])} keys of the sequence"
        bad("attention", "block_table", came, need)


def _check_ranges(ranges: Tensor, keys: Tensor) -> None:
    start, end = ranges.unbind(-1)
    wrong = ((start < end) & ((start < 0) | (end > keys[:, None]))).nonzero()
    if len(wrong):
        seq, place = wrong[0].tolist()
        came = f"is {ranges[seq, place].tolist()} at [{seq}, {place}]"
        need = f"0 <= start and end <= {int(keys[seq])}, the keys of the sequence (start >= end is empty)"
        bad("attention", "prefix_ranges", came, need)


def _first(wrong: Tensor) -> int | None:
    places = wrong.nonzero()
    return int(places[0]) if len(places) else None
