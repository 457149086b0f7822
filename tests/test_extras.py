"""Sinks, ALiBi slopes, prefix ranges and layout HND through the public functions: launches, refusals, operators,
explain.
"""

import pytest
import torch
from fake_package import PAGE, QK, V, batch, expected, fake, launched

from specgen.runtime import plans as plans_module
from specgen.runtime import reference
from specgen.runtime.arguments import ARGUMENTS, arguments, variant_arguments
from specgen.runtime.errors import ArgumentError, CaptureError, UnsupportedError
from specgen.runtime.extras import model_slopes
from specgen.runtime.jit import divisibility, signature

ALL = {"sinks": True, "alibi": True, "prefix_ranges": True}


@pytest.fixture
def package(tmp_path):
    return fake(tmp_path, features=ALL | {"sliding_window": 3, "softcap": 2.0})


def tensors_of(seqs, heads=8, dtype=torch.float32):
    ranges = torch.tensor([[0, 2], [5, 5]], dtype=torch.int32).repeat(seqs, 1, 1)
    sinks = torch.linspace(-1, 2, heads).bfloat16().to(dtype)
    return {"sinks": sinks, "alibi_slopes": torch.linspace(0.1, 1, heads), "prefix_ranges": ranges}


def test_arguments_stand_at_the_end_and_only_in_attention():
    names = [argument.name for argument in arguments("decode", **ALL)][len(ARGUMENTS["decode"]) :]
    assert names == [
        "sinks_bf16_ptr",
        "sinks_f32_ptr",
        "sinks_are_f32",
        "alibi_slopes_ptr",
        "prefix_ranges_ptr",
        "num_prefix_ranges",
    ]
    assert arguments("prefill", alibi=True)[-1].name == "alibi_slopes_ptr"
    for family in ("append_kv", "merge_states"):
        assert arguments(family, **ALL) == ARGUMENTS[family]
    assert variant_arguments({"family": "decode"}) == ARGUMENTS["decode"]
    variant = {"family": "prefill", "dtype": "float16", "aligned": True, "alignment": 16} | ALL
    assert signature(variant)[-6:] == ("*bf16", "*fp32", "i32", "*fp32", "*i32", "i32")
    assert all(i < len(ARGUMENTS["prefill"]) for i, _ in divisibility(variant))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_feature_at_once(package, dtype):
    tensors, keywords = batch([(1, 9), (2, 5), (6, 12)])
    extras = tensors_of(3, dtype=dtype)
    out, lse = package.attention(*tensors, **keywords, **extras, return_lse=True, checks="full")
    want, want_lse = expected(tensors, keywords, **extras, sliding_window=3, softcap=2.0)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert len(launched(package)) == 2
    for _, _, _, a in launched(package):
        read = "sinks_f32_ptr" if dtype is torch.float32 else "sinks_bf16_ptr"
        assert a[read] is extras["sinks"] and a["sinks_are_f32"] == (dtype is torch.float32)
        assert a["alibi_slopes_ptr"] is extras["alibi_slopes"]
        assert a["prefix_ranges_ptr"] is extras["prefix_ranges"] and a["num_prefix_ranges"] == 2
    again = package.attention(*tensors, **keywords, **extras, checks="none")
    assert torch.equal(again, out)


def test_model_slopes_and_no_ranges_where_none_are_given(package):
    tensors, keywords = batch()
    extras = tensors_of(4)
    out = package.attention(*tensors, **keywords, sinks=extras["sinks"], max_seqlen_q=2)
    slopes = torch.tensor(model_slopes(8))
    want = expected(
        tensors, keywords, sinks=extras["sinks"], alibi_slopes=slopes, sliding_window=3, softcap=2.0
    )
    torch.testing.assert_close(out.double(), want[0], rtol=1e-5, atol=1e-5)
    package.attention(*tensors, **keywords, sinks=extras["sinks"], max_seqlen_q=2)
    first, second = (launch[3] for launch in launched(package))
    assert first["num_prefix_ranges"] == 0 and first["alibi_slopes_ptr"] is second["alibi_slopes_ptr"]


def test_model_slopes_are_made_by_warmup_and_never_in_a_capture(package, monkeypatch):
    tensors, keywords = batch()
    sinks = tensors_of(4)["sinks"]
    monkeypatch.setattr(plans_module, "is_capturing", lambda device: True)
    with pytest.raises(CaptureError, match="slopes.*warmup"):
        package.attention(*tensors, **keywords, sinks=sinks)
    assert not launched(package)
    monkeypatch.setattr(plans_module, "is_capturing", lambda device: False)
    package.warmup("cpu")
    monkeypatch.setattr(plans_module, "is_capturing", lambda device: True)
    package.attention(*tensors, **keywords, sinks=sinks)
    assert launched(package)


def press(heads):
    """The published code, for comparison."""
    import math

    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return power_of_two(closest) + press(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 14, 16, 25, 71, 112])
def test_slopes_are_the_published_ones(heads):
    torch.testing.assert_close(torch.tensor(model_slopes(heads)), torch.tensor(press(heads)))
    assert len(model_slopes(heads)) == heads


WRONG = {
    "no sinks": ({"sinks": None}, ["sinks is None", "bfloat16 or float32 [8]", "layer 'global' has sinks"]),
    "sinks type": ({"sinks": 1.0}, ["sinks is float", "a torch.Tensor [query_heads]"]),
    "sinks dtype": ({"sinks": torch.zeros(8).half()}, ["float16", "torch.bfloat16 or torch.float32"]),
    "sinks shape": ({"sinks": torch.zeros(7)}, ["sinks has shape [7]", "[8]"]),
    "sinks rank": ({"sinks": torch.zeros(8, 1)}, ["sinks has shape [8, 1]", "[8]"]),
    "sinks stride": ({"sinks": torch.zeros(16)[::2]}, ["sinks has strides (2,)", "contiguous"]),
    "sinks device": ({"sinks": torch.zeros(8, device="meta")}, ["sinks is on meta", "q's device cpu"]),
    "sinks grad": ({"sinks": torch.zeros(8, requires_grad=True)}, ["sinks requires grad"]),
    "slopes dtype": ({"alibi_slopes": torch.zeros(8).double()}, ["alibi_slopes has dtype torch.float64"]),
    "slopes shape": ({"alibi_slopes": torch.zeros(1, 8)}, ["alibi_slopes has shape [1, 8]", "[8]"]),
    "ranges dtype": (
        {"prefix_ranges": torch.zeros(4, 1, 2).long()},
        ["prefix_ranges has dtype torch.int64", "torch.int32"],
    ),
    "ranges rank": ({"prefix_ranges": torch.zeros(4, 2).int()}, ["has shape [4, 2]", "[seqs, ranges, 2]"]),
    "ranges shape": ({"prefix_ranges": torch.zeros(3, 5, 2).int()}, ["has shape [3, 5, 2]", "[4, 5, 2]"]),
    "ranges type": ({"prefix_ranges": [[0, 1]]}, ["prefix_ranges is list"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_extras(package, case):
    change, parts = WRONG[case]
    tensors, keywords = batch()
    with pytest.raises(ArgumentError) as error:
        package.attention(*tensors, **keywords, **tensors_of(4) | change)
    assert all(part in str(error.value) for part in parts), error.value
    assert str(error.value).startswith("attention: ") and not package.opened


@pytest.mark.parametrize("checks", ["shapes", "full", "none"])
def test_what_a_layer_has_not_is_refused(tmp_path, checks):
    package = fake(tmp_path, features={"sinks": True})
    tensors, keywords = batch()
    given = tensors_of(4)
    for name in ("alibi_slopes", "prefix_ranges"):
        with pytest.raises(UnsupportedError, match=f"{name} is given; needed: None, layer 'global'"):
            package.attention(
                *tensors, **keywords, sinks=given["sinks"], **{name: given[name]}, checks=checks
            )
    with pytest.raises(ArgumentError, match="sinks is None"):
        package.attention(*tensors, **keywords, checks=checks)
    assert not package.opened


def test_a_rank_needs_its_own_slopes(tmp_path):
    package = fake(tmp_path, features={"alibi": True})
    tensors, keywords = batch(heads=(4, 1))
    with pytest.raises(ArgumentError, match=r"this rank's slopes, float32 \[4\].*model's 8 query heads"):
        package.attention(*tensors, **keywords)
    package.attention(*tensors, **keywords, alibi_slopes=torch.ones(4))
    assert launched(package)


def test_values_of_extras_under_full_checks(package):
    tensors, keywords = batch()
    good = tensors_of(4) | {"prefix_ranges": torch.tensor([[[1, 1], [9, -4]]] * 4, dtype=torch.int32)}
    package.attention(*tensors, **keywords, **good, checks="full")
    package.attention(*tensors, **keywords, **good | {"sinks": torch.full((8,), -torch.inf)}, checks="full")
    for change, part in (
        (
            {"prefix_ranges": torch.tensor([[[0, 1], [0, 2]]] * 4, dtype=torch.int32)},
            r"is \[0, 2\] at \[3, 1\]",
        ),
        ({"prefix_ranges": torch.tensor([[[-1, 1]]] * 4, dtype=torch.int32)}, r"is \[-1, 1\] at \[0, 0\]"),
        ({"sinks": torch.full((8,), torch.nan)}, "sinks is nan at head 0"),
        ({"sinks": torch.tensor([0.0] * 7 + [torch.inf])}, "sinks is inf at head 7; needed: a finite number, or -inf for no sink"),
        ({"alibi_slopes": torch.full((8,), torch.nan)}, "alibi_slopes is nan at head 0"),
        ({"alibi_slopes": torch.full((8,), -torch.inf)}, "alibi_slopes is -inf at head 0; needed: a finite number"),
    ):
        with pytest.raises(ArgumentError, match=part):
            package.attention(*tensors, **keywords, **good | change, checks="full")


@pytest.mark.parametrize("features, first", [({"sliding_window": 6}, 14), ({"chunk": 8}, 16), ({}, 0)])
def test_pages_left_of_the_window_may_be_anything_under_full_checks(tmp_path, features, first):
    """One sequence of 20 keys and one row at 19; then two rows, of which the first sees a key more to the left."""
    package = fake(tmp_path, features=features)
    tensors, keywords = batch([(1, 20)])
    needed = first // PAGE
    keywords["block_table"][0, :needed] = -1
    package.attention(*tensors, **keywords, checks="full")
    keywords["block_table"][0, needed] = -1
    with pytest.raises(ArgumentError, match=rf"page -1 at \[0, {needed}\]"):
        package.attention(*tensors, **keywords, checks="full")


def test_ranges_reach_left_of_the_window_under_full_checks(tmp_path):
    package = fake(tmp_path, features={"sliding_window": 4, "prefix_ranges": True})
    tensors, keywords = batch([(1, 20)])
    keywords["block_table"][0, 0] = -1
    ranges = torch.tensor([[[0, 8], [4, 20]]], dtype=torch.int32)
    package.attention(*tensors, **keywords, prefix_ranges=ranges, checks="full")
    keywords["block_table"][0, 1] = -1
    package.attention(*tensors, **keywords, checks="full")
    with pytest.raises(ArgumentError, match=r"page -1 at \[0, 1\]"):
        package.attention(*tensors, **keywords, prefix_ranges=ranges, checks="full")


def test_layout_hnd(tmp_path):
    package = fake(tmp_path, features={"layout": "HND"})
    tensors, keywords = batch([(6, 9), (1, 5)], layout="HND")
    for checks in ("full", "none"):
        out = package.attention(*tensors, **keywords, checks=checks)
        want = expected(tensors, keywords, layout="HND")[0]
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        a = launched(package)[-1][3]
        page, head, slot, _ = tensors[1].stride()
        assert (a["k_cache_stride_page"], a["k_cache_stride_slot"], a["k_cache_stride_head"]) == (
            page,
            slot,
            head,
        )
        assert a["v_cache_stride_head"] == PAGE * V
    k, v = torch.randn(3, 2, QK), torch.randn(3, 2, V)
    package.append_kv(k, v, *tensors[1:], slot_mapping=torch.tensor([5, -1, 63]))
    assert torch.equal(tensors[1][1, :, 1], k[0]) and torch.equal(tensors[2][15, :, 3], v[2])
    a = launched(package)[-1][3]
    assert (a["k_cache_stride_slot"], a["k_cache_stride_head"], a["num_slots"]) == (QK, PAGE * QK, 64)
    nhd, _ = batch([(6, 9), (1, 5)])
    for call, parts in (
        (lambda: package.attention(*nhd, **keywords), ["k_cache 4 kv heads", "8/2"]),
        (
            lambda: package.attention(tensors[0], tensors[1][:, :, :3], tensors[2], **keywords),
            ["page size 3"],
        ),
        (
            lambda: package.attention(tensors[0], tensors[1], nhd[2], **keywords),
            ["v_cache has shape [16, 4, 2, 16]", "[16, 2, 4, 16]"],
        ),
        (
            lambda: package.attention(tensors[0], tensors[1][0], tensors[2], **keywords),
            ["k_cache has shape [2, 4, 32]", "[pages, kv_heads, page_size, qk_dim]"],
        ),
        (
            lambda: package.append_kv(
                k, v, tensors[1][:1].expand(16, -1, -1, -1), tensors[2], slot_mapping=torch.arange(3)
            ),
            ["k_cache has strides (0, 128, 32, 1) that overlap"],
        ),
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert all(part in str(error.value) for part in parts), error.value


NAMES = ("attention", "attention_lse", "attention_out", "attention_out_lse")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(package, name):
    tensors, keywords = batch([(6, 9), (1, 5)])
    given = (*tensors, *keywords.values()) + ((torch.zeros(7, 8, V),) if "out" in name else ())
    operator = getattr(torch.ops.fake_kernels, name).default
    torch.library.opcheck(operator, given, {"layer": "global"} | tensors_of(2))


def test_compiled_and_fake_calls(package):
    tensors, keywords = batch()
    extras = tensors_of(4)

    def step(q, k_cache, v_cache, paged, extras):
        return package.attention(q, k_cache, v_cache, **paged, **extras) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, keywords, extras), step(*tensors, keywords, extras))
    only = {"sinks": extras["sinks"]}
    assert torch.equal(compiled(*tensors, keywords, only), step(*tensors, keywords, only))
    with pytest.raises(ArgumentError, match="sinks is None"):
        torch.ops.fake_kernels.attention(*tensors, *keywords.values())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert package.attention(*map(mode.from_tensor, tensors), **keywords, **extras).shape == (4, 8, V)


@pytest.mark.parametrize("features", [{"sliding_window": 5}, {"chunk": 8}], ids=str)
@pytest.mark.parametrize("ranged", [False, True])
def test_explain_counts_what_is_visible(tmp_path, features, ranged):
    package = fake(tmp_path, features=features | {"prefix_ranges": True})
    tensors, keywords = batch([(9, 30), (1, 32), (0, 7), (3, 2)])
    given = {"prefix_ranges": torch.tensor([[[2, 24], [20, 26]]] * 4, dtype=torch.int32)} if ranged else {}
    loose = package.explain(*tensors, **keywords, **given)
    assert not loose.exact
    if ranged:
        given["prefix_ranges"][2:] = 0
    exact = package.explain(*tensors, **keywords, **given, checks="full")
    pairs = read = pages = 0
    for seq, (m, n) in enumerate([(9, 30), (1, 32), (0, 7), (3, 2)]):
        ranges = given["prefix_ranges"][seq] if ranged else None
        seen = reference.visible(torch.arange(n - m, n), n, **features, ranges=ranges)
        pairs += int(seen.sum())
        read += int(seen.any(0).sum())
        pages += len(set((seen.any(0).nonzero() // PAGE).flatten().tolist()))
    assert exact.operations == 2 * pairs * 8 * (QK + V)
    assert exact.bytes == 4 * (13 * 8 + read * 2) * (QK + V) + 4 * (9 + pages)
    assert loose.bytes >= exact.bytes and loose.operations >= exact.operations
    full = fake(tmp_path, name="full_kernels").explain(*tensors, **keywords)
    assert ranged or (loose.bytes < full.bytes and loose.operations < full.operations)


def test_explain_and_describe_name_the_features(tmp_path):
    features = ALL | {"sliding_window": 8, "softcap": 30.0, "layout": "HND"}
    package = fake(tmp_path, features=features)
    tensors, keywords = batch([(1, 30), (1, 9)], layout="HND")
    text = str(package.explain(*tensors, **keywords, sinks=torch.zeros(8), max_seqlen_q=1))
    words = "window 8, softcap 30.0, sinks, alibi, prefix ranges, HND"
    assert words in text and words in package.describe()
    assert "1 tiles of 16 keys" in text  # eight keys, not the 32 of the block table
    cross = fake(tmp_path, name="cross_kernels", features={"cross": True, "mask": "bidirectional"})
    assert "bidirectional" in cross.describe() and ", cross;" in cross.describe()
