"""Why a leaf launches what it launches, in one line. Pure; imports matrix."""

from collections.abc import Sequence
from math import exp, log

from specgen.tuning.matrix import Matrix, is_faster

_NAMED = 3  # workloads that a line names; the others are counted


def text(matrix: Matrix, column: int, workloads: Sequence[int], gpu: str) -> str:
    """Such as "NVIDIA H200: dec b8 k4k 40.2 us (1f0e...), dec b32 k4k 128.3 us (...) and 5 more, at most 1.8% behind the best,
    6.1% ahead of q1 decode m16n128w4s3c2".
    """
    times = [(matrix.workloads[w].name, matrix.cells[w][column]) for w in workloads]
    known = [(name, cell) for name, cell in times if cell]
    if not known:
        return f"default: nothing measured here on {gpu}"
    named = [f"{name} {cell.time_us:.1f} us ({cell.id})" for name, cell in known[:_NAMED]]
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    behind = max(matrix.slowdowns[w][column] for w in workloads if matrix.cells[w][column]) - 1
    facts = [f"{', '.join(named)}{more}", "the best of each" if behind == 0 else f"at most {behind:.1%} behind the best"]
    return f"{gpu}: " + ", ".join([*facts, *_lead(matrix, column, workloads)])


def _lead(matrix: Matrix, column: int, workloads: Sequence[int]) -> list[str]:
    """How far ahead of the runner-up, the schedule with the next lowest geometric mean, measured on every workload."""
    rivals = {}
    for s in range(len(matrix.schedules)):
        if s != column and all(matrix.cells[w][s] and matrix.cells[w][column] for w in workloads):
            ratios = [matrix.cells[w][s].time_us / matrix.cells[w][column].time_us for w in workloads]
            rivals[s] = exp(sum(map(log, ratios)) / len(ratios))
    if not rivals:
        return []
    rival = min(rivals, key=lambda s: (rivals[s], s))
    lead, label = rivals[rival] - 1, matrix.schedules[rival].label
    if lead >= 0:
        return [f"{lead:.1%} ahead of {label}"]
    beyond = any(is_faster(matrix.cells[w][rival], matrix.cells[w][column]) for w in workloads)
    return [f"{-lead:.1%} behind {label}{'' if beyond else ', within noise'}"]
