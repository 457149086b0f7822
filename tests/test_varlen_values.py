"""attention_varlen of generated packages on a CPU, in Triton's interpreter: their own tests, and a fused QKV.

One subprocess per package, because TRITON_INTERPRET must be set before Triton is imported.
"""

import os
import re
import subprocess
import sys

import pytest

from specgen.pipeline import build_sources

LIMITS = "{max_seqs: 16, max_seq_len: 512, max_tokens: 96, max_spec_tokens: 4}"
SPECS = {
    "float16": [
        "query_heads: 9, kv_heads: 3, head_dim: 64",
        "query_heads: 4, kv_heads: 4, head_dim: {qk: 20, v: 36}, mask: bidirectional, cross: true",
        "query_heads: 4, kv_heads: 2, head_dim: 32, sliding_window: 20, softcap: 30.0",
        "query_heads: 4, kv_heads: 2, head_dim: 32, chunk: 24, sinks: true",
        "query_heads: 6, kv_heads: 2, head_dim: 32, alibi: true",
        "query_heads: 4, kv_heads: 2, head_dim: 32, prefix_ranges: true, sliding_window: 16",
        "query_heads: 4, kv_heads: 2, head_dim: 32, prefix_ranges: true",
    ],
    "float32": [
        "query_heads: 4, kv_heads: 2, head_dim: 36, mask: bidirectional, alibi: true, softcap: 20.0",
        "query_heads: 4, kv_heads: 1, head_dim: 16, scale: 0.3",
    ],
}
# Lengths 0, rows without keys, partial tiles, groups, edges of a window: the batches that bite and are quick.
BATCHES = "empty_sequences or rows_without_keys or groups or reach_rows"
FUSED = '''"""Slices of one fused QKV, whose rows between and behind the sequences are NaN."""

import pytest
import torch
import NAME_kernels as package
from NAME_kernels.runtime import reference

LAYERS = {layer["name"]: layer for layer in package._package.manifest["layers"]}
LENGTHS = (5, 0, 33, 1, 9)
DTYPE = getattr(torch, "NAME")


def given(name):
    layer = LAYERS[name]
    heads = layer["query_heads"], layer["kv_heads"]
    widths = heads[0] * layer["qk_dim"], heads[1] * layer["qk_dim"], heads[1] * layer["v_dim"]
    tokens = sum(LENGTHS)
    fused = torch.randn(tokens + 3, sum(widths), generator=torch.Generator().manual_seed(1)).to(DTYPE)
    fused[tokens:] = torch.nan
    counts = heads[0], heads[1], heads[1]
    tensors = [part.unflatten(1, (n, -1)) for part, n in zip(fused.split(widths, 1), counts)]
    cu_seqlens = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    formula = {key: layer[key] for key in ("mask", "scale", "sliding_window", "chunk", "softcap")}
    extras = {}
    if layer["sinks"]:
        extras["sinks"] = torch.linspace(-1, 3, heads[0])
    if layer["prefix_ranges"]:
        extras["prefix_ranges"] = torch.tensor([[[0, min(4, n)]] for n in LENGTHS], dtype=torch.int32)
    return tensors, cu_seqlens, formula, extras


def assert_right(found, expected, dtype=DTYPE):
    error = reference.errors(found[0], expected[0], found[1], expected[1])
    assert error.within(reference.tolerance(dtype)), error


@pytest.mark.parametrize("name", LAYERS)
def test_fused_qkv(name):
    (q, k, v), cu_seqlens, formula, extras = given(name)
    own = sum(LENGTHS)
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    out, lse = package.attention_varlen(
        q, k, v, **lengths, layer=name, return_lse=True, checks="full", **extras
    )
    if LAYERS[name]["alibi"]:
        extras["alibi_slopes"] = torch.tensor(package._package.open(q.device).alibi_slopes(q.shape[1]))
    expected = reference.attention_varlen(q[:own], k, v, **lengths, **formula, **extras)
    assert_right((out[:own], lse[:own]), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_the_first_prefill_without_a_cache_is_that_with_one(name):
    """The same batch through the paged kernels."""
    (q, k, v), cu_seqlens, formula, extras = given(name)
    own, lens = sum(LENGTHS), cu_seqlens.diff()
    page = LAYERS[name]["page_size"]
    pages = -(-lens // page)
    starts = pages.cumsum(0) - pages
    slots = torch.cat([start * page + torch.arange(n) for start, n in zip(starts, LENGTHS)])
    caches = [torch.full((int(pages.sum()) + 1, page, *x.shape[1:]), torch.nan, dtype=DTYPE) for x in (k, v)]
    package.append_kv(k[:own], v[:own], *caches, slot_mapping=slots, layer=name)
    table = (starts[:, None] + torch.arange(int(pages.max()))).int()
    options = dict(cu_seqlens_q=cu_seqlens, layer=name, return_lse=True, **extras)
    paged = package.attention(q[:own], *caches, block_table=table, seq_lens=lens.int(), **options)
    packed = package.attention_varlen(q[:own], k, v, cu_seqlens_k=cu_seqlens, **options)
    assert_right(packed, [x.double() for x in paged])
'''


@pytest.mark.parametrize("dtype", SPECS)
def test_values_in_the_interpreter(dtype, tmp_path):
    spec = tmp_path / f"{dtype}.yaml"
    entries = "\n".join(
        f"  - {{name: layer_{i}, layers: [{i}], {entry}}}" for i, entry in enumerate(SPECS[dtype])
    )
    spec.write_text(
        f"version: 1\nname: {dtype}\ndtype: {dtype}\nattention:\n{entries}\n"
        f"kv_cache: {{dtype: {dtype}, page_size: 16}}\ntargets: [h200]\nlimits: {LIMITS}\n"
    )
    package = build_sources(spec, tmp_path / "build")
    (package / "tests" / "test_varlen_fused.py").write_text(FUSED.replace("NAME", dtype))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests", "-k"]
        + [f"varlen and (fused or {BATCHES})"],
        cwd=package,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # Two fused ones a layer, and of each guard three batches at least.
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 8 * len(SPECS[dtype])
