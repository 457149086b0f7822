"""Write the specs whose packages `specgen bench` times besides the model's own, for the H200 alone.

    python tests/gpu/bench_specs.py build/bench_specs
    for spec in build/bench_specs/*.yaml; do specgen build "$spec"; done

llama_long is llama_3_1_8b with limits that hold the rows random-decode and random-prefill; heads has a layer for each geometry
with standard rows of its own. Imports of specgen only those geometries.
"""

import sys
from pathlib import Path

from specgen.bench.workloads import OF_HEADS

LIMITS = "{max_seqs: 256, max_seq_len: 131072, max_tokens: 16384, max_spec_tokens: 8}"
LONG = "{max_seqs: 1024, max_seq_len: 131072, max_tokens: 16384, max_spec_tokens: 8}"
LLAMA = (32, 8, 128)


def spec(name: str, limits: str, heads: list[tuple[int, int, int]]) -> str:
    """A whole spec file; `heads`: (query heads, kv heads, head dim) of each layer."""
    entries = "".join(
        f"  - {{name: h{query}x{kv}_d{dim}, layers: [{layer}], query_heads: {query}, kv_heads: {kv}, head_dim: {dim}}}\n"
        for layer, (query, kv, dim) in enumerate(heads)
    )
    return (
        f"version: 1\nname: {name}\ndtype: bfloat16\nattention:\n{entries}"
        "kv_cache: {dtype: bfloat16, page_size: 16, layout: NHD}\n"
        f"tensor_parallel: [1]\ntargets: [h200]\nlimits: {limits}\n"
    )


def all_specs() -> dict[str, str]:
    """File name -> text."""
    return {"llama_long.yaml": spec("llama_long", LONG, [LLAMA]), "heads.yaml": spec("heads", LIMITS, list(OF_HEADS))}


def main() -> None:
    """Write every spec into the folder given."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/bench_specs")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in all_specs().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
