"""The wheel: the launcher compiled for it, and the archive written so that equal content gives equal bytes.

Entries are sorted, dated 1980-01-01 and given fixed permissions. They are deflated at level 9: stored, a
wheel of several architectures passes 5 MB. zlib's output can differ between its implementations (zlib,
zlib-ng), so archives are equal byte for byte only among Pythons with the same zlib; the files inside, which
`specgen verify` compares, always are.
"""

import base64
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from specgen.cache import Cache, cache_key
from specgen.errors import BuildError
from specgen.write import staged

LAUNCHER_FILE = "_launch.abi3.so"  # what the import system calls a limited-API extension
PURE_TAG = "py3-none-any"
_LIMITED_API = "0x030B0000"  # Python 3.11
_LAUNCHER_FLAGS = (
    *(
        "-std=gnu11",
        "-O2",
        "-g0",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        f"-DPy_LIMITED_API={_LIMITED_API}",
    ),
    *("-Wl,--build-id=none", "-Wl,--strip-all"),
)
_OLDEST_GLIBC = (2, 17)
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Launcher:
    """The compiled launch extension, and the first line that its compiler prints for `--version`."""

    data: bytes
    compiler: str


def build_launcher(
    runtime_dir: Path,
    *,
    cache: Cache | None = None,
    warn: Callable[[str], None] | None = None,
) -> Launcher | None:
    """Compiles `_launch.c` and its headers in `runtime_dir` with $CC (default `cc`) against the limited API of Python 3.11.

    Returns None, after one call of `warn`, where there is no compiler, no Python.h, or no Linux: the package
    then launches through ctypes. Raises BuildError, with the compiler's first error line, if the source does
    not compile.
    """
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(runtime_dir.glob("_*.[ch]"))}
    command = shlex.split(os.environ.get("CC") or "cc")
    include = sysconfig.get_path("include")
    reason = _why_no_launcher(command, include)
    if reason:
        if warn is not None:
            warn(
                f"no launch extension ({reason}): the package will launch kernels through ctypes, "
                "which is slower"
            )
        return None
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace")
    compiler = (done.stdout.splitlines() or ["unknown"])[0].strip()
    key = cache_key(
        {
            "kind": "launcher",
            "sources": sources,
            "compiler": compiler,
            "command": command,
            "flags": _LAUNCHER_FLAGS,
            "machine": platform.machine(),
            "python": platform.python_version(),  # of the headers
        }
    )
    entry = cache.get(key) if cache is not None else None
    if entry is not None:
        return Launcher(entry[1], compiler)
    with tempfile.TemporaryDirectory(prefix="specgen-launcher-") as folder:
        for name, source in sources.items():
            Path(folder, name).write_text(source, encoding="utf-8")
        done = subprocess.run(
            [*command, *_LAUNCHER_FLAGS, f"-I{include}", "_launch.c", "-o", LAUNCHER_FILE],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            why = said[0].strip() if said else f"exit status {done.returncode} and no message"
            raise BuildError(
                f"{runtime_dir / '_launch.c'}: {command[0]} failed: {why}; `--pure` builds a wheel without the launch extension"
            )
        data = Path(folder, LAUNCHER_FILE).read_bytes()
    if cache is not None:
        cache.put(key, {}, data)
    return Launcher(data, compiler)


def wheel_tag(launcher: Launcher | None) -> str:
    """The wheel's tag: "py3-none-any" without a launcher, else cp311-abi3 and the oldest platform that the
    launcher runs on.

    That is manylinux_2_17, or a newer one if the extension asks for a newer glibc; plain linux where it is
    not linked with glibc.
    """
    if launcher is None:
        return PURE_TAG
    machine = platform.machine()
    needed = {
        tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(\d+\.\d+)\b", launcher.data)
    }
    if not needed and b"musl" in launcher.data:
        return f"cp311-abi3-linux_{machine}"
    major, minor = max(needed | {_OLDEST_GLIBC})
    return f"cp311-abi3-manylinux_{major}_{minor}_{machine}"


def write_wheel(
    files: Mapping[str, bytes],
    *,
    distribution: str,
    version: str,
    package: str,
    summary: str,
    generator: str,
    tag: str,
    dest: Path,
    requires: Sequence[str] = (),
    extras: Mapping[str, Sequence[str]] | None = None,
    requires_python: str = ">=3.11",
    license_expression: str = "Apache-2.0",
    license_files: Mapping[str, bytes] | None = None,
    description: str = "",
    keywords: Sequence[str] = (),
    classifiers: Sequence[str] = (),
    urls: Mapping[str, str] | None = None,
    together: Callable[[], None] = lambda: None,
) -> Path:
    """Writes `dest`/NAME-VERSION-TAG.whl and returns its path.

    `files` are the package's, by POSIX path inside its folder `package`; `license_files` go to the metadata
    folder. `requires` and `extras` are requirements as PEP 508 writes them, `description` is Markdown,
    `generator` such as "specgen 0.1.0". The wheel appears under its name in one step, so a build that fails
    leaves an older one as it was; `together` writes what must change with it, when all that is left is to give
    it its name. Raises BuildError for a name, version, tag, requirement or path that is not valid, SpecgenError
    where the wheel cannot be written.
    """
    name = canonicalize_name(distribution)
    _check(
        distribution, version, package, tag, [*requires, *(r for rs in (extras or {}).values() for r in rs)]
    )
    stem = f"{name.replace('-', '_')}-{Version(version)}"
    info = f"{stem}.dist-info"
    licenses = dict(license_files or {})
    entries = {f"{package}/{_inside(path)}": content for path, content in files.items()}
    entries |= {f"{info}/licenses/{_inside(path)}": content for path, content in licenses.items()}
    entries[f"{info}/METADATA"] = _metadata(
        [
            ("Metadata-Version", "2.4"),
            ("Name", name),
            ("Version", str(Version(version))),
            ("Summary", summary),
            ("Keywords", ",".join(keywords)),
            ("License-Expression", license_expression),
            *(("License-File", path) for path in sorted(licenses)),
            *(("Classifier", each) for each in classifiers),
            *(("Project-URL", f"{label}, {url}") for label, url in (urls or {}).items()),
            ("Requires-Python", requires_python),
            *(("Requires-Dist", each) for each in requires),
            *_extra_fields(extras or {}),
            ("Description-Content-Type", "text/markdown" if description else ""),
        ],
        description,
    )
    entries[f"{info}/WHEEL"] = _metadata(
        [
            ("Wheel-Version", "1.0"),
            ("Generator", generator),
            ("Root-Is-Purelib", "true" if tag.endswith("-none-any") else "false"),
            *(("Tag", str(each)) for each in sorted(parse_tag(tag), key=str)),
        ]
    )
    entries[f"{info}/RECORD"] = _record(entries, f"{info}/RECORD")
    return _publish(entries, Path(dest) / f"{stem}-{tag}.whl", together)


def record_digest(content: bytes) -> str:
    """A file's digest as RECORD has it: "sha256=" and unpadded URL-safe base64."""
    return "sha256=" + base64.urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()


def _why_no_launcher(command: list[str], include: str) -> str | None:
    if not sys.platform.startswith("linux"):
        return f"it is built on Linux only, this is {sys.platform}"
    if not command or shutil.which(command[0]) is None:
        return f"no C compiler: {command[0] if command else 'cc'!r} is not on PATH; $CC names another"
    if not Path(include, "Python.h").is_file():
        return f"no Python headers: {include}/Python.h is missing"
    return None


def _check(distribution: str, version: str, package: str, tag: str, requirements: Iterable[str]) -> None:
    try:
        canonicalize_name(distribution, validate=True)
        Version(version)
        for requirement in requirements:
            Requirement(requirement)
    except (ValueError, InvalidVersion, InvalidRequirement) as error:
        raise BuildError(f"wheel {distribution} {version}: {error}") from error
    if not package.isidentifier():
        raise BuildError(f"wheel {distribution} {version}: package {package!r} is not a Python identifier")
    if not re.fullmatch(r"[a-z0-9_.]+-[a-z0-9_.]+-[A-Za-z0-9_.]+", tag):
        raise BuildError(f"wheel {distribution} {version}: {tag!r} is not a tag such as {PURE_TAG}")


def _inside(path: str) -> str:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or not path.isprintable():
        raise BuildError(f"{path!r} is not a relative POSIX path of a file")
    return path


def _extra_fields(extras: Mapping[str, Sequence[str]]) -> Iterable[tuple[str, str]]:
    for extra in sorted(extras):
        yield "Provides-Extra", canonicalize_name(extra)
        for each in extras[extra]:
            requirement = Requirement(each)
            inner = f"({requirement.marker}) and " if requirement.marker else ""
            requirement.marker = None
            yield "Requires-Dist", f'{requirement}; {inner}extra == "{canonicalize_name(extra)}"'


def _metadata(fields: Iterable[tuple[str, str]], body: str = "") -> bytes:
    """Fields as "Name: value" lines, those without a value left out, and a body after an empty line."""
    head = "".join(f"{field}: {' '.join(value.split())}\n" for field, value in fields if value.strip())
    return (f"{head}\n{body.strip()}\n" if body else head).encode()


def _record(entries: Mapping[str, bytes], own: str) -> bytes:
    rows = [
        f"{_csv(path)},{record_digest(entries[path])},{len(entries[path])}\n" for path in _ordered(entries)
    ]
    return "".join([*rows, f"{_csv(own)},,\n"]).encode()


def _csv(path: str) -> str:
    return '"' + path.replace('"', '""') + '"' if re.search('[,"]', path) else path


def _ordered(paths: Iterable[str]) -> list[str]:
    """Sorted, the metadata folder last, as PEP 427 asks."""
    return sorted(paths, key=lambda path: (".dist-info/" in path, path.endswith("/RECORD"), path))


def _publish(entries: Mapping[str, bytes], path: Path, together: Callable[[], None]) -> Path:
    with staged(path) as partial:
        with zipfile.ZipFile(partial, "w") as archive:
            for name in _ordered(entries):
                entry = zipfile.ZipInfo(name, _DATE)
                entry.create_system = 3  # Unix, whatever this system is: the mode below is read that way
                entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
                archive.writestr(entry, entries[name], zipfile.ZIP_DEFLATED, 9)
        together()
    return path
