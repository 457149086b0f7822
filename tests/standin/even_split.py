"""A model in plain Python of how decode and decode_ws cut a batch into shares: what each program attends to, and through which
slots of scratch the states of an item meet. Follows templates/kernels/decode.py.jinja, and templates/blocks/decode_ws/plan.jinja
and merge.jinja; tests hold kernels to it.
"""

from dataclasses import dataclass

from specgen.decode_ws import SHARE_SLACK, Shape
from specgen.runtime.sizes import MERGE_GROUP
from specgen.variant import Variant


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Piece:
    """What one program attends to of one item; `slot`: where it keeps its partial state, None where it has the whole item."""

    program: int
    item: int
    units: int
    slot: int | None


@dataclass(frozen=True)
class Split:
    """Items of so many units (at least one each), in order, among `programs`; `cost`, `least` and `merging` as Shape's
    item_units, min_share and merge_units; decode, whose unit is a key tile, has no such ways: `merging` None.
    """

    items: tuple[int, ...]
    programs: int
    cost: int
    least: int
    merging: int | None = None

    @property
    def alike(self) -> bool:
        return len(set(self.items)) <= 1

    @property
    def plan(self) -> tuple[int, int, int]:
        """(share, gap, grain): a program's part of the axis; what items are lengthened by, and to a multiple of what."""
        count, units, longest = len(self.items), sum(self.items), max(self.items, default=1)
        least, gap = min(longest, self.least), 0 if self.alike else self.cost
        spread = max(ceil(units + gap * count, self.programs), gap + least)
        if self.merging is None or not count:
            return spread, gap, 1
        slack = spread // SHARE_SLACK if self.alike else 0
        if (whole := ceil(spread, longest) * longest) <= spread + slack:
            spread = whole
        if count > self.programs:
            return spread, gap, 1
        apart = ceil(longest, self.programs // count)
        if count < self.programs:
            apart = min(apart, ceil(units, self.programs - count))
        apart = max(apart, least)
        if apart + self.merging >= longest:
            apart = longest
        merges = self.merging if apart < longest else 0
        if apart + merges <= spread + self.merging + (self.cost if self.alike else 0) + slack:
            return apart, 0, apart
        return spread, gap, 1

    @property
    def share(self) -> int:
        return self.plan[0]

    @property
    def gap(self) -> int:
        return self.plan[1]

    @property
    def starts(self) -> list[int]:
        """Where the units of each item begin on the axis that is cut; then where the axis ends, and a gap more."""
        _, gap, grain = self.plan
        starts, end = [], 0
        for units in self.items:
            end += ceil(units + gap, grain) * grain
            starts.append(end - units)
        return [*starts, end + gap]

    def pieces(self) -> list[Piece]:
        """Every program's, in the order in which it attends to them."""
        starts, share, found = self.starts, self.share, []
        for item, units in enumerate(self.items):
            first, last = starts[item] // share, (starts[item] + units - 1) // share
            for program in range(first, last + 1):
                begin = max(starts[item], program * share)
                end = min(starts[item] + units, (program + 1) * share)
                slot = None if first == last else 2 * program + (begin != program * share)
                found.append(Piece(program, item, end - begin, slot))
        return found

    def merges(self) -> list[tuple[list[int], list[int]]]:
        """(slots, counters) that each item of several programs uses, those of groups of programs among them."""
        starts, share, found = self.starts, self.share, []
        kept = [(piece.item, piece.slot) for piece in self.pieces() if piece.slot is not None]
        for item, units in enumerate(self.items):
            first, last = starts[item] // share, (starts[item] + units - 1) // share
            if first == last:
                continue
            slots = [slot for of, slot in kept if of == item]
            counters = [first]
            if last - first >= MERGE_GROUP:
                groups = range(first // MERGE_GROUP, last // MERGE_GROUP + 1)
                late = [group == groups[0] and starts[item] != group * MERGE_GROUP * share for group in groups]
                slots += [2 * (self.programs + group) + is_late for group, is_late in zip(groups, late)]
                counters += [self.programs + 2 * group + is_late for group, is_late in zip(groups, late)]
            found.append((slots, counters))
        return found

    def longest_program(self, cost: int) -> int:
        """Units of the program that takes longest, an item at `cost` units besides its own."""
        spent = [0] * self.programs
        for piece in self.pieces():
            spent[piece.program] += piece.units + cost
        return max(spent)


def split_of(shape: Shape, batch: tuple[tuple[int, int], ...], programs: int) -> Split:
    """How `shape` splits sequences of (query rows, keys)."""
    items = items_of(shape.variant, batch, shape.unit)
    return Split(items, programs, shape.item_units, shape.min_share, shape.merge_units)


def decode_split(variant: Variant, batch: tuple[tuple[int, int], ...], programs: int) -> Split:
    """How plain decode splits them, where its splits may depend on the whole batch."""
    return Split(items_of(variant, batch, variant.config.tile_n), programs, variant.item_tiles, 1)


def items_of(variant: Variant, batch: tuple[tuple[int, int], ...], unit: int) -> tuple[int, ...]:
    """Units of so many keys of each item of sequences of (query rows, keys)."""
    g, c, most = variant.geometry, variant.config, variant.max_query_len
    items = []
    for queries, keys in batch:
        if not 1 <= queries <= most:
            continue
        left = 0
        if g.sliding_window is not None:
            left = max(left, keys - queries + 1 - g.sliding_window)
        if g.chunk is not None:
            left = max(left, (keys - queries) // g.chunk * g.chunk)
        units = max(-(-keys // unit) - left // unit, 1)
        row_blocks = -(-queries * g.group // c.block_m)
        items += [units] * (row_blocks * g.kv_heads // variant.heads_box)
    return tuple(items)
