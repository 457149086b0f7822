"""Checks of `attention_varlen`, as checks.py has them: keys and values are contiguous, sequence behind
sequence, and no page table says where they lie.

Reads shapes, strides, dtypes, devices and host integers only. Kept straight-line: it is on the path of every
call.
"""

from functools import reduce
from operator import or_

import torch
from torch import Tensor

from .checks import check_out
from .geometry import Geometry, Limits
from .refusals import bad, bad_strides, refuse_grad, same_device

_FUNCTION = "attention_varlen"
_INT32 = torch.int32
_grad_enabled = torch.is_grad_enabled


def check_varlen(
    geometry: Geometry,
    limits: Limits,
    q_shape: torch.Size,
    k_shape: torch.Size,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor | None,
) -> tuple[int, int, tuple[int, ...]]:
    """Check one call; return (num_seqs, stride bits, strides).

    Strides are in kernel order, those of a missing `out` contiguous; stride bits are the strides or-ed
    together.
    """
    dtype = geometry.dtype
    tokens, query_heads, qk_dim = q_shape
    key_tokens, kv_heads, k_dim = k_shape
    v_shape = v.shape
    v_dim = geometry.v_dim
    (q_entries,) = cu_seqlens_q.shape
    (k_entries,) = cu_seqlens_k.shape
    seqs = q_entries - 1
    if q.dtype is not dtype:
        bad(_FUNCTION, "q", f"has dtype {q.dtype}", dtype)
    if k.dtype is not dtype:
        bad(_FUNCTION, "k", f"has dtype {k.dtype}", dtype)
    if v.dtype is not dtype:
        bad(_FUNCTION, "v", f"has dtype {v.dtype}", dtype)
    if cu_seqlens_q.dtype is not _INT32:
        bad(_FUNCTION, "cu_seqlens_q", f"has dtype {cu_seqlens_q.dtype}", _INT32)
    if cu_seqlens_k.dtype is not _INT32:
        bad(_FUNCTION, "cu_seqlens_k", f"has dtype {cu_seqlens_k.dtype}", _INT32)
    if qk_dim != geometry.qk_dim:
        bad(_FUNCTION, "q", f"has head dim {qk_dim} in {list(q_shape)}", f"head dim {geometry.qk_dim}")
    if k_dim != geometry.qk_dim:
        bad(_FUNCTION, "k", f"has head dim {k_dim} in {list(k_shape)}", f"head dim {geometry.qk_dim}")
    if v_shape != (key_tokens, kv_heads, v_dim):
        need = f"{[key_tokens, kv_heads, v_dim]}: k's tokens and kv heads, head dim {v_dim}"
        bad(_FUNCTION, "v", f"has shape {list(v_shape)}", need)
    if seqs < 0:
        bad(_FUNCTION, "cu_seqlens_q", "has no entries", "one more than sequences")
    if k_entries != q_entries:
        need = f"{q_entries}, as cu_seqlens_q: one more than sequences"
        bad(_FUNCTION, "cu_seqlens_k", f"has {k_entries} entries", need)
    if tokens > limits.max_tokens:
        need = f"at most {limits.max_tokens}, the spec's limits.max_tokens"
        bad(_FUNCTION, "q", f"has {tokens} tokens", need)
    if seqs > limits.max_seqs:
        need = f"at most {limits.max_seqs}, the spec's limits.max_seqs"
        bad(_FUNCTION, "cu_seqlens_q", f"has {seqs} sequences", need)
    q_token, q_head, q_last = q.stride()
    k_token, k_head, k_last = k.stride()
    v_token, v_head, v_last = v.stride()
    (cu_q_last,) = cu_seqlens_q.stride()
    (cu_k_last,) = cu_seqlens_k.stride()
    if not q_last == k_last == v_last == cu_q_last == cu_k_last == 1:
        for name, tensor in _named(q, k, v, cu_seqlens_q, cu_seqlens_k).items():
            bad_strides(_FUNCTION, name, tensor)
    index = q.get_device()
    if not (
        k.get_device() == index == v.get_device()
        and cu_seqlens_q.get_device() == index == cu_seqlens_k.get_device()
        and index >= 0
    ):
        same_device(_FUNCTION, _named(q, k, v, cu_seqlens_q, cu_seqlens_k))
    if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        refuse_grad(_FUNCTION, {"q": q, "k": k, "v": v})
    if out is None:
        out_token, out_head = query_heads * v_dim, v_dim
    else:
        out_token, out_head = check_out(_FUNCTION, out, q, v_dim)
    bits = q_token | q_head | k_token | k_head | v_token | v_head | out_token | out_head
    return seqs, bits, (q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head)


def read_varlen(
    geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, out: Tensor | None
) -> tuple[int, int, tuple[int, ...]]:
    """What `check_varlen` returns, unchecked."""
    out_strides = (geometry.query_heads * geometry.v_dim, geometry.v_dim) if out is None else out.stride()[:2]
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out_strides)
    return cu_seqlens_q.shape[0] - 1, reduce(or_, strides), strides


def _named(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> dict[str, Tensor]:
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
