"""Random legal specs, built and run: what the rules allow, the templates render and the kernels compute.

Hypothesis draws an attention entry and a cache from everything that the rules know; what they refuse is drawn again. The
generated sources run their own tests in Triton's interpreter (float16, float32). SPECGEN_RANDOM_SPECS sets how many specs a run
draws (3); the draws are the same in every run unless HYPOTHESIS_PROFILE or the count changes them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from features import spec_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from specgen.pipeline import build_sources
from specgen.rules import refusals

COUNT = int(os.environ.get("SPECGEN_RANDOM_SPECS", "3"))
# One decode and one prefill bound, a window's edge, padding, groups: the batches that bite and are quick.
TESTS = "head_dim or groups or reach_rows or empty_sequences or test_writes_slots or test_merges"


@st.composite
def entries(draw) -> dict[str, str]:
    """Fields of one attention entry, as YAML texts."""
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    dims = [4 * draw(st.integers(4, 16)) for _ in range(2)]
    fields = {
        "query_heads": str(kv_heads * draw(st.sampled_from((1, 2, 3, 5)))),
        "kv_heads": str(kv_heads),
        "head_dim": str(dims[0]) if draw(st.booleans()) else f"{{qk: {dims[0]}, v: {dims[1]}}}",
        "mask": draw(st.sampled_from(("causal", "causal", "bidirectional"))),
    }
    optional = {
        "scale": "0.3",
        "softcap": draw(st.sampled_from(("1.0", "20.0"))),
        "sinks": "true",
        "alibi": "true",
        "prefix_ranges": "true",
        "cross": "true",
        "rotary": f"{{dim: {2 * draw(st.integers(1, dims[0] // 2))}, style: {draw(st.sampled_from(('half', 'interleaved')))}}}",
        draw(st.sampled_from(("sliding_window", "chunk"))): str(draw(st.integers(1, 40))),
    }
    return fields | {name: text for name, text in optional.items() if draw(st.booleans())}


@settings(max_examples=COUNT, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    fields=entries(),
    dtype=st.sampled_from(("float16", "float32")),
    page_size=st.sampled_from((1, 3, 16, 48)),
    layout=st.sampled_from(("NHD", "HND")),
)
def test_a_random_legal_spec_builds_and_its_tests_pass(fields, dtype, page_size, layout):
    cache = f"{{dtype: {dtype}, page_size: {page_size}, layout: {layout}}}"
    spec = spec_of(fields, dtype, cache)
    assume(not refusals(spec))
    body = ", ".join(f"{key}: {value}" for key, value in {"name": "a", **fields}.items())
    text = (
        f"version: 1\nname: drawn\ndtype: {dtype}\nattention:\n  - {{{body}}}\nkv_cache: {cache}\ntargets: [h200]\n"
        "limits: {max_seqs: 16, max_seq_len: 512, max_tokens: 64, max_spec_tokens: 4}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "drawn.yaml")
        path.write_text(text)
        package = build_sources(path, Path(folder, "build"))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", TESTS, "tests"],
            cwd=package,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(package.parent)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, text + done.stdout[-5000:] + done.stderr[-1000:]
        assert " passed" in done.stdout
