"""Write the specs whose packages tests/gpu/faults.py runs: few packages that cover head sizes, groups, page
sizes and dtypes.

    python tests/gpu/specs.py build/fault_specs
    for spec in build/fault_specs/*.yaml; do specgen build "$spec"; done

Page size and dtype belong to a spec, heads and head sizes to its attention entries. Imports nothing from
specgen.
"""

import re
import sys
from pathlib import Path

TARGET = "h200"
HEAD_DIMS = (32, 72, 80, 96, 100, 112, 120, 160, 192, 20, 36, 64, 128, 256)
HEADS = ((9, 3), (14, 2), (15, 5), (24, 4), (28, 4), (36, 4), (1, 1))
MANY_HEADS = ((71, 1), (232, 8), (64, 1))  # in a package of their own: the reference takes minutes
WINDOWS = (8, 16, 20, 128, 1024)
PAGE_SIZES = {1: "bfloat16", 8: "float16", 48: "bfloat16", 528: "float16", 2048: "bfloat16"}


def entry(
    query_heads: int,
    kv_heads: int,
    dim: int | str,
    mask: str = "causal",
    scale: float | None = None,
    **features,
) -> str:
    """One attention entry, named after what is in it; dim is a number or "{qk: 192, v: 128}", features are
    fields of the entry.
    """
    dims = "x".join(re.findall(r"\d+", str(dim)))
    shown = {"sliding_window": "w", "chunk": "c", "softcap": "cap", "prefix_ranges": "ranges"}
    words = "".join(
        f"_{shown.get(name, name)}" + ("" if value is True else f"{value:g}")
        for name, value in features.items()
    )
    lines = (
        f"- name: h{query_heads}x{kv_heads}_d{dims}_{mask}{words}",
        "  layers: LAYER",
        f"  query_heads: {query_heads}",
        f"  kv_heads: {kv_heads}",
        f"  head_dim: {dim}",
        f"  scale: {'null' if scale is None else scale}",
        f"  mask: {mask}",
        *(f"  {name}: {str(value).lower()}" for name, value in features.items()),
    )
    return "\n".join("  " + line for line in lines)


def spec(name: str, dtype: str, page_size: int, entries: list[str], layout: str = "NHD", more: str = "") -> str:
    """A whole spec file; `more`: further lines at the top level."""
    return (
        f"version: 1\nname: {name}\ndtype: {dtype}\nattention:\n"
        + "\n".join(text.replace("LAYER", f"[{layer}]") for layer, text in enumerate(entries))
        + f"\nkv_cache: {{dtype: {dtype}, page_size: {page_size}, layout: {layout}}}\n"
        + f"tensor_parallel: [1]\ntargets: [{TARGET}]\n"
        + "limits: {max_seqs: 256, max_seq_len: 32768, max_tokens: 4096, max_spec_tokens: 8}\n"
        + more
    )


def all_specs() -> dict[str, str]:
    """File name -> text."""
    mixed = [
        entry(12, 12, 32, "bidirectional"),
        entry(16, 16, 80, "bidirectional"),
        entry(16, 16, "{qk: 192, v: 128}"),
        entry(8, 2, "{qk: 192, v: 128}", "bidirectional"),
        entry(8, 4, 128, "causal", 0.0833),
    ]
    windows = [entry(8, 1, 64, sliding_window=w) for w in WINDOWS] + [entry(4, 2, 128, sliding_window=16)]
    chunks = [entry(8, 1, 64, chunk=8), entry(4, 2, 128, chunk=8), entry(4, 4, 64, chunk=96)]
    sinks = [
        entry(8, 8, 64, sinks=True),
        entry(8, 8, 64, sinks=True, sliding_window=128),
        entry(8, 8, 64, sinks=True, softcap=30.0),
        entry(64, 8, 64, sinks=True, sliding_window=128, softcap=30.0),
    ]
    caps = [entry(8, 4, 128, softcap=1.0), entry(8, 4, 128, softcap=50.0)]
    caps += [entry(8, 4, 128, "bidirectional", softcap=50.0)]
    slopes = [entry(12, 12, 64, alibi=True), entry(12, 12, 64, "bidirectional", alibi=True)]
    slopes += [entry(71, 1, 64, alibi=True), entry(12, 4, 64, alibi=True, softcap=50.0)]
    ranges = [
        entry(8, 2, 64, prefix_ranges=True),
        entry(8, 2, 64, prefix_ranges=True, sliding_window=16),
        entry(8, 2, 64, prefix_ranges=True, chunk=24),
    ]
    everything = entry(12, 4, 64, sliding_window=20, softcap=30.0, sinks=True, alibi=True, prefix_ranges=True)
    hnd = [entry(4, 2, 64), entry(8, 1, 128), entry(16, 16, "{qk: 192, v: 128}"), entry(8, 2, 80), windows[2]]
    specs = {
        "faults_windows": ("bfloat16", 16, windows),
        "faults_chunks": ("bfloat16", 16, chunks),
        "faults_sinks": ("bfloat16", 16, sinks),
        "faults_caps": ("float16", 16, caps),
        "faults_alibi": ("bfloat16", 16, slopes),
        "faults_ranges": ("bfloat16", 16, ranges + [everything]),
        "faults_features_fp32": (
            "float32",
            8,
            [windows[1], chunks[0], sinks[3], caps[0], slopes[1], ranges[1], everything],
        ),
        "faults_hnd": ("bfloat16", 16, hnd, "HND"),
        "faults_dims": ("bfloat16", 16, [entry(4, 2, dim) for dim in HEAD_DIMS]),
        "faults_dims_fp16": ("float16", 16, [entry(4, 2, dim) for dim in (20, 64, 80, 100, 128, 256)]),
        "faults_dims_fp32": (
            "float32",
            16,
            [entry(4, 2, dim) for dim in (36, 64, 100, 128, 256)] + mixed[:1],
        ),
        "faults_groups": ("bfloat16", 16, [entry(*heads, 64) for heads in HEADS] + [entry(32, 8, 128)]),
        "faults_many_heads": ("bfloat16", 16, [entry(*heads, 64) for heads in MANY_HEADS]),
        "faults_mixed": ("bfloat16", 16, mixed),
        "faults_invariant": (
            "bfloat16",
            16,
            [entry(32, 8, 128), entry(14, 2, 64), entry(64, 1, 64), entry(8, 4, 256), mixed[2], windows[3], sinks[3], everything],
            "NHD",
            "batch_invariant: true\n",
        ),
    }
    for page_size, dtype in PAGE_SIZES.items():
        specs[f"faults_page_{page_size}"] = (dtype, page_size, [entry(4, 2, 64), entry(8, 1, 128)])
    return {f"{name}.yaml": spec(name, *parts) for name, parts in specs.items()}


def main() -> None:
    """Write every spec into the folder given."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/fault_specs")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in all_specs().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
