"""What becomes of measurements: which are out of date, and the others as text for git. Needs no GPU; prints nothing."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import TemplateNotFound

from specgen.errors import SpecgenError
from specgen.load import Loaded, load
from specgen.plan import kernel_artifact
from specgen.render import render
from specgen.target import load_targets
from specgen.toolchain import triton_version
from specgen.tune_compile import geometries
from specgen.tuning.bundle import store_in, tuning_folder
from specgen.tuning.current import Stale, usable
from specgen.tuning.jsonl import dumps, read, unique_by_id
from specgen.tuning.records import ROLES, Measurement, Schedule, Setting, kernel_digest
from specgen.tuning.relatives import identify
from specgen.tuning.shipped import DIRECTORY, shipped
from specgen.tuning.space import families
from specgen.tuning.store import Store
from specgen.variant import Variant


def stale(path: Path, build_dir: Path, store: Path | None = None, imported: Sequence[Path] = ()) -> list[str]:
    """What of a spec's measurements must be taken again, and why: a line for each GPU and schedule.

    They are of other kernels than the spec generates now, or of another Triton. Looks at those that ship with specgen, those in
    the store (if None: beside the spec's bundles) and those in the JSON Lines files `imported`.
    """
    loaded = load(path)
    counts: dict[str, int] = {}
    for each in _current(loaded, [*shipped(), *_kept(loaded, build_dir, store, imported)])[1]:
        m = each.measurement
        line = f"{m.setting.gpu.name}: {m.schedule.label}: {each.reason}"
        counts[line] = counts.get(line, 0) + 1
    return [f"{line} ({count} measurement{'s' * (count > 1)})" for line, count in counts.items()]


def export(
    path: Path, build_dir: Path, data: Path = DIRECTORY, store: Path | None = None, imported: Sequence[Path] = ()
) -> dict[Path, int]:
    """Write a spec's measurements that are not stale to `data`/<gpu>_<spec>.jsonl, one file per GPU model; how many each has.

    What such a file holds already stays in it, as far as it is not stale.
    """
    loaded = load(path)
    files: dict[Path, list[Measurement]] = {}
    for m in _kept(loaded, build_dir, store, imported):
        files.setdefault(data / f"{_gpu_name(m)}_{loaded.spec.name}.jsonl", []).append(m)
    written = {}
    for file, found in files.items():
        before = read(file) if file.is_file() else []
        if good := unique_by_id(_current(loaded, [*before, *found])[0]):
            _write(file, dumps(good))
            written[file] = len(good)
    return written


def _kept(loaded: Loaded, build_dir: Path, store: Path | None, imported: Sequence[Path]) -> list[Measurement]:
    """The measurements of the store, where there is one, and of JSON Lines files."""
    if store is not None and not store.is_file():
        raise SpecgenError(f"{store}: no such file")
    file = store or store_in(tuning_folder(build_dir, loaded.spec.name))
    found = [m for each in imported for m in read(each)]
    if file.is_file():
        with Store(file) as kept:
            found += kept.measurements()
    shapes = geometries(loaded.spec)
    return [m for m in found if m.setting.geometry in shapes]


def _current(loaded: Loaded, measurements: Iterable[Measurement]) -> tuple[list[Measurement], list[Stale]]:
    """(usable, stale) of the spec's geometries, by the kernels that are generated now and the Triton that is installed."""
    shapes = geometries(loaded.spec)

    def digests_now(setting: Setting, schedule: Schedule) -> tuple[str, ...]:
        return tuple(_digest(loaded, setting, schedule, role) for role in ROLES if getattr(schedule, role))

    own = [m for m in unique_by_id(measurements) if m.setting.geometry in shapes]
    return usable(own, triton_version(), digests_now)


def _digest(loaded: Loaded, setting: Setting, schedule: Schedule, role: str) -> str:
    """The digest of a kernel as it would be generated now; "" where no template makes one any more."""
    launch = getattr(schedule, role)
    rows = None if launch.family in families("varlen") else schedule.max_query_len
    variant = Variant(launch.family, setting.geometry, launch.config, setting.aligned, setting.max_seqs, rows)
    try:
        return kernel_digest(render(kernel_artifact(variant), loaded).content.decode())
    except (TemplateNotFound, KeyError):  # a family that is gone
        return ""


def _gpu_name(m: Measurement) -> str:
    """The target that a GPU is, or its product name as a word."""
    target = identify(m.setting.gpu, load_targets())
    return target.id if target else re.sub(r"[^a-z0-9]+", "_", m.setting.gpu.name.lower()).strip("_")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
