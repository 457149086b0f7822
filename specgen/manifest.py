"""What the package says of itself: manifest.json, as a dictionary of JSON values. Pure: reads nouns, touches nothing."""

import json
from collections.abc import Mapping

from specgen import __version__
from specgen.binary import Binary
from specgen.expand import Dispatch, Expansion
from specgen.plan import package_name
from specgen.runtime.installed import FORMAT
from specgen.spec import AttentionSpec, Spec
from specgen.target import ARCHS, Target
from specgen.variant import Variant

_ABSENT = object()


def manifest(
    spec: Spec,
    expansion: Expansion,
    targets: dict[str, Target],
    binaries: dict[tuple[str, str], Binary],
    *,
    triton: str,
    ptxas: str,
    launcher_compiler: str | None,
    over_budget: Mapping[tuple[str, str], str],
) -> dict:
    """The manifest: versions, targets, limits, layers, and per variant what it is and what its binaries need.

    `binaries` by (symbol, arch); empty for a package of sources alone. `over_budget`: kernels that were preferred to these
    and that the compile refused, with the reason. Sizes are in bytes, bandwidth in GB/s, rate in TFLOP/s.
    """
    archs = tuple(dict.fromkeys(targets[name].arch for name in spec.targets))
    package = package_name(spec.name)
    return {
        "format": FORMAT,
        "package": package,
        "distribution": package.replace("_", "-"),
        "version": __version__,
        "specgen": __version__,
        "triton": triton,
        "ptxas": ptxas,
        "launcher_compiler": launcher_compiler,
        "spec": {"name": spec.name, "sha256": spec.digest, "file": "spec.yaml"},
        "oldest_driver": {arch: ARCHS[arch].oldest_driver for arch in archs},
        "targets": [_target(targets[name]) for name in spec.targets],
        "limits": spec.limits.model_dump(),
        "batch_invariant": spec.batch_invariant,
        "layers": [layer_fields(spec, entry) for entry in spec.attention],
        "dispatch": [_dispatch(each) for each in expansion.dispatch],
        "over_budget": [
            {"symbol": symbol, "arch": arch, "reason": reason} for (symbol, arch), reason in sorted(over_budget.items())
        ],
        "variants": {symbol: _variant(variant, binaries, expansion.stand_ins) for symbol, variant in expansion.variants.items()},
    }


def layer_fields(spec: Spec, entry: AttentionSpec) -> dict:
    """What the manifest says of one layer class; head counts are those of the whole model."""
    return {
        "name": entry.name,
        "layers": entry.layers if isinstance(entry.layers, str) else list(entry.layers),
        "query_heads": entry.query_heads,
        "kv_heads": entry.kv_heads,
        "qk_dim": entry.head_dim.qk,
        "v_dim": entry.head_dim.v,
        "scale": entry.resolved_scale,
        "mask": entry.mask,
        "page_size": spec.kv_cache.page_size,
        "layout": spec.kv_cache.layout,
        "dtype": spec.dtype,
        "sliding_window": entry.sliding_window,
        "chunk": entry.chunk,
        "softcap": entry.softcap,
        "sinks": entry.sinks,
        "alibi": entry.alibi,
        "prefix_ranges": entry.prefix_ranges,
        "cross": entry.cross,
        "rotary_dim": entry.rotary.dim if entry.rotary else None,
        "rotary_style": entry.rotary.style if entry.rotary else None,
    }


def _dispatch(each: Dispatch) -> dict:
    """Whose measurements route a layer's calls, and the slowdown against the best of each measured workload."""
    choice = each.choice
    return {
        "arch": each.arch,
        "layer": each.layer,
        "tensor_parallel": each.degree,
        "aligned": each.aligned,
        "measured_on": choice.source,
        "regret": {
            name: regret._asdict()
            for name in ("training", "held_out", "default")
            if (regret := getattr(choice, name)) is not None
        },
    }


def _target(target: Target) -> dict:
    return {
        "id": target.id,
        "arch": target.arch,
        "multiprocessors": target.multiprocessors,
        "shared_memory_per_block": target.shared_memory_per_block,
        "memory_bandwidth_GBps": target.memory_bandwidth,
        "matrix_rate_TFLOPs": target.matrix_rate,
    }


def _variant(variant: Variant, binaries: dict[tuple[str, str], Binary], stand_ins: Mapping[str, str]) -> dict:
    g, c = variant.geometry, variant.config
    return {
        "family": variant.family,
        "module": f"kernels/{variant.symbol}.py",
        "query_heads": g.query_heads,
        "kv_heads": g.kv_heads,
        "qk_dim": g.qk_dim,
        "v_dim": g.v_dim,
        "page_size": g.page_size,
        "dtype": g.dtype,
        "mask": g.mask,
        "scale": g.scale,
        "sliding_window": g.sliding_window,
        "chunk": g.chunk,
        "softcap": g.softcap,
        "sinks": g.sinks,
        "alibi": g.alibi,
        "prefix_ranges": g.prefix_ranges,
        "rotary_dim": g.rotary_dim,
        "rotary_style": g.rotary_style,
        "batch_invariant": g.batch_invariant,
        "max_query_len": variant.max_query_len,
        "block_m": c.block_m,
        "tile_n": c.tile_n,
        "num_warps": c.num_warps,
        "num_stages": c.num_stages,
        "ctas_per_multiprocessor": c.ctas_per_multiprocessor,
        "options": dict(c.options),
        "aligned": variant.aligned,
        "alignment": g.alignment if variant.aligned else g.itemsize,
        "stand_in": stand_ins.get(variant.symbol),
        "tensor_maps": [each._asdict() for each in variant.tensor_maps],
        "tuning": c.origin,
        "binaries": {
            arch: {
                "file": binary_path(variant.symbol, arch, binary),
                "sha256": binary.sha256,
                **{name: value for name, value in binary.facts().items() if name != "extension"},
            }
            for (symbol, arch), binary in binaries.items()
            if symbol == variant.symbol
        },
    }


def binary_path(symbol: str, arch: str, binary: Binary) -> str:
    """Where a binary lies in the package."""
    return f"binaries/{arch}/{symbol}.{binary.extension}"


def field_differences(found: object, expected: object, path: str = "") -> list[str]:
    """Dotted paths at which a manifest read back is not `expected`, what `manifest` gives now.

    What compiling adds is passed over: the binaries and the versions of the tools.
    """
    if isinstance(found, dict) and isinstance(expected, dict):
        built = ("triton", "ptxas", "launcher_compiler") if not path else ("binaries",)
        names = [name for name in expected | found if name not in built]
        return [
            line
            for name in names
            for line in field_differences(
                found.get(name, _ABSENT), expected.get(name, _ABSENT), f"{path}.{name}" if path else name
            )
        ]
    return [] if found == expected else [path]


def to_json(content: dict) -> bytes:
    """Reviewable JSON, the same bytes for the same content."""
    return (json.dumps(content, indent=1, sort_keys=False) + "\n").encode()
