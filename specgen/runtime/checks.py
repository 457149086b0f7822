"""Argument checks that read shapes, strides, dtypes, devices and host integers only: no synchronisation, no
allocation.

Each checker returns what a launch passes besides the tensors, so that nothing is read twice; `read_*` gives
the same without a check (checks="none"). Every error names the argument, what came and what is needed, and is
raised before anything is written. Kept straight-line: it is on the path of every call.
"""

from functools import reduce
from operator import or_

import torch
from torch import Tensor

from .geometry import Geometry, Limits
from .memory import overlaps
from .refusals import bad, bad_strides, diagnose, refuse_grad, same_device

CHECKS = ("shapes", "full", "none")
_INT32 = torch.int32
_FLOAT32 = torch.float32
_grad_enabled = torch.is_grad_enabled


def check_attention(
    geometry: Geometry,
    limits: Limits,
    q_shape: torch.Size,
    k_shape: torch.Size,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    out: Tensor | None,
) -> tuple[int, int, int, tuple[int, ...]]:
    """Check one attention call; return (num_seqs, max_pages, stride bits, strides).

    Strides are in kernel order (page, slot, head of a cache, whatever its layout), those of a missing `out` contiguous; stride bits are the data strides or-ed
    together.
    """
    dtype = geometry.dtype
    tokens, query_heads, qk_dim = q_shape
    hnd = geometry.hnd
    if hnd:
        pages, kv_heads, page_size, k_dim = k_shape
    else:
        pages, page_size, kv_heads, k_dim = k_shape
    v_shape = v_cache.shape
    seqs, max_pages = block_table.shape
    (lens,) = seq_lens.shape
    (cu_lens,) = cu_seqlens_q.shape
    v_dim = geometry.v_dim
    if q.dtype is not dtype:
        bad("attention", "q", f"has dtype {q.dtype}", dtype)
    if k_cache.dtype is not dtype:
        bad("attention", "k_cache", f"has dtype {k_cache.dtype}", dtype)
    if v_cache.dtype is not dtype:
        bad("attention", "v_cache", f"has dtype {v_cache.dtype}", dtype)
    if block_table.dtype is not _INT32:
        bad("attention", "block_table", f"has dtype {block_table.dtype}", _INT32)
    if seq_lens.dtype is not _INT32:
        bad("attention", "seq_lens", f"has dtype {seq_lens.dtype}", _INT32)
    if cu_seqlens_q.dtype is not _INT32:
        bad("attention", "cu_seqlens_q", f"has dtype {cu_seqlens_q.dtype}", _INT32)
    if qk_dim != geometry.qk_dim:
        bad("attention", "q", f"has head dim {qk_dim} in {list(q.shape)}", f"head dim {geometry.qk_dim}")
    if k_dim != geometry.qk_dim:
        bad(
            "attention",
            "k_cache",
            f"has head dim {k_dim} in {list(k_cache.shape)}",
            f"head dim {geometry.qk_dim}",
        )
    if page_size != geometry.page_size:
        bad(
            "attention",
            "k_cache",
            f"has page size {page_size} in {list(k_cache.shape)}",
            f"page size {geometry.page_size}",
        )
    need = (pages, kv_heads, page_size, v_dim) if hnd else (pages, page_size, kv_heads, v_dim)
    if v_shape != need:
        bad(
            "attention",
            "v_cache",
            f"has shape {list(v_shape)}",
            f"{list(need)}: k_cache's pages and kv heads, head dim {v_dim}",
        )
    if lens != seqs:
        bad(
            "attention",
            "seq_lens",
            f"has {lens} entries",
            f"{seqs}, one per row of block_table {[seqs, max_pages]}",
        )
    if cu_lens != seqs + 1:
        bad("attention", "cu_seqlens_q", f"has {cu_lens} entries", f"{seqs + 1}, one more than sequences")
    if tokens > limits.max_tokens:
        bad(
            "attention",
            "q",
            f"has {tokens} tokens",
            f"at most {limits.max_tokens}, the spec's limits.max_tokens",
        )
    if seqs > limits.max_seqs:
        bad(
            "attention",
            "block_table",
            f"has {seqs} sequences",
            f"at most {limits.max_seqs}, the spec's limits.max_seqs",
        )
    q_token, q_head, q_last = q.stride()
    if hnd:
        k_page, k_head, k_slot, k_last = k_cache.stride()
        v_page, v_head, v_slot, v_last = v_cache.stride()
    else:
        k_page, k_slot, k_head, k_last = k_cache.stride()
        v_page, v_slot, v_head, v_last = v_cache.stride()
    table_row, table_last = block_table.stride()
    (lens_last,) = seq_lens.stride()
    (cu_last,) = cu_seqlens_q.stride()
    if q_last != 1:
        bad_strides("attention", "q", q)
    if k_last != 1:
        bad_strides("attention", "k_cache", k_cache)
    if v_last != 1:
        bad_strides("attention", "v_cache", v_cache)
    if table_last != 1:
        bad_strides("attention", "block_table", block_table)
    if lens_last != 1:
        bad_strides("attention", "seq_lens", seq_lens)
    if cu_last != 1:
        bad_strides("attention", "cu_seqlens_q", cu_seqlens_q)
    index = q.get_device()
    if not (
        k_cache.get_device() == index == v_cache.get_device()
        and block_table.get_device() == index == seq_lens.get_device()
        and cu_seqlens_q.get_device() == index
        and index >= 0
    ):
        same_device(
            "attention",
            {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
            | {"cu_seqlens_q": cu_seqlens_q},
        )
    if _grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        refuse_grad("attention", {"q": q, "k_cache": k_cache, "v_cache": v_cache})
    if out is None:
        out_token, out_head = query_heads * v_dim, v_dim
    else:
        out_token, out_head = check_out("attention", out, q, v_dim)
    bits = q_token | q_head | k_page | k_slot | k_head | v_page | v_slot | v_head | out_token | out_head
    bits |= odd_cache(geometry, k_page, k_slot, k_head) | odd_cache(geometry, v_page, v_slot, v_head)
    strides = (
        table_row,
        q_token,
        q_head,
        k_page,
        k_slot,
        k_head,
        v_page,
        v_slot,
        v_head,
        out_token,
        out_head,
    )
    return seqs, max_pages, bits, strides


def check_out(function: str, out: Tensor, q: Tensor, v_dim: int) -> tuple[int, int]:
    """Check the output of an attention call whose q is already checked; return its strides (token, head)."""
    tokens, query_heads, _ = q.shape
    if out.shape != (tokens, query_heads, v_dim):
        bad(function, "out", f"has shape {list(out.shape)}", [tokens, query_heads, v_dim])
    if out.dtype is not q.dtype:
        bad(function, "out", f"has dtype {out.dtype}", q.dtype)
    token, head, last = out.stride()
    if last != 1:
        bad_strides(function, "out", out)
    if (head < v_dim or token < query_heads * head) and overlaps(
        (tokens, token), (query_heads, head), (v_dim, 1)
    ):
        came = f"has strides {out.stride()} that overlap"
        bad(function, "out", came, "every element at its own address")
    if out.get_device() != q.get_device() or q.get_device() < 0:
        same_device(function, {"q": q, "out": out})
    if _grad_enabled() and out.requires_grad:
        refuse_grad(function, {"out": out})
    return token, head


def read_attention(
    geometry: Geometry, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, out: Tensor | None
) -> tuple[int, int, int, tuple[int, ...]]:
    """What `check_attention` returns, unchecked."""
    seqs, max_pages = block_table.shape
    out_strides = (geometry.query_heads * geometry.v_dim, geometry.v_dim) if out is None else out.stride()[:2]
    if geometry.hnd:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    data = (*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out_strides)
    odd = odd_cache(geometry, *data[2:5]) | odd_cache(geometry, *data[5:8])
    return seqs, max_pages, reduce(or_, data, odd), (block_table.stride()[0], *data)


def odd_cache(geometry: Geometry, page: int, slot: int, head: int) -> int:
    """The stride bit of a cache, by its strides, that kernels for aligned tensors may not take.

    They may read it as a matrix of slots by elements: its pages are a whole number of slots apart, and where the last head of a
    slot begins is a coordinate of 32 bits. _read.h has the same.
    """
    return 1 if not slot or page % slot or (geometry.kv_heads - 1) * head >= 1 << 31 else 0


def check_append(
    geometry: Geometry, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]:
    """Check one append_kv call; return (num_tokens, num_slots, stride bits, strides, sizes): strides in kernel
    order (page, slot, head of a cache, whatever its layout), sizes in bytes from the first to the last of
    k, v, k_cache, v_cache and slot_mapping.
    """
    dtype = geometry.dtype
    qk_dim, v_dim = geometry.qk_dim, geometry.v_dim
    cache_shape = k_cache.shape
    pages, outer, inner, k_dim = cache_shape
    page_size, kv_heads = (inner, outer) if geometry.hnd else (outer, inner)
    tokens, _, _ = k_shape = k.shape
    (slots,) = slot_mapping.shape
    if k.dtype is not dtype:
        bad("append_kv", "k", f"has dtype {k.dtype}", dtype)
    if v.dtype is not dtype:
        bad("append_kv", "v", f"has dtype {v.dtype}", dtype)
    if k_cache.dtype is not dtype:
        bad("append_kv", "k_cache", f"has dtype {k_cache.dtype}", dtype)
    if v_cache.dtype is not dtype:
        bad("append_kv", "v_cache", f"has dtype {v_cache.dtype}", dtype)
    if slot_mapping.dtype is not torch.int64:
        bad("append_kv", "slot_mapping", f"has dtype {slot_mapping.dtype}", torch.int64)
    if k_dim != qk_dim:
        bad("append_kv", "k_cache", f"has head dim {k_dim} in {list(cache_shape)}", f"head dim {qk_dim}")
    if page_size != geometry.page_size:
        need = f"page size {geometry.page_size}"
        bad("append_kv", "k_cache", f"has page size {page_size} in {list(cache_shape)}", need)
    if v_cache.shape != (pages, outer, inner, v_dim):
        need = [pages, outer, inner, v_dim]
        bad("append_kv", "v_cache", f"has shape {list(v_cache.shape)}", need)
    if k_shape != (tokens, kv_heads, qk_dim):
        bad("append_kv", "k", f"has shape {list(k_shape)}", [tokens, kv_heads, qk_dim])
    if v.shape != (tokens, kv_heads, v_dim):
        bad("append_kv", "v", f"has shape {list(v.shape)}", [tokens, kv_heads, v_dim])
    if slots != tokens:
        bad("append_kv", "slot_mapping", f"has {slots} entries", f"{tokens}, one per token of k")
    k_token, k_head, k_last = k.stride()
    v_token, v_head, v_last = v.stride()
    kc_page, kc_outer, kc_inner, kc_last = k_cache.stride()
    vc_page, vc_outer, vc_inner, vc_last = v_cache.stride()
    (slot_last,) = slot_mapping.stride()
    if not k_last == v_last == kc_last == vc_last == slot_last == 1:
        tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
        for name, tensor in tensors.items():
            bad_strides("append_kv", name, tensor)
    for name, (page, far, near), dim in (
        ("k_cache", (kc_page, kc_outer, kc_inner), qk_dim),
        ("v_cache", (vc_page, vc_outer, vc_inner), v_dim),
    ):
        nested = near >= dim and far >= inner * near and page >= outer * far
        if not nested and overlaps((pages, page), (outer, far), (inner, near), (dim, 1)):
            bad(
                "append_kv",
                name,
                f"has strides {(page, far, near, 1)} that overlap",
                "every element at its own address",
            )
    index = k_cache.get_device()
    if not (
        v_cache.get_device() == index == k.get_device()
        and v.get_device() == index == slot_mapping.get_device()
        and index >= 0
    ):
        tensors = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "slot_mapping": slot_mapping}
        same_device("append_kv", tensors)
    if _grad_enabled() and (
        k.requires_grad or v.requires_grad or k_cache.requires_grad or v_cache.requires_grad
    ):
        refuse_grad("append_kv", {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache})
    if geometry.hnd:
        caches = (kc_page, kc_inner, kc_outer, vc_page, vc_inner, vc_outer)
    else:
        caches = (kc_page, kc_outer, kc_inner, vc_page, vc_outer, vc_inner)
    strides = (k_token, k_head, v_token, v_head, *caches)
    bits = k_token | k_head | v_token | v_head | kc_page | kc_outer | kc_inner | vc_page | vc_outer | vc_inner
    far, near = outer - 1, inner - 1
    size = dtype.itemsize
    sizes = (
        ((tokens - 1) * k_token + (kv_heads - 1) * k_head + qk_dim) * size,
        ((tokens - 1) * v_token + (kv_heads - 1) * v_head + v_dim) * size,
        ((pages - 1) * kc_page + far * kc_outer + near * kc_inner + qk_dim) * size,
        ((pages - 1) * vc_page + far * vc_outer + near * vc_inner + v_dim) * size,
        tokens * 8,
    )
    return tokens, pages * page_size, bits, strides, sizes


def check_merge(geometry: Geometry, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Check one merge_states call."""
    shape = out_a.shape
    for name, tensor, need, dtype in (
        ("out_a", out_a, shape, geometry.dtype),
        ("lse_a", lse_a, shape[:2], _FLOAT32),
        ("out_b", out_b, shape, geometry.dtype),
        ("lse_b", lse_b, shape[:2], _FLOAT32),
    ):
        diagnose("merge_states", {name: tensor})
        if tensor.dtype is not dtype:
            bad("merge_states", name, f"has dtype {tensor.dtype}", dtype)
        if tensor.shape != need:
            bad("merge_states", name, f"has shape {list(tensor.shape)}", list(need))
        if not tensor.is_contiguous():
            bad(
                "merge_states",
                name,
                f"has strides {tensor.stride()}",
                "a contiguous tensor; call .contiguous()",
            )
        if tensor.device != out_a.device:
            same_device("merge_states", {"out_a": out_a, name: tensor})
        if tensor.requires_grad and _grad_enabled():
            refuse_grad("merge_states", {name: tensor})
