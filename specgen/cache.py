"""A content-addressed store of build results that any number of processes may share.

A key is a sha256 over everything that decides a result; a value is a small JSON object and bytes, in one file
with a digest. Publishing is atomic (a temporary file in the same folder, then a rename). A damaged entry
counts as absent and is overwritten. A folder that cannot be written only costs the caching, with one warning.
Touches nothing outside its folder.
"""

import contextlib
import fcntl
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from specgen.errors import SpecgenError

FORMAT = 1  # of keys and files: raise it whenever the meaning of either changes
_MAGIC = b"specgen cache 1\n"
_DIGEST_SIZE = 64
_ABANDONED = 24 * 3600  # seconds after which another process's temporary file is litter


def default_folder() -> Path:
    """$SPECGEN_CACHE, else specgen in $XDG_CACHE_HOME or ~/.cache; SpecgenError if it needs an unknown home."""
    chosen = os.environ.get("SPECGEN_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "specgen"
    )
    try:
        return Path(chosen).expanduser()
    except RuntimeError:  # $HOME is not set and the user has no entry in the system's list
        raise SpecgenError(
            f"no cache folder: {chosen} needs a home folder that is not known here; "
            "set $HOME or $SPECGEN_CACHE"
        ) from None


def cache_key(content: Mapping[str, object]) -> str:
    """Key of a result: sha256 over canonical JSON of what decides it; never paths or times."""
    canonical = json.dumps({"format": FORMAT, **content}, sort_keys=True, separators=(",", ":"))
    return sha256(canonical.encode()).hexdigest()


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class Cache:
    """The store in `folder` (default: `default_folder()`). `warn` is told once if it cannot be written."""

    def __init__(self, folder: Path | None = None, *, warn: Callable[[str], None] | None = None):
        self.folder = Path(folder) if folder is not None else default_folder()
        self._warn = warn or _warn
        self._warned = False
        self._lock = threading.Lock()

    def path(self, key: str) -> Path:
        """Where the entry of `key` is, or would be."""
        return self.folder / key[:2] / f"{key}.bin"

    def get(self, key: str) -> tuple[dict, bytes] | None:
        """Facts and data of an entry; None if there is none, or it cannot be read, or it is damaged."""
        try:
            content = self.path(key).read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + _DIGEST_SIZE + 1
        body = content[head:]
        expected = _MAGIC + sha256(body).hexdigest().encode() + b"\n"
        if content[:head] != expected:
            return None
        line, _, data = body.partition(b"\n")
        entry = json.loads(line)
        return (entry["facts"], data) if entry["key"] == key else None

    def put(self, key: str, facts: Mapping[str, object], data: bytes) -> None:
        """Publishes an entry, replacing any other of this key. Warns once if the folder cannot be written."""
        line = json.dumps({"key": key, "facts": dict(facts)}, sort_keys=True).encode()
        body = line + b"\n" + data
        path = self.path(key)
        temporary = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}.{time.monotonic_ns()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sweep(path.parent)
            try:
                with open(temporary, "xb") as file:
                    file.write(_MAGIC + sha256(body).hexdigest().encode() + b"\n" + body)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._cannot_write(error)

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether this process is the one to make `key` now: False while another does.

        Held inside the `with` block and released by the system if the process dies. Where locks do not work
        (a folder that cannot be written, some network file systems), everyone may: the work is then done
        twice, and stays right.
        """
        try:
            folder = self.folder / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            file = open(
                folder / key[:3], "ab"
            )  # a fixed set of 4096: lock files cannot be removed without a race
        except OSError as error:
            self._cannot_write(error)
            yield True
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                mine = False
            except OSError:
                mine = True
            yield mine

    def _sweep(self, folder: Path) -> None:
        """Removes temporary files that killed processes left long ago."""
        for entry in os.scandir(folder):
            if entry.name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _ABANDONED:
                        os.unlink(entry.path)

    def _cannot_write(self, error: OSError) -> None:
        with self._lock:
            if self._warned:
                return
            self._warned = True
        reason = error.strerror or str(error)
        self._warn(f"the cache folder {self.folder} cannot be written ({reason}): results are not kept")
