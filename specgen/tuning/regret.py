"""How much slower a choice is than the best that was tried. Pure; imports nothing of specgen."""

from collections.abc import Iterable
from math import exp, log
from typing import NamedTuple


class Regret(NamedTuple):
    """Slowdowns against each workload's best schedule: 1.0 is none. `worst_workload` is where the worst was.

    `workloads` counts those with a time; `unmeasured` those on which the chosen schedule has none.
    """

    workloads: int
    unmeasured: int
    geometric_mean: float
    worst: float
    worst_workload: str


def regret(slowdowns: Iterable[tuple[str, float | None]]) -> Regret | None:
    """The regret over (workload, slowdown) pairs, slowdown None where it is not known; None if there is no slowdown at all.

    Of equal slowdowns the first counts as the worst.
    """
    pairs = list(slowdowns)
    known = [(name, slowdown) for name, slowdown in pairs if slowdown is not None]
    if not known:
        return None
    name, worst = max(known, key=lambda pair: pair[1])
    mean = exp(sum(log(slowdown) for _, slowdown in known) / len(known))
    return Regret(len(known), len(pairs) - len(known), mean, worst, name)
