"""From a spec to rows and specializations: rows are total and disjoint, nothing is missing and nothing is dead.

Also what is legal (rules.py): a configuration for every geometry on every target, budgets in bytes, and counts that fit int32.
"""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from specgen import decode_ws, pipeline, rules, tuning
from specgen.aot import compile_all
from specgen.errors import BuildError, SpecError
from specgen.expand import expand
from specgen.load import Loaded, loads
from specgen.manifest import manifest
from specgen.pipeline import expanded
from specgen.plan import dispatch_rows, plan
from specgen.render import kernel_view, render
from specgen.runtime.arguments import ROLES
from specgen.runtime.table import Bounds, Table
from specgen.target import load_targets
from specgen.variant import GLUON_FAMILIES, Config, Geometry, Variant

TARGETS = load_targets()


def entry(name="global", query_heads=8, kv_heads=2, head_dim="64", layers="all", **more) -> str:
    fields = {
        "name": name,
        "layers": layers,
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    return "  - {" + ", ".join(f"{key}: {value}" for key, value in (fields | more).items()) + "}\n"


def loaded(entries=None, dtype="bfloat16", page_size=16, degrees=(1,), targets=("h200",), **limits) -> Loaded:
    limits = {"max_seqs": 4, "max_seq_len": 64, "max_tokens": 20, "max_spec_tokens": 4} | limits
    return loads(
        f"version: 1\nname: tiny\ndtype: {dtype}\nattention:\n{''.join(entries or [entry()])}"
        f"kv_cache: {{dtype: {dtype}, page_size: {page_size}}}\ntensor_parallel: {list(degrees)}\n"
        f"targets: [{', '.join(targets)}]\nlimits: {{{', '.join(f'{k}: {v}' for k, v in limits.items())}}}\n"
    )


TWO = [
    entry("global", layers="'0::2'"),
    entry("local", 4, 4, "{qk: 96, v: 64}", "[1, 3]", mask="bidirectional"),
]
SPREAD = {
    "one layer": loaded(),
    "one spec token": loaded(max_spec_tokens=1),
    "decode takes all": loaded(max_spec_tokens=20),
    "one token": loaded(max_tokens=1, max_spec_tokens=1),
    "two tokens": loaded(max_tokens=2, max_spec_tokens=1),
    "replicated kv heads": loaded(degrees=(1, 2, 4, 8)),
    "two layers": loaded(TWO, degrees=(1, 2, 4)),
    "same geometry twice": loaded([entry("a", layers="[0]"), entry("b", layers="[1]")]),
    "masks apart": loaded([entry("a", layers="[0]"), entry("b", layers="[1]", mask="bidirectional")]),
    "scales apart": loaded([entry("a", layers="[0]", scale=0.1), entry("b", layers="[1]", scale=0.01)]),
    "same values, other keys": loaded(
        [entry("a", layers="[0]"), entry("b", 8, 2, "{qk: 100, v: 64}", "[1]")]
    ),
    "states of one size": loaded(
        [entry("a", head_dim="{qk: 192, v: 128}", layers="[0]"), entry("b", head_dim=128, layers="[1]")]
    ),
    "many targets": loaded(TWO, targets=tuple(TARGETS)),
    "float32": loaded([entry(head_dim=256)], dtype="float32", targets=("l4", "mi300x")),
    "features apart": loaded(
        [
            entry("plain", layers="[0]"),
            entry("window", layers="[1]", sliding_window=20),
            entry("chunk", layers="[2]", chunk=20),
            entry("softcap", layers="[3]", softcap=30.0),
            entry("sinks", layers="[4]", sinks="true"),
            entry("alibi", layers="[5]", alibi="true"),
            entry("ranges", layers="[6]", prefix_ranges="true"),
            entry("rotary", layers="[7]", rotary="{dim: 32, style: half}"),
            entry("cross", layers="[7]", mask="bidirectional", cross="true"),
        ],
        degrees=(1, 2),
    ),
}


@pytest.mark.parametrize("case", SPREAD)
def test_rows_are_total_and_disjoint(case):
    spec = SPREAD[case].spec
    rows = dispatch_rows(spec, expand(spec, TARGETS))
    table = Table(rows.attention, rows.append, rows.merge, rows.varlen)
    limits = spec.limits
    most = Bounds(limits.max_tokens, limits.max_seqs, limits.max_tokens, limits.max_seq_len, limits.max_tokens)
    assert table.faults(most) == []
    archs = {TARGETS[name].arch for name in spec.targets}
    for arch in archs:
        for layer in spec.attention:
            for query_heads, kv_heads in (layer.per_rank(degree) for degree in spec.tensor_parallel):
                for aligned in (True, False):
                    of_case = [
                        row
                        for row in rows.attention
                        if (row.arch, row.layer, row.query_heads, row.kv_heads, row.aligned)
                        == (arch, layer.name, query_heads, kv_heads, aligned)
                    ]
                    for length in range(1, spec.limits.max_tokens + 1):
                        for least in {1, length}:
                            call = Bounds(length, 2, 2 * length, 1, least)
                            (hit,) = [row for row in of_case if row.holds(call)]
                            assert table.attention(arch, layer.name, query_heads, kv_heads, aligned, call) is hit
                    table.append(arch, layer.name, kv_heads, aligned)
                    table.varlen(arch, layer.name, query_heads, kv_heads, aligned)
                table.merge(arch, query_heads, layer.head_dim.v)


@pytest.mark.parametrize("case", SPREAD)
def test_the_kernels_of_a_row_take_every_length_once(case):
    spec = SPREAD[case].spec
    expansion = expand(spec, TARGETS)
    variants = expansion.variants
    for row in dispatch_rows(spec, expansion).attention:
        decode = variants[row.decode].max_query_len if row.decode else 0
        for length in range(1, row.max_query_len + 1):
            takers = (row.decode is not None and length <= decode) + (
                row.prefill is not None and length > variants[row.prefill].max_query_len
            )
            assert takers == 1, (row, length)
        for symbol in row.symbols:
            assert_serves(variants[symbol], row, spec)


@pytest.mark.parametrize("case", SPREAD)
def test_a_varlen_row_takes_every_sequence(case):
    spec = SPREAD[case].spec
    expansion = expand(spec, TARGETS)
    for row in dispatch_rows(spec, expansion).varlen:
        variant = expansion.variants[row.symbol]
        assert variant.max_query_len is None and kernel_view(variant)["min_query_len"] == 1
        assert_serves(variant, row, spec)


def assert_serves(variant, row, spec):
    """The variant has the geometry and the guard that its row stands for."""
    layer = next(layer for layer in spec.attention if layer.name == row.layer)
    geometry = variant.geometry
    assert (geometry.query_heads, geometry.kv_heads) == (row.query_heads, row.kv_heads)
    assert (geometry.qk_dim, geometry.v_dim) == (layer.head_dim.qk, layer.head_dim.v)
    assert (geometry.mask, geometry.scale) == (layer.mask, layer.resolved_scale)
    assert variant.aligned == row.aligned


@pytest.mark.parametrize("case", SPREAD)
def test_rows_kernels_tests_and_manifest_name_the_same_symbols(case):
    spec = SPREAD[case].spec
    expansion = expand(spec, TARGETS)
    rows = dispatch_rows(spec, expansion)
    by_arch = {(row.arch, symbol) for row in rows.attention for symbol in row.symbols}
    by_arch |= {(row.arch, row.symbol) for row in (*rows.append, *rows.merge, *rows.varlen)}
    by_arch |= {(arch, expansion.stand_ins[symbol]) for arch, symbol in by_arch if symbol in expansion.stand_ins}
    symbols = {symbol for _, symbol in by_arch}
    paths = {artifact.path for artifact in plan(SPREAD[case], expansion)}
    assert {path for path in paths if path.startswith("kernels/")} - {"kernels/__init__.py"} == {
        f"kernels/{symbol}.py" for symbol in symbols
    }
    assert {path for path in paths if path.startswith("tests/")} - {"tests/__init__.py"} == {
        f"tests/test_{symbol}.py" for symbol in symbols
    }
    empty = {"triton": "", "ptxas": "", "launcher_compiler": None, "over_budget": {}}
    content = manifest(spec, expansion, TARGETS, {}, **empty)
    assert set(content["variants"]) == symbols
    assert {(arch, symbol) for symbol in symbols for arch in expansion.archs(symbol)} == by_arch


@pytest.mark.parametrize("case", SPREAD)
def test_equal_names_are_equal_code(case):
    """The geometry of a shared append_kv or merge_states may come from either use: the text does not tell which."""
    expansion = expand(SPREAD[case].spec, TARGETS)
    artifacts = {artifact.path: artifact for artifact in plan(SPREAD[case], expansion)}
    texts: dict[Variant, bytes] = {}
    for variant in dict.fromkeys(use.variant for use in expansion.uses):
        artifact = artifacts[f"kernels/{variant.symbol}.py"]
        texts[variant] = render(replace(artifact, context={"variant": variant}), SPREAD[case]).content
    for variant, text in texts.items():
        first = expansion.variants[variant.symbol]
        assert text == texts[first]
        assert (variant.signature, variant.divisibility) == (first.signature, first.divisibility)


geometries = st.builds(
    Geometry,
    query_heads=st.sampled_from([4, 8, 16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    qk_dim=st.sampled_from([16, 64, 128]),
    v_dim=st.sampled_from([16, 64, 128]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    page_size=st.sampled_from([1, 16, 161]),
    scale=st.one_of(st.sampled_from([0.25, 0.125, 1e-5, 1e-15, 1e16, 1.0]), st.floats(1e-20, 1e20)),
    mask=st.sampled_from(["causal", "bidirectional"]),
    sliding_window=st.sampled_from([None, 1, 12]),
    chunk=st.sampled_from([None, 1, 12]),
    softcap=st.one_of(st.sampled_from([None, 1.0, 12.0, 1.5, 15.0]), st.floats(1e-3, 1e6)),
    sinks=st.booleans(),
    alibi=st.booleans(),
    prefix_ranges=st.booleans(),
)
configs = st.builds(
    Config,
    block_m=st.sampled_from([16, 64]),
    tile_n=st.sampled_from([16, 64]),
    num_warps=st.sampled_from([4, 8]),
    num_stages=st.integers(1, 4),
    ctas_per_multiprocessor=st.integers(1, 4),
    options=st.sampled_from(
        [(), (("maxnreg", 16),), (("waves_per_eu", 2),), (("matrix_instr_nonkdim", 16),), (("kpack", 2),)]
    ),
)
attention_variants = st.builds(
    Variant,
    st.sampled_from(["decode", "prefill", "varlen"]),
    geometries,
    configs,
    st.booleans(),
    st.just(8),
    st.sampled_from([1, 8, 16]),
)


@given(attention_variants, attention_variants, st.data())
@settings(max_examples=300, deadline=None, database=None)
def test_different_attention_kernels_have_different_names(a, b, data):
    """b takes all but one or two of its fields from a, so that near misses are common."""
    for part, fields in (("geometry", list(vars(a.geometry))), ("config", list(vars(a.config))[:-1])):
        other = {
            name: getattr(getattr(b, part), name)
            for name in data.draw(st.lists(st.sampled_from(fields), max_size=2))
        }
        b = replace(b, **{part: replace(getattr(a, part), **other)})
    if a.family == b.family == "varlen":  # contiguous keys have no pages
        b = replace(b, geometry=replace(b.geometry, page_size=a.geometry.page_size))
    assert (a.symbol == b.symbol) == (a == b)
    assert a.symbol.isidentifier() and a.symbol == a.symbol.lower() and len(a.symbol) < 200


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_geometry_has_a_configuration_on_every_target(dtype):
    """Fault row 19: head 256 in float32 fits 64 KB of shared memory, and so does everything smaller."""
    dims = (
        "16",
        "36",
        "64",
        "100",
        "128",
        "192",
        "256",
        "{qk: 256, v: 16}",
        "{qk: 16, v: 256}",
        "{qk: 192, v: 128}",
        "{qk: 512, v: 16}",
        "{qk: 16, v: 512}",
    ) + (() if dtype == "float32" else ("320", "512"))
    entries = [entry(f"d{i}", 16, 2, dim, f"[{i}]") for i, dim in enumerate(dims)]
    spec = loaded(
        entries, dtype, degrees=(1, 2, 16), targets=tuple(TARGETS), max_seqs=4096, max_spec_tokens=16
    ).spec
    expansion = expand(spec, TARGETS)
    for use in expansion.uses:
        of_arch = [target for target in TARGETS.values() if target.arch == use.arch]
        assert [rules.why_not(use.variant, target, spec.limits) for target in of_arch] == [None] * len(
            of_arch
        )
    assert all(rejection.reason for rejection in expansion.rejections)


def test_wide_float32_heads_fit_where_shared_memory_is_large():
    """One tile of 16 keys and values of 512 float32 elements is 64 KB: all of an AMD block's, a part of an H200's."""
    assert expand(loaded([entry(head_dim=512)], "float32").spec, TARGETS).variants
    with pytest.raises(BuildError, match="bytes of shared memory per block, mi300x has 65536"):
        expand(loaded([entry(head_dim=512)], "float32", targets=("mi300x",)).spec, TARGETS)


def test_tuning_rows_are_well_formed():
    """A misspelt key would be passed over, and the row with it taken for every geometry."""
    rows = YAML(typ="safe", pure=True).load((Path(tuning.__file__).parent / "configs.yaml").read_text())
    plain = {"decode", "prefill", "varlen", "append_kv", "merge_states"}
    assert plain <= set(rows) <= plain | set(GLUON_FAMILIES)
    assert rows["varlen"] is rows["prefill"]
    for family, configs in rows.items():
        if family in plain:
            assert configs[-1]["for"].keys() <= {"itemsize", "max_dim"}, "the last row serves every vendor"
        for row in configs:
            needed = {"for", "block_m", "tile_n", "num_warps", "num_stages", "ctas", "origin"}
            assert row.keys() - {"options"} == needed
            known = {"arch", "vendor", "itemsize", "aligned", "plain", "max_dim"}
            assert row["for"].keys() <= (known if family in plain else known | {"rows"})
            arch = row["for"].get("arch", [])
            assert set([arch] if isinstance(arch, str) else arch) <= {target.arch for target in TARGETS.values()}
            assert row["for"].get("vendor", "amd") in ("nvidia", "amd") and row["for"].get("itemsize", 2) in (
                2,
                4,
            )
            sizes = [row["block_m"], row["tile_n"], row["num_warps"]]
            assert all(size & (size - 1) == 0 for size in sizes) and min(row["num_stages"], row["ctas"]) >= 1
            if family in ROLES:
                assert min(row["block_m"], row["tile_n"]) >= 16, "the least that a matrix instruction takes"
            assert row["origin"]


def test_what_fits_no_budget_names_bytes_needed_and_available():
    small = {**TARGETS, "h200": TARGETS["h200"].model_copy(update={"shared_memory_per_block": 8192})}
    with pytest.raises(BuildError) as caught:
        expand(loaded([entry(head_dim=128)]).spec, small)
    first, *lines = str(caught.value).splitlines()
    assert first == "attention 'global', tensor_parallel 1: no decode configuration fits sm_90:"
    assert lines and all("bytes of shared memory per block, h200 has 8192" in line for line in lines)


def test_limits_that_ask_too_much_are_named_with_what_would_fit():
    text = (Path(__file__).parent / "cases/too_many_tiles/spec.yaml").read_text()
    with pytest.raises(SpecError) as caught:
        expanded(loads(text, "x.yaml"))
    (said,) = str(caught.value).splitlines()
    most = int(re.search(r"^x.yaml:9:26: limits.max_seq_len: needs at most (\d+) beside the other limits; attention 'global'", said)[1])
    expanded(loads(text.replace("16777216", str(most))))
    with pytest.raises(SpecError, match=f"needs at most {most} "):
        expanded(loads(text.replace("16777216", str(most + 1))))


def test_the_smallest_gpu_of_an_architecture_decides():
    small = {
        **TARGETS,
        "h100_sxm": TARGETS["h100_sxm"].model_copy(update={"shared_memory_per_block": 96 * 1024}),
    }
    alone = expand(loaded([entry(head_dim=256)]).spec, small)
    both = expand(loaded([entry(head_dim=256)], targets=("h200", "h100_sxm")).spec, small)
    refused, refused_alone = ({rejection.target for rejection in each.rejections} for each in (both, alone))
    assert "h100_sxm" in refused - refused_alone
    assert alone.variants.keys() != both.variants.keys()


def test_counts_that_pass_int32_are_refused():
    def reason(variant, **limits):
        return rules.why_not(variant, TARGETS["h200"], loaded(**limits).spec.limits)

    many = {"max_seqs": 4096, "max_seq_len": 1 << 24, "max_tokens": 1 << 20, "max_spec_tokens": 1}
    variants = expand(loaded([entry(query_heads=128, kv_heads=128)]).spec, TARGETS).variants.values()
    decode = next(v for v in variants if v.family == "decode" and v.max_query_len == 1 and v.aligned)
    prefill = next(v for v in variants if v.family == "prefill" and v.aligned)
    assert reason(decode) is None and reason(prefill, **many) is None
    tiles = 4096 * ((1 << 24) // decode.config.tile_n + decode.item_tiles) * 128
    assert f"{tiles} key tiles of {decode.config.tile_n}" in reason(decode, **many)
    assert "max_seqs 4096" in reason(decode, **many)
    warps = next(v for v in variants if v.family == "decode_ws" and v.max_query_len == 1)
    shape = decode_ws.Shape(warps)
    units = 4096 * ((1 << 24) // warps.keys_box + shape.item_units) * 128 // warps.heads_box
    assert f"{shape.axis_end(units)} key tiles of {warps.keys_box}" in reason(warps, **many)
    # Sequences that have a query row are no more than the tokens.
    assert reason(decode, **(many | {"max_tokens": 64})) is None
    steep = replace(prefill, geometry=replace(prefill.geometry, query_heads=1 << 20, kv_heads=1 << 14))
    assert "row blocks" in reason(steep, **many)


def test_the_bound_holds_for_batches():
    """The kernels' own sums (templates/kernels) against rules.work_items, for random batches within the limits."""
    spec = loaded(max_seqs=6, max_seq_len=300, max_tokens=40, max_spec_tokens=8).spec
    rng = random.Random(0)
    for variant in expand(spec, TARGETS).variants.values():
        g, c, bound = variant.geometry, variant.config, rules.work_items(variant, spec.limits)
        for _ in range(200):
            left, total = spec.limits.max_tokens, 0
            for _ in range(rng.randint(0, spec.limits.max_seqs)):
                queries, keys = rng.randint(0, left), rng.randint(0, spec.limits.max_seq_len)
                left -= queries
                blocks = -(-queries * g.group // c.block_m) * g.kv_heads
                if variant.family == "decode" and 1 <= queries <= variant.max_query_len:
                    total += (max(-(-keys // c.tile_n), 1) + variant.item_tiles) * blocks
                elif variant.family == "prefill" and queries > variant.max_query_len:
                    total += blocks
                elif variant.family == "varlen":
                    total += blocks
            assert total <= bound


def test_shared_memory_is_bounded_from_above(tmp_path):
    """The rule's figure against what the compiler took, on both vendors."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        loaded(
            [entry(query_heads=2, kv_heads=1, head_dim=32)], targets=("a100_sxm", "mi300x"), max_spec_tokens=1
        ).text
    )
    generated = pipeline.generate(path)
    variants = generated.expansion.variants
    jobs = [job for job in pipeline.jobs(generated) if rules.shared_bytes(variants[job.symbol], "nvidia")]
    binaries = compile_all(jobs)
    assert {arch for _, arch in binaries} == {"sm_80", "gfx942"} and len(binaries) == len(jobs)
    for (symbol, arch), binary in binaries.items():
        bound = rules.shared_bytes(variants[symbol], "amd" if arch.startswith("gfx") else "nvidia")
        assert 0 < binary.shared_bytes <= bound, (symbol, arch, binary.shared_bytes, bound)
