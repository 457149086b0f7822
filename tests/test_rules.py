"""What is legal (specgen/rules.py): illegal combinations with their exact reason; every legal feature and pair of features expands."""

import itertools

import pytest
from features import FEATURES, spec_of

from specgen.expand import expand
from specgen.rules import refusals
from specgen.target import load_targets

TARGETS = load_targets()
CAUSAL = "needs mask: causal: it narrows or widens what a causal row sees"
NO_POSITION = "needs cross: false: a query has no position among an encoder's keys"
ALIKE = (
    "tensor_parallel 2 and 4 leave the same key/value heads beside different query heads:"
    " append_kv could not tell which queries to rotate"
)


BOTH_WAYS = {"mask": "bidirectional"}
ILLEGAL = [
    ({"fields": BOTH_WAYS | FEATURES["sliding_window"]}, "attention.0.sliding_window", CAUSAL),
    ({"fields": BOTH_WAYS | FEATURES["chunk"]}, "attention.0.chunk", CAUSAL),
    ({"fields": BOTH_WAYS | FEATURES["prefix_ranges"]}, "attention.0.prefix_ranges", CAUSAL),
    (
        {"fields": {"cross": "true"}},
        "attention.0.cross",
        "needs mask: bidirectional: every query sees the encoder's keys",
    ),
    ({"fields": FEATURES["cross"] | FEATURES["alibi"]}, "attention.0.alibi", NO_POSITION),
    ({"fields": FEATURES["cross"] | FEATURES["rotary"]}, "attention.0.rotary", NO_POSITION),
    ({"fields": FEATURES["rotary"], "degrees": "[1, 2, 4]"}, "attention.0.rotary", ALIKE),
    (
        {"fields": FEATURES["rotary"], "degrees": "[1, 2, 4, 8]"},
        "attention.0.rotary",
        ALIKE.replace("2 and 4", "2, 4 and 8"),
    ),
    (
        {"fields": {"softcap": "1e-4"}},
        "attention.0.softcap",
        "needs a softcap from 0.001 to 1e+06, got 0.0001: kernels apply it in float32",
    ),
    (
        {"fields": {"softcap": "1e7"}},
        "attention.0.softcap",
        "needs a softcap from 0.001 to 1e+06, got 10000000.0: kernels apply it in float32",
    ),
    (
        {"fields": {"scale": "1e-31"}},
        "attention.0.scale",
        "needs a scale from 1e-30 to 1e+30, got 1e-31: kernels apply it in float32",
    ),
    (
        {"cache": "{dtype: float8_e4m3fn, page_size: 16}"},
        "kv_cache.dtype",
        "no kernel template implements a float8_e4m3fn cache under bfloat16 queries yet",
    ),
    (
        {"cache": "{dtype: float16, page_size: 16}"},
        "kv_cache.dtype",
        "no kernel template implements a float16 cache under bfloat16 queries yet",
    ),
    (
        {"cache": "{dtype: bfloat16, page_size: 16, scales: head}"},
        "kv_cache.scales",
        "no kernel template implements scales of a quantised cache yet",
    ),
]


@pytest.mark.parametrize("arguments, field, reason", ILLEGAL)
def test_what_is_illegal_and_why(arguments, field, reason):
    assert refusals(spec_of(**arguments)) == [(field, reason)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_expands_alone(feature, dtype, layout):
    spec = spec_of(FEATURES[feature], dtype, f"{{dtype: {dtype}, page_size: 16, layout: {layout}}}")
    assert refusals(spec) == []
    assert {use.variant.family for use in expand(spec, TARGETS).uses} >= {"decode", "prefill", "append_kv"}


def test_every_pair_expands_or_is_refused_by_a_rule_above():
    reasons = {(field, reason) for _, field, reason in ILLEGAL}
    legal = 0
    for first, second in itertools.combinations(FEATURES, 2):
        one, two = FEATURES[first], FEATURES[second]
        if any(one[key] != two[key] for key in one.keys() & two.keys()) or {first, second} == {
            "sliding_window",
            "chunk",
        }:
            continue  # two values of one field; a window and a chunk are a mistake of the schema's
        spec = spec_of(one | two)
        found = refusals(spec)
        assert set(found) <= reasons, (first, second)
        if not found:
            legal += 1
            assert expand(spec, TARGETS).variants
    assert legal >= 45


def test_everything_that_goes_together_goes_together():
    fields = {}
    for name in (
        "scale",
        "head_dim",
        "sliding_window",
        "softcap",
        "sinks",
        "alibi",
        "rotary",
        "prefix_ranges",
    ):
        fields |= FEATURES[name]
    spec = spec_of(fields, degrees="[1, 2]")
    assert refusals(spec) == [] and expand(spec, TARGETS).variants


def test_rotary_takes_one_degree_of_replicated_heads():
    assert refusals(spec_of(FEATURES["rotary"], degrees="[1, 4]")) == []
    assert refusals(spec_of(degrees="[1, 2, 4, 8]")) == []
