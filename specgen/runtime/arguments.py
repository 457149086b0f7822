"""The run-time arguments of every kernel family, in order: the one statement that templates, compiler and launcher read.

A kernel's constants are baked into its module. `call_arguments` is what a caller passes, the same for every family that can
serve the call; `arguments` is what a family's kernel takes of it, in its own order, tensor maps among them (tensor_maps.py
says what a map is made of). `kind` is "pointer", "i32", "i64" or, of a kernel alone, "tensor_map"; a pointer's `dtype` is
"data" (the variant's own dtype), "bf16", "f32", "i32" or "i64". Strides are in elements, and the last dimension of every
tensor has stride 1. Arguments of features stand at the end, and only where the variant has the feature.
Nouns only: imports nothing but the standard library.
"""

from typing import NamedTuple


class Argument(NamedTuple):
    """One argument. `aligned` marks what the aligned variant promises: a pointer of 16 bytes, a stride of `alignment` bytes."""

    name: str
    kind: str
    dtype: str | None = None
    aligned: bool = False


def _pointer(name: str, dtype: str = "data") -> Argument:
    return Argument(name, "pointer", dtype, aligned=dtype == "data")


def _strides(tensor: str, *dims: str) -> tuple[Argument, ...]:
    return tuple(Argument(f"{tensor}_stride_{dim}", "i64", aligned=True) for dim in dims)


# States of parts of row blocks, as registers hold them: scratch, see sizes.py.
_PREFILL_PARTIAL = Argument("prefill_partial_ptr", "pointer", "f32", aligned=True)

# What a caller of paged attention passes, whichever family serves.
_ATTENTION = (
    _pointer("q_ptr"),  # [tokens, query_heads, qk_dim]
    _pointer("k_cache_ptr"),  # [pages, page_size, kv_heads, qk_dim]
    _pointer("v_cache_ptr"),  # [pages, page_size, kv_heads, v_dim]
    _pointer("block_table_ptr", "i32"),  # [seqs, max_pages]
    _pointer("seq_lens_ptr", "i32"),  # [seqs]
    _pointer("cu_seqlens_q_ptr", "i32"),  # [seqs + 1]
    _pointer("out_ptr"),  # [tokens, query_heads, v_dim]
    _pointer("lse_ptr", "f32"),  # [tokens, query_heads], contiguous; any pointer when store_lse is 0
    Argument("partial_acc_ptr", "pointer", "f32", aligned=True),  # [states, block_m, block_v]: scratch, see sizes.py
    Argument("partial_ml_ptr", "pointer", "f32", aligned=True),  # [states, 2, block_m]: running max (base 2) and sum
    _pointer("counters_ptr", "i32"),  # [grid]: arrivals per split item; zero between launches
    # [2 + parts]: work items handed out, programs that are done, arrivals at row blocks cut in parts; zero between launches
    _pointer("tickets_ptr", "i32"),
    _PREFILL_PARTIAL,
    Argument("num_seqs", "i32"),
    Argument("max_pages", "i32"),  # columns of block_table: longer sequences are clamped to max_pages * page_size keys
    Argument("store_lse", "i32"),  # 1: write lse, 0: leave lse_ptr alone
    Argument("num_tokens", "i32"),  # rows of q and out
    Argument("num_pages", "i32"),  # pages of the caches
    Argument("block_table_stride", "i64"),
    *_strides("q", "token", "head"),
    *_strides("k_cache", "page", "slot", "head"),
    *_strides("v_cache", "page", "slot", "head"),
    *_strides("out", "token", "head"),
)


def _taken(but: tuple[str, ...]) -> tuple[Argument, ...]:
    """The arguments of the attention call without those that begin with one of `but`."""
    return tuple(argument for argument in _ATTENTION if not argument.name.startswith(but))


def _maps(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, "tensor_map") for name in names)


# Sizes that bound a tensor map; kernels that load through pointers bound themselves by lengths.
_MAP_SIZES = ("num_tokens", "num_pages")
# Decode and prefill of one call may overlap: no scratch is of both.
_DECODE_SCRATCH = ("partial", "counters")
_PREFILL_SCRATCH = ("tickets", _PREFILL_PARTIAL.name)
# What a tensor map of a tensor holds already.
_IN_Q_MAP = ("q_ptr", "q_stride")
_IN_CACHE_MAPS = ("k_cache", "v_cache")

# Not of the call, but of the launch: programs, the last of the grid, that wait for multiprocessors of a launch that runs.
LATE_PROGRAMS = "late_programs"

ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "decode": _taken(but=(*_PREFILL_SCRATCH, *_MAP_SIZES)),
    "decode_ws": (*_maps("k_map", "v_map"), *_taken(but=(*_PREFILL_SCRATCH, *_MAP_SIZES, *_IN_CACHE_MAPS))),
    "prefill": _taken(but=(*_DECODE_SCRATCH, *_PREFILL_SCRATCH, *_MAP_SIZES)),
    "prefill_ws": (
        *_maps("q_map", "k_map", "v_map"),
        *_taken(but=(*_DECODE_SCRATCH, _PREFILL_PARTIAL.name, *_MAP_SIZES, *_IN_Q_MAP, "k_cache_ptr", "v_cache_ptr")),
        Argument(LATE_PROGRAMS, "i32"),
    ),
    "varlen": (
        _pointer("q_ptr"),  # [tokens, query_heads, qk_dim]
        _pointer("k_ptr"),  # [key_tokens, kv_heads, qk_dim]
        _pointer("v_ptr"),  # [key_tokens, kv_heads, v_dim]
        _pointer("cu_seqlens_q_ptr", "i32"),  # [seqs + 1]
        _pointer("cu_seqlens_k_ptr", "i32"),  # [seqs + 1]
        _pointer("out_ptr"),  # [tokens, query_heads, v_dim]
        _pointer("lse_ptr", "f32"),  # [tokens, query_heads], contiguous; any pointer when store_lse is 0
        Argument("num_seqs", "i32"),
        Argument("store_lse", "i32"),
        *_strides("q", "token", "head"),
        *_strides("k", "token", "head"),
        *_strides("v", "token", "head"),
        *_strides("out", "token", "head"),
    ),
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

_SINKS = (
    _pointer("sinks_bf16_ptr", "bf16"),  # [query_heads], contiguous: read where sinks_are_f32 is 0; else any pointer
    _pointer("sinks_f32_ptr", "f32"),  # [query_heads], contiguous: read where sinks_are_f32 is 1; else any pointer
    Argument("sinks_are_f32", "i32"),
)
_ALIBI = (_pointer("alibi_slopes_ptr", "f32"),)  # [query_heads], contiguous
_ROTARY = (
    _pointer("q_ptr"),  # [tokens, query_heads, qk_dim]
    _pointer("q_out_ptr"),  # [tokens, query_heads, qk_dim]: the rotated queries
    _pointer("positions_ptr", "i64"),  # [tokens]
    _pointer("cos_ptr", "f32"),  # [num_positions, rotary dim / 2], contiguous, as is sin
    _pointer("sin_ptr", "f32"),
    Argument("num_positions", "i64"),
    *_strides("q", "token", "head"),
    *_strides("q_out", "token", "head"),
)
_PREFIX_RANGES = (
    _pointer("prefix_ranges_ptr", "i32"),  # [seqs, num_prefix_ranges, 2], contiguous: start, end (not included)
    Argument("num_prefix_ranges", "i32"),  # 0: no range, and any pointer
)


# Families that serve attention over a paged cache, and whose sequences they take: decode's few query rows, or prefill's many.
ROLES = {"decode": "decode", "decode_ws": "decode", "prefill": "prefill", "prefill_ws": "prefill"}


def arguments(
    family: str, *, sinks: bool = False, alibi: bool = False, prefix_ranges: bool = False, rotary: bool = False, split: bool = False
) -> tuple[Argument, ...]:
    """What a variant's kernel takes: the arguments of its family, then those of its features, then what a prefill that cuts row
    blocks along their keys (`split`) takes besides.
    """
    return ARGUMENTS[family] + _features(family, sinks, alibi, prefix_ranges, rotary) + (_PREFILL_PARTIAL,) * split


def call_arguments(
    family: str, *, sinks: bool = False, alibi: bool = False, prefix_ranges: bool = False, rotary: bool = False
) -> tuple[Argument, ...]:
    """What a caller passes to a variant, of which its kernel takes some: the same for every family that serves the call."""
    passed = _ATTENTION if family in ROLES else ARGUMENTS[family]
    return passed + _features(family, sinks, alibi, prefix_ranges, rotary)


def _features(family, sinks, alibi, prefix_ranges, rotary) -> tuple[Argument, ...]:
    if family in ROLES or family == "varlen":
        return _SINKS * sinks + _ALIBI * alibi + _PREFIX_RANGES * prefix_ranges
    return _ROTARY * (rotary and family == "append_kv")


def variant_arguments(variant: dict) -> tuple[Argument, ...]:
    """`arguments` of a manifest entry, whose absent fields are off."""
    return arguments(variant["family"], **_manifest_features(variant), split=cuts_keys(variant))


def cuts_keys(variant: dict) -> bool:
    """Whether a prefill variant (manifest entry) cuts row blocks along their keys, as the option `split` of prefill_ws says."""
    return variant["family"] == "prefill_ws" and variant.get("options", {}).get("split", 0) == 1


def can_overlap(arguments: tuple[Argument, ...]) -> bool:
    """Whether a kernel of these arguments may begin while the launch before it runs."""
    return any(argument.name == LATE_PROGRAMS for argument in arguments)


def variant_call_arguments(variant: dict) -> tuple[Argument, ...]:
    """`call_arguments` of a manifest entry, whose absent fields are off."""
    return call_arguments(variant["family"], **_manifest_features(variant))


def _manifest_features(variant: dict) -> dict[str, bool]:
    features = {name: bool(variant.get(name)) for name in ("sinks", "alibi", "prefix_ranges")}
    return features | {"rotary": variant.get("rotary_dim") is not None}
