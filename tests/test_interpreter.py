"""Generated packages end to end on a CPU: their own tests run the generated Triton sources through Triton's interpreter.

One subprocess per package, because TRITON_INTERPRET must be set before Triton is imported. float16 and float32 only: the
interpreter multiplies bfloat16 operands of tl.dot as bit patterns. Gluon has no interpreter.
"""

import os
import subprocess
import sys

import pytest

from specgen.pipeline import build_sources

LIMITS = "{max_seqs: 16, max_seq_len: 2048, max_tokens: 320, max_spec_tokens: 4}"
SPECS = {
    # name: (dtype, page size, attention entries, tensor parallel)
    "group_of_three": ("float16", 16, ["query_heads: 9, kv_heads: 3, head_dim: 64"], "[1]"),
    "padded_bidirectional": ("float32", 7, ["query_heads: 4, kv_heads: 2, head_dim: 20, mask: bidirectional"], "[2]"),
    "mqa_two_head_dims": ("float16", 1, ["query_heads: 10, kv_heads: 1, head_dim: {qk: 48, v: 32}, scale: 0.2"], "[1]"),
    "rotary": (
        "float16",
        16,
        [
            "query_heads: 6, kv_heads: 3, head_dim: 20, rotary: {dim: 12, style: interleaved}",
            "query_heads: 4, kv_heads: 2, head_dim: 32, rotary: {dim: 32, style: half}",
        ],
        "[1]",
    ),
    "replicated": ("float32", 48, ["query_heads: 8, kv_heads: 2, head_dim: 36"], "[4]"),
}


@pytest.mark.parametrize("name", SPECS)
def test_generated_tests_pass_in_the_interpreter(name, tmp_path):
    chosen = ["-k", "append"] if name == "rotary" else []  # the other families do not know of it
    dtype, page_size, entries, degrees = SPECS[name]
    attention = "\n".join(f"  - {{name: layer_{i}, layers: [{i}], {entry}}}" for i, entry in enumerate(entries))
    spec = tmp_path / f"{name}.yaml"
    spec.write_text(
        f"version: 1\nname: {name}\ndtype: {dtype}\nattention:\n{attention}\n"
        f"kv_cache: {{dtype: {dtype}, page_size: {page_size}}}\n"
        f"tensor_parallel: {degrees}\ntargets: [h200]\nlimits: {LIMITS}\n"
    )
    package = build_sources(spec, tmp_path / "build")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen, str(package / "tests")],
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "no tests ran" not in done.stdout
