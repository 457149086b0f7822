"""checks="full": the checks of values that live on the device. Copies them to the host, so it synchronises;
never writes.
"""

import torch
from torch import Tensor

from .checks import bad
from .errors import ArgumentError
from .geometry import Geometry, Limits


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
) -> None:
    """Check lengths, offsets and page ids of one attention call whose shapes are already checked.

    Raises ArgumentError naming the sequence; also when a graph is being captured, as nothing can be read
    then. A sequence with more queries than keys is legal: its first rows see no key.
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
    used = torch.where(queries > 0, -(-keys // geometry.page_size), 0)
    table = block_table.cpu()
    visible = torch.arange(table.shape[1]) < used[:, None]
    wrong = (visible & ((table < 0) | (table >= pages))).nonzero()
    if len(wrong):
        seq, column = wrong[0].tolist()
        came = f"has page {int(table[seq, column])} at [{seq}, {column}]"
        bad(
            "attention",
            "block_table",
            came,
            f"0 to {pages - 1} for the {int(keys[seq])} keys of the sequence",
        )


def _first(wrong: Tensor) -> int | None:
    places = wrong.nonzero()
    return int(places[0]) if len(places) else None
