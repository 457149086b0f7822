"""Reading and checking the tensors of an attention call in one C call, where torch and the launch extension can.

torch.Tensor has DLPack's C exchange API from 2.10 on. A reader takes a call as it should be; of any other it
says nothing, and checks.py finds out what is wrong. Opens no device.
"""

from collections.abc import Callable

import torch

from .geometry import Geometries, Geometry, Limits
from .launcher import load_extension

DEVICE_TYPE = 10 if torch.version.hip else 2  # kDLROCM, kDLCUDA
_CODES = {torch.float16: 2, torch.float32: 2, torch.bfloat16: 4}  # kDLFloat, kDLBfloat

# read(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out or None) -> None, or the numbers (device index,
# aligned, tokens, seqs, max_pages, pages), the addresses in that order (0 for no out), and strides as check_attention.
Read = Callable[..., tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None]


def readers(
    geometries: Geometries, limits: Limits, device_type: int = DEVICE_TYPE
) -> dict[str | None, tuple[tuple[Geometry, Read], ...]]:
    """For each `layer` argument of a call its geometries with their readers, of tensors on devices of DLPack's
    `device_type`; empty where there is no exchange API or no extension.
    """
    extension, _ = load_extension()
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if extension is None or exchange is None:
        return {}
    found: dict[str | None, tuple] = {}
    for (layer, *_), geometry in geometries.by_heads.items():
        g, kind = geometry, geometry.dtype
        sizes = (g.query_heads, g.kv_heads, g.qk_dim, g.v_dim, g.page_size, g.hnd, g.stride_mask)
        try:
            read = extension.reader(
                exchange, device_type, _CODES[kind], 8 * kind.itemsize, *sizes, limits.max_tokens, limits.max_seqs
            )
        except ValueError:  # another DLPack
            return {}
        found[layer] = (*found.get(layer, ()), (geometry, read))
    return found
