"""The public functions of a package over a device that records its launches and computes with the float64 reference."""

import copy
import gc
import importlib.util
import json
import sys
import timeit

import pytest
import torch

from specgen.runtime import operators, plans, reference, workspace as workspaces
from specgen.runtime.arguments import ARGUMENTS
from specgen.runtime.errors import ArgumentError, CaptureError, NoBinaryError, UnsupportedError
from specgen.runtime.package import Package
from specgen.runtime.table import AppendRow, AttentionRow, MergeRow

ARCH, PAGE, QK, V, SPEC = "sm_90", 4, 32, 16, 4
LIMITS = {"max_seqs": 8, "max_seq_len": 128, "max_tokens": 64, "max_spec_tokens": SPEC}
HEADS = {"global": ((8, 2), (4, 1)), "local": ((6, 3),)}


def build(tmp_path, name="fake_kernels", layers=("global",), arch=ARCH):
    """A hand-made package folder: its manifest and rows, as the generator would write them."""
    variants, attention_rows, append_rows, merge_rows = {}, [], [], []

    def variant(symbol, family, query_heads, kv_heads, aligned, **facts):
        variants[symbol] = {
            "family": family, "module": f"kernels/{symbol}.py", "query_heads": query_heads, "kv_heads": kv_heads, "qk_dim": QK,
            "v_dim": V, "page_size": PAGE, "dtype": "float32", "mask": "causal", "scale": QK**-0.5, "max_query_len": None,
            "block_m": None, "tile_n": None, "num_warps": 4, "num_stages": 2, "ctas_per_multiprocessor": 2, "aligned": aligned,
            "alignment": 16 if aligned else 1, "tuning": "none",
            "binaries": {arch: {"file": f"binaries/{arch}/{symbol}.cubin", "sha256": "0" * 64, "shared_bytes": 1024,
                                "num_threads": 128, "registers": 64, "spill_bytes": 0, "main_loop_spills": 0, "occupancy": 4,
                                "function": symbol}},
        } | facts  # fmt: skip
        return symbol

    for layer in layers:
        for query_heads, kv_heads in HEADS[layer]:
            for aligned in (True, False):
                tail = f"{layer}_{query_heads}_{kv_heads}_{'a' if aligned else 'u'}"
                split = {"max_query_len": SPEC, "block_m": 16, "tile_n": 16}
                decode = variant(f"decode_{tail}", "decode", query_heads, kv_heads, aligned, **split)
                prefill = variant(f"prefill_{tail}", "prefill", query_heads, kv_heads, aligned, **split | {"block_m": 32})
                append = variant(f"append_{tail}", "append_kv", query_heads, kv_heads, aligned)
                for low, high, symbol in ((1, SPEC, None), (SPEC + 1, LIMITS["max_tokens"], prefill)):
                    facts = (len(attention_rows), arch, layer, query_heads, kv_heads, aligned, low, high, decode, symbol)
                    attention_rows.append(AttentionRow(*facts, "mixed" if symbol else "decode only"))
                append_rows.append(AppendRow(len(append_rows), arch, layer, kv_heads, aligned, append, "append"))
            merge = variant(f"merge_{query_heads}", "merge_states", query_heads, kv_heads, True)
            merge_rows.append(MergeRow(len(merge_rows), arch, query_heads, V, merge, "merge"))
    manifest = {
        "format": 1, "package": name, "distribution": name.replace("_", "-"), "version": "0.1.0", "specgen": "0.1.0",
        "triton": "3.7.1", "ptxas": "12.8", "launcher_compiler": "cc", "spec": {"name": "fake", "sha256": "1" * 64, "file": "spec.yaml"},
        "oldest_driver": {arch: "525.60.13"}, "limits": LIMITS, "variants": variants,
        "targets": [{"id": "h200", "arch": arch, "multiprocessors": 132, "shared_memory_per_block": 232448,
                     "memory_bandwidth_GBps": 4800.0, "matrix_rate_TFLOPs": 989.0}],
        "layers": [{"name": layer, "layers": "all", "query_heads": HEADS[layer][0][0], "kv_heads": HEADS[layer][0][1], "qk_dim": QK,
                    "v_dim": V, "scale": QK**-0.5, "mask": "causal", "page_size": PAGE, "dtype": "float32"} for layer in layers],
    }  # fmt: skip
    directory = tmp_path / name
    directory.mkdir(exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory, attention_rows, append_rows, merge_rows


class FakeDevice:
    """Records (symbol, grid, stream, arguments by name) and computes what the kernel would."""

    mode, multiprocessors, index, arch = "fake", 3, 0, ARCH

    def __init__(self, manifest, compute=True):
        self.variants, self.compute, self.launches, self.loaded = manifest["variants"], compute, [], []
        self.refuse = False

    def kernel(self, symbol):
        if self.refuse and symbol not in self.loaded:
            raise CaptureError(f"{symbol} is not loaded: call warmup() before the capture")
        self.loaded.append(symbol)
        variant = self.variants[symbol]
        names = [argument.name for argument in ARGUMENTS[variant["family"]]]

        def run(grid, stream, *args):
            assert len(args) == len(names)
            given = dict(zip(names, args))
            self.launches.append((symbol, grid, stream, given))
            if self.compute:
                getattr(self, "run_" + variant["family"])(variant, given)

        return run

    def load_all(self):
        for symbol in self.variants:
            self.kernel(symbol)

    def run_decode(self, variant, a):
        assert not a["counters_ptr"].any()
        self.run_rows(variant, a, lambda rows: 1 <= rows <= variant["max_query_len"])

    def run_prefill(self, variant, a):
        self.run_rows(variant, a, lambda rows: rows > variant["max_query_len"])

    def run_rows(self, variant, a, mine):
        paged = {name: a[name + "_ptr"] for name in ("block_table", "seq_lens", "cu_seqlens_q")}
        out, lse = reference.attention(a["q_ptr"], a["k_cache_ptr"], a["v_cache_ptr"], **paged, scale=variant["scale"])
        starts = a["cu_seqlens_q_ptr"].tolist()
        for first, last in zip(starts, starts[1:]):
            if mine(last - first):
                a["out_ptr"][first:last] = out[first:last].to(a["out_ptr"].dtype)
                if a["store_lse"]:
                    a["lse_ptr"][first:last] = lse[first:last].float()

    def run_append_kv(self, variant, a):
        caches = a["k_cache_ptr"], a["v_cache_ptr"]
        reference.append_kv(a["k_ptr"], a["v_ptr"], *caches, slot_mapping=a["slot_mapping_ptr"])

    def run_merge_states(self, variant, a):
        out, lse = reference.merge_states(a["out_a_ptr"], a["lse_a_ptr"], a["out_b_ptr"], a["lse_b_ptr"])
        a["out_ptr"].copy_(out)
        a["lse_ptr"].copy_(lse)


def fake(tmp_path, compute=True, **options):
    opened = []

    def open_device(directory, manifest, torch_device):
        opened.append(FakeDevice(manifest, compute))
        return opened[-1]

    directory, *rows = build(tmp_path, **options)
    package = Package(options.get("name", "fake_kernels"), directory, *rows, open_device=open_device)
    package.opened = opened
    return package


@pytest.fixture
def package(tmp_path):
    return fake(tmp_path)


def batch(lens=((1, 9), (2, 5), (0, 3), (1, 1)), heads=(8, 2), pages=16, max_pages=8, seed=0):
    """Arguments of one call: positional tensors and keywords."""
    make = torch.Generator().manual_seed(seed)
    tokens = sum(m for m, _ in lens)
    randn = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    q = randn(tokens, heads[0], QK)
    caches = randn(pages, PAGE, heads[1], QK), randn(pages, PAGE, heads[1], V)
    starts = [0]
    for m, _ in lens:
        starts.append(starts[-1] + m)
    keywords = {
        "block_table": torch.randint(0, pages, (len(lens), max_pages), generator=make, dtype=torch.int32),
        "seq_lens": torch.tensor([n for _, n in lens], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
    }
    return [q, *caches], keywords


def expected(tensors, keywords):
    return reference.attention(*tensors, **keywords)


def launched(package):
    return package.opened[0].launches


def test_decode_row(package):
    tensors, keywords = batch()
    out, lse = package.attention(*tensors, **keywords, max_seqlen_q=2, return_lse=True)
    want, want_lse = expected(tensors, keywords)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert [launch[0] for launch in launched(package)] == ["decode_global_8_2_a"]
    assert launched(package)[0][1:3] == (6, 0)


def test_mixed_row_launches_prefill_then_decode(package):
    tensors, keywords = batch([(9, 20), (1, 7), (3, 3), (5, 5)])
    out = package.attention(*tensors, **keywords, checks="full")
    torch.testing.assert_close(out.double(), expected(tensors, keywords)[0], rtol=1e-5, atol=1e-5)
    assert [launch[0] for launch in launched(package)] == ["prefill_global_8_2_a", "decode_global_8_2_a"]


@pytest.mark.parametrize("bound, symbols", [(1, 1), (SPEC, 1), (SPEC + 1, 2), (None, 2), (10**9, 2)])
def test_row_follows_the_bound(package, bound, symbols):
    tensors, keywords = batch([(1, 9)] * 6)
    package.attention(*tensors, **keywords, max_seqlen_q=bound)
    assert len(launched(package)) == symbols


def test_row_bound_is_never_more_than_tokens(package):
    tensors, keywords = batch([(1, 9)] * SPEC)
    package.attention(*tensors, **keywords, max_seqlen_q=60)
    assert len(launched(package)) == 1


def test_degree_is_read_from_the_heads(package):
    tensors, keywords = batch(heads=(4, 1))
    package.attention(*tensors, **keywords, max_seqlen_q=2)
    assert launched(package)[0][0] == "decode_global_4_1_a"


def test_argument_order_and_values(package):
    tensors, keywords = batch([(6, 8), (1, 3)])
    scratch = package.workspace("cpu")
    out = torch.empty(9, 10, V)[1:8, 1:9]
    package.attention(*tensors, **keywords, out=out, workspace=scratch)
    q, k, v = tensors
    for symbol, _, _, a in launched(package):
        assert a["q_ptr"] is q and a["k_cache_ptr"] is k and a["v_cache_ptr"] is v and a["out_ptr"] is out
        assert all(a[name + "_ptr"] is tensor for name, tensor in keywords.items())
        assert (a["num_seqs"], a["max_pages"], a["store_lse"], a["block_table_stride"]) == (2, 8, 0, 8)
        assert a["lse_ptr"] is scratch.partial_ml
        assert (a["q_stride_token"], a["q_stride_head"]) == q.stride()[:2]
        assert (a["k_cache_stride_page"], a["k_cache_stride_slot"], a["k_cache_stride_head"]) == k.stride()[:3]
        assert (a["v_cache_stride_page"], a["v_cache_stride_slot"], a["v_cache_stride_head"]) == v.stride()[:3]
        assert (a["out_stride_token"], a["out_stride_head"]) == (10 * V, V)
    decode = launched(package)[1][3]
    assert decode["partial_acc_ptr"] is scratch.partial_acc and decode["counters_ptr"] is scratch.counters
    assert decode["partial_ml_ptr"] is scratch.partial_ml


def test_contiguous_strides_of_an_allocated_out(package):
    tensors, keywords = batch()
    out = package.attention(*tensors, **keywords)
    assert out.is_contiguous() and out.shape == (4, 8, V)
    assert launched(package)[0][3]["out_stride_token"] == 8 * V


def test_checks_none_passes_the_same_arguments(package):
    tensors, keywords = batch()
    for checks in ("shapes", "none"):
        package.attention(*tensors, **keywords, out=torch.empty(4, 8, V), checks=checks)
    first, second = ([x for x in launch[3].values() if isinstance(x, int)] for launch in launched(package)[::1][:2])
    assert first == second and len(launched(package)) == 2


def misaligned(tensor):
    """The same values one element further: a pointer that is no multiple of 16 bytes."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return flat.view(tensor.shape).copy_(tensor)


def padded(tensor, dim=0):
    """The same values with one odd stride."""
    shape = list(tensor.shape)
    wide = torch.zeros(*shape[:dim], shape[dim] * 1, *shape[dim + 1 : -1], shape[-1] + 1)
    wide[..., :-1] = tensor
    return wide[..., :-1]


@pytest.mark.parametrize("change", [misaligned, padded])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_unaligned_guard(package, change, which):
    tensors, keywords = batch()
    out = torch.empty(4, 8, V)
    given = [*tensors, out]
    given[which] = change(given[which])
    package.attention(*given[:3], **keywords, max_seqlen_q=2, out=given[3])
    assert launched(package)[0][0] == "decode_global_8_2_u"
    package.attention(*tensors, **keywords, max_seqlen_q=2, out=out)
    assert launched(package)[1][0] == "decode_global_8_2_a"
    torch.testing.assert_close(given[3], out)


def test_interleaved_caches_and_sliced_queries_are_aligned(package):
    tensors, keywords = batch()
    q = torch.randn(4, 12, QK)
    pool = torch.randn(16, 2, PAGE, 2, QK)
    package.attention(q[:, :8], pool[:, 0], pool[:, 1, :, :, :V], **keywords, max_seqlen_q=2)
    assert launched(package)[0][0] == "decode_global_8_2_a"


def test_nothing_to_launch(package):
    tensors, keywords = batch([(0, 3), (0, 0)])
    assert package.attention(*tensors, **keywords).shape == (0, 8, V)
    tensors, keywords = batch()
    out = torch.full((4, 8, V), 7.0)
    assert package.attention(*tensors, **keywords, max_seqlen_q=0, out=out) is out
    empty = {"block_table": keywords["block_table"][:0], "seq_lens": keywords["seq_lens"][:0]}
    package.attention(*tensors, **empty, cu_seqlens_q=torch.zeros(1, dtype=torch.int32), out=out, checks="full")
    _, lse = package.attention(*batch([])[0], **empty, cu_seqlens_q=torch.zeros(1, dtype=torch.int32), return_lse=True)
    assert lse.shape == (0, 8) and (out == 7).all() and not launched(package)


def test_several_layers(tmp_path):
    package = fake(tmp_path, layers=("global", "local"))
    tensors, keywords = batch(heads=(6, 3))
    package.attention(*tensors, **keywords, layer="local", max_seqlen_q=2)
    assert launched(package)[0][0] == "decode_local_6_3_a"
    for call, parts in (
        ({}, ["layer is None", "several layers", "'global', 'local'"]),
        ({"layer": "nope"}, ["layer is 'nope'", "'global', 'local'"]),
        ({"layer": "global"}, ["6 heads", "3 kv heads", "8/2 (tensor_parallel 1), 4/1 (tensor_parallel 2)"]),
    ):
        with pytest.raises(ArgumentError) as error:
            package.attention(*tensors, **keywords, **call)
        assert all(part in str(error.value) for part in parts), error.value
        with pytest.raises(ArgumentError, match="append_kv: "):
            package.append_kv(torch.zeros(1, 3, QK), None, *tensors[1:], slot_mapping=None, **call)


def strided(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


def changed(name, change):
    """A case that changes one argument."""

    def apply(given):
        given[name] = change(given[name])

    return apply


def put(**values):
    return lambda given: given.update(values)


WRONG = {
    "q none": (put(q=None), ["q is NoneType", "torch.Tensor [tokens, query_heads, qk_dim]"]),
    "q list": (put(q=[1]), ["q is list", "torch.Tensor"]),
    "k none": (put(k_cache=None), ["k_cache is NoneType", "[pages, page_size, kv_heads, qk_dim]"]),
    "block_table list": (changed("block_table", lambda x: x.tolist()), ["block_table is list"]),
    "q rank": (changed("q", lambda x: x[0]), ["q has shape [8, 32]", "[tokens, query_heads, qk_dim]"]),
    "k rank": (changed("k_cache", lambda x: x[0]), ["k_cache has shape [4, 2, 32]", "[pages,"]),
    "v rank": (changed("v_cache", lambda x: x[0]), ["v_cache has shape [4, 2, 16]"]),
    "block_table rank": (changed("block_table", lambda x: x[0]), ["block_table has shape [8]", "[seqs, max_pages]"]),
    "seq_lens rank": (changed("seq_lens", lambda x: x[None]), ["seq_lens has shape [1, 4]", "[seqs]"]),
    "cu rank": (changed("cu_seqlens_q", lambda x: x[None]), ["cu_seqlens_q has shape [1, 5]", "[seqs + 1]"]),
    "q dtype": (changed("q", torch.Tensor.half), ["q has dtype torch.float16", "needed: torch.float32"]),
    "k dtype": (changed("k_cache", torch.Tensor.half), ["k_cache has dtype torch.float16", "torch.float32"]),
    "v dtype": (changed("v_cache", torch.Tensor.bfloat16), ["v_cache has dtype torch.bfloat16", "torch.float32"]),
    "block_table dtype": (changed("block_table", torch.Tensor.long), ["block_table has dtype torch.int64", "torch.int32"]),
    "seq_lens dtype": (changed("seq_lens", torch.Tensor.long), ["seq_lens has dtype torch.int64", "torch.int32"]),
    "cu dtype": (changed("cu_seqlens_q", torch.Tensor.long), ["cu_seqlens_q has dtype torch.int64", "torch.int32"]),
    "q dim": (changed("q", lambda x: x[..., :16]), ["q has head dim 16", "head dim 32"]),
    "k dim": (changed("k_cache", lambda x: x[..., :16]), ["k_cache has head dim 16", "head dim 32"]),
    "v dim": (changed("v_cache", lambda x: x[..., :8]), ["v_cache has shape [16, 4, 2, 8]", "[16, 4, 2, 16]"]),
    "page size": (changed("k_cache", lambda x: x[:, :3]), ["k_cache has page size 3", "page size 4"]),
    "v pages": (changed("v_cache", lambda x: x[:15]), ["v_cache has shape [15, 4, 2, 16]", "[16, 4, 2, 16]"]),
    "v heads": (changed("v_cache", lambda x: x[:, :, :1]), ["v_cache has shape [16, 4, 1, 16]", "[16, 4, 2, 16]"]),
    "heads": (changed("q", lambda x: x[:, :7]), ["q has 7 heads", "8/2 (tensor_parallel 1), 4/1 (tensor_parallel 2)"]),
    "layer name": (put(layer="glob"), ["layer is 'glob'", "'global'"]),
    "layer type": (put(layer=["global"]), ["layer is list", "a str"]),
    "seq_lens count": (changed("seq_lens", lambda x: x[:3]), ["seq_lens has 3 entries", "4, one per row"]),
    "cu count": (changed("cu_seqlens_q", lambda x: x[:4]), ["cu_seqlens_q has 4 entries", "5, one more"]),
    "tokens": (put(q=torch.zeros(65, 8, QK)), ["q has 65 tokens", "at most 64", "limits.max_tokens"]),
    "seqs": (
        put(block_table=torch.zeros(9, 1, dtype=torch.int32), seq_lens=torch.zeros(9, dtype=torch.int32),
            cu_seqlens_q=torch.zeros(10, dtype=torch.int32)),
        ["block_table has 9 sequences", "at most 8", "limits.max_seqs"],
    ),  # fmt: skip
    "q stride": (changed("q", strided), ["q has strides", "a last stride of 1"]),
    "k stride": (changed("k_cache", strided), ["k_cache has strides", "a last stride of 1"]),
    "v stride": (changed("v_cache", strided), ["v_cache has strides", "a last stride of 1"]),
    "block_table stride": (changed("block_table", strided), ["block_table has strides", "a last stride of 1"]),
    "seq_lens stride": (changed("seq_lens", strided), ["seq_lens has strides (2,)", "a last stride of 1"]),
    "cu stride": (changed("cu_seqlens_q", strided), ["cu_seqlens_q has strides (2,)", "a last stride of 1"]),
    "q sparse": (changed("q", torch.Tensor.to_sparse), ["q has layout torch.sparse_coo", "dense strided"]),
    "seq_lens sparse": (changed("seq_lens", torch.Tensor.to_sparse), ["seq_lens has layout torch.sparse_coo"]),
    "k meta": (changed("k_cache", lambda x: x.to("meta")), ["k_cache is on meta", "q's device cpu"]),
    "q meta": (changed("q", lambda x: x.to("meta")), ["q is a meta tensor", "a tensor with storage"]),
    "seq_lens meta": (changed("seq_lens", lambda x: x.to("meta")), ["seq_lens is on meta", "cpu"]),
    "k nested": (
        changed("k_cache", lambda x: torch.nested.nested_tensor([x[0], x[1]])),
        ["k_cache is a nested tensor", "dense strided"],
    ),
    "q grad": (changed("q", lambda x: x.requires_grad_()), ["q requires grad", "no backward"]),
    "v grad": (changed("v_cache", lambda x: x.requires_grad_()), ["v_cache requires grad", "no backward"]),
    "out grad": (put(out=torch.zeros(4, 8, V, requires_grad=True)), ["out requires grad"]),
    "out type": (put(out=3), ["out is int", "torch.Tensor"]),
    "out shape": (put(out=torch.zeros(4, 8, QK)), ["out has shape [4, 8, 32]", "[4, 8, 16]"]),
    "out dtype": (put(out=torch.zeros(4, 8, V).half()), ["out has dtype torch.float16", "torch.float32"]),
    "out stride": (put(out=strided(torch.zeros(4, 8, V))), ["out has strides", "a last stride of 1"]),
    "out overlap": (put(out=torch.zeros(1, 8, V).expand(4, 8, V)), ["out has strides (0, 16, 1) that overlap", "own address"]),
    "out overlap heads": (put(out=torch.zeros(999).as_strided((4, 8, V), (128, 8, 1))), ["out has strides (128, 8, 1)"]),
    "out meta": (put(out=torch.zeros(4, 8, V, device="meta")), ["out is on meta", "cpu"]),
    "max_seqlen_q bool": (put(max_seqlen_q=True), ["max_seqlen_q is bool", "host int"]),
    "max_seqlen_q float": (put(max_seqlen_q=1.0), ["max_seqlen_q is float", "host int"]),
    "max_seqlen_q tensor": (put(max_seqlen_q=torch.tensor(1)), ["max_seqlen_q is Tensor", "host int"]),
    "max_seqlen_q negative": (put(max_seqlen_q=-1), ["max_seqlen_q is -1", "at least 0"]),
    "max_seqlen_k": (put(max_seqlen_k="9"), ["max_seqlen_k is str", "host int"]),
    "checks": (put(checks="all"), ["checks is 'all'", "shapes, full, none"]),
    "sinks": (put(sinks=torch.zeros(8)), ["sinks is given", "no such feature"]),
    "alibi": (put(alibi_slopes=torch.zeros(8)), ["alibi_slopes is given", "no such feature"]),
    "prefix": (put(prefix_ranges=torch.zeros(8)), ["prefix_ranges is given"]),
    "q_scale": (put(q_scale=1.0), ["q_scale is given"]),
    "k_scale": (put(k_scale=1.0), ["k_scale is given"]),
    "v_scale": (put(v_scale=1.0), ["v_scale is given"]),
    "workspace type": (put(workspace=torch.zeros(8)), ["workspace is Tensor", "workspace()"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_attention_calls(package, case):
    change, parts = WRONG[case]
    (q, k_cache, v_cache), keywords = batch()
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": torch.full((4, 8, V), 7.0)} | keywords
    untouched = given["out"]
    change(given)
    with pytest.raises(ArgumentError) as error:
        package.attention(given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), **given)
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert text.startswith("attention: ") and "needed" in text
    assert (untouched == 7).all() and not any(device.launches for device in package.opened)


def table_with(page, place=(0, 0)):
    def apply(given):
        given["block_table"] = given["block_table"].clone()
        given["block_table"][place] = page

    return apply


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


WRONG_VALUES = {
    "negative keys": (put(seq_lens=ints(9, -1, 3, 1)), ["seq_lens is -1 at sequence 1", "at least 0"]),
    "table row": (put(seq_lens=ints(9, 5, 3, 33)), ["seq_lens is 33 at sequence 3", "at most 32", "8 block_table columns"]),
    "limit": (
        put(block_table=torch.zeros(4, 64, dtype=torch.int32), seq_lens=ints(129, 5, 3, 1)),
        ["seq_lens is 129 at sequence 0", "at most 128", "limits.max_seq_len"],
    ),
    "cu start": (put(cu_seqlens_q=ints(1, 1, 3, 3, 4)), ["cu_seqlens_q starts at 1", "0"]),
    "cu falls": (put(cu_seqlens_q=ints(0, 3, 1, 1, 4)), ["cu_seqlens_q falls from 3 to 1 at sequence 1"]),
    "cu end": (put(cu_seqlens_q=ints(0, 1, 3, 3, 5)), ["cu_seqlens_q ends at 5", "at most 4"]),
    "bound q": (put(max_seqlen_q=1), ["max_seqlen_q is 1", "sequence 1 has 2 query rows"]),
    "bound k": (put(max_seqlen_k=8), ["max_seqlen_k is 8", "sequence 0 has 9 keys"]),
    "page": (table_with(16, (0, 2)), ["block_table has page 16 at [0, 2]", "0 to 15 for the 9 keys"]),
    "page -1": (table_with(-1, (3, 0)), ["block_table has page -1 at [3, 0]", "0 to 15"]),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_values_under_full_checks(package, case):
    change, parts = WRONG_VALUES[case]
    tensors, keywords = batch()
    change(keywords)
    with pytest.raises(ArgumentError) as error:
        package.attention(*tensors, **keywords, checks="full")
    assert all(part in str(error.value) for part in parts), error.value
    assert not package.opened


@pytest.mark.parametrize("change", [table_with(99, (0, 3)), table_with(-1, (2, 0)), put(seq_lens=ints(9, 1, 3, 0))])
def test_right_values_under_full_checks(package, change):
    """Pages behind the keys, or of a sequence without queries, and more queries than keys are legal."""
    tensors, keywords = batch()
    change(keywords)
    package.attention(*tensors, **keywords, checks="full")


def test_grad_is_fine_without_grad_mode(package):
    tensors, keywords = batch()
    tensors[0] = torch.nn.Parameter(tensors[0])
    with torch.no_grad():
        package.attention(*tensors, **keywords)
    with torch.inference_mode():
        package.attention(*tensors, **keywords)
    assert len(launched(package)) == 2
    with pytest.raises(ArgumentError, match="q requires grad"):
        package.attention(*tensors, **keywords)


def test_transposed_out_is_not_overlapping(package):
    tensors, keywords = batch()
    out = torch.empty(8, 4, V).transpose(0, 1)
    package.attention(*tensors, **keywords, out=out)
    torch.testing.assert_close(out, package.attention(*tensors, **keywords))


def kv(tokens=5, heads=2, pages=16):
    k, v = torch.randn(tokens, heads, QK), torch.randn(tokens, heads, V)
    caches = torch.zeros(pages, PAGE, heads, QK), torch.zeros(pages, PAGE, heads, V)
    return {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "slot_mapping": torch.tensor([3, -1, 63, 64, 0])[:tokens]}


def append(package, given):
    given = dict(given)
    return package.append_kv(given.pop("k"), given.pop("v"), given.pop("k_cache"), given.pop("v_cache"), **given)


def test_append_kv(package):
    given = kv()
    assert append(package, given) is None
    symbol, grid, stream, a = launched(package)[0]
    assert (symbol, grid, stream, a["num_tokens"], a["num_slots"]) == ("append_global_8_2_a", 6, 0, 5, 64)
    assert (a["k_cache_stride_page"], a["k_cache_stride_slot"], a["k_cache_stride_head"]) == given["k_cache"].stride()[:3]
    assert (a["v_stride_token"], a["v_stride_head"]) == given["v"].stride()[:2]
    torch.testing.assert_close(given["k_cache"][0, 3], given["k"][0])
    torch.testing.assert_close(given["v_cache"][15, 3], given["v"][2])
    append(package, given | {"k": misaligned(given["k"])})
    assert launched(package)[1][0] == "append_global_8_2_u"
    append(package, kv(0))
    assert len(launched(package)) == 2


WRONG_APPENDS = {
    "k none": (put(k=None), ["k is NoneType"]),
    "k_cache none": (put(k_cache=None), ["k_cache is NoneType"]),
    "k_cache rank": (changed("k_cache", lambda x: x[0, 0]), ["k_cache has shape [2, 32]"]),
    "k rank": (changed("k", lambda x: x[0]), ["k has shape [2, 32]", "[tokens, kv_heads, qk_dim]"]),
    "dtype": (changed("v", torch.Tensor.half), ["v has dtype torch.float16", "torch.float32"]),
    "slots dtype": (changed("slot_mapping", torch.Tensor.int), ["slot_mapping has dtype torch.int32", "torch.int64"]),
    "slots count": (changed("slot_mapping", lambda x: x[:4]), ["slot_mapping has 4 entries", "5, one per token"]),
    "slots stride": (changed("slot_mapping", strided), ["slot_mapping has strides (2,)"]),
    "k shape": (changed("k", lambda x: x[:, :1]), ["k has shape [5, 1, 32]", "[5, 2, 32]"]),
    "v shape": (changed("v", lambda x: x[:4]), ["v has shape [4, 2, 16]", "[5, 2, 16]"]),
    "heads": (changed("k_cache", lambda x: x[:, :, :0]), ["k_cache has 0 kv heads", "one of 2, 1"]),
    "page size": (changed("k_cache", lambda x: x[:, :2]), ["k_cache has page size 2", "page size 4"]),
    "k stride": (changed("k", strided), ["k has strides", "a last stride of 1"]),
    "overlap": (changed("k_cache", lambda x: x[:1].expand(16, -1, -1, -1)), ["k_cache has strides", "overlap"]),
    "meta": (changed("v", lambda x: x.to("meta")), ["v is on meta", "k_cache's device cpu"]),
    "grad": (changed("k", lambda x: x.requires_grad_()), ["k requires grad"]),
    "scale": (put(k_scale=2.0), ["k_scale is given"]),
    "layer": (put(layer="x"), ["layer is 'x'", "'global'"]),
}


@pytest.mark.parametrize("case", WRONG_APPENDS)
def test_wrong_appends(package, case):
    change, parts = WRONG_APPENDS[case]
    given = kv()
    caches = given["k_cache"], given["v_cache"]
    change(given)
    with pytest.raises(ArgumentError) as error:
        append(package, given)
    assert all(part in str(error.value) for part in parts), error.value
    assert str(error.value).startswith("append_kv: ") and not any(map(torch.any, caches))


def states(tokens=3, heads=8):
    return [torch.randn(tokens, heads, V), torch.randn(tokens, heads), torch.randn(tokens, heads, V), torch.randn(tokens, heads)]


def test_merge_states(package):
    given = states()
    given[1][0] = given[3][0] = -torch.inf
    out, lse = package.merge_states(*given)
    want, want_lse = reference.merge_states(*given)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert launched(package)[0][0] == "merge_8" and launched(package)[0][3]["num_rows"] == 24
    package.merge_states(misaligned(given[0]), *given[1:])
    assert launched(package)[1][3]["out_a_ptr"].data_ptr() % 16 == 0
    assert package.merge_states(*states(0))[0].shape == (0, 8, V)


@pytest.mark.parametrize(
    "place, change, parts",
    [
        (0, lambda x: x[0], ["out_a has shape [8, 16]"]),
        (0, lambda x: x[:, :5], ["out_a has shape [tokens, 5, 16]", "[tokens, 8, 16], [tokens, 4, 16]"]),
        (0, lambda x: x.half(), ["out_a has dtype torch.float16"]),
        (1, lambda x: x.double(), ["lse_a has dtype torch.float64", "torch.float32"]),
        (1, lambda x: x[:2], ["lse_a has shape [2, 8]", "[3, 8]"]),
        (2, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), ["out_b has strides", "contiguous"]),
        (3, lambda x: x.to("meta"), ["lse_b is a meta tensor"]),
        (2, lambda x: x.requires_grad_(), ["out_b requires grad"]),
        (3, lambda x: None, ["lse_b is NoneType"]),
    ],
)
def test_wrong_merges(package, place, change, parts):
    given = states()
    given[place] = change(given[place])
    with pytest.raises(ArgumentError) as error:
        package.merge_states(*given)
    assert all(part in str(error.value) for part in parts), error.value


def test_workspace_is_of_published_size_and_belongs(package, tmp_path):
    scratch = package.workspace("cpu", max_seqs=2, max_tokens=3)
    assert scratch.nbytes == 4 * (2 * 6 * 16 * 16 + 2 * 6 * 2 * 16 + 6) == package.workspace("cpu").nbytes
    scratch.counters.fill_(3)
    scratch.reset()
    assert not scratch.counters.any() and scratch.partial_acc.dtype == torch.float32 and scratch.counters.dtype == torch.int32
    tensors, keywords = batch([(1, 3), (2, 3)])
    package.attention(*tensors, **keywords, workspace=scratch)
    for lens, part in (([(1, 3)] * 3, "max_seqs 2; needed: 3"), ([(2, 3)] * 2, "max_tokens 3; needed: 4")):
        tensors, keywords = batch(lens)
        with pytest.raises(ArgumentError, match=part):
            package.attention(*tensors, **keywords, workspace=scratch)
    other = fake(tmp_path, name="other_kernels")
    with pytest.raises(ArgumentError, match="workspace is of another package; needed: one that other_kernels"):
        other.attention(*tensors, **keywords, workspace=scratch)


@pytest.mark.parametrize(
    "limits, part",
    [({"max_seqs": 9}, "max_seqs is 9; needed: 1 to 8"), ({"max_seqs": 0}, "max_seqs is 0"), ({"rows": 1}, "rows is no limit; needed: one of max_seqs"),
     ({"max_tokens": True}, "max_tokens is bool"), ({"max_tokens": 1.0}, "max_tokens is float")],
)  # fmt: skip
def test_wrong_workspace_limits(package, limits, part):
    with pytest.raises(ArgumentError, match=part):
        package.workspace("cpu", **limits)


def test_one_workspace_per_stream(package):
    tensors, keywords = batch()
    package.attention(*tensors, **keywords)
    served = package._devices[torch.device("cpu")]
    seen = []
    for stream in (0, 7, 0, 9, 7):
        served.current_stream = lambda index, stream=stream: stream
        package.attention(*tensors, **keywords)
        seen.append((launched(package)[-1][2], launched(package)[-1][3]["counters_ptr"].data_ptr()))
    assert [stream for stream, _ in seen] == [0, 7, 0, 9, 7]
    assert seen[0] == seen[2] and seen[1] == seen[4] and len(set(seen)) == 3


def test_capture_takes_the_spare_and_calls_outside_renew_it(package, monkeypatch):
    capturing = False
    monkeypatch.setattr(workspaces, "is_capturing", lambda device: capturing)
    package.warmup("cpu")
    tensors, keywords = batch()
    served = package._devices[torch.device("cpu")]

    def call(stream):
        served.current_stream = lambda index: stream
        package.attention(*tensors, **keywords)
        return launched(package)[-1][3]["counters_ptr"]

    eager = call(0)
    capturing = True
    captured = call(5)
    assert captured is not eager and call(5) is captured
    before = len(launched(package))
    with pytest.raises(CaptureError, match=r"needed: call warmup\(\) before the capture"):
        call(6)
    assert len(launched(package)) == before
    capturing = False
    assert call(0) is eager
    capturing = True
    assert call(6) is not captured
    assert call(0) is eager


def test_first_call_inside_capture(package, monkeypatch):
    """Without warmup a named error and no launch; after it the call works."""
    capturing = True
    monkeypatch.setattr(workspaces, "is_capturing", lambda device: capturing)
    monkeypatch.setattr("specgen.runtime.package.is_capturing", lambda device: capturing)
    tensors, keywords = batch()
    package._plans("cpu", "warmup")
    package.opened[0].refuse = True
    with pytest.raises(CaptureError, match="warmup"):
        package.attention(*tensors, **keywords)
    for call in (package.warmup, package.workspace):
        with pytest.raises(CaptureError, match="being captured"):
            call("cpu")
    assert not launched(package)
    capturing, package.opened[0].refuse = False, False
    package.warmup("cpu")
    capturing, package.opened[0].refuse = True, True
    served = package._devices[torch.device("cpu")]
    served.current_stream = lambda index: 3
    package.attention(*tensors, **keywords)
    assert len(launched(package)) == 1


def test_a_workspace_made_in_inference_mode_can_be_reset_outside(package):
    with torch.inference_mode():
        scratch = package.workspace("cpu")
    scratch.reset()


def test_warmup_loads_everything(package):
    package.warmup("cpu")
    assert set(package.opened[0].loaded) >= set(package.manifest["variants"]) and len(package.opened) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(package, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for call in (package.warmup, package.workspace):
        with pytest.raises(NoBinaryError, match="no CUDA or HIP device.*sm_90"):
            call()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    package.warmup()
    assert str(package.workspace().device) == "cpu"


def test_argument_errors_come_before_the_device(tmp_path):
    directory, *rows = build(tmp_path)

    def open_device(*_):
        raise NoBinaryError("nothing fits")

    package = Package("closed_kernels", directory, *rows, open_device=open_device)
    tensors, keywords = batch()
    with pytest.raises(ArgumentError, match="q has dtype"):
        package.attention(tensors[0].half(), *tensors[1:], **keywords)
    with pytest.raises(NoBinaryError):
        package.attention(*tensors, **keywords)
    text = str(package.explain(*tensors, **keywords))
    assert "nothing fits" in text and "cannot run" in text and "shown for h200" in text


def test_explain(package):
    tensors, keywords = batch([(9, 20), (1, 7)])
    found = package.explain(*tensors, **keywords, return_lse=True)
    assert not launched(package) and not package.opened[0].loaded
    assert found.row.index == 1 and [launch.symbol for launch in found.launches] == list(found.row.symbols)
    assert [launch.grid for launch in found.launches] == [6, 6]
    text = str(found)
    for part in ("attention[1]: mixed", "8/2 heads (tensor_parallel 1)", "at most 10 query rows", "row takes 5..64",
                 "aligned: pointers are multiples of 16", "grid 6", "key tiles", "blocks of 32 rows", "at most", "us on h200"):  # fmt: skip
        assert part in text, text
    exact = package.explain(*tensors, **keywords, checks="full")
    assert exact.exact and exact.bytes < found.bytes and exact.operations < found.operations
    pairs = sum(range(12, 21)) + 7
    assert exact.operations == 2 * pairs * 8 * (QK + V)
    assert exact.bytes == 4 * (10 * 8 + 27 * 2) * (QK + V) + 4 * (5 + 7)
    assert exact.floor_us == {"h200": pytest.approx(exact.bytes / 4800e3)}
    assert exact.workspace_bytes == package.workspace("cpu").nbytes
    bounded = package.explain(*tensors, **keywords, max_seqlen_k=20)
    assert exact.bytes < bounded.bytes < found.bytes


def test_explain_says_what_breaks_alignment(package):
    tensors, keywords = batch()
    text = str(package.explain(misaligned(tensors[0]), padded(tensors[1]), tensors[2], **keywords))
    assert "unaligned: q starts at an address" in text and "k_cache has strides" in text and "multiples of 4 elements" in text
    tensors, keywords = batch([(0, 0)])
    assert "nothing to launch" in str(package.explain(*tensors, **keywords))
    with pytest.raises(ArgumentError, match="sinks"):
        package.explain(*tensors, **keywords, sinks=1)


def test_describe(package):
    text = package.describe()
    for part in ("fake_kernels 0.1.0", "triton 3.7.1", "max_seqs 8", "global: layers all, 8/2", "head dim 32 (v 16)",
                 "per rank 8/2, 4/1", "h200: sm_90, 132 multiprocessors", "oldest driver 525.60.13", "decode_global_8_2_a (decode)",
                 "64 registers", "0 spill bytes", "8 attention, 4 append_kv, 2 merge_states"):  # fmt: skip
        assert part in text, text
    assert not package.opened


def op_arguments(tensors, keywords):
    return (*tensors, *keywords.values())


@pytest.mark.parametrize("name", ["attention", "attention_lse", "attention_out", "attention_out_lse"])
def test_opcheck_attention(package, name):
    tensors, keywords = batch([(6, 9), (1, 5)])
    given = op_arguments(tensors, keywords)
    given += (torch.zeros(7, 8, V),) if "out" in name else ()
    torch.library.opcheck(getattr(torch.ops.fake_kernels, name).default, given, {"max_seqlen_q": 6, "layer": "global"})


def test_opcheck_the_others(package):
    given = kv()
    given["slot_mapping"] = torch.tensor([3, -1, 9, 12, 0])
    torch.library.opcheck(torch.ops.fake_kernels.append_kv.default, tuple(given.values()))
    torch.library.opcheck(torch.ops.fake_kernels.merge_states.default, tuple(states()))


def test_operators_refuse_as_the_functions_do(package):
    tensors, keywords = batch()
    with pytest.raises(ArgumentError, match="q has dtype"):
        torch.ops.fake_kernels.attention(tensors[0].half(), *tensors[1:], *keywords.values())
    with pytest.raises(ArgumentError, match="q requires grad"):
        torch.ops.fake_kernels.attention(tensors[0].requires_grad_(), *tensors[1:], *keywords.values())


class Step(torch.nn.Module):
    """Append, attend, merge: one layer's use of a package."""

    def __init__(self, package, use_out=False):
        super().__init__()
        self.package, self.use_out = package, use_out

    def forward(self, q, k, v, k_cache, v_cache, slot_mapping, block_table, seq_lens, cu_seqlens_q):
        self.package.append_kv(k, v, k_cache, v_cache, slot_mapping=slot_mapping)
        out = torch.zeros(q.shape[0], q.shape[1], V) if self.use_out else None
        paged = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        out, lse = self.package.attention(q * 1.0, k_cache, v_cache, **paged, out=out, return_lse=True, max_seqlen_q=q.shape[0])
        return self.package.merge_states(out, lse, out, lse)[0] + self.package.attention(q, k_cache, v_cache, **paged)


def step_arguments(tokens=5, interleaved=True):
    tensors, keywords = batch([(tokens - 1, 9), (1, 5)])
    k, v = torch.randn(tokens, 2, QK), torch.randn(tokens, 2, V)
    if interleaved:
        pool = torch.zeros(16, 2, PAGE, 2, QK)
        caches = pool[:, 0], pool[:, 1, :, :, :V]
    else:
        caches = torch.zeros(16, PAGE, 2, QK), torch.zeros(16, PAGE, 2, V)
    keywords["block_table"] = torch.arange(16, dtype=torch.int32).view(2, 8)
    return [tensors[0], k, v, *caches, torch.arange(tokens), *keywords.values()]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("use_out", [True, False])
def test_compile_fullgraph(package, use_out, interleaved):
    step = Step(package, use_out)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for tokens in (5, 7, 3):
            mine, theirs = step_arguments(tokens, interleaved), step_arguments(tokens, interleaved)
            for place in (1, 2):
                theirs[place] = mine[place].clone()
            torch.testing.assert_close(compiled(*mine), step(*theirs))
            torch.testing.assert_close(mine[3], theirs[3])
            torch.testing.assert_close(mine[4], theirs[4])


def test_compile_of_a_module_level_function(package):
    """As the generated __init__ has them: bound methods of one Package."""
    attention = package.attention
    tensors, keywords = batch()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k_cache, v_cache, paged):
        return attention(q, k_cache, v_cache, **paged, max_seqlen_q=2, layer="global") * 2

    torch.testing.assert_close(step(*tensors, keywords), attention(*tensors, **keywords) * 2)


def test_compile_refuses_a_workspace(package):
    tensors, keywords = batch()
    scratch = package.workspace("cpu")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k_cache, v_cache, paged):
        return package.attention(q, k_cache, v_cache, **paged, workspace=scratch)

    with pytest.raises(Exception, match="workspace"):
        step(*tensors, keywords)


@pytest.mark.parametrize("strict", [True, False])
def test_export(package, strict):
    step = Step(package).eval()
    with torch.no_grad():
        given = step_arguments()
        program = torch.export.export(step, tuple(copy.deepcopy(given)), strict=strict)
        names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert any(name.startswith("fake_kernels.attention_lse") for name in names)
        torch.testing.assert_close(program.module()(*copy.deepcopy(given)), step(*given))


def test_fake_tensors_give_shapes_and_launch_nothing(package):
    tensors, keywords = batch()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k_cache, v_cache = map(mode.from_tensor, tensors)
        out, lse = package.attention(q, k_cache, v_cache, **keywords, return_lse=True)
        assert out.shape == (4, 8, V) and lse.shape == (4, 8) and lse.dtype == torch.float32
    assert not package.opened


def test_two_packages_and_a_reload(tmp_path):
    """Operators live in a namespace per package; a reload serves the new object and registers nothing twice."""
    first, second = fake(tmp_path, name="first_kernels"), fake(tmp_path, name="second_kernels")
    tensors, keywords = batch()
    torch.ops.first_kernels.attention(*op_arguments(tensors, keywords))
    assert first.opened and not second.opened
    again = fake(tmp_path, name="first_kernels")
    del first
    gc.collect()
    torch.ops.first_kernels.attention(*op_arguments(tensors, keywords))
    torch.ops.second_kernels.attention(*op_arguments(tensors, keywords))
    assert again.opened and second.opened


def test_a_reloaded_operators_module_serves_too(package, tmp_path):
    spec = importlib.util.spec_from_file_location("specgen.runtime.operators_again", operators.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        module.Operators(package)
    finally:
        del sys.modules[spec.name]
    tensors, keywords = batch()
    torch.ops.fake_kernels.attention(*op_arguments(tensors, keywords))
    assert launched(package)


def test_unsupported_features_are_their_own_class(package):
    tensors, keywords = batch()
    with pytest.raises(UnsupportedError):
        package.attention(*tensors, **keywords, sinks=torch.zeros(8))


def test_plan_of_a_stream_reader_needs_no_gpu():
    assert plans._stream_reader(torch.device("cpu"))(-1) == 0


def main():
    """Print the host time of one eager call over a device that does nothing."""
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        package = fake(pathlib.Path(folder), compute=False, name="timed_kernels")
        tensors, keywords = batch()
        out = torch.empty(4, 8, V)
        given = kv()
        merged = states()
        package.warmup("cpu")
        device = package.opened[0]
        device.kernel = lambda symbol: lambda *args: None
        served = package._devices[torch.device("cpu")]
        served._attention.clear()
        for name, call in {
            "attention, out given": lambda: package.attention(*tensors, **keywords, max_seqlen_q=2, out=out),
            "attention, two kernels": lambda: package.attention(*tensors, **keywords, max_seqlen_q=9, out=out),
            "attention, out allocated": lambda: package.attention(*tensors, **keywords, max_seqlen_q=2),
            "attention, checks none": lambda: package.attention(*tensors, **keywords, max_seqlen_q=2, out=out, checks="none"),
            "append_kv": lambda: append(package, given),
            "merge_states": lambda: package.merge_states(*merged),
        }.items():
            call()
            best = min(timeit.repeat(call, number=5000, repeat=7)) / 5000
            print(f"{name:<28}{best * 1e6:6.2f} us")


if __name__ == "__main__":
    main()
