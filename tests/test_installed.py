"""A damaged file of an installed package is named, with advice to reinstall: manifest.json and dispatch.py at import."""

import json
import os
import subprocess
import sys

import pytest
import torch
from fake_package import build, fake

from specgen.pipeline import build_sources
from specgen.runtime.errors import DamagedBinaryError
from specgen.runtime.installed import TABLES, read_dispatch

SPEC = """
version: 1
name: tiny
dtype: float16
attention:
  - {name: a, query_heads: 2, kv_heads: 1, head_dim: 16}
kv_cache: {dtype: float16, page_size: 16}
targets: [h200]
limits: {max_seqs: 2, max_seq_len: 64, max_tokens: 8, max_spec_tokens: 1}
"""


def without(*names):
    def change(manifest):
        for name in names[:-1]:
            manifest = manifest[name]
        del manifest[names[-1]]

    return change


def put(value, *names):
    def change(manifest):
        for name in names[:-1]:
            manifest = manifest[name]
        manifest[names[-1]] = value

    return change


FIRST = "decode_global_8_2_a"
MANIFESTS = {
    "empty": (b"", "is damaged: Expecting value"),
    "half": (lambda text: text[: len(text) // 2], "is damaged: "),
    "no text": (b"\xff\xfe\x00", "is damaged: 'utf-8' codec"),
    "a list": (b"[]", "is damaged: it is list, an object is needed"),
    "an empty object": (b"{}", "is damaged: it lacks format"),
    "format": (put(99, "format"), "has format 99, and this package's runtime reads 1: the files are of two builds"),
    "no version": (without("version"), "is damaged: it lacks version"),
    "a limit": (without("limits", "max_seqs"), "is damaged: it lacks limits.max_seqs"),
    "a null limit": (put(None, "limits", "max_seqs"), "is damaged: limits.max_seqs is None"),
    "a layer": (without("layers", 0, "scale"), "is damaged: it lacks layers.0.scale"),
    "a target": (put("h200", "targets", 0), "is damaged: targets.0 is str, an object is needed"),
    "variants": (put([], "variants"), "is damaged: variants is []"),
    "a variant's field": (put("x", "variants", FIRST, "block_m"), f"is damaged: variants.{FIRST}.block_m is 'x'"),
    "a binary": (without("variants", FIRST, "binaries", "sm_90", "sha256"), f"it lacks variants.{FIRST}.binaries.sm_90.sha256"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_damaged_manifest(tmp_path, monkeypatch, case):
    change, reason = MANIFESTS[case]
    directory, *_ = built = build(tmp_path)
    monkeypatch.setattr("fake_package.build", lambda *_, **__: built)
    path = directory / "manifest.json"
    text = path.read_bytes()
    if isinstance(change, bytes):
        text = change
    elif case == "half":
        text = change(text)
    else:
        manifest = json.loads(text)
        change(manifest)
        text = json.dumps(manifest).encode()
    path.write_bytes(text)
    with pytest.raises(DamagedBinaryError) as error:
        fake(tmp_path)
    found = str(error.value)
    assert found.startswith(f"{path} ") and reason in found and found.endswith("; reinstall fake-kernels")


def test_a_missing_manifest(tmp_path, monkeypatch):
    directory, *_ = built = build(tmp_path)
    monkeypatch.setattr("fake_package.build", lambda *_, **__: built)
    (directory / "manifest.json").unlink()
    with pytest.raises(DamagedBinaryError, match="manifest.json is missing; reinstall fake-kernels"):
        fake(tmp_path)


@pytest.mark.parametrize("place", range(1, 5))
def test_rows_of_kernels_that_the_manifest_has_not(tmp_path, monkeypatch, place):
    built = list(build(tmp_path))
    lost = built[place][-1].symbols[-1]
    path = built[0] / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["variants"][lost]
    path.write_text(json.dumps(manifest))
    monkeypatch.setattr("fake_package.build", lambda *_, **__: built)
    with pytest.raises(DamagedBinaryError, match=f"dispatch.py names the kernel {lost}, which manifest.json has not; reinstall"):
        fake(tmp_path).open(torch.device("cpu"))
    with pytest.raises(DamagedBinaryError, match=lost):
        fake(tmp_path).describe()


def test_rows_out_of_order(tmp_path, monkeypatch):
    built = list(build(tmp_path))
    built[1] = built[1][1:]
    monkeypatch.setattr("fake_package.build", lambda *_, **__: built)
    with pytest.raises(DamagedBinaryError, match="dispatch.py is damaged: AttentionRow 1 stands at place 0"):
        fake(tmp_path).open(torch.device("cpu"))


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("lost", None, "is missing"),
        ("empty", "", "is damaged: it lacks ATTENTION_ROWS, APPEND_ROWS, MERGE_ROWS, VARLEN_ROWS, SELECTORS"),
        ("half", "ATTENTION_ROWS = (", "is damaged: SyntaxError"),
        ("cut", "ATTENTION_ROWS = ()\nAPPEND", "is damaged: NameError"),
        ("shorter", "".join(f"{table} = ()\n" for table in TABLES[:-1]), "is damaged: it lacks SELECTORS"),
    ],
)
def test_a_damaged_dispatch_table(tmp_path, monkeypatch, name, text, reason):
    directory = tmp_path / f"{name}_kernels"
    directory.mkdir()
    (directory / "__init__.py").touch()
    if text is not None:
        (directory / "dispatch.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DamagedBinaryError) as error:
        read_dispatch(directory.name, directory)
    found = str(error.value)
    assert found.startswith(f"{directory / 'dispatch.py'} {reason}") and found.endswith(f"reinstall {name}-kernels")


def test_importing_a_damaged_package_names_the_file(tmp_path):
    (tmp_path / "tiny.yaml").write_text(SPEC)
    package = build_sources(tmp_path / "tiny.yaml", tmp_path / "build")
    (package / "dispatch.py").write_text((package / "dispatch.py").read_text()[:2000])
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, "-c", "import tiny_kernels"], capture_output=True, text=True, env=environment)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"tiny_kernels.runtime.errors.DamagedBinaryError: {package / 'dispatch.py'} is damaged: "), last
    assert last.endswith("; reinstall tiny-kernels")
