"""Reading, checking and launching an attention call in one C call, where torch and the launch extension can.

torch.Tensor has DLPack's C exchange API from 2.10 on. A reader takes a call as it should be; of any other it
says nothing, and checks.py finds out what is wrong. It launches what eager.py launched for such a call before
and told it to keep; of others it says what it read. Opens no device.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .geometry import Geometries, Geometry, Limits
from .launcher import load_extension

DEVICE_TYPE = 10 if torch.version.hip else 2  # kDLROCM, kDLCUDA
_CODES = {torch.float16: 2, torch.float32: 2, torch.bfloat16: 4}  # kDLFloat, kDLBfloat


class Reader(NamedTuple):
    """What _routes.h offers for the calls of one geometry.

    call(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out or None, sinks or None, max_seqlen_q, max_seqlen_k,
    plain) -> None; or the output, launched; or a tuple of what was read: (device index, aligned, max_pages, pages), the call's
    table.Bounds, the addresses of the tensors in that order (0 for no out), and strides as check_attention.
    keep(device index, stream, aligned, box, scratch, decode, decode_grid, prefill, prefill_grid): what to launch from
    now on for a `plain` call on that stream whose bounds the box holds. forget(): nothing any longer. `routed`:
    calls of this geometry take no tensor of a feature but sinks; others are never launched here.
    """

    geometry: Geometry
    call: Callable[..., torch.Tensor | tuple[tuple[int, ...], ...] | None]
    keep: Callable[..., None]
    forget: Callable[[], None]
    routed: bool


def readers(
    geometries: Geometries, limits: Limits, current_stream: Callable[[int], int], device_type: int = DEVICE_TYPE
) -> dict[str | None, tuple[Reader, ...]]:
    """For each `layer` argument of a call its readers, of tensors on devices of DLPack's `device_type`; empty
    where there is no exchange API or no extension. `current_stream` gives the stream's handle by device index.
    """
    extension, _ = load_extension()
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if extension is None or exchange is None:
        return {}
    found: dict[str | None, tuple] = {}
    for (layer, *_), geometry in geometries.by_heads.items():
        g, kind = geometry, geometry.dtype
        sinks, alibi, prefix_ranges = g.extras or (False, False, False)
        sizes = (g.query_heads, g.kv_heads, g.qk_dim, g.v_dim, g.page_size, g.hnd, g.stride_mask, sinks)
        try:
            made = extension.reader(
                exchange, current_stream, torch.is_grad_enabled, device_type, _CODES[kind], 8 * kind.itemsize,
                *sizes, limits.max_tokens, limits.max_seqs,
            )  # fmt: skip
        except ValueError:  # another DLPack
            return {}
        found[layer] = (*found.get(layer, ()), Reader(geometry, *made, routed=not (alibi or prefix_ranges)))
    return found
