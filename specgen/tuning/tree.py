"""Small axis-aligned trees over what the host knows of a call, its Bounds: fit, read, and their boxes. Pure; imports nouns.

A tree is a Split or a leaf; a leaf is any other object. What a leaf means is the caller's: `fit` makes Leaf objects that name
a column of its cost table, choose.py puts decisions in their place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from specgen.runtime.table import Bounds, least_query_len
from specgen.spec import Limits

MAX_LEAVES = 32
# What a fit splits at, the first of Bounds: the last only tells whether a sequence may be decode's, which choose.py asks.
_SEARCHED = Bounds._fields[:4]
# What one more leaf must save: this much of the mean cost, a log slowdown; 0.0005 is 0.05 % of the geometric mean.
MIN_GAIN = 0.0005
# Bounds of the search, counts and not times so that the same table gives the same tree.
_MAX_REGIONS = 6000
_MAX_CUTS = 16


@dataclass(frozen=True)
class Leaf:
    """The cheapest column for some points, by index."""

    column: int
    points: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Where `feature` (a name in Bounds) is at most `threshold` the answer is in `low`, else in `high`."""

    feature: str
    threshold: int
    low: object
    high: object


class Box(NamedTuple):
    """A leaf and where it answers: the lowest and the highest Bounds, inclusive."""

    low: Bounds
    high: Bounds
    leaf: object


def domain(limits: Limits) -> tuple[Bounds, Bounds]:
    """The lowest and the highest Bounds of a call within `limits`."""
    most = Bounds(limits.max_tokens, limits.max_seqs, limits.max_tokens, limits.max_seq_len, limits.max_tokens)
    return Bounds(1, 1, 1, 1, 1), most


def decide(tree: object, bounds: Bounds) -> object:
    """The leaf that answers for `bounds`."""
    while isinstance(tree, Split):
        tree = tree.low if getattr(bounds, tree.feature) <= tree.threshold else tree.high
    return tree


def boxes(tree: object, limits: Limits) -> list[Box]:
    """Every leaf with its region, lowest first: together they cover all Bounds within `limits` exactly once."""
    return list(_boxes(tree, *domain(limits)))


def _boxes(tree: object, low: Bounds, high: Bounds) -> Iterator[Box]:
    if not isinstance(tree, Split):
        yield Box(low, high, tree)
        return
    bound, least, most = tree.threshold, getattr(low, tree.feature), getattr(high, tree.feature)
    if least <= bound:
        yield from _boxes(tree.low, low, high._replace(**{tree.feature: min(most, bound)}))
    if most > bound:
        yield from _boxes(tree.high, low._replace(**{tree.feature: max(least, bound + 1)}), high)


def clip(tree: object, limits: Limits) -> object:
    """The tree without splits that cannot matter within `limits`."""
    return _clip(tree, *domain(limits))


def _clip(tree: object, low: Bounds, high: Bounds) -> object:
    if not isinstance(tree, Split):
        return tree
    below, above = high._replace(**{tree.feature: tree.threshold}), low._replace(**{tree.feature: tree.threshold + 1})
    if getattr(high, tree.feature) <= tree.threshold or not _occurs(above, high):
        return _clip(tree.low, low, high)
    if getattr(low, tree.feature) > tree.threshold or not _occurs(low, below):
        return _clip(tree.high, low, high)
    return Split(tree.feature, tree.threshold, _clip(tree.low, low, below), _clip(tree.high, above, high))


def _occurs(low: Bounds, high: Bounds) -> bool:
    """Whether a call has bounds between these: the fewest rows follow from the others, and tokens are no fewer than `query_len`."""
    tokens = max(low.tokens, low.query_len)
    fewest = least_query_len(high.query_len, high.seqs, tokens)
    most = least_query_len(low.query_len, low.seqs, high.tokens)
    return tokens <= high.tokens and fewest <= high.least_query_len and low.least_query_len <= most


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
    points: Sequence[Bounds],
    weights: Sequence[float],
    costs: Sequence[Sequence[float]],
    *,
    max_leaves: int = MAX_LEAVES,
    min_gain: float = MIN_GAIN,
    min_points: int = 1,
    edges: Mapping[str, Sequence[int]] = {},
) -> object:
    """A tree of Leaf objects with a low weighted sum of costs[point][column of the point's leaf].

    Each leaf holds `min_points` different points at least, and must save `min_gain` of the sum of weights: the tree with the least
    cost and price of leaves together is found. Of one with more than `max_leaves` those splits go that save least for each of their leaves ("weakest link": Breiman et al.,
    Classification and Regression Trees, 1984). The most saving splits are tried first, and when _MAX_REGIONS were
    weighed only those; of a feature with many values _MAX_CUTS are tried. Thresholds fall on the geometric mean between
    neighbouring values, rounded down, or if one of the feature's `edges`, values above which costs are known to jump, lies there,
    on that nearest to the mean. Of columns that cost the same the first is taken, of splits that save the same the first
    feature and the lowest threshold. Needs at least one point and one column.
    """
    return _Search(points, weights, costs, min_gain * sum(weights), min_points, edges).tree(max_leaves)


class _Search:
    """Regions are bit masks over the distinct points; what a region costs as a leaf is worked out once."""

    def __init__(
        self,
        points: Sequence[Bounds],
        weights: Sequence[float],
        costs: Sequence[Sequence[float]],
        price: float,
        min_points: int,
        edges: Mapping[str, Sequence[int]],
    ):
        self.alike: dict[Bounds, list[int]] = {}
        for i, point in enumerate(points):
            self.alike.setdefault(point, []).append(i)
        self.points = sorted(self.alike)
        weighted = [[weight * cost for cost in row] for weight, row in zip(weights, costs)]
        self.costs = [_sums(weighted[i] for i in self.alike[point]) for point in self.points]
        self.cuts = [(feature, mask) for feature in range(len(_SEARCHED)) for mask in self._masks(feature)]
        self._leaves: dict[int, tuple[float, int, float]] = {}
        self._best: dict[int, tuple[float, tuple[int, int] | None]] = {}
        self._price = price  # of a leaf
        self._min_points = min_points
        self._edges = edges

    def tree(self, max_leaves: int) -> object:
        """The cheapest tree, pruned to so many leaves."""
        everything = (1 << len(self.points)) - 1
        while True:
            count, _, links = self._pruned(everything)
            if count <= max_leaves:
                return self._grown(everything)
            _, weakest = min(links)
            self._best[weakest] = self._leaf(weakest)[0], None

    def _pruned(self, region: int) -> tuple[int, float, list[tuple[float, int]]]:
        """The tree over a region: its leaves, their cost, and what each split saves for every leaf that it has more, with its region."""
        first, cost = self._cheapest(region)[1], self._leaf(region)[0]
        if first is None:
            return 1, cost, []
        low, high = self._pruned(first[1]), self._pruned(region & ~first[1])
        count, total = low[0] + high[0], low[1] + high[1]
        return count, total, [(round((cost - total) / (count - 1), 9), region), *low[2], *high[2]]

    def _masks(self, feature: int) -> list[int]:
        """The points at or below each value of a feature but the highest; of many values, evenly chosen ones."""
        values = sorted({point[feature] for point in self.points})[:-1]
        if len(values) > _MAX_CUTS:
            values = [values[(2 * i + 1) * len(values) // (2 * _MAX_CUTS)] for i in range(_MAX_CUTS)]
        return [sum(1 << i for i, p in enumerate(self.points) if p[feature] <= value) for value in values]

    def _members(self, region: int) -> list[int]:
        return [i for i, bit in enumerate(f"{region:b}"[::-1]) if bit == "1"]

    def _leaf(self, region: int) -> tuple[float, int, float]:
        """(cost as a leaf, its column, cost if each point had its own)."""
        if region not in self._leaves:
            rows = [self.costs[i] for i in self._members(region)]
            sums = _sums(rows)
            least = min(sums)
            self._leaves[region] = (least, sums.index(least), sum(map(min, rows)))
        return self._leaves[region]

    def _cheapest(self, region: int) -> tuple[float, tuple[int, int] | None]:
        """(cost and price of the best tree over a region, its first cut as (feature, the part below) or None for a leaf)."""
        if region in self._best:
            return self._best[region]
        cost, _, ideal = self._leaf(region)
        best, first = cost + self._price, None
        if ideal + 2 * self._price < best:
            for tried, (feature, low) in enumerate(self._divisions(region)):
                if tried and len(self._leaves) >= _MAX_REGIONS:  # only the first
                    break
                high = region & ~low
                if self._leaf(low)[2] + self._leaf(high)[2] + 2 * self._price >= best:
                    continue  # not with a leaf for each point either
                total = round(self._cheapest(low)[0] + self._cheapest(high)[0], 9)
                if total < best:
                    best, first = total, (feature, low)
        self._best[region] = best, first
        return best, first

    def _divisions(self, region: int) -> list[tuple[int, int]]:
        """(feature, the part below) of every way to divide a region, those first that save most at once."""
        found: dict[int, tuple] = {}
        for order, (feature, mask) in enumerate(self.cuts):
            low = region & mask
            if min(low.bit_count(), (region & ~low).bit_count()) >= self._min_points and low not in found:
                cost = round(self._leaf(low)[0] + self._leaf(region & ~low)[0], 9)
                found[low] = (cost, order, feature, low)
        return [(feature, low) for *_, feature, low in sorted(found.values())]

    def _grown(self, region: int) -> object:
        first = self._cheapest(region)[1]
        if first is None:
            points = sorted(i for member in self._members(region) for i in self.alike[self.points[member]])
            return Leaf(self._leaf(region)[1], tuple(points))
        feature, low = first
        below = max(self.points[i][feature] for i in self._members(low))
        above = min(self.points[i][feature] for i in self._members(region & ~low))
        name, mean = Bounds._fields[feature], isqrt(below * above)
        between = [edge for edge in self._edges.get(name, ()) if below <= edge < above]
        threshold = min(between, key=lambda edge: (abs(edge - mean), edge), default=mean)
        return Split(name, threshold, self._grown(low), self._grown(region & ~low))


def _sums(rows: Iterable[Sequence[float]]) -> list[float]:
    """Sums of the columns, rounded so that the order of rows does not matter."""
    return [round(sum(column), 9) for column in zip(*rows)]
