"""Generated packages end to end on a CPU: their own tests run the generated Triton sources through Triton's interpreter.

One subprocess per package, because TRITON_INTERPRET must be set before Triton is imported. float16 and float32 only: the
interpreter multiplies bfloat16 operands of tl.dot as bit patterns, and such kernels are refused. Gluon has no interpreter.
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
    "brain_floats": ("bfloat16", 16, ["query_heads: 4, kv_heads: 2, head_dim: 16"], "[1]"),
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
plain = next(row.decode for row in ATTENTION_ROWS if not row.aligned)
try:
    testing.check_batch_invariance(package, replace(case, symbol=plain, aligned=False))
except AssertionError as error:
    assert "other bits alone than among the others" in str(error), error
else:
    sys.exit("every sequence has the bits that it has alone")
"""

BRAIN_FLOATS = """
import torch
import brain_floats_kernels as package
from brain_floats_kernels.runtime import errors, reference

ints = lambda *values: torch.tensor(values, dtype=torch.int32)
bf16 = lambda *shape: torch.randn(shape).to(torch.bfloat16)
q, k, v = bf16(3, 4, 16), bf16(3, 2, 16), bf16(3, 2, 16)
caches, wanted = [torch.zeros(2, 16, 2, 16, dtype=torch.bfloat16) for _ in "kv"], [torch.zeros(2, 16, 2, 16) for _ in "kv"]
slots = torch.tensor([5, -1, 20])
package.append_kv(k, v, *caches, slot_mapping=slots)
reference.append_kv(k, v, *wanted, slot_mapping=slots)
assert all(torch.equal(ours.float(), theirs) for ours, theirs in zip(caches, wanted))
lse = torch.zeros(3, 4)
assert torch.equal(package.merge_states(q, lse, q, lse)[0], q)
tables = dict(block_table=ints([0]), seq_lens=ints(3), cu_seqlens_q=ints(0, 3))
for call in (
    lambda: package.attention(q, *caches, **tables),
    lambda: package.attention(q[:1], *caches, **tables | dict(cu_seqlens_q=ints(0, 1)), max_seqlen_q=1),
    lambda: package.attention_varlen(q, k, v, cu_seqlens_q=ints(0, 3), cu_seqlens_k=ints(0, 3)),
):
    try:
        call()
    except errors.UnsupportedError as error:
        assert "multiplies bfloat16 operands" in str(error) and "needed: tensors on a GPU" in str(error), error
    else:
        raise SystemExit("a result came")
"""
# Strides of which a product with a head or a slot is beyond 32 bits, in a file with holes.
WIDE = """
import torch
import group_of_three_kernels as package

ints = lambda *values: torch.tensor(values, dtype=torch.int32)
wide = 2**30 + 4
memory = torch.from_file("wide", shared=True, size=3 * wide, dtype=torch.float16)
heads_apart = lambda tokens, heads, start: memory[start:].as_strided((tokens, heads, 64), (64, wide, 1))
cache = lambda start: memory[start:].as_strided((1, 16, 3, 64), (16 * 64, 64, wide, 1))
k, v, q = (torch.randn(4, heads, 64).half() for heads in (3, 3, 9))
far, near = [cache(start) for start in (0, 4096)], [torch.zeros(1, 16, 3, 64).half() for _ in "kv"]
far_k, far_v = (heads_apart(4, 3, start).copy_(x) for start, x in ((8192, k), (12288, v)))
slots = torch.tensor([3, 0, 1, 2])
package.append_kv(far_k, far_v, *far, slot_mapping=slots)
package.append_kv(k, v, *near, slot_mapping=slots)
assert all(torch.equal(a, b) for a, b in zip(far, near))
tables = dict(block_table=ints([0]), seq_lens=ints(4))
for rows in (1, 4):
    call = tables | dict(cu_seqlens_q=ints(0, rows))
    assert torch.equal(package.attention(q[:rows], *far, **call), package.attention(q[:rows], *near, **call))
call = dict(cu_seqlens_q=ints(0, 4), cu_seqlens_k=ints(0, 4))
assert torch.equal(package.attention_varlen(q, far_k, far_v, **call), package.attention_varlen(q, k, v, **call))
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


@pytest.mark.parametrize("name", [name for name, (dtype, *_) in SPECS.items() if dtype != "bfloat16"])
def test_generated_tests_pass_in_the_interpreter(name, tmp_path):
    package = built(name, tmp_path)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", CHOSEN.get(name, "test")]
    printed = interpreted(package, "-m", "pytest", *options, str(package / "tests"))
    assert " passed" in printed and "no tests ran" not in printed


def test_without_batch_invariance_the_batch_decides_bits(tmp_path):
    """The check sees what it is for: kernels that split evenly fail it."""
    package = built("group_of_three", tmp_path)
    interpreted(package, "-c", UNLIKE.format(name="group_of_three"))


def test_what_multiplies_bfloat16_is_refused(tmp_path):
    """It would be garbage; what multiplies nothing runs, and the generated tests skip."""
    package = built("brain_floats", tmp_path)
    interpreted(package, "-c", BRAIN_FLOATS)
    printed = interpreted(package, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", str(package / "tests"))
    assert "multiplies bfloat16 operands" in printed and " passed" not in printed


def test_strides_have_64_bits(tmp_path):
    package = built("group_of_three", tmp_path)
    with open(package.parent / "wide", "wb") as file:
        file.truncate(2 * 3 * (2**30 + 4))
    interpreted(package, "-c", WIDE)
