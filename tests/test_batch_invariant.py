"""`batch_invariant: true` before a kernel runs: who serves a call, which code is its own, what is refused. Kernels run in
test_interpreter.py; the sizes of splits and scratch are in test_table.py.
"""

from dataclasses import replace

import pytest
from features import FEATURES, spec_of
from measurements import SETTING, both, measurement, rows

from specgen.errors import SpecgenError
from specgen.expand import expand, geometry
from specgen.plan import dispatch_rows
from specgen.render import kernel_source
from specgen.runtime import sizes
from specgen.target import load_targets
from specgen.tune_compile import make_bundles
from specgen.variant import Config, Variant

TARGETS = load_targets()
INVARIANT = "batch_invariant: true\n"


@pytest.mark.parametrize("feature", [None, *FEATURES])
def test_query_rows_and_alignment_alone_choose_kernels(feature):
    spec = spec_of(FEATURES.get(feature), more=INVARIANT)
    groups = {}
    for row in dispatch_rows(spec, expand(spec, TARGETS)).attention:
        assert not row.narrowed, "a bound on the whole batch chooses"
        groups.setdefault((row.arch, row.layer, row.aligned), []).append(row)
    for alone, mixed in groups.values():
        assert (alone.max_query_len, alone.prefill) == (spec.limits.max_spec_tokens, None)
        assert alone.decode == mixed.decode and "_invariant_q4_" in mixed.decode
        assert mixed.prefill and "invariant" not in mixed.prefill


def test_measurements_choose_nothing():
    spec = spec_of(more=INVARIANT)
    shape = geometry(spec, spec.attention[0], 1)
    setting = replace(SETTING, geometry=shape, max_seqs=spec.limits.max_seqs)
    given = [measurement(((1, 60),) * seqs, schedule, 1.0, setting=setting) for seqs in (1, 4) for schedule in (rows(32, 4), both(64, 64, 4))]
    assert expand(spec, TARGETS, measurements=given) == expand(spec, TARGETS)
    plain = replace(shape, batch_invariant=False)
    given = [replace(m, setting=replace(setting, geometry=plain)) for m in given]
    assert expand(spec_of(), TARGETS, measurements=given) != expand(spec_of(), TARGETS)


@pytest.mark.parametrize("family", ["decode", "prefill", "varlen"])
def test_only_decode_has_code_of_its_own(family):
    config, limit = Config(16, 64, 4, 2, 2), None if family == "varlen" else 4
    plain, other = (
        Variant(family, geometry(spec, spec.attention[0], 1), config, True, 16, limit)
        for spec in (spec_of(), spec_of(more=INVARIANT))
    )
    assert (plain.symbol == other.symbol) == (kernel_source(plain) == kernel_source(other)) == (family != "decode")


def test_splits_are_bounded_by_constants_of_the_kernel():
    spec = spec_of(more=INVARIANT)
    source = kernel_source(Variant("decode", geometry(spec, spec.attention[0], 1), Config(16, 96, 4, 2, 2), True, 16, 4))
    assert f"MAX_SPLITS: tl.constexpr = tl.constexpr({sizes.max_splits(2)})" in source
    assert f"MIN_SPLIT_TILES: tl.constexpr = tl.constexpr({sizes.split_tiles(96)})" in source


def test_it_cannot_be_tuned(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "version: 1\nname: tiny\ndtype: float16\nattention:\n  - {name: a, query_heads: 4, kv_heads: 2, head_dim: 64}\n"
        "kv_cache: {dtype: float16, page_size: 16}\ntargets: [h200]\n"
        "limits: {max_seqs: 4, max_seq_len: 64, max_tokens: 16, max_spec_tokens: 2}\n" + INVARIANT
    )
    with pytest.raises(SpecgenError, match="tiny: cannot be tuned: measurements choose kernels by the batch"):
        make_bundles(path, tmp_path / "build")
