"""Whether a wheel is what its embedded spec builds: digests of RECORD, then a rebuild compared file by file.

Wheels come from elsewhere: an archive is read with limits, nothing is extracted but the spec, into a
temporary folder.
"""

import csv
import io
import json
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from specgen.errors import SpecgenError
from specgen.wheel import record_digest

_MAX_FILES = 20_000
_MAX_BYTES = 1 << 30  # of all files together, inflated
_TOOLS = ("specgen", "triton", "ptxas", "launcher_compiler")  # the manifest's versions that can change files


@dataclass(frozen=True)
class Difference:
    """One file that is not as it should be, and why. `str()` is one line."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def verify_wheel(path: Path, build: Callable[[Path], Path]) -> list[Difference]:
    """Differences between the wheel at `path` and what `build(spec file)` makes of its embedded spec; empty
    if there are none.

    `build` returns the path of the wheel that it built. A file that RECORD contradicts, or that is missing
    from either side, is a difference too; where both manifests name the tools, a difference says which
    version is another. Raises SpecgenError with one line if `path` is no readable wheel of a generated
    package, or `build`'s errors.
    """
    files = read_wheel(path)
    damaged = _record_differences(files)
    with tempfile.TemporaryDirectory(prefix="specgen-verify-") as folder:
        spec = Path(folder, "spec.yaml")
        spec.write_bytes(files[_embedded(files, "spec.yaml", path)])
        made = build(spec)
        rebuilt = read_wheel(made)
    tools = _tool_differences(_manifest(files, path), _manifest(rebuilt, path))
    known = {difference.file for difference in damaged}
    found = list(damaged)
    if Path(path).name != made.name:
        found.append(
            Difference(Path(path).name, f"is not the name of the wheel; the rebuild is {made.name}{tools}")
        )
    for name in sorted(files.keys() | rebuilt.keys()):
        if name in known or name.endswith(".dist-info/RECORD"):  # RECORD follows from the others
            continue
        if name not in rebuilt:
            found.append(Difference(name, f"in the wheel only; the rebuild has no such file{tools}"))
        elif name not in files:
            found.append(Difference(name, f"missing from the wheel; the rebuild has it{tools}"))
        elif files[name] != rebuilt[name]:
            came, new = sha256(files[name]).hexdigest(), sha256(rebuilt[name]).hexdigest()
            found.append(
                Difference(name, f"sha256 {came[:16]}... in the wheel, {new[:16]}... rebuilt{tools}")
            )
    return sorted(found, key=lambda difference: difference.file)


def read_wheel(path: Path) -> dict[str, bytes]:
    """The files of a wheel by name; SpecgenError with one line for anything but a sound wheel."""
    try:
        parse_wheel_filename(Path(path).name)
    except InvalidWheelFilename as error:
        raise SpecgenError(f"{path}: not a wheel's file name: {error}") from error
    files: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if len(entries) > _MAX_FILES:
                raise SpecgenError(f"{path}: has {len(entries)} files; {_MAX_FILES} are allowed")
            left = _MAX_BYTES
            for entry in entries:
                _check_entry(path, entry, files)
                with archive.open(entry) as file:
                    content = file.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise SpecgenError(f"{path}: inflates to more than {_MAX_BYTES} bytes")
                files[entry.filename] = content
    except FileNotFoundError:
        raise SpecgenError(f"{path}: no such file") from None
    except OSError as error:
        raise SpecgenError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise SpecgenError(f"{path}: damaged, or not a wheel: {error}") from error
    if sum(name.endswith(".dist-info/RECORD") for name in files) != 1:
        raise SpecgenError(f"{path}: not a wheel: it needs one .dist-info/RECORD")
    return files


def _check_entry(path: Path, entry: zipfile.ZipInfo, files: dict[str, bytes]) -> None:
    parts = entry.filename.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in entry.filename or ":" in parts[0]:
        raise SpecgenError(f"{path}: has a file outside its own folder: {entry.filename!r}")
    if entry.external_attr >> 16 & 0o170000 == 0o120000:
        raise SpecgenError(f"{path}: has a symbolic link: {entry.filename!r}")
    if entry.filename in files:
        raise SpecgenError(f"{path}: has two files {entry.filename!r}")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise SpecgenError(
            f"{path}: {entry.filename!r} is compressed by method {entry.compress_type}, not deflate"
        )


def _embedded(files: dict[str, bytes], name: str, path: Path) -> str:
    found = [each for each in files if each.count("/") == 1 and each.endswith(f"/{name}")]
    if len(found) != 1:
        raise SpecgenError(
            f"{path}: not a wheel built by specgen: it needs one PACKAGE/{name}, it has {len(found)}"
        )
    return found[0]


def _manifest(files: dict[str, bytes], path: Path) -> dict:
    name = _embedded(files, "manifest.json", path)
    try:
        manifest = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise SpecgenError(f"{path}: {name} is not JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise SpecgenError(f"{path}: {name} is not a JSON object")
    return manifest


def _record_differences(files: dict[str, bytes]) -> list[Difference]:
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    text = files[record].decode("utf-8", "replace")
    try:
        rows = [row for row in csv.reader(io.StringIO(text), strict=True) if row]
    except csv.Error as error:
        return [Difference(record, f"cannot be read: {error}")]
    differences = [Difference(record, f"bad line {row!r}") for row in rows if len(row) != 3]
    names = [row[0] for row in rows]
    differences += [
        Difference(name, f"listed {names.count(name)} times in RECORD")
        for name in sorted({*names})
        if names.count(name) > 1
    ]
    listed = {row[0]: row for row in rows if len(row) == 3}
    for name, (_, digest, size) in listed.items():
        if name == record:
            continue
        if name not in files:
            differences.append(Difference(name, "listed in RECORD, missing from the wheel"))
        elif digest != record_digest(files[name]) or size != str(len(files[name])):
            differences.append(
                Difference(
                    name,
                    f"damaged: RECORD has {digest or 'no digest'}, {size} bytes; "
                    f"the file has {record_digest(files[name])}, {len(files[name])} bytes",
                )
            )
    unlisted = files.keys() - listed.keys()
    return differences + [Difference(name, "in the wheel, not listed in RECORD") for name in sorted(unlisted)]


def _tool_differences(came: dict, made: dict) -> str:
    parts = [
        f"{tool} {came.get(tool)} there, {made.get(tool)} here"
        for tool in _TOOLS
        if came.get(tool) != made.get(tool)
    ]
    return f" ({'; '.join(parts)})" if parts else " (the same tool versions)"
