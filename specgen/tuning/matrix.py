"""Measurements -> a table of times, workloads by schedules, that can be compared. Pure; imports nouns, records and current."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from statistics import median
from typing import NamedTuple

from specgen.runtime.table import Bounds
from specgen.tuning.current import Blocklist, latest
from specgen.tuning.records import UNMEASURED, Measurement, Schedule



class Cell(NamedTuple):
    """A time in microseconds, half of its samples' 10th to 90th percentile, and the id of its measurement."""

    time_us: float
    noise_us: float
    id: str


class Workload(NamedTuple):
    """A measured batch: what it is called, and what the host knows of a call with it."""

    name: str
    bounds: Bounds


def is_faster(one: Cell, other: Cell) -> bool:
    """Whether `one` is faster beyond noise: by more than the wider of the two half-spreads. The one rule for noise."""
    return other.time_us - one.time_us > max(one.noise_us, other.noise_us)


@dataclass(frozen=True)
class Matrix:
    """cells[workload][schedule], None where it was not measured; each workload has at least one time."""

    workloads: tuple[Workload, ...]
    schedules: tuple[Schedule, ...]
    cells: tuple[tuple[Cell | None, ...], ...]

    @cached_property
    def best(self) -> tuple[Cell, ...]:
        """The lowest time of each workload."""
        return tuple(min(cell for cell in row if cell) for row in self.cells)

    @cached_property
    def slowdowns(self) -> tuple[tuple[float, ...], ...]:
        """[workload][schedule]: time over the workload's best, UNMEASURED where there is none."""
        return tuple(
            tuple(cell.time_us / best.time_us if cell else UNMEASURED for cell in row)
            for row, best in zip(self.cells, self.best)
        )

    @cached_property
    def losses(self) -> tuple[tuple[float, ...], ...]:
        """[workload][schedule]: log of the slowdown, 0 where the best is not faster beyond noise."""
        return tuple(
            tuple(
                log(slowdown) if cell is None or is_faster(best, cell) else 0.0
                for cell, slowdown in zip(row, slowdowns)
            )
            for row, best, slowdowns in zip(self.cells, self.best, self.slowdowns)
        )

    def gaps(self, schedules: Iterable[int]) -> list[tuple[int, int]]:
        """(workload, schedule) of these schedules that have no time though the schedule serves the workload."""
        pairs = [(w, s) for s in schedules for w in range(len(self.workloads)) if self.cells[w][s] is None]
        return [(w, s) for w, s in pairs if self.schedules[s].legal(self.workloads[w].bounds.query_len)]

    def only(self, workloads: Iterable[int], schedules: Iterable[int] | None = None) -> "Matrix":
        """The part with these workloads (and these schedules) by index; workloads without a time fall out."""
        columns = tuple(range(len(self.schedules)) if schedules is None else schedules)
        rows = [(self.workloads[w], tuple(self.cells[w][s] for s in columns)) for w in workloads]
        rows = [(workload, cells) for workload, cells in rows if any(cells)]
        return Matrix(
            tuple(workload for workload, _ in rows),
            tuple(self.schedules[s] for s in columns),
            tuple(cells for _, cells in rows),
        )


def tabulate(measurements: Iterable[Measurement], also: Iterable[Schedule] = ()) -> Matrix:
    """The table of one geometry on one GPU model: latest good trials; schedules with a blocked kernel are left out.

    Workloads are sorted by bounds, schedules by label after those of `also`, which are in the table whether measured or not.
    Times of another run of a workload are scaled by what both runs measured of it (the median ratio), as `Measurement.run`
    demands; runs with nothing in common are taken as they are.
    """
    everything = list(measurements)
    blocklist = Blocklist(everything)
    good = [m for m in everything if m.status == "ok" and blocklist.bad(m.digests) is None]
    batches: dict[tuple, list[Measurement]] = {}
    for m in good:
        batches.setdefault((m.bounds, m.seqs), []).append(m)
    first = tuple(dict.fromkeys(also))
    found = sorted({m.schedule for m in good} - set(first), key=lambda schedule: schedule.label)
    schedules = (*first, *found)
    workloads, cells = [], []
    for (bounds, _), of_batch in sorted(batches.items()):
        scales = _scales(of_batch)
        row = {m.schedule: _cell(m, scales[m.run]) for m in sorted(latest(of_batch), key=lambda m: (m.when, m.id))}
        workloads.append(Workload(min(m.workload for m in of_batch), bounds))
        cells.append(tuple(row.get(schedule) for schedule in schedules))
    return Matrix(tuple(workloads), schedules, tuple(cells))


def _cell(m: Measurement, scale: float) -> Cell:
    return Cell(m.time_us * scale, m.noise_us * scale, m.id)


def _scales(of_batch: list[Measurement]) -> dict[str, float]:
    """run -> factor that brings its times of this batch to those of the run that measured most of it (then the last by name)."""
    runs: dict[str, dict[Schedule, float]] = {}
    for m in of_batch:
        runs.setdefault(m.run, {})[m.schedule] = m.time_us
    reference = runs[max(runs, key=lambda run: (len(runs[run]), run))]
    scales = {}
    for run, times in runs.items():
        ratios = [log(reference[schedule] / times[schedule]) for schedule in times.keys() & reference.keys()]
        scales[run] = exp(median(ratios)) if ratios else 1.0
    return scales
