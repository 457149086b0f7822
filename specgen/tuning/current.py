"""Which measurements still count: the latest of each trial, not of another kernel or compiler, not of a kernel that failed.

Pure; imports nouns and records.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specgen.tuning.records import Measurement, Schedule, Setting

# Digests of the kernels that a schedule launches in a setting as they would be generated now, in the order of its launches.
DigestsNow = Callable[[Setting, Schedule], tuple[str, ...]]


@dataclass(frozen=True)
class Stale:
    """A measurement that must be taken again before it is used, and why."""

    measurement: Measurement
    reason: str


def latest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The latest measurement of each key, sorted by key; of equal times the one with the last id."""
    newest: dict[tuple, Measurement] = {}
    for m in sorted(measurements, key=lambda m: (m.key, m.when, m.id)):
        newest[m.key] = m
    return list(newest.values())


def usable(
    measurements: Iterable[Measurement], triton: str, digests_now: DigestsNow
) -> tuple[list[Measurement], list[Stale]]:
    """(usable, stale): those of the kernels that this Triton version and these templates make, and the others with reasons.

    `digests_now` may return fewer or other digests for a schedule that can no longer be generated; it is asked once for
    each schedule of a setting.
    """
    good, stale, asked = [], [], {}
    for m in measurements:
        what = (m.setting, m.schedule)
        if what not in asked:
            asked[what] = digests_now(*what)
        reasons = []
        if m.setting.software.triton != triton:
            reasons.append(f"compiled by Triton {m.setting.software.triton or 'unknown'}, now {triton}")
        if m.digests != asked[what]:
            reasons.append("the kernel source changed")
        if reasons:
            stale.append(Stale(m, "; ".join(reasons)))
        else:
            good.append(m)
    return good, stale


def comparable(setting: Setting, other: Setting) -> bool:
    """Whether trials of one setting need no repeating in the other: same problem, same GPU model, same compiler.

    A driver or torch of another version launches the same binaries; the memory that a driver reports varies with it.
    """
    return _identity(setting) == _identity(other)


def _identity(s: Setting) -> tuple:
    return s.geometry, s.aligned, s.max_seqs, s.gpu.name, s.gpu.multiprocessors, s.software.triton, s.software.ptxas


class Blocklist:
    """Kernels that must not be tried again nor chosen, from the latest measurements of one GPU model.

    A schedule is blocked if it failed on any batch, or if it launches a kernel that failed alone: a wrong answer on one
    batch condemns the kernel for all. A later good trial of the same key lifts the block.
    """

    def __init__(self, measurements: Iterable[Measurement]):
        self._bad: dict[tuple[str, ...], Measurement] = {}
        for m in latest(measurements):
            if m.status != "ok":
                self._bad.setdefault(m.digests, m)

    def __len__(self) -> int:
        return len(self._bad)

    def bad(self, digests: tuple[str, ...]) -> Measurement | None:
        """The failed trial that blocks a schedule of these kernels, or None. Its status and detail are the reason."""
        return next((self._bad[key] for key in (digests, *((d,) for d in digests)) if key in self._bad), None)


def done(measurements: Iterable[Measurement], setting: Setting) -> set[tuple]:
    """(schedule, digests, seqs) of every trial with a result in a comparable setting: what a resumed sweep skips."""
    return {(m.schedule, m.digests, m.seqs) for m in measurements if comparable(m.setting, setting)}
