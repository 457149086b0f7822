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
    """Check lengths, offsets, page ids and feature tensors of one `attention` call whose shapes are already
    checked.

    Raises ArgumentError naming the sequence; also when a graph is being captured, as nothing can be read
    then. A sequence with more queries than keys is legal: its first rows see no key. Page ids left of every
    row's window or chunk may be anything.
    """
    function = "attention"
    _refuse_capture(function, seq_lens)
    queries = _lengths(function, "cu_seqlens_q", cu_seqlens_q, tokens, "q")
    keys = seq_lens.cpu().long()
    _check_bound(function, "max_seqlen_q", max_seqlen_q, queries, "query rows")
    if (seq := _first(keys < 0)) is not None:
        bad(function, "seq_lens", f"is {int(keys[seq])} at sequence {seq}", "at least 0")
    capacity = block_table.shape[1] * geometry.page_size
    if (seq := _first(keys > capacity)) is not None:
        columns = f"{block_table.shape[1]} block_table columns of {geometry.page_size} keys"
        need = f"at most {capacity}, what {columns} hold"
        bad(function, "seq_lens", f"is {int(keys[seq])} at sequence {seq}", need)
    if (seq := _first(keys > limits.max_seq_len)) is not None:
        need = f"at most {limits.max_seq_len}, the spec's limits.max_seq_len"
        bad(function, "seq_lens", f"is {int(keys[seq])} at sequence {seq}", need)
    _check_bound(function, "max_seqlen_k", max_seqlen_k, keys, "keys")
    ranges = _check_extras(function, extras, keys)
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
        bad(function, "block_table", came, need)


def check_varlen_values(
    limits: Limits,
    tokens: int,
    key_tokens: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    extras: tuple | None,
) -> None:
    """Check offsets and feature tensors of one `attention_varlen` call, as `check_values` has it."""
    function = "attention_varlen"
    _refuse_capture(function, cu_seqlens_q)
    queries = _lengths(function, "cu_seqlens_q", cu_seqlens_q, tokens, "q")
    keys = _lengths(function, "cu_seqlens_k", cu_seqlens_k, key_tokens, "k")
    _check_bound(function, "max_seqlen_q", max_seqlen_q, queries, "query rows")
    if (seq := _first(keys > limits.max_seq_len)) is not None:
        need = f"at most {limits.max_seq_len}, the spec's limits.max_seq_len"
        bad(function, "cu_seqlens_k", f"gives sequence {seq} {int(keys[seq])} keys", need)
    _check_bound(function, "max_seqlen_k", max_seqlen_k, keys, "keys")
    _check_extras(function, extras, keys)


def _refuse_capture(function: str, tensor: Tensor) -> None:
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            if torch.cuda.is_current_stream_capturing():
                raise ArgumentError(
                    f"{function}: checks is 'full' while a graph is being captured, and that synchronises; "
                    "needed: 'shapes' or 'none'"
                )


def _lengths(function: str, name: str, cumulative: Tensor, tokens: int, of: str) -> Tensor:
    """The lengths between offsets that rise from 0 to at most `tokens`; int64 [seqs] on the host."""
    offsets = cumulative.cpu().long()
    lengths = offsets.diff()
    if offsets[0] != 0:
        bad(function, name, f"starts at {int(offsets[0])}", "0")
    if (seq := _first(lengths < 0)) is not None:
        came = f"falls from {int(offsets[seq])} to {int(offsets[seq + 1])} at sequence {seq}"
        bad(function, name, came, "offsets that never fall")
    if offsets[-1] > tokens:
        bad(function, name, f"ends at {int(offsets[-1])}", f"at most {tokens}, the tokens of {of}")
    return lengths


def _check_bound(function: str, name: str, bound: int | None, lengths: Tensor, unit: str) -> None:
    if bound is not None and (seq := _first(lengths > bound)) is not None:
        came = f"is {bound}, but sequence {seq} has {int(lengths[seq])} {unit}"
        bad(function, name, came, "a bound of every sequence")


def _check_extras(function: str, extras: tuple | None, keys: Tensor) -> Tensor | None:
    """Check the tensors of features; return the prefix ranges, int64 on the host."""
    sinks, slopes, ranges = extras or ABSENT
    if ranges is not None:
        ranges = ranges.cpu().long()
        start, end = ranges.unbind(-1)
        wrong = ((start < end) & ((start < 0) | (end > keys[:, None]))).nonzero()
        if len(wrong):
            seq, place = wrong[0].tolist()
            came = f"is {ranges[seq, place].tolist()} at [{seq}, {place}]"
            need = f"0 <= start and end <= {int(keys[seq])}, the keys of the sequence (start >= end is empty)"
            bad(function, "prefix_ranges", came, need)
    for name, values, need in (
        ("sinks", sinks, "a finite number, or -inf for no sink: any other makes the head's output NaN"),
        ("alibi_slopes", slopes, "a finite number: any other makes the head's output NaN"),
    ):
        if values is not None:
            values = values.cpu().float()
            legal = values.isfinite() | (values.isneginf() if name == "sinks" else False)
            if (head := _first(~legal)) is not None:
                bad(function, name, f"is {float(values[head])} at head {head}", need)
    return ranges


def _first(wrong: Tensor) -> int | None:
    places = wrong.nonzero()
    return int(places[0]) if len(places) else None
