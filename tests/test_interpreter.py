"""Generated packages end to end on a CPU: their own tests run the generated Triton sources through Triton's interpreter.

One subprocess per package, because TRITON_INTERPRET must be set before Triton is imported. float16 and float32 only: the
interpreter multiplies bfloat16 operands of tl.dot as bit patterns. Gluon has no interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

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
    "invariant": ("float16", 16, ["query_heads: 2, kv_heads: 1, head_dim: 32"], "[1]"),
    "invariant_single_precision": (
        "float32",
        48,
        ["query_heads: 3, kv_heads: 1, head_dim: 16, sliding_window: 700, sinks: true"],
        "[1]",
    ),
}
# What the other kernels have in common with those of another spec is tested there.
CHOSEN = {
    "rotary": "append",
    "invariant": "invariance or (decode and page_sizes)",
    "invariant_single_precision": "invariance and not unaligned",
}
UNLIKE = """
import sys
from dataclasses import replace
import {name}_kernels as package
from {name}_kernels.dispatch import ATTENTION_ROWS
from {name}_kernels.runtime import testing

case = testing.Case.of_layer(package._package.manifest, "layer_0", 9, 3)
try:
    testing.check_batch_invariance(package, replace(case, symbol=ATTENTION_ROWS[0].decode))
except AssertionError as error:
    assert "other bits alone than among the others" in str(error), error
else:
    sys.exit("every sequence has the bits that it has alone")
"""


def built(name: str, folder: Path) -> Path:
    """The package of a spec of SPECS, sources alone."""
    dtype, page_size, entries, degrees = SPECS[name]
    attention = "\n".join(f"  - {{name: layer_{i}, layers: [{i}], {entry}}}" for i, entry in enumerate(entries))
    spec = folder / f"{name}.yaml"
    spec.write_text(
        f"version: 1\nname: {name}\ndtype: {dtype}\nattention:\n{attention}\n"
        f"kv_cache: {{dtype: {dtype}, page_size: {page_size}}}\n"
        f"tensor_parallel: {degrees}\ntargets: [h200]\nlimits: {LIMITS}\n"
        f"batch_invariant: {str(name.startswith('invariant')).lower()}\n"
    )
    return build_sources(spec, folder / "build")


def interpreted(package: Path, *arguments: str) -> str:
    """What Python prints with the package to import and Triton's interpreter; it must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=package.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", SPECS)
def test_generated_tests_pass_in_the_interpreter(name, tmp_path):
    package = built(name, tmp_path)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", CHOSEN.get(name, "test")]
    printed = interpreted(package, "-m", "pytest", *options, str(package / "tests"))
    assert " passed" in printed and "no tests ran" not in printed


def test_without_batch_invariance_the_batch_decides_bits(tmp_path):
    """The check sees what it is for: kernels that split evenly fail it."""
    package = built("group_of_three", tmp_path)
    interpreted(package, "-c", UNLIKE.format(name="group_of_three"))
