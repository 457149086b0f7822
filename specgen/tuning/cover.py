"""The smallest set of schedules that serves every workload almost as fast as its best. Pure; imports matrix."""

from math import log1p

from specgen.tuning.matrix import Matrix

TOLERANCE = 0.03  # what a workload may lose against its best: 3 %
_MAX_STEPS = 20_000  # of the exact search; a larger table gets the greedy set


def cover(matrix: Matrix, tolerance: float = TOLERANCE) -> tuple[int, ...]:
    """Indices of schedules, sorted: on every workload one of them is within `tolerance` of the best, or not slower beyond noise.

    As few as can be where the search ends within its steps, else the greedy set; of sets of one size the one whose slowdowns
    sum to least, then the first by index. The same table gives the same set.
    """
    limit = log1p(tolerance) + 1e-12
    serves = [0] * len(matrix.schedules)  # bit w: the schedule is good enough on workload w
    for w, losses in enumerate(matrix.losses):
        for s, loss in enumerate(losses):
            if loss <= limit and matrix.cells[w][s]:
                serves[s] |= 1 << w
    everything = (1 << len(matrix.workloads)) - 1
    greedy = _greedy(matrix, serves, everything)
    return _Exact(matrix, serves, everything, greedy).search()


def _total(matrix: Matrix, chosen: tuple[int, ...]) -> float:
    """Sum over the workloads of the slowdown that the best of `chosen` leaves."""
    return round(sum(min(row[s] for s in chosen) for row in matrix.slowdowns), 9)


def _greedy(matrix: Matrix, serves: list[int], everything: int) -> tuple[int, ...]:
    chosen, open_ = [], everything
    columns = list(zip(*matrix.slowdowns))
    while open_:
        best = max(range(len(serves)), key=lambda s: ((serves[s] & open_).bit_count(), -sum(columns[s]), -s))
        chosen.append(best)
        open_ &= ~serves[best]
    return tuple(sorted(chosen))


class _Exact:
    """Depth-first search for every smallest set: branches on the open workload that fewest schedules serve."""

    def __init__(self, matrix: Matrix, serves: list[int], everything: int, greedy: tuple[int, ...]):
        self.matrix, self.serves, self.everything = matrix, serves, everything
        self.servers = [[s for s, mask in enumerate(serves) if mask >> w & 1] for w in range(len(matrix.workloads))]
        self.order = sorted(range(len(self.servers)), key=lambda w: (len(self.servers[w]), w))
        self.widest = max(mask.bit_count() for mask in serves)
        self.greedy = greedy
        self.steps = 0

    def search(self) -> tuple[int, ...]:
        for size in range(1, len(self.greedy) + 1):
            found: set[tuple[int, ...]] = set()
            if not self._extend((), self.everything, size, found):
                return self.greedy
            if found:
                return min(found, key=lambda chosen: (_total(self.matrix, chosen), chosen))
        return self.greedy

    def _extend(self, chosen: tuple[int, ...], open_: int, left: int, found: set) -> bool:
        """Adds to `found` every set of at most `left` more schedules that closes `open_`; False when out of steps."""
        if not open_:
            found.add(tuple(sorted(chosen)))
            return True
        self.steps += 1
        if self.steps > _MAX_STEPS:
            return False
        if left * self.widest < open_.bit_count():
            return True
        workload = next(w for w in self.order if open_ >> w & 1)
        return all(
            self._extend((*chosen, s), open_ & ~self.serves[s], left - 1, found) for s in self.servers[workload]
        )
