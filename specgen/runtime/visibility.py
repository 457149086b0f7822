"""How far each row of one sequence sees: what explain counts, and which pages checks="full" asks for.

Closed forms over host integers; the reference says the same key by key. Touches no device.
"""

import torch
from torch import Tensor

from .geometry import Geometry


def spans(geometry: Geometry, rows: int, keys: int, ranges: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(first, end) of the keys that each row sees, int64 [rows] on the host: the visible keys are one interval.

    One sequence of `rows` query rows over `keys` keys; `ranges` [ranges, 2] on the host. A row that sees no
    key has first == end.
    """
    if geometry.mask != "causal":
        return torch.zeros(rows, dtype=torch.int64), torch.full((rows,), keys, dtype=torch.int64)
    positions = torch.arange(keys - rows, keys)
    first, end = torch.zeros_like(positions), positions + 1
    if geometry.sliding_window is not None:
        first = positions - geometry.sliding_window + 1
    if geometry.chunk is not None:
        first = positions // geometry.chunk * geometry.chunk
    for start, stop in (
        [] if ranges is None else ranges.tolist()
    ):  # each holds the row itself: unions stay whole
        inside = (start <= positions) & (positions < stop)
        first = torch.where(inside, first.clamp(max=start), first)
        end = torch.where(inside, end.clamp(min=stop), end)
    first, end = first.clamp(0, keys), end.clamp(0, keys)
    return torch.minimum(first, end), end
