"""Write random legal specs, bfloat16 among them, for a longer draw than CI's: build them, then run the wheels' own tests on a GPU.

    python tests/gpu/draw.py build/drawn [COUNT [SEED]]
    for spec in build/drawn/*.yaml; do specgen build "$spec"; done
    pytest --pyargs drawn_0_kernels ...

Each spec has three layers, drawn as tests/test_random_specs.py draws one. The same count and seed give the same specs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from features import spec_of  # noqa: E402
from hypothesis import HealthCheck, assume, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_random_specs import entries  # noqa: E402

from specgen.rules import refusals  # noqa: E402

LAYERS = 3
_EACH = 12  # examples for each spec taken: neighbouring draws are often variations of one


def drawn(count: int, start: int) -> list[str]:
    """The texts of `count` specs."""
    found: dict[str, None] = {}

    @settings(max_examples=_EACH * count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(start)
    @given(
        layers=st.lists(entries(), min_size=LAYERS, max_size=LAYERS, unique_by=str),
        dtype=st.sampled_from(("bfloat16", "bfloat16", "float16", "float32")),
        page_size=st.sampled_from((1, 3, 16, 48, 128)),
        layout=st.sampled_from(("NHD", "HND")),
    )
    def draw(layers, dtype, page_size, layout):
        cache = f"{{dtype: {dtype}, page_size: {page_size}, layout: {layout}}}"
        assume(not any(refusals(spec_of(fields, dtype, cache)) for fields in layers))
        lines = []
        for layer, fields in enumerate(layers):
            body = {"name": f"layer_{layer}", "layers": f"[{layer}]", **fields}
            lines.append("  - {" + ", ".join(f"{name}: {text}" for name, text in body.items()) + "}")
        found[
            f"dtype: {dtype}\nattention:\n" + "\n".join(lines) + f"\nkv_cache: {cache}\ntargets: [h200]\n"
            "limits: {max_seqs: 64, max_seq_len: 4096, max_tokens: 512, max_spec_tokens: 4}\n"
        ] = None

    draw()
    return [f"version: 1\nname: drawn_{i}\n{text}" for i, text in enumerate(list(found)[:: _EACH // 2][:count])]


def main() -> None:
    folder, *numbers = sys.argv[1:]
    count, start = [*map(int, numbers), *(10, 1)[len(numbers) :]]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(drawn(count, start)):
        (folder / f"drawn_{i}.yaml").write_text(text)


if __name__ == "__main__":
    main()
