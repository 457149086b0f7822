"""The parts of a dispatch group: ranges of query lengths with what is launched there untuned. Pure; imports trees and records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil

from specgen.spec import Limits
from specgen.tuning.records import Schedule
from specgen.tuning.tree import Split
from specgen.variant import Geometry

# Rows of the smallest row block of a decode, those of a matrix product.
DECODE_ROWS = 16


@dataclass(frozen=True)
class Part:
    """A range of query lengths. default: what is launched there untuned; alone: its prefill, for calls that are whole, none of whose
    sequences may be decode's, or None; spread_keys: up to so many keys a prefill that cuts them needs no decode; full_seqs: numbers
    of sequences that give every multiprocessor an item of decode: with one more some have two.
    """

    low: int
    high: int
    default: Schedule
    alone: Schedule | None
    spread_keys: int
    full_seqs: tuple[int, ...] = ()

    @property
    def whole_default(self) -> Schedule:
        """The default of whole calls."""
        return self.alone or self.default

    def untuned(self, leaf: Callable[[Schedule], object]) -> object:
        """The tree over `leaf(schedule)` of the defaults."""
        if self.alone is None:
            return leaf(self.default)
        return Split("least_query_len", self.default.max_query_len, leaf(self.default), leaf(self.alone))


def divided(
    defaults: Sequence[tuple[int, Schedule]], limits: Limits, may_serve: Callable[[Schedule], bool], spread_keys: int
) -> list[Part]:
    """The parts of (bound on query rows, schedule) by rising bound, each `alone` where its schedule `may_serve`. Raises ValueError
    where a call within the limits has no default, or one that cannot serve it.
    """
    found, low = [], 1
    for bound, schedule in defaults:
        if not schedule.legal(bound):
            raise ValueError(f"default {schedule.label!r} cannot serve {bound} query rows per sequence")
        if bound < low:
            raise ValueError(f"defaults: needs rising bounds, got {bound} after {low - 1}")
        alone = Schedule(None, schedule.prefill, 0) if schedule.decode and schedule.prefill else None
        found.append(Part(low, bound, schedule, alone if alone and may_serve(alone) else None, spread_keys))
        low = bound + 1
    if low <= limits.max_tokens:
        raise ValueError(f"defaults: end at {low - 1} query rows per sequence, limits.max_tokens is {limits.max_tokens}")
    return found


def by_row_block(parts: Sequence[Part], geometry: Geometry, multiprocessors: int) -> list[Part]:
    """The parts with one of its own for as many rows as one row block of a decode holds: two row blocks take twice as long. Those of
    decode alone know their `full_seqs`, for each number of row blocks that a sequence may have.
    """
    bound = DECODE_ROWS // geometry.group
    found = []
    for part in parts:
        if part.default.prefill is not None:
            found.append(part)
            continue
        cut = part.low <= bound < part.high
        for each in [replace(part, high=bound), replace(part, low=bound + 1)] if cut else [part]:
            most = ceil(each.high * geometry.group / DECODE_ROWS)
            full = (multiprocessors // (geometry.kv_heads * blocks) for blocks in range(1, most + 1))
            found.append(replace(each, full_seqs=tuple(seqs for seqs in full if seqs)))
    return found


def joined(parts: Sequence[Part], trees: Sequence[object]) -> object:
    """One tree that takes each part's tree in its range."""
    pairs = list(zip(parts, trees))
    return reduce(lambda high, pair: Split("query_len", pair[0].high, pair[1], high), reversed(pairs[:-1]), trees[-1])
