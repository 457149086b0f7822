"""The wheel, its launcher and its tag; and `verify`, on sound, altered and hostile archives."""

import csv
import email
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from specgen import verify, wheel
from specgen.cache import Cache
from specgen.errors import BuildError, SpecgenError

RUNTIME = Path(wheel.__file__).parent / "runtime"
TAG = "cp311-abi3-manylinux_2_17_x86_64"
STAND_IN = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *unused) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launch", NULL, 0, methods};
PyMODINIT_FUNC PyInit__launch(void) { return PyModule_Create(&module); }
"""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def package_files() -> dict[str, bytes]:
    manifest = {"specgen": "0.1.0", "triton": "3.7.1", "ptxas": "12.8.93", "launcher_compiler": None}
    return {
        "__init__.py": b"__version__ = '0.1.0'\n",
        "spec.yaml": b"version: 1\n",
        "manifest.json": json.dumps(manifest).encode(),
        "binaries/sm_90/decode.cubin": b"\x7fELF" + bytes(range(256)) * 40,
        "runtime/_launch.abi3.so": b"\x7fELF",
        'odd, "name".txt': b"",
    }


def write(dest: Path, files: dict[str, bytes] | None = None, **changes) -> Path:
    arguments = {
        "distribution": "Some_Model-kernels",
        "version": "0.1.0",
        "package": "some_model_kernels",
        "summary": "Attention kernels\nfor some-model",
        "generator": "specgen 0.1.0",
        "tag": TAG,
        "dest": dest,
        "requires": ["torch>=2.6"],
        "extras": {"jit": ["triton>=3.6; sys_platform == 'linux'"], "test": ["pytest", "numpy"]},
        "license_files": {"LICENSE": b"Apache License\n"},
        "description": "# some-model\n\nText, \u00e9.",
        "urls": {"Source": "https://example.org/x"},
    }
    return wheel.write_wheel(package_files() if files is None else files, **(arguments | changes))


def test_equal_content_gives_equal_bytes(tmp_path, monkeypatch):
    first = write(tmp_path / "a")
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    monkeypatch.chdir(tmp_path)
    old = os.umask(0o077)
    try:
        second = write(Path("b"), dict(reversed(package_files().items())))
    finally:
        os.umask(old)
    assert first.name == "some_model_kernels-0.1.0-cp311-abi3-manylinux_2_17_x86_64.whl"
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.name]
    with zipfile.ZipFile(first) as archive:
        for entry in archive.infolist():
            assert entry.date_time == (1980, 1, 1, 0, 0, 0)
            mode = entry.external_attr >> 16
            assert stat.S_ISREG(mode) and mode & 0o777 == (0o755 if entry.filename.endswith(".so") else 0o644)
        assert archive.namelist()[-1] == "some_model_kernels-0.1.0.dist-info/RECORD"


def test_metadata_and_record(tmp_path):
    with zipfile.ZipFile(write(tmp_path)) as archive:
        info = "some_model_kernels-0.1.0.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        tags = email.message_from_bytes(archive.read(f"{info}/WHEEL"))
        rows = list(csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode())))
        assert archive.read(f"{info}/licenses/LICENSE") == b"Apache License\n"
        assert {row[0] for row in rows} == set(archive.namelist())
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            assert digest == wheel.record_digest(content) and int(size) == len(content)
    assert rows[-1] == [f"{info}/RECORD", "", ""]
    assert metadata["Metadata-Version"] == "2.4" and metadata["Name"] == "some-model-kernels"
    assert metadata["Summary"] == "Attention kernels for some-model"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_all("Provides-Extra") == ["jit", "test"]
    assert metadata.get_all("Requires-Dist") == [
        "torch>=2.6",
        'triton>=3.6; (sys_platform == "linux") and extra == "jit"',
        'pytest; extra == "test"',
        'numpy; extra == "test"',
    ]
    assert metadata.get_payload(decode=True).decode() == "# some-model\n\nText, \u00e9.\n"
    assert tags["Tag"] == TAG and tags["Root-Is-Purelib"] == "false" and tags["Generator"] == "specgen 0.1.0"


def test_pip_installs_two_wheels_side_by_side(tmp_path):
    pytest.importorskip("pip")
    wheels = [
        write(tmp_path, tag=wheel.PURE_TAG),
        write(tmp_path, tag=wheel.PURE_TAG, distribution="other-kernels", package="other_kernels"),
    ]
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target]
    subprocess.run([*command, *wheels], check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    found = {each.metadata["Name"]: each for each in distributions(path=[str(target)])}
    assert set(found) == {"some-model-kernels", "other-kernels"}
    assert found["other-kernels"].version == "0.1.0"
    assert (target / "other_kernels/binaries/sm_90/decode.cubin").is_file()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"distribution": "-bad-"}, "name is invalid"),
        ({"version": "one"}, "Invalid version: 'one'"),
        ({"package": "some-model"}, "'some-model' is not a Python identifier"),
        ({"tag": "any"}, "'any' is not a tag such as py3-none-any"),
        ({"requires": ["torch >= "]}, "torch >="),
        ({"files": {"../x.py": b""}}, "is not a relative POSIX path"),
        ({"files": {"a//x.py": b""}}, "is not a relative POSIX path"),
    ],
)
def test_invalid_wheels_are_refused_and_the_old_one_stays(tmp_path, changes, said):
    old = write(tmp_path)
    content = old.read_bytes()
    with pytest.raises(BuildError, match=said):
        write(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == [old] and old.read_bytes() == content


def test_a_build_that_fails_midway_leaves_the_old_wheel(tmp_path, monkeypatch):
    old = write(tmp_path)
    content = old.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(SpecgenError, match="some_model_kernels.*cannot be written: No space left on device"):
        write(tmp_path, {"__init__.py": b"new"})
    assert list(tmp_path.iterdir()) == [old] and old.read_bytes() == content


# The launcher


def stand_in(folder: Path, source: str = STAND_IN) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_launch.c").write_text(source)
    return folder


@needs_compiler
def test_launcher_is_reproducible_and_loads(tmp_path, monkeypatch):
    first = wheel.build_launcher(stand_in(tmp_path / "a"))
    monkeypatch.chdir(tmp_path)
    second = wheel.build_launcher(stand_in(tmp_path / "another folder with a longer name"))
    assert first == second and first.compiler
    assert str(tmp_path).encode() not in first.data and b".note.gnu.build-id" not in first.data
    (tmp_path / wheel.LAUNCHER_FILE).write_bytes(first.data)
    program = "import _launch; assert _launch.answer() == 42"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )


@needs_compiler
def test_the_launcher_does_not_depend_on_the_headers_of_one_python(tmp_path):
    """3.13's headers call PyArg_ParseTuple where 3.11's call another; with "s#", 3.11 refuses the former."""
    data = wheel.build_launcher(RUNTIME).data
    assert b"\0PyArg_ParseTuple\0" in data and b"\0Py_DecRef\0" in data and b"_SizeT\0" not in data
    source = "".join(path.read_text() for path in sorted(RUNTIME.glob("_*.[ch]")))
    assert not re.search(r"\bPy_X?(INCREF|DECREF)\(", source)
    formats = re.findall(r'PyArg_ParseTuple\(\w+, "(.*?)"', source)
    assert len(formats) == source.count("PyArg_ParseTuple(") and "#" not in "".join(formats)
    for other in filter(shutil.which, ("python3.11", "python3.12", "python3.13")):
        program = "import sysconfig; print(sysconfig.get_path('include'))"
        found = subprocess.run([other, "-c", program], capture_output=True, text=True)
        if found.returncode or not Path(found.stdout.strip(), "Python.h").is_file():
            continue  # a shim without its Python, or one without headers
        extension = tmp_path / wheel.LAUNCHER_FILE
        flags = [*wheel._LAUNCHER_FLAGS, f"-I{found.stdout.strip()}", str(RUNTIME / "_launch.c")]
        subprocess.run(["cc", *flags, "-o", str(extension)], check=True, capture_output=True)
        assert extension.read_bytes() == data, other


@needs_compiler
def test_launcher_is_cached_by_content(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    first = wheel.build_launcher(stand_in(tmp_path / "a"), cache=cache)
    entry = next((tmp_path / "cache").rglob("*.bin"))
    content = entry.read_bytes()
    assert wheel.build_launcher(stand_in(tmp_path / "b"), cache=cache) == first
    entry.write_bytes(b"")
    assert wheel.build_launcher(stand_in(tmp_path / "b"), cache=cache) == first
    assert entry.read_bytes() == content


def test_without_a_compiler_the_wheel_is_pure(tmp_path, monkeypatch):
    said = []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert wheel.build_launcher(stand_in(tmp_path / "a"), warn=said.append) is None
    assert len(said) == 1 and "no C compiler: 'cc' is not on PATH" in said[0] and "ctypes" in said[0]
    assert wheel.wheel_tag(None) == "py3-none-any"
    monkeypatch.undo()
    monkeypatch.setattr(wheel.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", sys.executable)
    assert wheel.build_launcher(tmp_path / "a", warn=said.append) is None
    assert "Python.h is missing" in said[1]


@needs_compiler
def test_a_launcher_that_does_not_compile_is_an_error(tmp_path):
    with pytest.raises(BuildError, match=r"_launch\.c: cc failed: _launch\.c:2:\d+: error: "):
        wheel.build_launcher(stand_in(tmp_path, "\nint broken(void) { return nothing; }\n"))


def test_tag_follows_the_glibc_that_is_needed(monkeypatch):
    monkeypatch.setattr(wheel.platform, "machine", lambda: "x86_64")
    cases = {
        b"": TAG,
        b"\0GLIBC_2.2.5\0GLIBC_2.14\0": TAG,
        b"\0GLIBC_2.4\0GLIBC_2.34\0": "cp311-abi3-manylinux_2_34_x86_64",
        b"\0libc.musl-x86_64.so.1\0": "cp311-abi3-linux_x86_64",
    }
    for data, tag in cases.items():
        assert wheel.wheel_tag(wheel.Launcher(data, "cc")) == tag


@needs_compiler
@pytest.mark.skipif(
    wheel.platform.machine() != "x86_64", reason="auditwheel knows the policies of this machine only"
)
def test_auditwheel_confirms_the_tag(tmp_path):
    pytest.importorskip("auditwheel")
    launcher = wheel.build_launcher(RUNTIME)
    tag = wheel.wheel_tag(launcher)
    assert tag == TAG
    path = write(tmp_path, package_files() | {"runtime/_launch.abi3.so": launcher.data}, tag=tag)
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", path], capture_output=True, text=True
    )
    if shown.returncode:  # before 6.7 without --json
        shown = subprocess.run(
            [sys.executable, "-m", "auditwheel", "show", path], capture_output=True, text=True
        )
    text = " ".join(shown.stdout.split())
    assert any(f'"manylinux_2_{minor}_x86_64"' in text for minor in range(5, 18)), shown.stdout + shown.stderr


# verify


def rebuild(dest: Path, files: dict[str, bytes] | None = None):
    """A builder for `verify_wheel` that checks the spec it is given."""

    def build(spec: Path) -> Path:
        assert spec.read_bytes() == b"version: 1\n"
        return write(dest, files)

    return build


def test_verify_accepts_what_it_can_rebuild(tmp_path):
    assert verify.verify_wheel(write(tmp_path / "a"), rebuild(tmp_path / "b")) == []


def test_verify_names_each_file_and_the_tools_that_differ(tmp_path):
    files = package_files()
    cubin, kernel = "binaries/sm_90/decode.cubin", "kernels/decode.py"
    files[cubin] += b"!"
    files[kernel] = b"pass\n"
    del files["__init__.py"]
    said = {
        d.file: d.reason for d in verify.verify_wheel(write(tmp_path / "a"), rebuild(tmp_path / "b", files))
    }
    assert list(said) == [f"some_model_kernels/{name}" for name in ("__init__.py", cubin, kernel)]
    reasons = list(said.values())
    assert reasons[0].startswith("in the wheel only") and reasons[2].startswith("missing from the wheel")
    assert reasons[1].startswith("sha256 ") and reasons[1].endswith("(the same tool versions)")
    files["manifest.json"] = files["manifest.json"].replace(b"12.8.93", b"13.1.80")
    difference = verify.verify_wheel(write(tmp_path / "a"), rebuild(tmp_path / "b", files))[1]
    assert difference.reason.endswith("(ptxas 12.8.93 there, 13.1.80 here)") and cubin in str(difference)


def rezip(path: Path, change) -> Path:
    """Rewrites a wheel through `change(name, content) -> content or None`."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            if (changed := change(name, content)) is not None:
                archive.writestr(name, changed)
    return path


def test_verify_finds_what_record_contradicts(tmp_path):
    path = write(tmp_path / "a")
    rezip(path, lambda name, content: content + b"#" if name.endswith("__init__.py") else content)
    (difference,) = verify.verify_wheel(path, rebuild(tmp_path / "b"))
    assert (
        difference.file == "some_model_kernels/__init__.py"
        and "damaged: RECORD has sha256=" in difference.reason
    )
    rezip(path, lambda name, content: None if name.endswith("__init__.py") else content)
    (difference,) = verify.verify_wheel(path, rebuild(tmp_path / "b"))
    assert difference.reason == "listed in RECORD, missing from the wheel"
    with zipfile.ZipFile(write(tmp_path / "a"), "a") as archive:
        archive.writestr("some_model_kernels/extra.py", b"")
    said = [str(difference) for difference in verify.verify_wheel(path, rebuild(tmp_path / "b"))]
    assert "some_model_kernels/extra.py: in the wheel, not listed in RECORD" in said


def test_verify_finds_another_name_of_the_wheel(tmp_path):
    path = write(tmp_path / "a")
    other = path.rename(path.with_name(f"other_kernels-9.9.9-{TAG}.whl"))
    (difference,) = verify.verify_wheel(other, rebuild(tmp_path / "b"))
    assert (difference.file, difference.reason) == (
        other.name,
        f"is not the name of the wheel; the rebuild is {path.name} (the same tool versions)",
    )


def test_verify_finds_a_file_that_record_lists_twice(tmp_path):
    name = "some_model_kernels/__init__.py"
    path = rezip(
        write(tmp_path / "a"),
        lambda entry, content: f"{name},sha256=AAAA,1\n".encode() + content if "RECORD" in entry else content,
    )
    assert [str(d) for d in verify.verify_wheel(path, rebuild(tmp_path / "b"))] == [
        f"{name}: listed 2 times in RECORD"
    ]


def hostile(path: Path, name: str | zipfile.ZipInfo, content: bytes = b"") -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, content)


def symbolic_link() -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo("some_model_kernels/link")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b""), "damaged, or not a wheel"),
        (lambda path: path.write_bytes(b"text"), "damaged, or not a wheel"),
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), "damaged, or not a wheel"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"\xed", b"\x00")),
            "damaged, or not a wheel",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
        (lambda path: hostile(path, "../outside.py"), r"outside its own folder: '../outside.py'"),
        (lambda path: hostile(path, "/etc/passwd"), "outside its own folder"),
        (lambda path: hostile(path, "a\\..\\b"), "outside its own folder"),
        (lambda path: hostile(path, symbolic_link(), b"/etc/passwd"), "has a symbolic link"),
        (
            lambda path: rezip(path, lambda name, content: None if "spec.yaml" in name else content),
            "one PACKAGE/spec.yaml",
        ),
        (
            lambda path: rezip(path, lambda name, content: None if "RECORD" in name else content),
            "one .dist-info/RECORD",
        ),
        (
            lambda path: rezip(path, lambda name, content: b"[" if "manifest" in name else content),
            "manifest.json is not JSON",
        ),
    ],
)
def test_verify_refuses_what_is_no_wheel_in_one_line(tmp_path, damage, said):
    path = write(tmp_path / "a")
    damage(path)
    with pytest.raises(SpecgenError, match=said) as caught:
        verify.verify_wheel(path, rebuild(tmp_path / "b"))
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_verify_refuses_bombs_and_duplicates(tmp_path, monkeypatch):
    path = write(tmp_path)
    hostile(path, "some_model_kernels/__init__.py", b"two")
    with pytest.raises(SpecgenError, match="has two files 'some_model_kernels/__init__.py'"):
        verify.read_wheel(path)
    path = write(tmp_path)
    hostile_size = verify._MAX_BYTES
    monkeypatch.setattr(verify, "_MAX_BYTES", 1 << 20)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("some_model_kernels/zeros", bytes(1 << 22))
    assert path.stat().st_size < 1 << 16 < hostile_size
    with pytest.raises(SpecgenError, match="inflates to more than 1048576 bytes"):
        verify.read_wheel(path)
    monkeypatch.setattr(verify, "_MAX_FILES", 3)
    with pytest.raises(SpecgenError, match="3 are allowed"):
        verify.read_wheel(path)
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(SpecgenError, match="not a wheel's file name"):
        verify.read_wheel(tmp_path / "x.zip")
