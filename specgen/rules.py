"""What is legal, stated once: a spec's features that no template implements, and a variant that a target cannot hold.

Every function returns reasons; None or an empty list means legal. Imports only nouns.
"""

from specgen.dtypes import DTYPES
from specgen.spec import AttentionSpec, Spec
from specgen.target import Target
from specgen.variant import Variant

# Fields of an attention entry that no kernel template implements: (field, is it on?, what it is).
_UNIMPLEMENTED = (
    ("sliding_window", lambda a: a.sliding_window is not None, "sliding window attention"),
    ("chunk", lambda a: a.chunk is not None, "chunked local attention"),
    ("softcap", lambda a: a.softcap is not None, "logit softcap"),
    ("sinks", lambda a: a.sinks, "attention sinks"),
    ("alibi", lambda a: a.alibi, "ALiBi"),
    ("rotary", lambda a: a.rotary is not None, "rotary embedding fused into append_kv"),
    ("prefix_ranges", lambda a: a.prefix_ranges, "prefix ranges"),
    ("cross", lambda a: a.cross, "cross-attention"),
)
_MAX_HEAD_DIM = 256


def unimplemented(spec: Spec) -> list[tuple[str, str]]:
    """(field path, reason) for everything the spec asks for that no template implements: `build` refuses it."""
    reasons = []
    for i, entry in enumerate(spec.attention):
        reasons += [
            (f"attention.{i}.{field}", f"{what} is not implemented by any kernel template yet")
            for field, is_on, what in _UNIMPLEMENTED
            if is_on(entry)
        ]
        reasons += [(f"attention.{i}.head_dim", reason) for reason in _head_dims(entry)]
    if spec.kv_cache.dtype != spec.dtype:
        what = f"a {spec.kv_cache.dtype} cache under {spec.dtype} queries is not implemented by any kernel template yet"
        reasons.append(("kv_cache.dtype", what))
    if spec.kv_cache.layout != "NHD":
        reasons.append(("kv_cache.layout", f"layout {spec.kv_cache.layout} is not implemented by any kernel template yet"))
    if spec.kv_cache.scales is not None:
        reasons.append(("kv_cache.scales", "scales of a quantised cache are not implemented by any kernel template yet"))
    if spec.dtype not in DTYPES:
        reasons.append(("dtype", f"{spec.dtype} is not implemented by any kernel template yet"))
    if spec.batch_invariant:
        reasons.append(("batch_invariant", "batch-invariant splits are not implemented by any kernel template yet"))
    return reasons


def _head_dims(entry: AttentionSpec) -> list[str]:
    dims = {"qk": entry.head_dim.qk, "v": entry.head_dim.v}
    return [
        f"head size {name}={dim} is above {_MAX_HEAD_DIM}, the largest that the kernel templates implement"
        for name, dim in dims.items()
        if dim > _MAX_HEAD_DIM
    ]


def shared_bytes(variant: Variant, vendor: str) -> int:
    """Bytes of shared memory that a variant needs, at most; elementwise families stage nothing.

    NVIDIA: the pipeliner buffers num_stages tiles of K and V beside Q and P. AMD: num_stages - 1 buffers and P; Q passes
    through before the loop and its room is used again. An upper bound checked against compiled binaries
    (tests/test_generate.py); the compiled figure is what the build's budget gate reads.
    """
    if variant.family not in ("decode", "prefill"):
        return 0
    g, c = variant.geometry, variant.config
    key_tile = c.tile_n * (g.block_qk + g.block_v) * g.itemsize
    query_tile = c.block_m * g.block_qk * g.itemsize
    weight_tile = c.block_m * c.tile_n * g.itemsize
    if vendor == "amd":
        return max(query_tile, max(c.num_stages - 1, 1) * key_tile + weight_tile)
    return c.num_stages * key_tile + query_tile + weight_tile


def why_not(variant: Variant, target: Target) -> str | None:
    """The reason why `target` cannot run `variant`, or None."""
    needed, available = shared_bytes(variant, target.vendor), target.shared_memory_per_block
    if needed > available:
        return f"needs {needed} bytes of shared memory per block, {target.id} has {available}"
    return None
