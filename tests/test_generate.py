"""Golden trees, golden errors, and that generating is a pure function of the spec.

    python -m pytest tests/test_generate.py --update-goldens      # then review the difference

A case is a folder of tests/cases: spec.yaml with expected/ or with stderr.txt. expected/files.txt names every generated
file; beside it lie the files that STORED selects, so that each branch of each template is in one of them.
"""

import fnmatch
import hashlib
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest

from specgen import cli, pipeline
from specgen.artifact import Artifact
from specgen.cache import Cache
from specgen.errors import BuildError
from specgen.expand import expand
from specgen.format import format_source
from specgen.load import load
from specgen.plan import plan
from specgen.render import kernel_view, render
from specgen.target import load_targets
from specgen.write import write_tree

CASES = Path(__file__).parent / "cases"
_ALIGNED = "s[0-9]c[0-9].py"
_PAGED = "[dp]*"  # decode and prefill; varlen's own branches are in full_tree
# Which files of a tree are kept for review; what each case is for.
STORED = {
    "full_tree": ("*.py",),  # every kind of file once; one query row, causal, nothing padded
    "bidirectional": (f"kernels/*fill_*{_ALIGNED}", "kernels/append_kv_*_unaligned.py"),
    "padded_both": (f"kernels/decode_*{_ALIGNED}",),  # bidirectional and padded
    "padded_queries": ("kernels/prefill_*_unaligned.py",),  # qk != v, causal and padded queries and keys
    "padded_values": (f"kernels/prefill_*{_ALIGNED}",),  # v padded, group of 3
    "single_precision": (
        f"kernels/decode_*_q4_*{_ALIGNED}",
        "tests/test_decode_*_q4_*_unaligned.py",
    ),  # IEEE products
    "tensor_parallel": ("dispatch.py",),  # three degrees, the last with replicated key/value heads; two archs
    "two_layers": (
        "dispatch.py",
        "kernels/append_kv_h4_*",
        "tests/test_append_kv_h4_*",
        "tests/test_merge_*",
    ),
    "amd_scaled": (f"kernels/decode_*{_ALIGNED}", "dispatch.py"),  # explicit scale, pages of 528, group of 8
    "narrow_rows": (
        f"kernels/append_kv_*{_ALIGNED}",
        f"kernels/merge_*{_ALIGNED}",
    ),  # 40-byte rows: 8 bytes promised
    "window_and_cap": (f"kernels/{_PAGED}_window100_*{_ALIGNED}",),
    "chunk_and_sinks": (f"kernels/{_PAGED}_chunk96_*{_ALIGNED}",),
    # Ranges alone move the right edge only, beside a window both edges.
    "prefix_ranges": (
        f"kernels/prefill_*_causal_ranges_*{_ALIGNED}",
        f"kernels/{_PAGED}_window100_ranges_*{_ALIGNED}",
    ),
    "alibi": (f"kernels/decode_*{_ALIGNED}", f"kernels/prefill_*_bidirectional_*{_ALIGNED}"),
    "rotary": (f"kernels/append_kv_*{_ALIGNED}",),  # whole heads in halves; 32 of 80 elements interleaved
    "wide_heads": (f"kernels/decode_*{_ALIGNED}",),  # above 256, qk != v
    # Two tiles of a head behind a left edge, one without; what is tested besides.
    "batch_invariant": (f"kernels/decode_*{_ALIGNED}", "dispatch.py", "tests/test_[dv]*_h4x1_*_unaligned.py"),
    "decode_only": ("dispatch.py",),  # max_spec_tokens == max_tokens: no prefill
}
ERRORS = sorted(path.parent.name for path in CASES.glob("*/stderr.txt"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def updates(request):
    return request.config.getoption("--update-goldens")


def generated_text(case: str, cache: Cache | None = None) -> dict[str, str]:
    files = pipeline.generate(CASES / case / "spec.yaml", cache).files
    return {path: content.decode() for path, content in files.items() if not path.startswith("runtime/")}


def stored_text(case: str) -> dict[str, str]:
    """What expected/ holds: as generate() makes it, but only the selected files are rendered and formatted."""
    loaded = load(CASES / case / "spec.yaml")
    planned = plan(loaded, expand(loaded.spec, load_targets()))
    artifacts = [artifact for artifact in planned if not artifact.path.startswith("runtime/")]
    texts = {"files.txt": "".join(f"{artifact.path}\n" for artifact in artifacts)}
    for artifact in artifacts:
        if artifact.template and any(fnmatch.fnmatchcase(artifact.path, pattern) for pattern in STORED[case]):
            texts[artifact.path] = format_source(artifact.path, render(artifact, loaded).content.decode())
    return texts


@pytest.mark.parametrize("case", STORED)
def test_generates_the_golden_tree(case, updates):
    expected = stored_text(case)
    root = CASES / case / "expected"
    if updates:
        write_tree({path: text.encode() for path, text in expected.items()}, root)
    found = {
        path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()
    }
    assert sorted(found) == sorted(expected)
    for path, text in expected.items():
        assert found[path] == text, f"{case}/expected/{path}"


def test_the_pipeline_generates_the_full_tree(cache):
    files = generated_text("full_tree", cache)
    root = CASES / "full_tree" / "expected"
    assert files.pop("spec.yaml") == (CASES / "full_tree" / "spec.yaml").read_text()
    assert files == {path: (root / path).read_text() for path in files}


def test_every_pattern_selects_a_file():
    for case, patterns in STORED.items():
        root = CASES / case / "expected"
        present = [path.relative_to(root).as_posix() for path in root.rglob("*")]
        for pattern in patterns:
            assert fnmatch.filter(present, pattern), (case, pattern)
    assert set(STORED) == {path.parent.name for path in CASES.glob("*/expected")}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_read_as_reviewed(case, monkeypatch, capsys, updates, tmp_path):
    monkeypatch.chdir(CASES / case)
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    command = Path("command.txt")
    arguments = shlex.split(command.read_text()) if command.exists() else ["build", "spec.yaml"]
    assert cli.main([*arguments, *(["--build-dir", str(tmp_path)] if arguments[0] == "build" else [])]) == 1
    streams = capsys.readouterr()
    if updates:
        Path("stderr.txt").write_text(streams.err)
    assert streams.err == Path("stderr.txt").read_text()
    assert streams.out == ""


@pytest.mark.parametrize("text", [b"version: 1\nname: caf\xe9\n", b"\xff\xfev\x00e\x00r\x00"])
def test_a_spec_that_is_not_utf8_is_one_line(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_bytes(text)
    assert cli.main(["build", "spec.yaml"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("spec.yaml:") and "UTF-8" in error


def test_a_yaml_12_float_is_a_number():
    assert load(CASES / "amd_scaled" / "spec.yaml").spec.attention[0].scale == 1e-4


def test_generating_is_pure(cache, tmp_path, monkeypatch):
    first = generated_text("narrow_rows")
    assert generated_text("narrow_rows", cache) == first  # the cache changes nothing, filled or empty
    assert generated_text("narrow_rows", cache) == first
    monkeypatch.chdir(tmp_path)
    assert generated_text("narrow_rows") == first


@pytest.mark.parametrize("seed", ["1", "2"])
def test_generating_does_not_depend_on_the_hash_seed(seed, cache):
    program = (
        "import hashlib, sys; from specgen.pipeline import generate\n"
        "files = generate(sys.argv[1]).files\n"
        "print(hashlib.sha256(repr(list(files.items())).encode()).hexdigest())"
    )
    spec = CASES / "full_tree" / "spec.yaml"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    run = subprocess.run(
        [sys.executable, "-c", program, str(spec)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    files = pipeline.generate(spec, cache).files
    assert run.stdout.strip() == hashlib.sha256(repr(list(files.items())).encode()).hexdigest()


def test_no_path_of_this_machine_is_generated(cache):
    for path, text in generated_text("full_tree", cache).items():
        for part in (str(CASES), str(Path.home()), os.getcwd()):
            assert path == "spec.yaml" or part not in text, path


@pytest.fixture(scope="module")
def kernel():
    """(loaded spec, a kernel's artifact, not yet rendered)."""
    loaded = load(CASES / "full_tree" / "spec.yaml")
    planned = plan(loaded, expand(loaded.spec, load_targets()))
    return loaded, next(artifact for artifact in planned if artifact.path.startswith("kernels/decode_"))


def test_a_name_that_the_context_lacks_is_an_error(kernel, monkeypatch):
    loaded, artifact = kernel
    for name in kernel_view(artifact.context["variant"]):
        assert name.isidentifier()
    monkeypatch.setattr("specgen.render.kernel_view", lambda variant: {"symbol": variant.symbol})
    with pytest.raises(jinja2.UndefinedError):
        render(artifact, loaded)
    with pytest.raises(jinja2.UndefinedError):
        render(replace(artifact, template="package/dispatch.py.jinja", context={"name": "x"}), loaded)


def test_copied_files_pass_unchanged(kernel):
    artifact = Artifact("spec.yaml", None, b"\xff {{ name }}")
    assert render(artifact, kernel[0]) is artifact


def test_generated_python_is_checked():
    with pytest.raises(BuildError, match="x.py: the template rendered invalid Python"):
        format_source("x.py", "def f(:\n")
    with pytest.raises(BuildError, match="x.py: the template rendered names that nothing defines: block_n"):
        format_source("x.py", "def f(a):\n    return range(0, a, block_n)\n")
    assert format_source("x.py", "def f( a,):\n  return [a,]\n") == "def f(a):\n    return [a]\n"
