"""Write a file or a generated tree in one step, and compare a tree with what it should be. Touches only the place it is given."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from specgen.errors import BuildError, SpecgenError

_STAGED = ".specgen-"  # what begins the name of a file that is not whole yet


def write_file(path: Path, content: bytes | str) -> None:
    """Replace a file, and make its folder; on any error all stays as it was. Text is written as UTF-8. Raises as `staged`."""
    with staged(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """The name of a file to write, which takes the place of `path` when the block ends; nothing stays of one that raises.

    SpecgenError names `path`, and says why it cannot be written.
    """
    partial = path.with_name(f"{_STAGED}{os.getpid()}-{threading.get_ident()}")
    try:
        if path.exists() and not path.is_file():
            raise SpecgenError(f"{path}: is {'a folder' if path.is_dir() else 'no ordinary file'}; needs the name of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise SpecgenError(f"{path}: cannot be written: {_why(error)}") from error


def sweep_staged(folder: Path) -> None:
    """Remove what killed processes were writing in a folder; for who holds the place of all that writes there."""
    for left in [*folder.glob(f"{_STAGED}*"), *folder.glob(".wheel-*")]:  # the latter of specgen 0.1 and earlier
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def refuse_folder(folder: Path) -> None:
    """BuildError unless a folder can be written, or made. Touches nothing."""
    place = folder
    while not os.path.lexists(place):
        place = place.parent
    if place.is_symlink() and not place.exists():
        raise BuildError(f"{place}: cannot be written: is a link to {os.readlink(place)}, which is not there")
    if not place.is_dir():
        raise BuildError(f"{folder}: cannot be written: {os.strerror(errno.EEXIST if place == folder else errno.ENOTDIR)}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise BuildError(f"{folder}: cannot be written: {os.strerror(errno.EACCES)}")


def refuse_place(root: Path, mark: str, what: str) -> None:
    """BuildError if no tree can be written to `root`, or something else lies there than a tree with a file `mark`. Touches nothing.

    `what` is what such a tree is called: "package".
    """
    refuse_folder(root.parent)
    own = not os.path.lexists(root) or root.is_dir() and ((root / mark).is_file() or not any(root.iterdir()))
    if not own:
        raise BuildError(f"{root}: exists and is no {what} that specgen wrote; move it away or build elsewhere")


@contextlib.contextmanager
def replacing(root: Path, mark: str, what: str) -> Iterator[None]:
    """Hold the place of the tree `root`, and what is beside it, against other processes; raises as `refuse_place`."""
    refuse_folder(root.parent)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        lock = open(root.parent / f".{root.name}.lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise BuildError(f"{root.parent}: cannot be written: {_why(error)}") from error
    with lock:
        refuse_place(root, mark, what)
        yield


def write_tree(files: Mapping[str, bytes], root: Path) -> None:
    """Replace the folder `root` by `files` (POSIX path -> content): all of them or, on any error, none.

    The tree is written beside `root` and renamed into place; who calls it holds that (`replacing`), so that concurrent builds
    leave one whole tree. What a killed build left there goes. BuildError if the folder cannot be written.
    """
    try:
        for left in root.parent.glob(f".{root.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        _write(files, root)
    except OSError as error:
        raise BuildError(f"{root}: cannot be written: {_why(error)}") from error


def _why(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _write(files: Mapping[str, bytes], root: Path) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        for path, content in files.items():
            target = fresh / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        fresh.chmod(0o755)
        _swap(fresh, root)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _swap(fresh: Path, root: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{root.name}-old-", dir=root.parent))
    try:
        if root.exists():
            os.rename(root, old / "tree")
        try:
            os.rename(fresh, root)
        except OSError:
            if (old / "tree").exists():
                os.rename(old / "tree", root)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def diff_tree(files: Mapping[str, bytes], root: Path, ignored: tuple[str, ...] = ()) -> list[str]:
    """Differences between `files` and the tree at `root`, both directions, one line each, sorted by path.

    Python's caches are passed over, and so are paths that begin with one of `ignored`.
    """
    present = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.relative_to(root).parts and path.suffix != ".pyc"
    }
    present = {name: path for name, path in present.items() if not name.startswith(ignored)} if ignored else present
    lines = []
    for name in sorted(files.keys() | present.keys()):
        if name not in present:
            lines.append(f"{name}: missing from the tree")
        elif name not in files:
            lines.append(f"{name}: not generated by this spec")
        elif present[name].read_bytes() != files[name]:
            lines.append(f"{name}: differs from what the spec generates")
    return lines
