"""Small axis-aligned trees over the features that the host knows: fit, read, and their boxes. Pure; imports records.

A tree is a Split or a leaf; a leaf is any other object. What a leaf means is the caller's: `fit` makes Leaf objects that name
a column of its cost table, choose.py puts decisions in their place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import isqrt
from typing import NamedTuple, Protocol

from specgen.tuning.records import Features

MAX_LEAVES = 8
# What one more leaf must save: this much of the mean cost, a log slowdown; 0.002 is 0.2 % of the geometric mean.
MIN_GAIN = 0.002


class LimitsLike(Protocol):
    """What of a spec's limits bounds the features (spec.Limits has it)."""

    max_seqs: int
    max_seq_len: int
    max_tokens: int


@dataclass(frozen=True)
class Leaf:
    """The cheapest column for some points, by index."""

    column: int
    points: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Where `feature` (a name in Features) is at most `threshold` the answer is in `low`, else in `high`."""

    feature: str
    threshold: int
    low: object
    high: object


class Box(NamedTuple):
    """A leaf and where it answers: inclusive bounds of each feature."""

    low: Features
    high: Features
    leaf: object


def domain(limits: LimitsLike) -> tuple[Features, Features]:
    """The lowest and the highest features of a call within `limits`."""
    return Features(1, 1, 1, 1), Features(limits.max_tokens, limits.max_seqs, limits.max_tokens, limits.max_seq_len)


def decide(tree: object, features: Features) -> object:
    """The leaf that answers for `features`."""
    while isinstance(tree, Split):
        tree = tree.low if getattr(features, tree.feature) <= tree.threshold else tree.high
    return tree


def boxes(tree: object, limits: LimitsLike) -> list[Box]:
    """Every leaf with its region, lowest first: together they cover each features within `limits` exactly once."""
    return list(_boxes(tree, *domain(limits)))


def _boxes(tree: object, low: Features, high: Features) -> Iterator[Box]:
    if not isinstance(tree, Split):
        yield Box(low, high, tree)
        return
    bound, least, most = tree.threshold, getattr(low, tree.feature), getattr(high, tree.feature)
    if least <= bound:
        yield from _boxes(tree.low, low, high._replace(**{tree.feature: min(most, bound)}))
    if most > bound:
        yield from _boxes(tree.high, low._replace(**{tree.feature: max(least, bound + 1)}), high)


def clip(tree: object, limits: LimitsLike) -> object:
    """The tree without splits that cannot matter within `limits`."""
    return _clip(tree, *domain(limits))


def _clip(tree: object, low: Features, high: Features) -> object:
    if not isinstance(tree, Split):
        return tree
    bound = tree.threshold
    if getattr(high, tree.feature) <= bound:
        return _clip(tree.low, low, high)
    if getattr(low, tree.feature) > bound:
        return _clip(tree.high, low, high)
    return Split(
        tree.feature,
        bound,
        _clip(tree.low, low, high._replace(**{tree.feature: bound})),
        _clip(tree.high, low._replace(**{tree.feature: bound + 1}), high),
    )


def leaves(tree: object) -> list:
    """The leaves, lowest first."""
    return [*leaves(tree.low), *leaves(tree.high)] if isinstance(tree, Split) else [tree]


def replace_leaves(tree: object, new: Callable[[object], object]) -> object:
    """The same splits over `new(leaf)`."""
    if not isinstance(tree, Split):
        return new(tree)
    low, high = (replace_leaves(side, new) for side in (tree.low, tree.high))
    return Split(tree.feature, tree.threshold, low, high)


def merge(tree: object, joined: Callable[[object, object], object | None]) -> object:
    """The tree with sibling leaves made one, where `joined(low, high)` gives one."""
    if not isinstance(tree, Split):
        return tree
    low, high = merge(tree.low, joined), merge(tree.high, joined)
    if not isinstance(low, Split) and not isinstance(high, Split) and (one := joined(low, high)) is not None:
        return one
    return Split(tree.feature, tree.threshold, low, high)


def fit(
    points: Sequence[Features],
    weights: Sequence[float],
    costs: Sequence[Sequence[float]],
    *,
    max_leaves: int = MAX_LEAVES,
    min_gain: float = MIN_GAIN,
) -> object:
    """A tree of Leaf objects with a low weighted sum of costs[point][column of the point's leaf].

    Grown greedily, the most saving split first, looking two splits ahead where one saves nothing. Thresholds fall on the
    geometric mean between neighbouring values, rounded down. Of columns that cost the same the first is taken, of splits
    the first feature and the lowest threshold. Needs at least one point and one column.
    """
    return _Growth(points, weights, costs, min_gain).grow(max_leaves)


class _Cut(NamedTuple):
    """A way to divide a group: sorts by what it leaves, then by feature and threshold."""

    cost: float  # of both sides as leaves
    feature: int
    threshold: int
    low: tuple[int, ...]
    high: tuple[int, ...]


class _Growth:
    def __init__(self, points, weights, costs, min_gain: float):
        self.points = points
        self.weighted = [[weight * cost for cost in row] for weight, row in zip(weights, costs)]
        self.min_gain = min_gain * sum(weights)
        self._cuts: dict[tuple[int, ...], list[_Cut]] = {}

    def grow(self, max_leaves: int) -> object:
        everything = tuple(range(len(self.points)))
        divided: dict[tuple[int, ...], _Cut] = {}
        heap = [self._candidate(everything)]
        heapify(heap)
        count = 1
        while heap and count < max_leaves:
            lack, _, group, cut = heappop(heap)
            if -lack < self.min_gain or cut is None:
                continue
            divided[group] = cut
            count += 1
            for side in (cut.low, cut.high):
                heappush(heap, self._candidate(side))
        return self._tree(everything, divided)

    def _tree(self, group: tuple[int, ...], divided: dict) -> object:
        if group not in divided:
            sums = self._sums(group)
            return Leaf(sums.index(min(sums)), group)
        cut = divided[group]
        return Split(
            Features._fields[cut.feature], cut.threshold, self._tree(cut.low, divided), self._tree(cut.high, divided)
        )

    def _candidate(self, group: tuple[int, ...]) -> tuple:
        """(minus the saving per leaf added, a tie-break, group, how to divide it or None)."""
        cost = self._leaf(group)
        cuts = self._divisions(group)
        if not cuts:
            return (0.0, group, group, None)
        best = cuts[0]
        saving = cost - best.cost
        if saving < self.min_gain:  # perhaps two splits do what one cannot
            after = [(self._after_two(cut), cut) for cut in cuts]
            least = min(after)
            if (cost - least[0]) / 2 >= self.min_gain:
                saving, best = (cost - least[0]) / 2, least[1]
        return (-saving, group, group, best)

    def _after_two(self, cut: _Cut) -> float:
        """The cost after `cut` and the best division of one of its sides."""
        return round(cut.cost - max(self._saving(cut.low), self._saving(cut.high)), 9)

    def _saving(self, group: tuple[int, ...]) -> float:
        cuts = self._divisions(group)
        return self._leaf(group) - cuts[0].cost if cuts else 0.0

    def _leaf(self, group: tuple[int, ...]) -> float:
        return round(min(self._sums(group)), 9)

    def _sums(self, group: tuple[int, ...]) -> list[float]:
        return [round(sum(column), 9) for column in zip(*(self.weighted[i] for i in group))]

    def _divisions(self, group: tuple[int, ...]) -> list[_Cut]:
        """Every way to divide a group at a threshold, the cheapest first."""
        if group not in self._cuts:
            self._cuts[group] = sorted(cut for feature in range(len(Features._fields)) for cut in self._along(group, feature))
        return self._cuts[group]

    def _along(self, group: tuple[int, ...], feature: int) -> Iterator[_Cut]:
        values = [self.points[i][feature] for i in group]
        if min(values) == max(values):
            return
        order = [i for _, i in sorted(zip(values, group))]
        below, above = self._running(order), self._running(order[::-1])[::-1]
        for place in range(1, len(order)):
            before, after = self.points[order[place - 1]][feature], self.points[order[place]][feature]
            if before < after:
                cost = round(below[place - 1] + above[place], 9)
                sides = (tuple(sorted(order[:place])), tuple(sorted(order[place:])))
                yield _Cut(cost, feature, isqrt(before * after), *sides)

    def _running(self, order: list[int]) -> list[float]:
        """The cost of the first 1, 2, ... points of `order` as one leaf."""
        sums = self.weighted[order[0]]
        found = [min(sums)]
        for i in order[1:]:
            sums = [a + b for a, b in zip(sums, self.weighted[i])]
            found.append(min(sums))
        return found
