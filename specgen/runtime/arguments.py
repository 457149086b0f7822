"""The run-time arguments of every kernel family, in order: the one statement that templates, compiler and launcher read.

A kernel's constants are baked into its module; what is listed here is what a launch passes. `kind` is "pointer", "i32" or
"i64"; a pointer's `dtype` is "data" (the variant's own dtype), "f32", "i32" or "i64". Strides are in elements, and the last
dimension of every tensor has stride 1. Nouns only: imports nothing but the standard library.
"""

from typing import NamedTuple


class Argument(NamedTuple):
    """One kernel argument. `aligned` marks what the aligned variant promises: a pointer of 16 bytes, a stride of `alignment` bytes."""

    name: str
    kind: str
    dtype: str | None = None
    aligned: bool = False


def _pointer(name: str, dtype: str = "data") -> Argument:
    return Argument(name, "pointer", dtype, aligned=dtype == "data")


def _strides(tensor: str, *dims: str) -> tuple[Argument, ...]:
    return tuple(Argument(f"{tensor}_stride_{dim}", "i64", aligned=True) for dim in dims)


_PAGED = (
    _pointer("q_ptr"),  # [tokens, query_heads, qk_dim]
    _pointer("k_cache_ptr"),  # [pages, page_size, kv_heads, qk_dim]
    _pointer("v_cache_ptr"),  # [pages, page_size, kv_heads, v_dim]
    _pointer("block_table_ptr", "i32"),  # [seqs, max_pages]
    _pointer("seq_lens_ptr", "i32"),  # [seqs]
    _pointer("cu_seqlens_q_ptr", "i32"),  # [seqs + 1]
    _pointer("out_ptr"),  # [tokens, query_heads, v_dim]
    _pointer("lse_ptr", "f32"),  # [tokens, query_heads], contiguous; any pointer when store_lse is 0
)
_PAGED_SCALARS = (
    Argument("num_seqs", "i32"),
    Argument("max_pages", "i32"),  # columns of block_table: longer sequences are clamped to max_pages * page_size keys
    Argument("store_lse", "i32"),  # 1: write lse, 0: leave lse_ptr alone
    Argument("block_table_stride", "i64"),
    *_strides("q", "token", "head"),
    *_strides("k_cache", "page", "slot", "head"),
    *_strides("v_cache", "page", "slot", "head"),
    *_strides("out", "token", "head"),
)

ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "decode": (
        *_PAGED,
        Argument("partial_acc_ptr", "pointer", "f32", aligned=True),  # [2 * grid, block_m, block_v]: scratch, see sizes.py
        Argument("partial_ml_ptr", "pointer", "f32", aligned=True),  # [2 * grid, 2, block_m]: running max (base 2) and sum
        _pointer("counters_ptr", "i32"),  # [grid]: arrivals per split item; zero between launches
        *_PAGED_SCALARS,
    ),
    "prefill": (*_PAGED, *_PAGED_SCALARS),
    "append_kv": (
        _pointer("k_ptr"),  # [tokens, kv_heads, qk_dim]
        _pointer("v_ptr"),  # [tokens, kv_heads, v_dim]
        _pointer("k_cache_ptr"),
        _pointer("v_cache_ptr"),
        _pointer("slot_mapping_ptr", "i64"),  # [tokens]: page * page_size + offset; negative or past num_slots: skipped
        Argument("num_tokens", "i32"),
        Argument("num_slots", "i64"),
        *_strides("k", "token", "head"),
        *_strides("v", "token", "head"),
        *_strides("k_cache", "page", "slot", "head"),
        *_strides("v_cache", "page", "slot", "head"),
    ),
    "merge_states": (
        _pointer("out_a_ptr"),  # [tokens, query_heads, v_dim], contiguous, as the four others
        _pointer("lse_a_ptr", "f32"),  # [tokens, query_heads]
        _pointer("out_b_ptr"),
        _pointer("lse_b_ptr", "f32"),
        _pointer("out_ptr"),
        _pointer("lse_ptr", "f32"),
        Argument("num_rows", "i64"),  # tokens * query_heads
    ),
}
