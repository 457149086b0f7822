"""attention_varlen over a fake device: rows, launches, refusals, operators, explain.

Its values: test_varlen_values.py.
"""

from dataclasses import replace

import pytest
import torch
from fake_package import QK, V, fake, launched, misaligned, packed, padded

from specgen.runtime import plans as plans_module
from specgen.runtime import reference
from specgen.runtime.arguments import ARGUMENTS, arguments
from specgen.runtime.errors import ArgumentError, CaptureError, UnsupportedError
from specgen.runtime.table import Bounds, NoRowError, Table, VarlenRow

ALL = {"sinks": True, "alibi": True, "prefix_ranges": True}
LENS = ((1, 9), (2, 5), (0, 3), (1, 1))


@pytest.fixture
def package(tmp_path):
    return fake(tmp_path)


def close(found, want):
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def rows():
    return [
        VarlenRow(i, "sm_90", "all", 8, 2, aligned, "varlen", "") for i, aligned in enumerate((True, False))
    ]


def test_one_row_of_each_guard():
    table = Table((), (), (), rows())
    assert table.varlen("sm_90", "all", 8, 2, False) is table.varlen_rows[1] and table.archs == ("sm_90",)
    with pytest.raises(ValueError, match="attention_varlen rows 0 and 1 overlap"):
        Table((), (), (), [rows()[0], replace(rows()[0], index=1)])
    with pytest.raises(
        NoRowError, match="9/2 heads, aligned True; the table has all with 8/2 heads on sm_90"
    ):
        table.varlen("sm_90", "all", 9, 2, True)


MOST = Bounds(64, 8, 64, 128)  # the limits of the package


def test_missing_rows_are_faults(package):
    table = package.table
    assert table.faults(MOST) == []
    fewer = Table(table.attention_rows, table.append_rows, table.merge_rows, table.varlen_rows[:-1])
    assert fewer.faults(MOST) == ["sm_90 global 4/1 unaligned: no attention_varlen row"]
    moved = Table(table.attention_rows, (), (), [*table.varlen_rows[1:], table.varlen_rows[0]])
    assert "row 1 stands at place 0" in moved.faults(MOST)[0]


@pytest.mark.parametrize("checks", ["shapes", "full", "none"])
def test_one_launch_serves_every_batch(package, checks):
    for lens in (LENS, [(40, 40), (1, 7)], [(5, 2)]):
        tensors, keywords = packed(lens)
        out, lse = package.attention_varlen(*tensors, **keywords, return_lse=True, checks=checks)
        want, want_lse = reference.attention_varlen(*tensors, **keywords)
        close(out, want)
        close(lse, want_lse)
    assert [launch[:3] for launch in launched(package)] == [("varlen_global_8_2_a", 6, 0)] * 3


def test_the_reference_is_attention_sequence_by_sequence():
    (q, k, v), keywords = packed([(3, 7), (4, 4)])
    for mask in ("causal", "bidirectional"):
        out, lse = reference.attention_varlen(q, k, v, **keywords, mask=mask)
        for rows, keys in ((slice(0, 3), slice(0, 7)), (slice(3, 7), slice(7, 11))):
            m, n = rows.stop - rows.start, keys.stop - keys.start
            seen = torch.ones(m, n, dtype=torch.bool)
            if mask == "causal":
                seen = seen.tril(n - m)
            heads = [x.double().transpose(0, 1) for x in (q[rows], k[keys], v[keys])]
            heads[1:] = [x.repeat_interleave(4, 0) for x in heads[1:]]
            want = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen)
            close(out[rows], want.transpose(0, 1))
            scores = (heads[0] @ heads[1].mT * QK**-0.5).masked_fill(~seen, -torch.inf)
            close(lse[rows], scores.logsumexp(-1).T)


def test_argument_order_and_values(package):
    (q, k, v), keywords = packed()
    out = torch.empty(9, 10, V)[1:5, 1:9]
    given = package.attention_varlen(q, k, v, **keywords, out=out)
    (launch,) = launched(package)
    a = launch[3]
    assert given is out and list(a) == [argument.name for argument in ARGUMENTS["varlen"]]
    assert a["q_ptr"] is q and a["k_ptr"] is k and a["v_ptr"] is v and a["out_ptr"] is out
    assert all(a[f"{name}_ptr"] is tensor for name, tensor in keywords.items())
    assert (a["num_seqs"], a["store_lse"]) == (4, 0)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert (a[f"{name}_stride_token"], a[f"{name}_stride_head"]) == tensor.stride()[:2]
    for checks in ("shapes", "none"):
        package.attention_varlen(q, k, v, **keywords, checks=checks)
    first, second = (
        [x for x in launch[3].values() if isinstance(x, int)] for launch in launched(package)[1:]
    )
    assert first == second and first[-2:] == [8 * V, V]


@pytest.mark.parametrize("change", [misaligned, padded])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_unaligned_guard(package, change, which):
    tensors, keywords = packed()
    given = [*tensors, torch.empty(4, 8, V)]
    given[which] = change(given[which])
    package.attention_varlen(*given[:3], **keywords, out=given[3])
    assert launched(package)[0][0] == "varlen_global_8_2_u"
    close(given[3], reference.attention_varlen(*tensors, **keywords)[0])


def test_slices_of_a_fused_qkv_are_aligned(package):
    _, keywords = packed([(3, 3), (2, 2)])
    fused = torch.randn(5, 8 + 2 + 2, QK)
    q, k, v = fused[:, :8], fused[:, 8:10], fused[:, 10:, :V]
    out = package.attention_varlen(q, k, v, **keywords)
    assert launched(package)[0][0] == "varlen_global_8_2_a"
    close(out, reference.attention_varlen(q, k, v, **keywords)[0])


def test_nothing_to_launch(package):
    tensors, keywords = packed([(0, 3), (0, 0)])
    assert package.attention_varlen(*tensors, **keywords).shape == (0, 8, V)
    tensors, keywords = packed()
    out = torch.full((4, 8, V), 7.0)
    assert package.attention_varlen(*tensors, **keywords, max_seqlen_q=0, out=out) is out
    none = {name: torch.zeros(1, dtype=torch.int32) for name in keywords}
    package.attention_varlen(*tensors, **none, out=out, checks="full")
    assert (out == 7).all() and not launched(package)


def test_rows_beyond_the_batch_and_sequences_without_keys(package):
    (q, k, v), keywords = packed([(2, 0), (1, 4)])
    longer = torch.cat([q, q])
    out = torch.full((6, 8, V), 7.0)
    package.attention_varlen(longer, k, v, **keywords, out=out, checks="full")
    assert (out[3:] == 7).all() and not out[:2].any() and out[2].any()
    out, lse = package.attention_varlen(q[:2], k[:0], v[:0], return_lse=True, **packed([(2, 0)])[1])
    assert not out.any() and (lse == -torch.inf).all()


def test_layers_and_degrees(tmp_path):
    package = fake(tmp_path, layers=("global", "local"))
    tensors, keywords = packed(heads=(6, 3))
    package.attention_varlen(*tensors, **keywords, layer="local")
    assert launched(package)[0][0] == "varlen_local_6_3_a"
    tensors, keywords = packed(heads=(4, 1))
    package.attention_varlen(*tensors, **keywords, layer="global")
    assert launched(package)[1][0] == "varlen_global_4_1_a"
    with pytest.raises(ArgumentError, match="^attention_varlen: layer is None; this package has several"):
        package.attention_varlen(*tensors, **keywords)


def test_a_package_of_hnd_caches(tmp_path):
    package = fake(tmp_path, features={"layout": "HND"})
    tensors, keywords = packed()
    close(package.attention_varlen(*tensors, **keywords), reference.attention_varlen(*tensors, **keywords)[0])


def extras_of(seqs, heads=8):
    ranges = torch.tensor([[0, 2], [5, 5]], dtype=torch.int32).repeat(seqs, 1, 1)
    return {
        "sinks": torch.linspace(-1, 2, heads),
        "alibi_slopes": torch.linspace(0.1, 1, heads),
        "prefix_ranges": ranges,
    }


def test_every_feature_at_once(tmp_path):
    package = fake(tmp_path, features=ALL | {"sliding_window": 3, "softcap": 2.0})
    lens = [(1, 9), (2, 5), (6, 12)]
    tensors, keywords = packed(lens)
    extras = extras_of(3)
    out = package.attention_varlen(*tensors, **keywords, **extras, checks="full")
    close(out, reference.attention_varlen(*tensors, **keywords, **extras, sliding_window=3, softcap=2.0)[0])
    a = launched(package)[0][3]
    assert list(a) == [argument.name for argument in arguments("varlen", **ALL)]
    assert a["sinks_f32_ptr"] is extras["sinks"] and a["num_prefix_ranges"] == 2
    assert torch.equal(package.attention_varlen(*tensors, **keywords, **extras, checks="none"), out)
    for change, part in (
        ({"sinks": None}, "sinks is None; needed: bfloat16 or float32"),
        ({"alibi_slopes": torch.zeros(7)}, r"alibi_slopes has shape \[7\]"),
        ({"prefix_ranges": torch.zeros(2, 1, 2).int()}, r"prefix_ranges has shape \[2, 1, 2\]"),
        ({"prefix_ranges": torch.tensor([[[0, 10]]] * 3).int()}, r"prefix_ranges is \[0, 10\] at \[0, 0\]"),
        ({"sinks": torch.full((8,), torch.nan)}, "sinks is nan at head 0"),
    ):
        with pytest.raises(ArgumentError, match=f"^attention_varlen: {part}"):
            package.attention_varlen(*tensors, **keywords, **extras | change, checks="full")


def test_model_slopes_are_made_by_warmup_and_never_in_a_capture(tmp_path, monkeypatch):
    package = fake(tmp_path, features={"alibi": True})
    tensors, keywords = packed()
    monkeypatch.setattr(plans_module, "is_capturing", lambda device: True)
    with pytest.raises(CaptureError, match="slopes.*warmup"):
        package.attention_varlen(*tensors, **keywords)
    monkeypatch.setattr(plans_module, "is_capturing", lambda device: False)
    package.warmup("cpu")
    monkeypatch.setattr(plans_module, "is_capturing", lambda device: True)
    package.opened[0].refuse = True  # kernels are loaded too
    package.attention_varlen(*tensors, **keywords)
    assert launched(package)


def strided(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


def changed(name, change):
    return lambda given: given.update({name: change(given[name])})


def put(**values):
    return lambda given: given.update(values)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "q none": (put(q=None), ["q is NoneType", "torch.Tensor [tokens, query_heads, qk_dim]"]),
    "k list": (put(k=[1]), ["k is list", "torch.Tensor [key_tokens, kv_heads, qk_dim]"]),
    "k rank": (changed("k", lambda x: x[0]), ["k has shape [2, 32]", "[key_tokens, kv_heads, qk_dim]"]),
    "v rank": (changed("v", lambda x: x[0]), ["v has shape [2, 16]", "[18, 2, 16]"]),
    "cu list": (changed("cu_seqlens_k", lambda x: x.tolist()), ["cu_seqlens_k is list", "[seqs + 1]"]),
    "cu rank": (changed("cu_seqlens_q", lambda x: x[None]), ["cu_seqlens_q has shape [1, 5]"]),
    "q dtype": (changed("q", torch.Tensor.half), ["q has dtype torch.float16", "needed: torch.float32"]),
    "k dtype": (changed("k", torch.Tensor.half), ["k has dtype torch.float16", "torch.float32"]),
    "v dtype": (changed("v", torch.Tensor.half), ["v has dtype torch.float16", "torch.float32"]),
    "cu q dtype": (changed("cu_seqlens_q", torch.Tensor.long), ["cu_seqlens_q has dtype torch.int64"]),
    "cu k dtype": (changed("cu_seqlens_k", torch.Tensor.long), ["cu_seqlens_k has dtype torch.int64"]),
    "q dim": (changed("q", lambda x: x[..., :16]), ["q has head dim 16", "head dim 32"]),
    "k dim": (changed("k", lambda x: x[..., :16]), ["k has head dim 16", "head dim 32"]),
    "v dim": (changed("v", lambda x: x[..., :8]), ["v has shape [18, 2, 8]", "[18, 2, 16]: k's tokens"]),
    "v tokens": (changed("v", lambda x: x[1:]), ["v has shape [17, 2, 16]", "[18, 2, 16]"]),
    "v heads": (changed("v", lambda x: x[:, :1]), ["v has shape [18, 1, 16]", "[18, 2, 16]"]),
    "heads": (
        changed("q", lambda x: x[:, :7]),
        ["q has 7 heads and k 2 kv heads", "8/2 (tensor_parallel 1), 4/1 (tensor_parallel 2)"],
    ),
    "layer name": (put(layer="glob"), ["layer is 'glob'", "'global'"]),
    "layer type": (put(layer=["global"]), ["layer is list", "a str"]),
    "cu none": (put(cu_seqlens_q=ints()), ["cu_seqlens_q has no entries"]),
    "cu count": (
        changed("cu_seqlens_k", lambda x: x[:4]),
        ["cu_seqlens_k has 4 entries", "5, as cu_seqlens_q"],
    ),
    "tokens": (put(q=torch.zeros(65, 8, QK)), ["q has 65 tokens", "at most 64", "limits.max_tokens"]),
    "seqs": (
        put(cu_seqlens_q=ints(*[0] * 10), cu_seqlens_k=ints(*[0] * 10)),
        ["cu_seqlens_q has 9 sequences", "at most 8", "limits.max_seqs"],
    ),
    "q stride": (changed("q", strided), ["q has strides", "a last stride of 1"]),
    "k stride": (changed("k", strided), ["k has strides", "a last stride of 1"]),
    "v stride": (changed("v", strided), ["v has strides", "a last stride of 1"]),
    "cu stride": (changed("cu_seqlens_k", strided), ["cu_seqlens_k has strides (2,)", "a last stride of 1"]),
    "k sparse": (changed("k", torch.Tensor.to_sparse), ["k has layout torch.sparse_coo", "dense strided"]),
    "v meta": (changed("v", lambda x: x.to("meta")), ["v is on meta", "q's device cpu"]),
    "cu meta": (changed("cu_seqlens_k", lambda x: x.to("meta")), ["cu_seqlens_k is on meta", "cpu"]),
    "k grad": (changed("k", lambda x: x.requires_grad_()), ["k requires grad", "no backward"]),
    "out shape": (put(out=torch.zeros(4, 8, QK)), ["out has shape [4, 8, 32]", "[4, 8, 16]"]),
    "out dtype": (put(out=torch.zeros(4, 8, V).half()), ["out has dtype torch.float16", "torch.float32"]),
    "out overlap": (
        put(out=torch.zeros(1, 8, V).expand(4, 8, V)),
        ["out has strides (0, 16, 1) that overlap"],
    ),
    "out over q": (
        lambda given: given.update(q=(x := torch.zeros(4 * 8 * QK)).view(4, 8, QK), out=x[-4 * 8 * V :].view(4, 8, V)),
        ["out overlaps q", "memory of its own: q is read while out is written"],
    ),
    "out over k": (
        lambda given: given.update(out=given["k"].view(-1)[: 4 * 8 * V].view(4, 8, V)),
        ["out overlaps k", "memory of its own"],
    ),
    "out over v": (
        lambda given: given.update(out=(x := torch.zeros(999))[-4 * 8 * V :].view(4, 8, V), v=x[: 18 * 2 * V].view(18, 2, V)),
        ["out overlaps v", "memory of its own"],
    ),
    "max_seqlen_q": (put(max_seqlen_q=True), ["max_seqlen_q is bool", "host int"]),
    "max_seqlen_k": (put(max_seqlen_k=-1), ["max_seqlen_k is -1", "at least 0"]),
    "return_lse": (put(return_lse=1), ["return_lse is int", "True or False"]),
    "checks": (put(checks="all"), ["checks is 'all'", "shapes, full, none"]),
    "sinks": (put(sinks=torch.zeros(8)), ["sinks is given", "no such feature"]),
    "freed": (changed("k", lambda x: freed(x)), ["k has no memory"]),
}


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(package, case):
    change, parts = WRONG[case]
    tensors, keywords = packed()
    given = dict(zip("qkv", tensors)) | {"out": torch.full((4, 8, V), 7.0)} | keywords
    untouched = given["out"]
    change(given)
    with pytest.raises(ArgumentError) as error:
        package.attention_varlen(**given)
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert text.startswith("attention_varlen: ") and "needed" in text
    assert (untouched == 7).all() and not any(device.launches for device in package.opened)


WRONG_VALUES = {
    "q start": (put(cu_seqlens_q=ints(1, 1, 3, 3, 4)), ["cu_seqlens_q starts at 1", "0"]),
    "k start": (put(cu_seqlens_k=ints(2, 9, 14, 17, 18)), ["cu_seqlens_k starts at 2", "0"]),
    "k falls": (put(cu_seqlens_k=ints(0, 9, 4, 17, 18)), ["cu_seqlens_k falls from 9 to 4 at sequence 1"]),
    "q end": (
        put(cu_seqlens_q=ints(0, 1, 3, 3, 5)),
        ["cu_seqlens_q ends at 5", "at most 4, the tokens of q"],
    ),
    "k end": (put(cu_seqlens_k=ints(0, 9, 14, 17, 19)), ["cu_seqlens_k ends at 19", "18, the tokens of k"]),
    "bound q": (put(max_seqlen_q=1), ["max_seqlen_q is 1", "sequence 1 has 2 query rows"]),
    "bound k": (put(max_seqlen_k=8), ["max_seqlen_k is 8", "sequence 0 has 9 keys"]),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_values_under_full_checks(package, case):
    change, parts = WRONG_VALUES[case]
    tensors, keywords = packed()
    change(keywords)
    with pytest.raises(ArgumentError) as error:
        package.attention_varlen(*tensors, **keywords, checks="full")
    assert all(part in str(error.value) for part in parts), error.value
    assert str(error.value).startswith("attention_varlen: ") and not package.opened


def test_too_many_keys_under_full_checks(package):
    tensors, keywords = packed([(1, 129)])
    with pytest.raises(ArgumentError, match="gives sequence 0 129 keys; needed: at most 128.*max_seq_len"):
        package.attention_varlen(*tensors, **keywords, checks="full")


def test_what_attention_takes_besides_is_unknown(package):
    tensors, keywords = packed()
    with pytest.raises(TypeError):
        package.attention_varlen(*tensors, **keywords, workspace=None)
    with pytest.raises(UnsupportedError, match="alibi_slopes is given"):
        package.attention_varlen(*tensors, **keywords, alibi_slopes=torch.zeros(8), checks="none")


@pytest.mark.parametrize("suffix", ["", "_lse", "_out", "_out_lse"])
def test_opcheck(tmp_path, suffix):
    package = fake(tmp_path, features=ALL)
    tensors, keywords = packed([(6, 9), (1, 5)])
    given = (*tensors, *keywords.values()) + ((torch.zeros(7, 8, V),) if "out" in suffix else ())
    operator = getattr(torch.ops.fake_kernels, f"attention_varlen{suffix}").default
    options = {"max_seqlen_q": 6, "layer": "global"} | extras_of(2)
    torch.library.opcheck(operator, given, options)
    assert launched(package)


class Encoder(torch.nn.Module):
    """One layer's attention over a fused QKV."""

    def __init__(self, package, use_out):
        super().__init__()
        self.package, self.use_out = package, use_out

    def forward(self, fused, cu_seqlens):
        q, k, v = fused[:, :8], fused[:, 8:10], fused[:, 10:, :V]
        out = torch.zeros(q.shape[0], q.shape[1], V) if self.use_out else None
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        out, lse = self.package.attention_varlen(q * 1.0, k, v, **lengths, out=out, return_lse=True)
        return out * lse[..., None] + self.package.attention_varlen(q, k, v, **lengths)


@pytest.mark.parametrize("use_out", [True, False])
def test_compile_fullgraph(package, use_out):
    step = Encoder(package, use_out)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for tokens in (5, 7, 3):
            given = torch.randn(tokens, 12, QK), ints(0, 2, tokens)
            torch.testing.assert_close(compiled(*given), step(*given))


@pytest.mark.parametrize("strict", [True, False])
def test_export(package, strict):
    step = Encoder(package, False).eval()
    given = torch.randn(5, 12, QK), ints(0, 2, 5)
    with torch.no_grad():
        program = torch.export.export(step, given, strict=strict)
        names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert any(name.startswith("fake_kernels.attention_varlen_lse") for name in names)
        torch.testing.assert_close(program.module()(*given), step(*given))


def test_fake_tensors_give_shapes_and_launch_nothing(package):
    tensors, keywords = packed()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v = map(mode.from_tensor, tensors)
        out, lse = package.attention_varlen(q, k, v, **keywords, return_lse=True)
        assert out.shape == (4, 8, V) and lse.shape == (4, 8) and lse.dtype == torch.float32
        assert torch.ops.fake_kernels.attention_varlen(q=q, k=k, v=v, **keywords).shape == (4, 8, V)
        with pytest.raises(ArgumentError, match=r"attention_varlen: v has shape \[2, 16\]"):
            package.attention_varlen(q, k, v[0], **keywords)
    with pytest.raises(ArgumentError, match="attention_varlen: q, k or v requires grad"):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            package.attention_varlen(tensors[0].requires_grad_(), *tensors[1:], **keywords)
    assert not package.opened


def test_explain(package):
    tensors, keywords = packed([(9, 20), (1, 7)])
    found = package.explain_varlen(*tensors, **keywords, return_lse=True)
    assert not launched(package) and not package.opened[0].loaded
    assert found.row == package.table.varlen("sm_90", "global", 8, 2, True)
    assert [(launch.family, launch.symbol, launch.grid) for launch in found.launches] == [
        ("varlen", "varlen_global_8_2_a", 6)
    ]
    text = str(found)
    for part in (
        "attention_varlen[0]: varlen",
        "8/2 heads (tensor_parallel 1)",
        "aligned: pointers are multiples of 16",
        "grid 6: programs share at most 8 blocks of 32 rows",
        "workspace   0 bytes",
        "us on h200",
    ):
        assert part in text, text
    exact = package.explain_varlen(*tensors, **keywords, checks="full")
    assert exact.exact and exact.operations == 2 * (sum(range(12, 21)) + 7) * 8 * (QK + V)
    assert exact.bytes == 4 * (10 * 8 + 27 * 2) * (QK + V) + 8 * 3
    assert exact.bytes == found.bytes - 4 * 80 and exact.operations < found.operations
    assert exact.floor_us == {"h200": pytest.approx(exact.bytes / 4800e3)}
    bounded = package.explain_varlen(*tensors, **keywords, max_seqlen_k=20)
    assert exact.operations < bounded.operations < found.operations
    text = str(package.explain_varlen(misaligned(tensors[0]), padded(tensors[1]), tensors[2], **keywords))
    assert "unaligned: q starts at an address" in text and "k has strides" in text
    assert "nothing to launch" in str(package.explain_varlen(*packed([(0, 2)])[0], **packed([(0, 2)])[1]))
    assert "4 attention_varlen" in package.describe()


@pytest.mark.parametrize(
    "features", [{"sliding_window": 5}, {"chunk": 8}, {"mask": "bidirectional"}], ids=str
)
def test_explain_counts_what_is_visible(tmp_path, features):
    package = fake(tmp_path, features=features)
    lens = [(9, 30), (1, 32), (0, 7), (3, 2)]
    tensors, keywords = packed(lens)
    loose = package.explain_varlen(*tensors, **keywords)
    exact = package.explain_varlen(*tensors, **keywords, checks="full")
    seen = [reference.visible(torch.arange(n - m, n), n, **features) for m, n in lens]
    pairs, read = sum(int(x.sum()) for x in seen), sum(int(x.any(0).sum()) for x in seen)
    assert exact.operations == 2 * pairs * 8 * (QK + V)
    assert exact.bytes == 4 * (13 * 8 + read * 2) * (QK + V) + 8 * 5
    assert loose.bytes >= exact.bytes and loose.operations >= exact.operations
