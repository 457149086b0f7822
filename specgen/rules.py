"""What is legal, stated once: a spec's features that no template implements, and a variant that a target cannot hold.

Every function returns reasons; None or an empty list means legal. Imports only nouns.
"""

from collections.abc import Sequence

from specgen import decode_ws, prefill_ws
from specgen.spec import AttentionSpec, Limits, Spec
from specgen.target import Target
from specgen.variant import MATRIX_ROWS, Variant

# Features that need another field to mean anything: (field, is it on?, does the entry allow it?, what is needed and why).
_CAUSAL = "mask: causal: it narrows or widens what a causal row sees"
_NOT_CROSS = "cross: false: a query has no position among an encoder's keys"
_NEEDS = (
    ("sliding_window", lambda a: a.sliding_window is not None, lambda a: a.mask == "causal", _CAUSAL),
    ("chunk", lambda a: a.chunk is not None, lambda a: a.mask == "causal", _CAUSAL),
    ("prefix_ranges", lambda a: a.prefix_ranges, lambda a: a.mask == "causal", _CAUSAL),
    ("cross", lambda a: a.cross, lambda a: a.mask == "bidirectional", "mask: bidirectional: every query sees the encoder's keys"),
    ("alibi", lambda a: a.alibi, lambda a: not a.cross, _NOT_CROSS),
    ("rotary", lambda a: a.rotary is not None, lambda a: not a.cross, _NOT_CROSS),
)
# The kernels multiply scores by scale x log2(e) in float32.
_SCALES = (1e-30, 1e30)
_SOFTCAPS = (1e-3, 1e6)
# Work is counted in int32. What is left of 2^31 covers the rounding up of shares to any grid (at most 2 per program)
# and what decode counts for an item behind the last.
_MAX_ITEMS = (1 << 31) - (1 << 20)


def refusals(spec: Spec) -> list[tuple[str, str]]:
    """(field path, reason) for what the spec asks for that is not legal or that no template implements: `build` refuses it."""
    reasons = []
    for i, entry in enumerate(spec.attention):
        reasons += [
            (f"attention.{i}.{field}", f"needs {needed}")
            for field, is_on, allowed, needed in _NEEDS
            if is_on(entry) and not allowed(entry)
        ]
        if entry.rotary is not None and (alike := _alike(entry, spec.tensor_parallel)):
            those = f"{', '.join(map(str, alike[:-1]))} and {alike[-1]}"
            what = f"tensor_parallel {those} leave the same key/value heads beside different query heads"
            reasons.append((f"attention.{i}.rotary", f"{what}: append_kv could not tell which queries to rotate"))
        if entry.softcap is not None and not _SOFTCAPS[0] <= entry.softcap <= _SOFTCAPS[1]:
            reason = f"needs a softcap from {_SOFTCAPS[0]:g} to {_SOFTCAPS[1]:g}, got {entry.softcap!r}: kernels apply it in float32"
            reasons.append((f"attention.{i}.softcap", reason))
        if not _SCALES[0] <= entry.resolved_scale <= _SCALES[1]:
            reason = f"needs a scale from {_SCALES[0]:g} to {_SCALES[1]:g}, got {entry.scale!r}: kernels apply it in float32"
            reasons.append((f"attention.{i}.scale", reason))
    if spec.kv_cache.dtype != spec.dtype:
        what = f"no kernel template implements a {spec.kv_cache.dtype} cache under {spec.dtype} queries yet"
        reasons.append(("kv_cache.dtype", what))
    if spec.kv_cache.scales is not None:
        reasons.append(("kv_cache.scales", "no kernel template implements scales of a quantised cache yet"))
    return reasons


def _alike(entry: AttentionSpec, degrees: tuple[int, ...]) -> list[int]:
    """The degrees that replication leaves with one key/value head each, if more than one: append_kv's table keys on that count alone."""
    replicated = [degree for degree in degrees if entry.per_rank(degree)[1] == 1]
    return replicated if len(replicated) > 1 else []


def shared_bytes(variant: Variant, vendor: str) -> int:
    """Bytes of shared memory that a variant needs, at most; elementwise families stage nothing.

    NVIDIA: the pipeliner buffers num_stages tiles of K and V beside Q and P. AMD: num_stages - 1 buffers and P; Q passes
    through before the loop and its room is used again. An upper bound checked against compiled binaries
    (tests/test_dispatch_rows.py); the compiled figure is what the build's budget gate reads.
    """
    if variant.family == "decode_ws":
        return decode_ws.Shape(variant).shared_bytes
    if variant.family == "prefill_ws":
        return prefill_ws.Shape(variant).shared_bytes
    if variant.family not in ("decode", "prefill", "varlen"):
        return 0
    g, c = variant.geometry, variant.config
    key_tile = c.tile_n * (sum(g.qk_tiles) + sum(g.v_tiles)) * g.itemsize
    query_tile = c.block_m * sum(g.qk_tiles) * g.itemsize
    weight_tile = c.block_m * c.tile_n * g.itemsize
    if vendor == "amd":
        return max(query_tile, max(c.num_stages - 1, 1) * key_tile + weight_tile)
    return c.num_stages * key_tile + query_tile + weight_tile


def work_items(variant: Variant, limits: Limits) -> int:
    """Upper bound of what one launch counts in int32 for a batch within `limits`: decode key tiles and what items cost besides
    theirs, prefill row blocks.

    The other families count rows in int64, or tokens that fit no memory before they reach 2^31.
    """
    g, c = variant.geometry, variant.config
    if variant.family in ("decode", "decode_ws"):
        row_blocks = -(-variant.max_query_len * g.group // c.block_m)
        heads = g.kv_heads // variant.heads_box
        tiles = -(-limits.max_seq_len // _grain(variant)) + _item_cost(variant)
        total = min(limits.max_seqs, limits.max_tokens) * tiles * row_blocks * heads
        return decode_ws.Shape(variant).axis_end(total) if variant.family == "decode_ws" else total
    if variant.family == "prefill_ws":
        shape = prefill_ws.Shape(variant)
        return (-(-limits.max_tokens // shape.block_tokens) + limits.max_seqs) * shape.head_blocks
    if variant.family in ("prefill", "varlen"):
        return (-(-limits.max_tokens * g.group // c.block_m) + limits.max_seqs) * g.kv_heads
    return 0


def _grain(variant: Variant) -> int:
    """Keys of what decode counts."""
    return variant.keys_box if variant.family == "decode_ws" else variant.config.tile_n


def _item_cost(variant: Variant) -> int:
    """Of these, what decode counts for an item besides its own."""
    return decode_ws.Shape(variant).item_units if variant.family == "decode_ws" else variant.item_tiles


def _copies_and_registers(variant: Variant) -> tuple[tuple[bool, str], ...]:
    """(is met, what a Gluon kernel says) of options that these families share."""
    fetch = variant.tunable("fetch", 128)
    return (
        (fetch in (128, 256), f"lets L2 fetch 128 or 256 bytes, not {fetch}"),
        (variant.tunable("maxnreg", 0) > 0, "needs option maxnreg: the registers that warps share"),
    )


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _decode_ws_refusal(variant: Variant, target: Target) -> str | None:
    """Why decode_ws cannot be what `variant` says: what TMA asks of a cache, what the template implements, how tiles divide."""
    g, c, shape = variant.geometry, variant.config, decode_ws.Shape(variant)
    least, unit, warps = decode_ws.MATRIX_KEYS, variant.tunable("unit", 0), shape.parts * shape.row_warps
    dims, share = f"{g.qk_dim} and {g.v_dim}", variant.tunable("share", 100)
    needs = (
        (target.arch == "sm_90", f"is written for sm_90, {target.id} is {target.arch}"),
        (variant.aligned, "copies pages by TMA, which needs aligned pointers and strides"),
        (g.itemsize == 2, f"multiplies elements of 2 bytes, {g.dtype} has {g.itemsize}"),
        (g.alignment == 16, f"copies pages by TMA, which needs heads of a multiple of 16 bytes, not {dims} elements"),
        (max(g.qk_dim, g.v_dim) <= 256, f"holds heads of up to 256 elements, not {dims}"),
        (
            g.page_size >= least and g.page_size & (g.page_size - 1) == 0,
            f"needs pages of a power of two of at least {least} keys, not {g.page_size}",
        ),
        (not (g.alibi or g.prefix_ranges), "implements neither ALiBi nor prefix ranges"),
        (not g.batch_invariant, "splits keys evenly over the whole batch, which batch_invariant excludes"),
        (shape.heads in decode_ws.HEADS, f"attends to one of {decode_ws.HEADS} heads at once, not {shape.heads}"),
        (g.kv_heads % shape.heads == 0, f"attends to {shape.heads} key/value heads at once, which do not divide {g.kv_heads}"),
        (unit <= g.page_size, f"takes boxes from one page, of {g.page_size} keys, not {unit}"),
        (c.tile_n % shape.unit == 0, f"needs tiles of whole boxes of {shape.unit} keys, not {c.tile_n}"),
        (shape.heads == 1 or c.tile_n == shape.unit, f"needs tiles of one box of {shape.heads} heads, {shape.unit} keys"),
        (shape.part_keys >= least, f"needs {least} keys a warp, tiles of {c.tile_n} give {shape.part_keys}"),
        (
            c.block_m % decode_ws.MATRIX_ROWS == 0,
            f"needs row blocks of a multiple of {decode_ws.MATRIX_ROWS}, not {c.block_m}",
        ),
        (c.num_warps == warps, f"needs {warps} warps here, not {c.num_warps}"),
        (0 < share <= 100, f"takes 1 to 100 percent of the multiprocessors, not {share}"),
        *_copies_and_registers(variant),
    )
    return next((f"decode_ws {reason}" for is_met, reason in needs if not is_met), None)


def _prefill_ws_refusal(variant: Variant, target: Target) -> str | None:
    """Why prefill_ws cannot be what `variant` says: what TMA asks of a cache, what the template implements, how tiles divide."""
    g, c = variant.geometry, variant.config
    pages = g.page_size >= prefill_ws.LEAST_PAGE and g.page_size & (g.page_size - 1) == 0
    rows = [groups * MATRIX_ROWS for groups in prefill_ws.GROUPS]
    shape, programs = prefill_ws.Shape(variant), c.ctas_per_multiprocessor
    needs = (
        (target.arch == "sm_90", f"is written for sm_90, {target.id} is {target.arch}"),
        (variant.aligned, "copies pages by TMA, which needs aligned pointers and strides"),
        (g.itemsize == 2, f"multiplies elements of 2 bytes, {g.dtype} has {g.itemsize}"),
        (g.alignment == 16, f"copies pages by TMA, which needs heads of a multiple of 16 bytes, not {g.qk_dim} and {g.v_dim} elements"),
        (max(g.qk_dim, g.v_dim) <= 256, f"holds heads of up to 256 elements, not {g.qk_dim} and {g.v_dim}"),
        (pages, f"needs pages of a power of two of at least {prefill_ws.LEAST_PAGE} keys, not {g.page_size}"),
        (not (g.alibi or g.prefix_ranges), "implements neither ALiBi nor prefix ranges"),
        (c.block_m in rows, f"needs row blocks of {_either(rows)}, {MATRIX_ROWS} for each group of {prefill_ws.GROUP_WARPS} warps, not {c.block_m}"),
        (c.tile_n in (64, 128), f"needs tiles of 64 or 128 keys, not {c.tile_n}"),
        (c.num_warps == shape.compute_warps, f"needs {shape.compute_warps} warps for row blocks of {c.block_m}, not {c.num_warps}"),
        (c.num_stages >= 2, f"needs 2 tiles in flight, not {c.num_stages}"),
        (shape.loaders in prefill_ws.LOADERS, f"needs {_either(prefill_ws.LOADERS)} loaders, not {shape.loaders}"),
        (shape.groups == 1 or not variant.cuts_keys, f"cuts keys of row blocks of {MATRIX_ROWS}: two groups leave no registers to merge parts"),
        (variant.block_v <= 128 or not variant.cuts_keys, f"cuts keys of heads of up to 128 elements: {g.v_dim} leave no registers to merge parts"),
        (not (g.batch_invariant and variant.cuts_keys), "cuts keys by what else is in the batch, which batch_invariant excludes"),
        *_copies_and_registers(variant),
        (
            shape.compute_registers % 8 == 0 and 0 < shape.compute_registers <= prefill_ws.MOST_REGISTERS,
            f"leaves {shape.compute_registers} registers for a thread that computes, which takes a multiple of 8, at most "
            f"{prefill_ws.MOST_REGISTERS}",
        ),
        (
            programs * shape.registers <= target.registers_per_multiprocessor,
            f"needs {shape.registers} registers for each of {programs} programs, a multiprocessor of {target.id} has "
            f"{target.registers_per_multiprocessor}",
        ),
    )
    return next((f"prefill_ws {reason}" for is_met, reason in needs if not is_met), None)


def why_not(variant: Variant, target: Target, limits: Limits) -> str | None:
    """The reason why `target` cannot run `variant` on every batch within `limits`, or None."""
    own = {"decode_ws": _decode_ws_refusal, "prefill_ws": _prefill_ws_refusal}.get(variant.family)
    if own and (reason := own(variant, target)):
        return reason
    most = _MAX_ITEMS
    if variant.family == "decode_ws":  # a share may be larger than even
        most -= most // decode_ws.SHARE_SLACK
    if (items := work_items(variant, limits)) > most:
        what = f"key tiles of {_grain(variant)}" if variant.family in ("decode", "decode_ws") else "row blocks"
        return (
            f"a launch may have {items} {what} (max_seqs {limits.max_seqs}, max_seq_len {limits.max_seq_len}, "
            f"max_tokens {limits.max_tokens}), the kernel counts to {most}"
        )
    needed, available = shared_bytes(variant, target.vendor), target.shared_memory_per_block
    if needed > available:
        return f"needs {needed} bytes of shared memory per block, {target.id} has {available}"
    programs = variant.config.ctas_per_multiprocessor
    each = (available + prefill_ws.RESERVED_SHARED) // programs - prefill_ws.RESERVED_SHARED
    if variant.family == "prefill_ws" and needed > each:
        return f"needs {needed} bytes of shared memory per block, {target.id} has {each} for each of {programs}"
    return None
