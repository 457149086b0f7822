"""Rotary embedding fused into append_kv, over a fake device: what is launched, what is refused before."""

import pytest
import torch
from fake_package import QK, append, fake, kv, launched

from specgen.runtime import reference
from specgen.runtime.errors import ArgumentError, UnsupportedError

DIM, TOKENS, HEADS = 16, 5, 8


@pytest.fixture
def package(tmp_path):
    return fake(tmp_path, features={"rotary_dim": DIM, "rotary_style": "half"})


def call(**changes):
    angles = torch.rand(7, DIM // 2)
    more = {
        "q": torch.randn(TOKENS, HEADS, QK),
        "positions": torch.tensor([0, 6, 2, 2, 5]),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    return kv(TOKENS) | more | changes


def rotated(given):
    return reference.rotate(given["q"], given["positions"], given["cos"], given["sin"], "half").float()


def test_queries_come_back_rotated_and_keys_land_rotated(package):
    given = call()
    q_out = append(package, given)
    torch.testing.assert_close(q_out, rotated(given))
    keys = reference.rotate(given["k"], given["positions"], given["cos"], given["sin"], "half").float()
    torch.testing.assert_close(given["k_cache"][0, 3], keys[0])
    a = launched(package)[0][3]
    assert q_out.is_contiguous() and a["num_positions"] == 7
    assert (a["q_out_stride_token"], a["q_out_stride_head"]) == (HEADS * QK, QK)


@pytest.mark.parametrize("where", ["apart", "padded", "beside q", "beside k"])
def test_q_out_with_memory_of_its_own_is_taken(package, where):
    """Column ranges of one buffer share no address, though their extents do."""
    given = call()
    fused = torch.zeros(TOKENS, 2 * HEADS + 2, QK)
    q_out = {
        "apart": torch.empty(TOKENS, HEADS, QK),
        "padded": torch.empty(TOKENS, HEADS + 1, QK + 4)[:, 1:, :QK],
        "beside q": fused[:, HEADS : 2 * HEADS],
        "beside k": fused[:, :HEADS],
    }[where]
    if where == "beside q":
        given["q"] = fused[:, :HEADS].copy_(given["q"])
    if where == "beside k":
        given["k"] = fused[:, 2 * HEADS :].copy_(given["k"])
    assert append(package, given | {"q_out": q_out}) is q_out
    torch.testing.assert_close(q_out, rotated(given))


def shared(name):
    """A call whose q_out lies over another argument, and the words of its refusal."""
    given = call()
    base = torch.zeros(4 * TOKENS * HEADS * QK)
    given["q_out"] = base.as_strided((TOKENS, HEADS, QK), (HEADS * QK, QK, 1), 64)
    given[name] = {
        "q": base.as_strided((TOKENS, HEADS, QK), (HEADS * QK, QK, 1), 0),
        "k": base.as_strided((TOKENS, 2, QK), (HEADS * QK, QK, 1), HEADS * QK - 32),
        "v": base.as_strided((TOKENS, 2, 16), (32, 16, 1), 1024),
    }[name]
    return given, [f"q_out overlaps {name}", "memory of its own"]


def over(tokens, heads, dim=QK):
    return torch.zeros(9999).as_strided((TOKENS, HEADS, QK), (tokens, heads, 1))


WRONG = {
    "over q": lambda: shared("q"),
    "over k": lambda: shared("k"),
    "over v": lambda: shared("v"),
    "in place": lambda: ((given := call()) | {"q_out": given["q"]}, ["q_out overlaps q"]),
    "over a cache": lambda: (
        call(k_cache=(cache := torch.zeros(16, 4, 2, QK)), q_out=cache.view(-1)[: TOKENS * HEADS * QK].view(TOKENS, HEADS, QK)),
        ["q_out overlaps k_cache", "both are written"],
    ),
    "over cos": lambda: (
        call(cos=(table := torch.zeros(200, 8)), sin=table.clone(), q_out=table.view(-1)[: TOKENS * HEADS * QK].view(-1, HEADS, QK)),
        ["q_out overlaps cos", "cos is read while q_out is written"],
    ),
    "positions in a cache": lambda: (
        call(v_cache=(cache := torch.zeros(16, 4, 2, 16)), positions=cache.view(-1).view(torch.int64)[:TOKENS]),
        ["v_cache overlaps positions"],
    ),
    "itself": lambda: (
        call(q_out=over(128, QK)),
        ["q_out has strides (128, 32, 1) that overlap", "own address"],
    ),
    "expanded": lambda: (call(q_out=over(0, QK)), ["q_out has strides (0, 32, 1) that overlap"]),
    "no cos": lambda: (call(cos=None), ["cos is None", "layer 'global' has rotary embedding"]),
    "q type": lambda: (call(q=[1]), ["q is list", "torch.Tensor [tokens, query_heads, qk_dim]"]),
    "cos rank": lambda: (call(cos=torch.zeros(8)), ["cos has shape [8]", "[positions, rotary_dim / 2]"]),
    "cos columns": lambda: (call(cos=torch.zeros(7, 9)), ["cos has shape [7, 9]", "[7, 8]"]),
    "sin rows": lambda: (call(sin=torch.zeros(6, 8)), ["sin has shape [6, 8]", "[7, 8]"]),
    "no rows": lambda: (call(cos=torch.zeros(0, 8), sin=torch.zeros(0, 8)), ["cos has no rows"]),
    "positions": lambda: (call(positions=torch.zeros(5).int()), ["positions has dtype torch.int32", "int64"]),
    "positions stride": lambda: (call(positions=torch.zeros(10).long()[::2]), ["positions has strides (2,)"]),
    "q dtype": lambda: (call(q=torch.zeros(TOKENS, HEADS, QK).half()), ["q has dtype torch.float16"]),
    "q stride": lambda: (
        call(q=torch.zeros(TOKENS, HEADS, 2 * QK)[..., ::2]),
        ["q has strides", "last stride of 1"],
    ),
    "q_out shape": lambda: (
        call(q_out=torch.zeros(TOKENS, HEADS, 16)),
        ["q_out has shape [5, 8, 16]", "[5, 8, 32]"],
    ),
    "q meta": lambda: (
        call(q=torch.zeros(TOKENS, HEADS, QK, device="meta")),
        ["q is on meta", "k's device cpu"],
    ),
    "sin grad": lambda: (call(sin=torch.zeros(7, 8, requires_grad=True)), ["sin requires grad"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(package, case):
    given, parts = WRONG[case]()
    with pytest.raises(ArgumentError) as error:
        append(package, given)
    assert all(part in str(error.value) for part in parts), error.value
    assert str(error.value).startswith("append_kv: ") and not package.opened


def test_a_layer_without_rotary_takes_none(tmp_path):
    with pytest.raises(UnsupportedError, match="positions given; needed: None, layer 'global'"):
        append(fake(tmp_path), kv(TOKENS) | {"positions": torch.zeros(5).long()})
