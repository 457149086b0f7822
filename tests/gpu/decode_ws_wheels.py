"""Build the wheels that tests/gpu/decode_ws.py runs: packages whose dispatch rows stay as they are, and which hold decode_ws
besides, in every configuration of tuning/configs.yaml that is legal and in some more.

    python tests/gpu/decode_ws_wheels.py FOLDER [NAME ...]     # all of WHEELS, or those named

Needs specgen and Triton, no GPU. FOLDER gets one folder per package, with its wheel in dist/.
"""

import sys
from dataclasses import replace
from pathlib import Path

from specgen import pipeline
from specgen.cache import Cache
from specgen.expand import Expansion, expand
from specgen.rules import why_not
from specgen.tuning import candidates
from specgen.variant import Config, Variant

HEADS = {"llama": (32, 8, 128), "mqa": (32, 1, 128), "mha": (32, 32, 128), "qwen": (14, 2, 64), "wide": (8, 4, 256)}
FEATURES = {
    "window_sinks": (32, 8, 128, "sliding_window: 128, sinks: true"),
    "window_softcap": (16, 8, 256, "sliding_window: 1024, softcap: 50.0"),
    "chunk": (40, 8, 128, "chunk: 512"),
    "bidirectional": (12, 12, 64, "mask: bidirectional"),
    "one_head_of_eight": (8, 1, 128, "scale: 0.1"),
    "group_256": (256, 1, 64, "scale: 0.2"),
    "dims_192_128": (16, 16, "{qk: 192, v: 128}", "softcap: 30.0"),
    "dim_80": (32, 8, 80, "sinks: true"),
}
WHEELS = {
    # name: dtype, page size, layout, max_spec_tokens, layers
    "ws_bf16_p16": ("bfloat16", 16, "NHD", 4, HEADS),
    "ws_fp16_p64": ("float16", 64, "NHD", 8, HEADS),
    "ws_bf16_p256_hnd": ("bfloat16", 256, "HND", 4, {name: HEADS[name] for name in ("llama", "mqa", "wide")}),
    "ws_features": ("bfloat16", 16, "NHD", 3, FEATURES),
}
# Of this one every legal configuration is built, with and without the L2 hint; of the others the first of each kind of box.
TIMED = "ws_bf16_p16"
# Tried beside those of configs.yaml: more heads at once, deeper rings, more keys in a box.
MORE = (
    Config(16, 16, 4, 3, 2, (("heads", 4), ("maxnreg", 128)), "tried: a head a warp, deeper"),
    Config(16, 16, 4, 4, 1, (("heads", 4), ("maxnreg", 168)), "tried: a head a warp, one program a multiprocessor"),
    Config(16, 16, 8, 2, 1, (("heads", 8), ("maxnreg", 168)), "tried: eight heads"),
    Config(16, 64, 4, 2, 2, (("fetch", 256), ("maxnreg", 128)), "tried: L2 fetches 256 bytes"),
    Config(16, 64, 4, 3, 1, (("fetch", 256), ("maxnreg", 168)), "tried: L2 fetches 256 bytes"),
    Config(16, 16, 4, 2, 2, (("fetch", 256), ("heads", 4), ("maxnreg", 128)), "tried: a head a warp, L2 fetches 256 bytes"),
    Config(16, 64, 4, 2, 2, (("align", 0), ("maxnreg", 128)), "tried: an even split of items that are alike too"),
    Config(16, 64, 4, 2, 2, (("maxnreg", 128), ("unit", 64)), "tried: boxes of 64 keys"),
    Config(16, 32, 4, 2, 1, (("heads", 4), ("maxnreg", 168), ("unit", 32)), "tried: a head a warp, boxes of 32 keys"),
)


def spec_text(name: str) -> str:
    """A whole spec file."""
    dtype, page_size, layout, rows, layers = WHEELS[name]
    entries = "".join(
        f"  - {{name: {layer}, layers: [{i}], query_heads: {heads}, kv_heads: {kv_heads}, head_dim: {dim}"
        + "".join(f", {text}" for text in more)
        + "}\n"
        for i, (layer, (heads, kv_heads, dim, *more)) in enumerate(layers.items())
    )
    return (
        f"version: 1\nname: {name}\ndtype: {dtype}\nattention:\n{entries}"
        f"kv_cache: {{dtype: {dtype}, page_size: {page_size}, layout: {layout}}}\ntensor_parallel: [1]\ntargets: [h200]\n"
        f"limits: {{max_seqs: 256, max_seq_len: 131072, max_tokens: 4096, max_spec_tokens: {rows}}}\n"
    )


def legal(plain: Variant, target, spec) -> list[Variant]:
    """decode_ws in the place of a plain specialization, the preferred configuration first."""
    known = candidates("decode_ws", plain.geometry, target, True, plain.max_query_len)
    found = [replace(plain, family="decode_ws", config=config) for config in (*known, *MORE)]
    return [variant for variant in found if why_not(variant, target, spec.limits) is None]


def hinted(variant: Variant) -> Variant:
    """The same with the L2 hint."""
    options = tuple(sorted((("evict_first", 1), *variant.config.options)))
    return replace(variant, config=replace(variant.config, options=options))


def with_decode_ws(spec, targets, over_budget=None, measurements=()) -> Expansion:
    """What a build expands, and decode_ws for each decode specialization of aligned tensors."""
    found = expand(spec, targets, over_budget, measurements)
    target, uses = targets[spec.targets[0]], list(found.uses)
    for use in found.uses:
        if use.variant.family != "decode" or not use.variant.aligned:
            continue
        variants = [v for v in legal(use.variant, target, spec) if (v.symbol, use.arch) not in (over_budget or {})]
        if spec.name == TIMED:
            variants += [v for v in map(hinted, variants) if (v.symbol, use.arch) not in (over_budget or {})]
        else:
            variants = list({(v.heads_box, v.keys_box, v.config.block_m): v for v in reversed(variants)}.values())
        uses += [replace(use, variant=variant) for variant in variants]
    return replace(found, uses=tuple(dict.fromkeys(uses)))


def main() -> None:
    """Build the wheels that are named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pipeline.expand = with_decode_ws
    for name in sys.argv[2:] or WHEELS:
        path = folder / f"{name}.yaml"
        path.write_text(spec_text(name), "utf-8")
        print(pipeline.build(path, folder, cache=Cache()), flush=True)


if __name__ == "__main__":
    main()
