"""A kernel that compiles and may not ship gives way to the next configuration; the package remembers why."""

import json
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from specgen import cli, pipeline
from specgen.binary import Binary
from specgen.errors import BudgetError, BuildError

SPEC = """version: 1
name: tight
dtype: float16
attention:
  - {name: a, query_heads: 4, kv_heads: 2, head_dim: 64}
kv_cache: {dtype: float16, page_size: 16}
targets: [h200]
limits: {max_seqs: 4, max_seq_len: 64, max_tokens: 20, max_spec_tokens: 4}
"""
REASON = "spills registers in a main loop: 16 bytes"


def compiler(refuses):
    """A compile_all that refuses the kernels for which `refuses(job)` holds, and makes small binaries of the others."""

    def compile_all(jobs, **_):
        over = {(job.symbol, job.arch): REASON for job in jobs if refuses(job)}
        if over:
            raise BudgetError(over)
        facts = dict(num_threads=128, shared_bytes=0, registers=32, spill_bytes=0, main_loop_spills=0, occupancy=4)
        return {(job.symbol, job.arch): Binary(job.symbol.encode(), "cubin", job.symbol, **facts) for job in jobs}

    return compile_all


def test_the_next_configuration_takes_the_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec = tmp_path / "tight.yaml"
    spec.write_text(SPEC)
    first = {symbol for symbol in pipeline.generate(spec).expansion.variants if symbol.startswith("prefill")}
    monkeypatch.setattr(pipeline, "compile_all", compiler(lambda job: job.symbol in first))
    assert cli.main(["build", str(spec), "--pure"]) == 0
    content = json.loads((tmp_path / "build/tight/tight_kernels/manifest.json").read_text())
    assert {each["symbol"] for each in content["over_budget"]} == first
    assert all(each["reason"] == REASON and each["arch"] == "sm_90" for each in content["over_budget"])
    chosen = {symbol for symbol in content["variants"] if symbol.startswith("prefill")}
    assert len(chosen) == len(first) and not chosen & first
    capsys.readouterr()
    assert cli.main(["check", str(spec)]) == 0
    assert cli.main(["list", str(spec), "--why-not"]) == 0
    printed = capsys.readouterr().out
    for symbol in first:
        if "prefill_ws" not in symbol or "_q0_" not in symbol:  # which follows the prefill beside decode
            assert f"not {symbol} for h200: {REASON}" in printed
    assert "not built" not in printed


def test_when_none_is_left_the_build_names_every_reason(tmp_path, monkeypatch):
    spec = tmp_path / "tight.yaml"
    spec.write_text(SPEC)
    monkeypatch.setattr(pipeline, "compile_all", compiler(lambda job: job.symbol.startswith("decode")))
    with pytest.raises(BuildError, match="no decode configuration fits sm_90:") as caught:
        pipeline.build(spec, tmp_path / "build", pure=True)
    assert str(caught.value).count(REASON) >= 3
    assert not (tmp_path / "build" / "tight").exists()


def test_a_folder_that_specgen_did_not_write_is_left_alone(tmp_path, monkeypatch):
    spec = tmp_path / "tight.yaml"
    spec.write_text(SPEC)
    monkeypatch.setattr(pipeline, "compile_all", compiler(lambda job: False))
    mine = tmp_path / "build/tight/tight_kernels/mine.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("my work")
    with pytest.raises(pipeline.SpecgenError, match="no package that specgen wrote"):
        pipeline.build(spec, tmp_path / "build", pure=True)
    assert mine.read_text() == "my work"


def test_a_build_leaves_one_wheel(tmp_path, monkeypatch):
    spec = tmp_path / "tight.yaml"
    spec.write_text(SPEC)
    monkeypatch.setattr(pipeline, "compile_all", compiler(lambda job: False))
    stale = pipeline.build(spec, tmp_path / "build", pure=True)
    old = stale.with_name("tight_kernels-0.0.9-py3-none-any.whl")
    stale.rename(old)
    wheel = pipeline.build(spec, tmp_path / "build", pure=True)
    assert [path.name for path in wheel.parent.glob("*.whl")] == [wheel.name]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("build/tight/tight_kernels/mine.py", "tight_kernels: exists and is no package that specgen wrote"),
        ("build/tight/tight_kernels", "tight_kernels: exists and is no package that specgen wrote"),
        ("build/tight", "build/tight: cannot be written: File exists"),
        ("build", "build/tight: cannot be written: Not a directory"),
        ("build/tight/dist", "build/tight/dist: cannot be written: File exists"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_the_first_compile(tmp_path, monkeypatch, place, said):
    spec = tmp_path / "tight.yaml"
    spec.write_text(SPEC)
    monkeypatch.setattr(pipeline, "compile_all", lambda *_, **__: pytest.fail("compiled"))
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BuildError, match=said):
        pipeline.build(spec, tmp_path / "build", pure=True)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / place).read_text() == "mine"


def test_a_link_to_nothing_in_the_way_is_named(tmp_path, monkeypatch):
    spec = tmp_path / "tight.yaml"
    spec.write_text(SPEC)
    monkeypatch.setattr(pipeline, "compile_all", lambda *_, **__: pytest.fail("compiled"))
    (tmp_path / "build/tight").mkdir(parents=True)
    (tmp_path / "build/tight/dist").symlink_to("nowhere")
    with pytest.raises(BuildError, match="tight/dist: cannot be written: is a link to nowhere, which is not there"):
        pipeline.build(spec, tmp_path / "build", pure=True)


def test_a_wheel_that_cannot_be_written_leaves_the_tree_beside_the_old_one(tmp_path, monkeypatch):
    spec = tmp_path / "tight.yaml"
    spec.write_text(SPEC)
    monkeypatch.setattr(pipeline, "compile_all", compiler(lambda job: False))
    wheel = pipeline.build(spec, tmp_path / "build", pure=True)
    before = {path: path.read_bytes() for path in (tmp_path / "build").rglob("*") if path.is_file()}
    spec.write_text(SPEC.replace("max_seqs: 4", "max_seqs: 8"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(pipeline.SpecgenError) as caught:
        patch.setattr("zipfile.ZipFile.writestr", full)
        pipeline.build(spec, tmp_path / "build", pure=True)
    assert str(caught.value) == f"{wheel}: cannot be written: No space left on device"
    assert before == {path: path.read_bytes() for path in (tmp_path / "build").rglob("*") if path.is_file()}
    for name in (".wheel-1", ".specgen-2"):  # of killed builds
        (wheel.parent / name).mkdir()
    pipeline.build(spec, tmp_path / "build", pure=True)
    assert list(wheel.parent.iterdir()) == [wheel]


def test_builds_of_two_tags_at_once_leave_a_tree_and_its_wheel(tmp_path, monkeypatch):
    spec = tmp_path / "tight.yaml"
    spec.write_text(SPEC)
    monkeypatch.setattr(pipeline, "compile_all", compiler(lambda job: False))
    generated = pipeline.generate(spec)
    files = pipeline.package_files(generated, {}, None)
    root = pipeline.package_folder(generated.loaded.spec, tmp_path / "build")

    def write(number: int) -> None:
        tag = pipeline.PURE_TAG if number % 2 else "cp311-abi3-manylinux_2_17_x86_64"
        pipeline._write_package(generated, files | {"number": b"%d" % number}, root, tag)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(12)))
    (wheel,) = (root.parent / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("tight_kernels/number") == (root / "number").read_bytes()
