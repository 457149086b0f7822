"""What becomes of a sweep's measurements: which are out of date, and the others as text for git. Needs no GPU; prints nothing."""

import re
from collections.abc import Sequence
from pathlib import Path

from specgen.errors import SpecgenError
from specgen.expand import geometries
from specgen.load import Loaded, load
from specgen.measured import beside, current, measured
from specgen.target import load_targets
from specgen.tuning.bundle import store_in, tuning_folder
from specgen.tuning.jsonl import dumps, read, unique_by_id
from specgen.tuning.records import Measurement
from specgen.tuning.relatives import identify
from specgen.tuning.store import Store
from specgen.write import write_file


def stale(path: Path, build_dir: Path, store: Path | None = None, imported: Sequence[Path] = ()) -> tuple[list[str], int]:
    """What of a spec's measurements must be taken again, and why: a line for each GPU and schedule; of how many.

    They are of other kernels than the spec generates now, or of another Triton. Looks at those that a build reads (measured.py),
    those in the store (if None: beside the spec's bundles) and those in the JSON Lines files `imported`.
    """
    loaded = load(path)
    kept = _kept(loaded, build_dir, store, imported)
    used, found = (own + other for own, other in zip(measured(loaded), current(loaded, kept)))
    ids: dict[str, set[str]] = {}
    for each in found:
        m = each.measurement
        ids.setdefault(f"{m.setting.gpu.name}: {m.schedule.label}: {each.reason}", set()).add(m.id)
    lines = [f"{line} ({len(own)} measurement{'s' * (len(own) > 1)})" for line, own in ids.items()]
    return lines, len({m.id for m in used} | set().union(*ids.values()))


def export(
    path: Path, build_dir: Path, data: Path | None = None, store: Path | None = None, imported: Sequence[Path] = ()
) -> dict[Path, int]:
    """Write a spec's measurements that are not stale as JSON Lines; the files, and how many each has.

    data: None writes them beside the spec, where its next build reads them; a folder gets a file for each GPU, <gpu>_<spec>.jsonl,
    as specgen/tuning/data has them. What such a file holds already stays in it, as far as it is not stale.
    """
    loaded = load(path)
    files: dict[Path, list[Measurement]] = {}
    for m in _kept(loaded, build_dir, store, imported):
        file = beside(path) if data is None else data / f"{_gpu_name(m)}_{loaded.spec.name}.jsonl"
        files.setdefault(file, []).append(m)
    written = {}
    for file, found in files.items():
        before = read(file) if file.is_file() else []
        if good := unique_by_id(current(loaded, [*before, *found])[0]):
            write_file(file, dumps(good))
            written[file] = len(good)
    return written


def _kept(loaded: Loaded, build_dir: Path, store: Path | None, imported: Sequence[Path]) -> list[Measurement]:
    """The measurements of the spec's geometries in the store, where there is one, and in JSON Lines files."""
    if store is not None and not store.is_file():
        raise SpecgenError(f"{store}: no such file")
    file = store or store_in(tuning_folder(build_dir, loaded.spec.name))
    found = [m for each in imported for m in read(each)]
    if file.is_file():
        with Store(file) as kept:
            found += kept.measurements()
    shapes = geometries(loaded.spec)
    return [m for m in found if m.setting.geometry in shapes]


def _gpu_name(m: Measurement) -> str:
    """The target that a GPU is, or its product name as a word."""
    target = identify(m.setting.gpu, load_targets())
    return target.id if target else re.sub(r"[^a-z0-9]+", "_", m.setting.gpu.name.lower()).strip("_")
