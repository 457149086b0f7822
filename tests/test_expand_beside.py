"""What untuned calls launch: decode leaves multiprocessors to a prefill that can run beside it, prefill cuts keys for few rows."""

import pytest

from specgen.expand import SHORT_ROWS, expand
from specgen.load import loads
from specgen.runtime import sizes
from specgen.runtime.arguments import LATE_PROGRAMS
from specgen.target import load_targets
from specgen.tuning.tree import boxes, leaves

SPEC = (
    "version: 1\nname: tiny\ndtype: {dtype}\nattention:\n"
    "  - {{name: global, layers: all, query_heads: 8, kv_heads: 2, head_dim: {dim}{more}}}\n"
    "kv_cache: {{dtype: {dtype}, page_size: 16}}\ntensor_parallel: [1]\ntargets: [{target}]\n"
    "limits: {{max_seqs: 16, max_seq_len: 2048, max_tokens: {tokens}, max_spec_tokens: 4}}\n"
)


def expanded(target="h200", dtype="bfloat16", dim=64, more="", tokens=256):
    spec = loads(SPEC.format(target=target, dtype=dtype, dim=dim, more=more, tokens=tokens)).spec
    return spec, expand(spec, load_targets()).dispatch


def routes(**options):
    return [route for dispatch in expanded(**options)[1] for route in leaves(dispatch.tree)]


def share(variant) -> int:
    return variant.tunable("share", 100)


@pytest.mark.parametrize("dim", [64, 128])
def test_beside_a_prefill_of_its_architecture(dim):
    both = [route for route in routes(dim=dim) if route.decode and route.prefill and route.decode.aligned]
    assert both and all(share(route.decode) == 50 for route in both)
    assert all(any(a.name == LATE_PROGRAMS for a in route.prefill.arguments) for route in both)
    assert all(share(route.decode) == 100 for route in routes(dim=dim) if not route.prefill)


@pytest.mark.parametrize("options", [{"target": "a100_sxm"}, {"dtype": "float32"}, {"more": ", prefix_ranges: true"}, {"dim": 256}])
def test_not_where_prefill_waits_for_it_or_few_bytes_fit(options):
    assert all(share(route.decode) == 100 for route in routes(**options) if route.decode)


def prefills(**options) -> dict[int, bool]:
    """Most query rows of each part that prefill serves -> whether it cuts keys, where alignment is promised."""
    spec, dispatch = expanded(**options)
    found = [box for each in dispatch if each.aligned for box in boxes(each.tree, spec.limits) if box.leaf.prefill]
    return {box.high.query_len: box.leaf.prefill.cuts_keys for box in found}


@pytest.mark.parametrize("dim", [64, 128])
def test_short_rows_get_a_prefill_that_cuts_keys(dim):
    assert prefills(dim=dim, tokens=4096) == {SHORT_ROWS: True, 4096: False}
    assert prefills(dim=dim, tokens=256) == {256: True}


@pytest.mark.parametrize("options", [{"target": "a100_sxm"}, {"dtype": "float32"}, {"dim": 256}])
def test_where_none_can_cut_keys_there_is_one_prefill(options):
    assert prefills(tokens=4096, **options) == {4096: False}


def test_programs_follow_the_share():
    whole = {"ctas_per_multiprocessor": 2, "options": {}}
    half = {"ctas_per_multiprocessor": 1, "options": {"share": 50}}
    assert (sizes.taken(132, whole), sizes.programs(132, whole)) == (132, 264)
    assert (sizes.taken(132, half), sizes.programs(132, half)) == (66, 66)
    assert sizes.programs(1, half) == 1
