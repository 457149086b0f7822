"""The compile stage of `specgen tune`, what becomes of its measurements, and the command line."""

import json
import re
from dataclasses import replace

import pytest

from specgen import cli, measured, pipeline, tune_compile, tune_data
from specgen.cache import Cache
from specgen.errors import SpecgenError
from specgen.tune_compile import Choice, make_bundles
from specgen.tuning import jsonl, space
from specgen.tuning.bundle import FILE, find_bundles, read_bundle, store_in
from specgen.tuning.records import Gpu, Measurement, Schedule, Setting, Software
from specgen.tuning.store import Store
from specgen.variant import Config

SPEC = """version: 1
name: tiny
dtype: float16
attention:
  - {name: a, query_heads: 4, kv_heads: 2, head_dim: 64}
kv_cache: {dtype: float16, page_size: 16}
targets: [h200]
limits: {max_seqs: 4, max_seq_len: 64, max_tokens: 16, max_spec_tokens: 2}
"""
SPILLS = Config(128, 128, 4, 2, 1)
INJECTED = {
    # family: configurations in place of the space's
    "decode": [
        Config(16, 32, 4, 2, 1),
        Config(16, 32, 4, 2, 2),
        Config(16, 32, 4, 2, 16),  # as often no multiprocessor holds it
        Config(16, 32, 4, 2, 1, (("no_such_option", 1),)),
        Config(16, 128, 4, 16, 1),
    ],
    "prefill": [SPILLS],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, cache):
    """(spec, build folder, bundle) of candidates some of which are bad."""
    folder = tmp_path_factory.mktemp("tune")
    spec = folder / "tiny.yaml"
    spec.write_text(SPEC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "_crossed", lambda family, *_: iter(INJECTED.get(family, [])))
        patch.setattr(space, "candidates", lambda family, *_: [replace(INJECTED["decode"][0], num_warps=2)] * (family in INJECTED))
        patch.setattr(space, "_reason", lambda *_: None)  # what it would see, the compiler shall find
        (bundle,) = make_bundles(spec, folder / "build", cache=cache)
    return spec, folder / "build", bundle


def of_role(bundle, role, rows):
    return {c.launch.config: c for c in bundle.groups[0].candidates if (c.role, c.max_query_len) == (role, rows)}


def test_what_does_not_compile_is_in_the_bundle_with_the_reason(made):
    spec, build, bundle = made
    assert bundle.folder == build / "tiny" / "tuning" / "sm_90" and read_bundle(bundle.folder) == bundle
    untuned, once, twice, often, option, large = [replace(INJECTED["decode"][0], num_warps=2), *INJECTED["decode"]]
    found = of_role(bundle, "decode", 1)
    assert list(found)[0] == untuned and often not in found
    assert [found[config].status for config in (untuned, once, twice)] == ["ok"] * 3
    assert found[option].status == "compile" and "has no option no_such_option for sm_90" in found[option].detail
    assert found[large].status == "budget" and "bytes of shared memory per block, 232448 are available" in found[large].detail
    spills = of_role(bundle, "prefill", 0)[SPILLS]
    assert spills.status == "budget" and "spills registers in a main loop" in spills.detail
    assert bundle.summary.startswith("8 kernels to try, 4 over a budget, 2 that do not compile; ")
    manifest = bundle.manifest
    assert set(manifest["variants"]) == {c.symbol for g in bundle.groups for c in g.candidates if c.status == "ok"}
    package = bundle.folder / bundle.package
    for symbol, variant in manifest["variants"].items():
        assert (package / variant["module"]).is_file() and (package / variant["binaries"]["sm_90"]["file"]).is_file()
    assert (package / "runtime" / "package.py").is_file() and not (package / "tests").exists()


def test_kernels_that_differ_in_their_launch_alone_share_a_binary(made):
    _, _, bundle = made
    found = of_role(bundle, "decode", 1)
    once, twice = (bundle.manifest["variants"][found[config].symbol] for config in INJECTED["decode"][:2])
    (one,), (other,) = once["binaries"].values(), twice["binaries"].values()
    assert one["sha256"] == other["sha256"] and one["function"] == other["function"]
    assert (once["ctas_per_multiprocessor"], twice["ctas_per_multiprocessor"]) == (1, 2)
    assert found[INJECTED["decode"][0]].digest != found[INJECTED["decode"][1]].digest


def test_kernels_are_those_of_the_product(made, cache):
    """Digest and text of an untuned candidate are what a build generates."""
    spec, build, _ = made
    product = pipeline.generate(spec, cache)
    (bundle,) = make_bundles(spec, build.parent / "own", Choice(only=("decode_h*",), most=2, binaries=False), cache=cache)
    untuned = bundle.groups[0].of("decode", 1)[0]
    assert untuned.symbol in product.expansion.variants
    kernel = bundle.folder / bundle.package / "kernels" / f"{untuned.symbol}.py"
    assert kernel.read_bytes() == product.files[f"kernels/{untuned.symbol}.py"]
    assert {c.role for c in bundle.groups[0].candidates} == {"decode"}
    assert [len(bundle.groups[0].of("decode", rows)) for rows in (1, 2)] == [2, 2]


def test_a_bundle_replaces_only_a_bundle(made, tmp_path, cache):
    spec, _, _ = made
    mine = tmp_path / "tiny" / "tuning" / "sm_90" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("my work")
    choice = Choice(only=("decode_h*",), most=1, binaries=False)
    with pytest.raises(SpecgenError, match="exists and is no bundle that specgen wrote"):
        make_bundles(spec, tmp_path, choice, cache=cache)
    mine.unlink()
    first = make_bundles(spec, tmp_path, choice, cache=cache)[0]
    files = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    assert make_bundles(spec, tmp_path, choice, cache=cache)[0] == first
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == files


def test_a_damaged_bundle_says_so(tmp_path):
    with pytest.raises(SpecgenError, match="no such file; needs a bundle"):
        find_bundles(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(SpecgenError, match="trials.json:1:2: not valid JSON: .*; make the bundle anew"):
        read_bundle(tmp_path)
    (tmp_path / FILE).write_text('{"format": 1}')
    with pytest.raises(SpecgenError, match="trials.json: damaged"):
        read_bundle(tmp_path)
    (tmp_path / FILE).write_text('{"format": 9}')
    with pytest.raises(SpecgenError, match="format 9, this specgen reads 1"):
        read_bundle(tmp_path)


DAMAGES = [
    (("workloads",), ["bogus"], "workloads.0: 'bogus'"),
    (("workloads",), [5], "bundle.workloads: "),
    (("workloads",), 5, "damaged"),
    (("query_lens",), "x", "bundle.query_lens: "),
    (("query_lens",), [], "query_lens: needs rising"),
    (("package",), "../../x", "package: needs a Python identifier"),
    (("aligned",), "x", "bundle.aligned: "),
    (("groups",), [], "groups: needs one"),
    (("groups",), [5], "damaged"),
    (("groups", 0, "layer"), "nope", "groups.0.layer: "),
    (("groups", 0, "layer", "kv_heads"), "x", "groups.0.layer.kv_heads: 'x' is not the geometry's "),
    (("groups", 0, "layer", "name"), 5, "groups.0.layer.name: needs text"),
    (("groups", 0, "layer"), {}, "groups.0.layer: has no 'name'"),
    (("groups", 0, "geometry", "query_heads"), "x", "groups.0.geometry.query_heads: "),
    (("groups", 0, "geometry", "kv_heads"), 0, "groups.0.geometry: no attention has such sizes"),
    (("groups", 0, "candidates", 1, "config", "tile_n"), None, "groups.0.candidates.1.config.tile_n: "),
    (("groups", 0, "candidates", 0, "status"), [], "groups.0.candidates.0.status: "),
    (("groups", 0, "candidates", 0, "odd"), 1, "groups.0.candidates.0: unknown field 'odd'"),
    (("spec_sha256",), 5, "bundle.spec_sha256: "),
    (("odd",), 5, "bundle: unknown field 'odd'"),
]


@pytest.mark.parametrize(("place", "value", "said"), DAMAGES, ids=lambda each: str(each)[:40])
def test_a_damaged_field_of_a_bundle_is_named(made, tmp_path, place, value, said):
    fields = json.loads((made[2].folder / FILE).read_text())
    inner = fields
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    (tmp_path / FILE).write_text(json.dumps(fields))
    with pytest.raises(SpecgenError, match=f"trials.json: damaged.*{re.escape(said)}.*; make the bundle anew" if said != "damaged" else said):
        read_bundle(tmp_path)


# What becomes of measurements


def measurement(bundle, candidate, **changes):
    group = bundle.groups[0]
    gpu = Gpu("NVIDIA H200", "sm_90", 132, 150 << 30)
    software = Software(bundle.triton, bundle.ptxas, "580.159.04", "2.11.0")
    fields = dict(
        setting=Setting(group.geometry, True, 4, gpu, software),
        workload="dec b1 k64",
        seqs=((1, 64),),
        schedule=Schedule(candidate.launch, None, candidate.max_query_len),
        digests=(candidate.digest,),
        status="ok",
        samples_us=(9.0, 10.0, 11.0),
        empty_us=4.0,
        error=1e-4,
        when="2026-01-01T00:00:00+00:00",
        run="r",
    )
    return Measurement(**fields | changes)


@pytest.fixture
def store(made, tmp_path):
    """(spec, build folder, file) with a measurement of this kernel, one of another kernel and one of another Triton."""
    spec, build, bundle = made
    good, other, old = bundle.groups[0].of("decode", 1)
    old_setting = measurement(bundle, old).setting
    old_setting = replace(old_setting, software=replace(old_setting.software, triton="3.6.0"))
    own = tmp_path / "tiny.yaml"
    own.write_bytes(spec.read_bytes())
    with Store(tmp_path / "m.sqlite") as kept:
        kept.add(
            measurement(bundle, good),
            measurement(bundle, good, run="again", samples_us=(8.0,)),
            measurement(bundle, other, digests=("0" * 16,)),
            measurement(bundle, old, setting=old_setting),
        )
    return own, build, tmp_path / "m.sqlite"


def test_stale_lists_what_must_be_measured_again(store, monkeypatch):
    lines, count = tune_data.stale(store[0], store[1], store[2])
    assert len(lines) == 2 and count == 4
    assert all(line.count("decode ") == 1 for line in lines)
    assert any("the kernel source changed (1 measurement)" in line and line.startswith("NVIDIA H200: q1 decode ") for line in lines)
    assert any("compiled by Triton 3.6.0, now " in line for line in lines)
    monkeypatch.setattr(measured, "triton_version", lambda: "9.9.9")
    lines, _ = tune_data.stale(store[0], store[1], store[2])
    assert len(lines) == 3 and any("now 9.9.9 (2 measurements)" in line for line in lines)


def test_export_writes_what_the_next_build_reads(store, tmp_path):
    spec, build, file = store
    assert tune_data.export(spec, build, store=file) == {measured.beside(spec): 2}
    good, stale = measured.measured(pipeline.load(spec))
    assert len(good) == 2 and not stale
    written = tune_data.export(spec, build, data=tmp_path / "data", store=file)
    assert written == {tmp_path / "data" / "h200_tiny.jsonl": 2}
    found = jsonl.read(tmp_path / "data" / "h200_tiny.jsonl")
    before = (tmp_path / "data" / "h200_tiny.jsonl").read_text()
    with Store(tmp_path / "empty.sqlite") as kept:
        kept.add(replace(found[0], run="new", samples_us=(7.0,)))
    tune_data.export(spec, build, data=tmp_path / "data", store=tmp_path / "empty.sqlite")
    after = (tmp_path / "data" / "h200_tiny.jsonl").read_text()
    assert len(jsonl.read(tmp_path / "data" / "h200_tiny.jsonl")) == 3 and set(before.splitlines()) < set(after.splitlines())
    with pytest.raises(SpecgenError, match="none.sqlite: no such file"):
        tune_data.export(spec, build, store=tmp_path / "none.sqlite")


# The command line


def run(capsys, *arguments):
    status = cli.main(["tune", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_mistakes_of_the_command_line(made, tmp_path, capsys, monkeypatch):
    spec, build, bundle = made
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(capsys) == (1, "tune: needs a spec, or --measure-only with --bundle\n")
    status, text = run(capsys, spec, "--target", "h20", "--compile-only")
    assert status == 1 and text == "--target h20: no target of tiny; did you mean 'h200'?\n"
    status, text = run(capsys, spec, "--only", "decoder_*", "--compile-only", "--build-dir", tmp_path)
    assert status == 1 and text == "tiny: no kernel named decoder_* can be tried on sm_90\n"
    assert run(capsys, spec, "--stale", "--build-dir", tmp_path) == (0, f"no measurements of the geometries of {spec}\n")
    status, text = run(capsys, spec, "--export", "--build-dir", tmp_path)
    assert status == 0 and text.startswith("nothing to export: ")
    status, text = run(capsys, spec, "--build-dir", build)
    assert status == 1 and text.startswith("no GPU is visible here; `specgen tune SPEC --compile-only` makes the bundle here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    status, text = run(capsys, spec, "--measure-only", "--build-dir", tmp_path)
    assert status == 1 and "trials.json: no such file; needs a bundle" in text
    status, text = run(capsys, spec, "--measure-only", "--build-dir", build, "--search", "bayes")
    assert status == 1 and text.startswith("--search: needs one of auto, grid, tpe, nsga, random")
    changed = tmp_path / "tiny.yaml"
    changed.write_text(spec.read_text().replace("max_seqs: 4", "max_seqs: 3"))
    status, text = run(capsys, changed, "--measure-only", "--build-dir", build)
    assert status == 1 and text.endswith("is of another state of it; make it anew\n")
    with pytest.raises(SystemExit):
        run(capsys, spec, "--compile-only", "--measure-only")


def test_the_whole_command_in_the_interpreter(made, tmp_path, capsys, monkeypatch):
    """Compile, measure, resume, list and export, on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec, build = tmp_path / "tiny.yaml", tmp_path / "build"
    spec.write_text(SPEC)
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"seqs": [[1, 40], [1, 3]]}\n')
    own = [spec, "--build-dir", build, "--trace", trace, "--rounds", "1"]
    status, text = run(capsys, *own, "--only", "decode_h*_q1_*", "--candidates", "2")
    assert status == 0, text
    assert "2 kernels to try" in text and "a 4/2: decode of 1 query row: 2 schedules, 1 batches, " in text
    bundle = find_bundles(build / "tiny" / "tuning")[0]
    with Store(store_in(build / "tiny" / "tuning")) as kept:
        found = kept.measurements()
    assert {m.digests[0] for m in found} == {c.digest for c in bundle.groups[0].of("decode", 1)}
    assert all(m.status == "ok" and m.error < 6.25e-4 and m.setting.gpu.name == "CPU" for m in found)
    status, text = run(capsys, *own, "--measure-only")
    assert status == 0 and ", 0 trials and 2 known\n" in text
    status, text = run(capsys, "--measure-only", "--bundle", bundle.folder, "--trace", trace)
    assert status == 0 and ", 0 trials and 2 known\n" in text
    assert run(capsys, spec, "--stale", "--build-dir", build) == (0, "every measurement is of the kernels and the Triton of now\n")
    status, text = run(capsys, spec, "--export", "--build-dir", build, "--data", tmp_path / "data")
    assert status == 0 and f"wrote {tmp_path / 'data' / 'cpu_tiny.jsonl'}: {len(found)} measurements" in text
    status, text = run(capsys, *own, "--measure-only", "--store", tmp_path / "new.sqlite", "--import", tmp_path / "data" / "cpu_tiny.jsonl")
    assert status == 0 and ", 0 trials and 2 known\n" in text
