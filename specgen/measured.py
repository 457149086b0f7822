"""The measurements that decide a spec's dispatch: those that ship with specgen and those beside the spec. Reads only these files."""

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

from jinja2 import TemplateNotFound

from specgen.expand import geometries
from specgen.load import Loaded
from specgen.plan import kernel_artifact
from specgen.render import render
from specgen.runtime.arguments import ROLES
from specgen.toolchain import triton_version
from specgen.tuning import jsonl
from specgen.tuning.current import Stale, usable
from specgen.tuning.records import Launch, Measurement, Schedule, Setting, kernel_digest
from specgen.tuning.shipped import shipped
from specgen.variant import Variant


def beside(spec: Path) -> Path:
    """Where a user keeps the measurements of a spec: specs/name.measurements.jsonl beside specs/name.yaml."""
    return spec.with_suffix(".measurements.jsonl")


def measured(loaded: Loaded) -> tuple[list[Measurement], list[Stale]]:
    """(usable, stale) of what was measured for the spec's geometries. SpecError if a file is damaged."""
    own = beside(Path(loaded.path))
    found = list(jsonl.read(own)) if own.is_file() else []
    for geometry in geometries(loaded.spec):
        found += shipped(geometry)
    return current(loaded, found)


def current(loaded: Loaded, measurements: Iterable[Measurement]) -> tuple[list[Measurement], list[Stale]]:
    """(usable, stale) of the spec's geometries, by the kernels that are generated now and the Triton that is installed."""
    shapes = geometries(loaded.spec)
    digest = cache(partial(_digest, loaded))  # schedules share kernels

    def digests_now(setting: Setting, schedule: Schedule) -> tuple[str, ...]:
        return tuple(digest(_variant(setting, schedule, launch)) for launch in schedule.launches)

    own = [m for m in jsonl.unique_by_id(measurements) if m.setting.geometry in shapes]
    return usable(own, triton_version(), digests_now)


def _variant(setting: Setting, schedule: Schedule, launch: Launch) -> Variant:
    """The kernel of one launch of a schedule."""
    rows = schedule.max_query_len if launch.family in ROLES else None
    return Variant(launch.family, setting.geometry, launch.config, setting.aligned, setting.max_seqs, rows)


def _digest(loaded: Loaded, variant: Variant) -> str:
    """The digest of a kernel as it would be generated now; "" where no template makes one any more."""
    try:
        return kernel_digest(render(kernel_artifact(variant), loaded).content.decode())
    except (TemplateNotFound, KeyError):  # a family that is gone
        return ""
