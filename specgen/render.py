"""Artifacts -> text: Jinja with StrictUndefined over templates/, a context of named values, no logic of its own."""

import json
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specgen import __version__, decode_ws, prefill_ws
from specgen.artifact import Artifact
from specgen.data_files import TEMPLATES
from specgen.load import Loaded
from specgen.variant import BOX_COLUMNS, GLUON_FAMILIES, LOG2E, Geometry, Variant, next_power_of_two


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = lambda text: json.dumps(text, ensure_ascii=False)
    environment.filters["identifier"] = lambda name: "None" if name is None else f'"{name}"'
    return environment


def _mask_words(g: Geometry) -> list[str]:
    """What bounds or bends the scores besides the mask, for a docstring."""
    numbers = (("window", g.sliding_window), ("chunk", g.chunk), ("softcap", g.softcap))
    switches = (("sinks", g.sinks), ("ALiBi", g.alibi), ("prefix ranges", g.prefix_ranges))
    return [f"{name} {value}" for name, value in numbers if value is not None] + [name for name, on in switches if on]


class Part(NamedTuple):
    """One tile of a head: the ending of its names, the constant that is its width, where it starts (text), its padding."""

    suffix: str
    block: str
    start: str
    padded: bool


def _parts(tiles: tuple[int, ...], dim: int, block: str) -> tuple[Part, ...]:
    if len(tiles) == 1:
        return (Part("", block, "", tiles[0] != dim),)
    return Part("", block, "", False), Part("_tail", f"{block}_TAIL", f"{block} + ", sum(tiles) != dim)


def _tile_text(tiles: tuple[int, ...], dim: str) -> str:
    return f"{dim} rounded up to a tile" if len(tiles) == 1 else f"the leading elements of {dim}: one tile"


def kernel_view(variant: Variant) -> dict:
    """The names that a kernel template may use, flat: numbers, identifiers and named booleans, never a condition to compute."""
    own = {"decode_ws": decode_ws.Shape, "prefill_ws": prefill_ws.Shape}.get(variant.family)
    return _common_view(variant) | (own(variant).view() if own else {})


def _common_view(variant: Variant) -> dict:
    g, c = variant.geometry, variant.config
    qk_tiles, v_tiles = variant.qk_tiles, variant.v_tiles
    return {
        "symbol": variant.symbol,
        "family": variant.family,
        "query_heads": g.query_heads,
        "kv_heads": g.kv_heads,
        "group": g.group,
        "qk_dim": g.qk_dim,
        "v_dim": g.v_dim,
        "head_dims": str(g.qk_dim) if g.qk_dim == g.v_dim else f"{g.qk_dim} (v {g.v_dim})",
        "block_qk": qk_tiles[0],
        "qk_tail": sum(qk_tiles[1:]),
        "qk_tile_text": _tile_text(qk_tiles, "QK_DIM"),
        "qk_parts": _parts(qk_tiles, g.qk_dim, "BLOCK_QK"),
        "block_v": v_tiles[0],
        "v_tail": sum(v_tiles[1:]),
        "v_tile_text": _tile_text(v_tiles, "V_DIM"),
        "v_parts": _parts(v_tiles, g.v_dim, "BLOCK_V"),
        "partial_v": "(BLOCK_V + BLOCK_V_TAIL)" if len(v_tiles) > 1 else "BLOCK_V",
        "qk_padded": variant.block_qk != g.qk_dim,
        "v_padded": variant.block_v != g.v_dim,
        "dtype": g.dtype,
        "page_size": g.page_size,
        "scale": repr(g.scale),
        "scale_log2e": repr(variant.scale_log2e),
        "mask": g.mask,
        "mask_text": ", ".join([g.mask, *_mask_words(g)]),
        "causal": g.mask == "causal",
        "paged": variant.family != "varlen",
        "unmasked_tiles": variant.family != "decode",
        "positional": g.mask == "causal" or g.alibi,
        "window": g.sliding_window,
        "chunk": g.chunk,
        "left_edge": g.sliding_window is not None or g.chunk is not None,
        "softcap": g.softcap is not None,
        "softcap_log2e": repr((g.softcap or 0.0) * LOG2E),
        "scale_over_softcap": repr(g.scale / (g.softcap or 1.0)),
        "sinks": g.sinks,
        "alibi": g.alibi,
        "prefix_ranges": g.prefix_ranges,
        "batch_invariant": g.batch_invariant,
        "max_splits": variant.max_splits,
        "min_split_tiles": variant.min_split_tiles,
        "item_tiles": variant.item_tiles,
        "rotary": g.rotary_dim is not None,
        "rotary_dim": g.rotary_dim,
        "rotary_style": g.rotary_style,
        "interleaved": g.rotary_style == "interleaved",
        "query_blocks": -(-g.query_heads // c.block_m),
        # A cap or a bias works on scaled scores; without them the scale rides on the exponent's multiply-add.
        "scaled_scores": g.softcap is not None or g.alibi,
        "natural_logits": g.softcap is not None or g.alibi or g.sinks,
        # Real float32 products: Triton's default for float32 operands is TF32.
        "dot_options": ', input_precision="ieee"' if g.itemsize == 4 else "",
        "block_m": c.block_m,
        "head_blocks": -(-g.kv_heads // c.block_m),
        "tile_n": c.tile_n,
        "num_warps": c.num_warps,
        "num_stages": c.num_stages,
        "ctas_per_multiprocessor": c.ctas_per_multiprocessor,
        "share": variant.tunable("share", None),
        "tuning": c.origin,
        "aligned": variant.aligned,
        "alignment": g.alignment,
        "strided": variant.family != "merge_states",
        "vector_plan": variant.family not in GLUON_FAMILIES,
        "block_seqs": next_power_of_two(variant.max_seqs),
        "max_query_len": variant.max_query_len,
        "min_query_len": (variant.max_query_len or 0) + 1,
    }


def banner(loaded: Loaded, template: str) -> list[str]:
    """The lines that head every generated file: no path of the builder's machine, no date."""
    return [
        f"Generated by specgen {__version__} from {loaded.spec.name}.yaml (sha256 {loaded.spec.digest}).",
        f"Do not edit: change the spec or templates/{template} and run `specgen build`.",
    ]


def render_source(template: str, context: dict, banner_lines: list[str]) -> str:
    """One template rendered; a name that the context lacks is jinja2.UndefinedError, never an empty string."""
    return _environment().get_template(template).render(banner=banner_lines, **context)


def render(artifact: Artifact, loaded: Loaded) -> Artifact:
    """`artifact` with its content rendered (unformatted); copied files pass unchanged."""
    if artifact.template is None:
        return artifact
    context = dict(artifact.context)
    if variant := context.get("variant"):
        context |= _variant_context(variant)
    text = render_source(artifact.template, context, banner(loaded, artifact.template))
    return replace(artifact, content=text.encode())


def kernel_source(variant: Variant) -> str:
    """The unformatted module of one specialization, without a spec to name in its banner."""
    return render_source(f"kernels/{variant.family}.py.jinja", _variant_context(variant), [])


def _variant_context(variant: Variant) -> dict:
    arguments = variant.arguments
    return {
        "v": kernel_view(variant),
        "arguments": arguments,
        # Values that change from call to call must not make the JIT compile anew.
        "unspecialized": [a.name for a in arguments if a.kind in ("i32", "i64") and not a.aligned],
    }
