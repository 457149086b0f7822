"""A model in plain Python of how decode and decode_ws cut a batch into shares: what each program attends to, and through which
slots of scratch the states of an item meet. Follows templates/kernels/decode.py.jinja, and templates/blocks/decode_ws/plan.jinja
and merge.jinja; tests hold kernels to it.
"""

from dataclasses import dataclass

from specgen.decode_ws import SHARE_SLACK, Shape
from specgen.runtime.sizes import MERGE_GROUP
from specgen.variant import Variant


@dataclass(frozen=True)
class Piece:
    """What one program attends to of one item; `slot`: where it keeps its partial state, None where it has the whole item."""

    program: int
    item: int
    units: int
    slot: int | None


@dataclass(frozen=True)
class Split:
    """Items of so many units (at least one each), in order, among `programs`; `cost` and `least` as Shape's item_units and
    min_share; `aligns`: shares may be aligned with items that are alike. A unit of decode is a key tile.
    """

    items: tuple[int, ...]
    programs: int
    cost: int
    least: int
    aligns: bool = True

    @property
    def alike(self) -> bool:
        return len(set(self.items)) <= 1

    @property
    def gap(self) -> int:
        return 0 if self.alike else self.cost

    @property
    def starts(self) -> list[int]:
        """Where the units of each item begin on the axis that is cut; then where the axis ends, and a gap more."""
        starts = [self.gap]
        for units in self.items:
            starts.append(starts[-1] + units + self.gap)
        return starts

    @property
    def share(self) -> int:
        longest, total = max(self.items, default=1), self.starts[-1] - self.gap
        share = max(-(-total // self.programs), self.gap + min(longest, self.least))
        if not (self.aligns and self.alike and self.items):
            return share
        parts = longest // share
        larger = longest // parts if parts else -(-share // longest) * longest
        aligned = parts * larger == longest or not parts
        return larger if aligned and larger <= share + share // SHARE_SLACK else share

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
    aligns = shape.variant.tunable("align", 1) == 1
    return Split(items, programs, shape.item_units, shape.min_share, aligns)


def decode_split(variant: Variant, batch: tuple[tuple[int, int], ...], programs: int) -> Split:
    """How plain decode splits them, where its splits may depend on the whole batch."""
    return Split(items_of(variant, batch, variant.config.tile_n), programs, variant.item_tiles, 1, aligns=False)


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
