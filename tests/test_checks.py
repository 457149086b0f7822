"""Wrong calls: each error names the argument, what came and what is needed, and nothing is launched or
written.
"""

import pytest
import torch
from fake_package import QK, V, append, batch, fake, kv, states

from specgen.runtime.errors import ArgumentError, UnsupportedError


@pytest.fixture
def package(tmp_path):
    return fake(tmp_path)


def strided(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


def changed(name, change):
    """A case that changes one argument."""

    def apply(given):
        given[name] = change(given[name])

    return apply


def put(**values):
    return lambda given: given.update(values)


def out_over(name):
    """A case whose out begins within another argument's memory."""

    def apply(given):
        memory = torch.zeros(8 * 8 * QK + given[name].numel())
        given[name] = memory[: given[name].numel()].view(given[name].shape)
        given["out"] = memory[given[name].numel() - 1 :][: 4 * 8 * V].view(4, 8, V)

    return apply


def appended_over(name, cache):
    """A case whose `name` lies in slots of a cache."""

    def apply(given):
        given[name] = given[cache].view(-1)[-given[name].numel() :].view(given[name].shape)

    return apply


WRONG = {
    "q none": (put(q=None), ["q is NoneType", "torch.Tensor [tokens, query_heads, qk_dim]"]),
    "q list": (put(q=[1]), ["q is list", "torch.Tensor"]),
    "k none": (put(k_cache=None), ["k_cache is NoneType", "[pages, page_size, kv_heads, qk_dim]"]),
    "block_table list": (changed("block_table", lambda x: x.tolist()), ["block_table is list"]),
    "q rank": (changed("q", lambda x: x[0]), ["q has shape [8, 32]", "[tokens, query_heads, qk_dim]"]),
    "k rank": (changed("k_cache", lambda x: x[0]), ["k_cache has shape [4, 2, 32]", "[pages,"]),
    "v rank": (changed("v_cache", lambda x: x[0]), ["v_cache has shape [4, 2, 16]"]),
    "block_table rank": (
        changed("block_table", lambda x: x[0]),
        ["block_table has shape [8]", "[seqs, max_pages]"],
    ),
    "seq_lens rank": (changed("seq_lens", lambda x: x[None]), ["seq_lens has shape [1, 4]", "[seqs]"]),
    "cu rank": (changed("cu_seqlens_q", lambda x: x[None]), ["cu_seqlens_q has shape [1, 5]", "[seqs + 1]"]),
    "q dtype": (changed("q", torch.Tensor.half), ["q has dtype torch.float16", "needed: torch.float32"]),
    "k dtype": (changed("k_cache", torch.Tensor.half), ["k_cache has dtype torch.float16", "torch.float32"]),
    "v dtype": (
        changed("v_cache", torch.Tensor.bfloat16),
        ["v_cache has dtype torch.bfloat16", "torch.float32"],
    ),
    "block_table dtype": (
        changed("block_table", torch.Tensor.long),
        ["block_table has dtype torch.int64", "torch.int32"],
    ),
    "seq_lens dtype": (
        changed("seq_lens", torch.Tensor.long),
        ["seq_lens has dtype torch.int64", "torch.int32"],
    ),
    "cu dtype": (
        changed("cu_seqlens_q", torch.Tensor.long),
        ["cu_seqlens_q has dtype torch.int64", "torch.int32"],
    ),
    "q dim": (changed("q", lambda x: x[..., :16]), ["q has head dim 16", "head dim 32"]),
    "k dim": (changed("k_cache", lambda x: x[..., :16]), ["k_cache has head dim 16", "head dim 32"]),
    "v dim": (
        changed("v_cache", lambda x: x[..., :8]),
        ["v_cache has shape [16, 4, 2, 8]", "[16, 4, 2, 16]"],
    ),
    "page size": (changed("k_cache", lambda x: x[:, :3]), ["k_cache has page size 3", "page size 4"]),
    "v pages": (changed("v_cache", lambda x: x[:15]), ["v_cache has shape [15, 4, 2, 16]", "[16, 4, 2, 16]"]),
    "v heads": (
        changed("v_cache", lambda x: x[:, :, :1]),
        ["v_cache has shape [16, 4, 1, 16]", "[16, 4, 2, 16]"],
    ),
    "heads": (
        changed("q", lambda x: x[:, :7]),
        ["q has 7 heads", "8/2 (tensor_parallel 1), 4/1 (tensor_parallel 2)"],
    ),
    "layer name": (put(layer="glob"), ["layer is 'glob'", "'global'"]),
    "layer type": (put(layer=["global"]), ["layer is list", "a str"]),
    "seq_lens count": (changed("seq_lens", lambda x: x[:3]), ["seq_lens has 3 entries", "4, one per row"]),
    "cu count": (changed("cu_seqlens_q", lambda x: x[:4]), ["cu_seqlens_q has 4 entries", "5, one more"]),
    "tokens": (put(q=torch.zeros(65, 8, QK)), ["q has 65 tokens", "at most 64", "limits.max_tokens"]),
    "seqs": (
        put(
            block_table=torch.zeros(9, 1, dtype=torch.int32),
            seq_lens=torch.zeros(9, dtype=torch.int32),
            cu_seqlens_q=torch.zeros(10, dtype=torch.int32),
        ),
        ["block_table has 9 sequences", "at most 8", "limits.max_seqs"],
    ),
    "q stride": (changed("q", strided), ["q has strides", "a last stride of 1"]),
    "k stride": (changed("k_cache", strided), ["k_cache has strides", "a last stride of 1"]),
    "v stride": (changed("v_cache", strided), ["v_cache has strides", "a last stride of 1"]),
    "block_table stride": (
        changed("block_table", strided),
        ["block_table has strides", "a last stride of 1"],
    ),
    "seq_lens stride": (changed("seq_lens", strided), ["seq_lens has strides (2,)", "a last stride of 1"]),
    "cu stride": (changed("cu_seqlens_q", strided), ["cu_seqlens_q has strides (2,)", "a last stride of 1"]),
    "q sparse": (changed("q", torch.Tensor.to_sparse), ["q has layout torch.sparse_coo", "dense strided"]),
    "seq_lens sparse": (
        changed("seq_lens", torch.Tensor.to_sparse),
        ["seq_lens has layout torch.sparse_coo"],
    ),
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
    "out overlap": (
        put(out=torch.zeros(1, 8, V).expand(4, 8, V)),
        ["out has strides (0, 16, 1) that overlap", "own address"],
    ),
    "out overlap heads": (
        put(out=torch.zeros(999).as_strided((4, 8, V), (128, 8, 1))),
        ["out has strides (128, 8, 1)"],
    ),
    "out over q": (out_over("q"), ["out overlaps q", "memory of its own: q is read while out is written"]),
    "out over k": (out_over("k_cache"), ["out overlaps k_cache", "memory of its own"]),
    "out over v": (out_over("v_cache"), ["out overlaps v_cache", "memory of its own"]),
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
    "table row": (
        put(seq_lens=ints(9, 5, 3, 33)),
        ["seq_lens is 33 at sequence 3", "at most 32", "8 block_table columns"],
    ),
    "limit": (
        put(block_table=torch.zeros(4, 64, dtype=torch.int32), seq_lens=ints(129, 5, 3, 1)),
        ["seq_lens is 129 at sequence 0", "at most 128", "limits.max_seq_len"],
    ),
    "cu start": (put(cu_seqlens_q=ints(1, 1, 3, 3, 4)), ["cu_seqlens_q starts at 1", "0"]),
    "cu falls": (put(cu_seqlens_q=ints(0, 3, 1, 1, 4)), ["cu_seqlens_q falls from 3 to 1 at sequence 1"]),
    "cu end": (put(cu_seqlens_q=ints(0, 1, 3, 3, 5)), ["cu_seqlens_q ends at 5", "at most 4"]),
    "bound q": (put(max_seqlen_q=1), ["max_seqlen_q is 1", "sequence 1 has 2 query rows"]),
    "bound q of nothing": (put(max_seqlen_q=0), ["max_seqlen_q is 0", "sequence 0 has 1 query rows"]),
    "bound k": (put(max_seqlen_k=8), ["max_seqlen_k is 8", "sequence 0 has 9 keys"]),
    "page": (table_with(16, (0, 2)), ["block_table has page 16 at [0, 2]", "0 to 15 for the 9 keys"]),
    "page -1": (table_with(-1, (3, 0)), ["block_table has page -1 at [3, 0]", "0 to 15"]),
}


def test_tables_under_the_output_under_full_checks(package):
    tensors, keywords = batch()
    out = torch.zeros(4, 8, V)
    keywords["seq_lens"] = out.view(torch.int32).view(-1)[5:9].copy_(keywords["seq_lens"])
    with pytest.raises(ArgumentError, match="out overlaps seq_lens"):
        package.attention(*tensors, **keywords, out=out, checks="full")
    assert not package.opened


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_values_under_full_checks(package, case):
    change, parts = WRONG_VALUES[case]
    tensors, keywords = batch()
    change(keywords)
    with pytest.raises(ArgumentError) as error:
        package.attention(*tensors, **keywords, checks="full")
    assert all(part in str(error.value) for part in parts), error.value
    assert not package.opened


@pytest.mark.parametrize(
    "change", [table_with(99, (0, 3)), table_with(-1, (2, 0)), put(seq_lens=ints(9, 1, 3, 0))]
)
def test_right_values_under_full_checks(package, change):
    """Pages behind the keys, or of a sequence without queries, and more queries than keys are legal."""
    tensors, keywords = batch()
    change(keywords)
    package.attention(*tensors, **keywords, checks="full")


WRONG_APPENDS = {
    "k none": (put(k=None), ["k is NoneType"]),
    "k_cache none": (put(k_cache=None), ["k_cache is NoneType"]),
    "k_cache rank": (changed("k_cache", lambda x: x[0, 0]), ["k_cache has shape [2, 32]"]),
    "k rank": (changed("k", lambda x: x[0]), ["k has shape [2, 32]", "[tokens, kv_heads, qk_dim]"]),
    "dtype": (changed("v", torch.Tensor.half), ["v has dtype torch.float16", "torch.float32"]),
    "slots dtype": (
        changed("slot_mapping", torch.Tensor.int),
        ["slot_mapping has dtype torch.int32", "torch.int64"],
    ),
    "slots count": (
        changed("slot_mapping", lambda x: x[:4]),
        ["slot_mapping has 4 entries", "5, one per token"],
    ),
    "slots stride": (changed("slot_mapping", strided), ["slot_mapping has strides (2,)"]),
    "k shape": (changed("k", lambda x: x[:, :1]), ["k has shape [5, 1, 32]", "[5, 2, 32]"]),
    "v shape": (changed("v", lambda x: x[:4]), ["v has shape [4, 2, 16]", "[5, 2, 16]"]),
    "heads": (changed("k_cache", lambda x: x[:, :, :0]), ["k_cache has 0 kv heads", "one of 2, 1"]),
    "page size": (changed("k_cache", lambda x: x[:, :2]), ["k_cache has page size 2", "page size 4"]),
    "k stride": (changed("k", strided), ["k has strides", "a last stride of 1"]),
    "overlap": (
        changed("k_cache", lambda x: x[:1].expand(16, -1, -1, -1)),
        ["k_cache has strides", "overlap"],
    ),
    "one cache": (
        lambda given: given.update(k_cache=(both := torch.zeros(16, 4, 2, QK)), v_cache=both[..., :V]),
        ["k_cache overlaps v_cache", "memory of its own: both are written"],
    ),
    "k in cache": (appended_over("k", "k_cache"), ["k_cache overlaps k", "k is read while k_cache is written"]),
    "v in the other cache": (appended_over("v", "k_cache"), ["k_cache overlaps v", "memory of its own"]),
    "slots in cache": (
        lambda given: given.update(slot_mapping=given["v_cache"].view(-1)[:10].view(torch.int64)),
        ["v_cache overlaps slot_mapping"],
    ),
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


def test_unsupported_features_are_their_own_class(package):
    tensors, keywords = batch()
    with pytest.raises(UnsupportedError):
        package.attention(*tensors, **keywords, sinks=torch.zeros(8))


@pytest.mark.parametrize(("layout", "other"), [("NHD", "HND"), ("HND", "NHD")])
def test_caches_of_the_other_layout_are_told(tmp_path, layout, other):
    package = fake(tmp_path, features={"layout": layout})
    tensors, keywords = batch(layout=other)
    given = kv()
    for name, cache in zip(("k_cache", "v_cache"), tensors[1:]):
        given[name] = cache
    for call in (lambda: package.attention(*tensors, **keywords), lambda: append(package, given)):
        with pytest.raises(UnsupportedError) as error:
            call()
        assert f"k_cache {list(tensors[1].shape)} has layout {other}; this package's is {layout}: [pages, " in str(error.value)


def test_wrong_keywords_name_the_function_as_it_is_called(package):
    tensors, keywords = batch()
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'max_seqlen'"):
        package.attention(*tensors, **keywords, max_seqlen=1)
    with pytest.raises(TypeError, match=r"^append_kv\(\) missing 1 required keyword-only argument: 'slot_mapping'"):
        package.append_kv(*tensors, tensors[0])
