"""From times to a tree: what noise hides, the smallest cover, where thresholds fall, boxes that are total and disjoint."""

import itertools
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import both, failure, measurement, rows, table

from specgen.runtime.table import Bounds, least_query_len
from specgen.spec import Limits
from specgen.tuning.cover import _greedy, cover
from specgen.tuning.matrix import is_faster, tabulate
from specgen.tuning.records import UNMEASURED
from specgen.tuning.regret import regret
from specgen.tuning.tree import Leaf, Split, boxes, clip, decide, domain, fit, leaves, merge, replace_leaves

LIMITS = Limits(max_seqs=5, max_seq_len=7, max_tokens=6, max_spec_tokens=1)
BATCH = ((1, 4096),)


# --- times that can be compared ---


def test_losses_are_logs_of_slowdowns_and_noise_hides_the_small_ones():
    matrix = table([[100.0, 102.0, 110.0, None]], noise_us=2.0)
    assert matrix.slowdowns[0] == pytest.approx((1.0, 1.02, 1.10, UNMEASURED))
    assert matrix.losses[0] == pytest.approx((0.0, 0.0, log(1.10), log(UNMEASURED)))
    assert table([[100.0, 102.0]], noise_us=1.9).losses[0] == pytest.approx((0.0, log(1.02)))


def test_the_wider_spread_decides_what_is_faster():
    quiet, loud = table([[100.0]], noise_us=0.5).cells[0][0], table([[95.0]], noise_us=6.0).cells[0][0]
    assert not is_faster(loud, quiet) and not is_faster(quiet, loud)
    assert is_faster(loud._replace(noise_us=4.9), quiet)


def test_a_table_takes_the_latest_good_trials_and_leaves_out_blocked_kernels():
    matrix = tabulate(
        [
            measurement(BATCH, rows(16), 10.0, name="a"),
            measurement(BATCH, rows(16), 11.0, name="a", when="2025-03-01T00:00:00Z", run="run 2"),
            measurement(((1, 10),) * 2, rows(16), 7.0, name="b"),
            measurement(BATCH, rows(32), 9.0, name="a"),
            failure(rows(32), "wrong"),
            failure(rows(64), "compile"),
        ],
        also=[both(16, 16)],
    )
    assert [w.name for w in matrix.workloads] == ["a", "b"]
    assert matrix.schedules == (both(16, 16), rows(16))
    assert [[cell and cell.time_us for cell in row] for row in matrix.cells] == [[None, 11.0], [None, 7.0]]
    assert matrix.gaps([0, 1]) == [(0, 0), (1, 0)]
    assert matrix.only([1], [1]).cells == ((matrix.cells[1][1],),)
    assert matrix.only([0, 1], [0]).workloads == (), "a workload without a time falls out"


def test_gaps_are_only_what_a_schedule_serves():
    matrix = tabulate([measurement(((4, 9),), both(16, 16), 3.0)], also=[rows(16), rows(16, 4)])
    assert matrix.gaps(range(3)) == [(0, 1)]


def test_runs_are_compared_by_what_both_measured():
    """The second run was 10 % slower throughout: its new schedule is 5 % better, not 5 % worse."""
    first = [measurement(BATCH, rows(n), t) for n, t in ((16, 100.0), (32, 120.0), (64, 130.0), (256, 150.0))]
    later = [measurement(BATCH, rows(n), t, run="run 2") for n, t in ((16, 110.0), (32, 132.0), (128, 104.5))]
    matrix = tabulate(first + later)
    of_schedule = dict(zip(matrix.schedules, matrix.cells[0]))
    assert of_schedule[rows(128)].time_us == pytest.approx(95.0)
    assert of_schedule[rows(16)].time_us == pytest.approx(100.0)
    alone = tabulate([first[0], later[2]])
    assert {round(cell.time_us, 3) for cell in alone.cells[0]} == {100.0, 104.5}, "nothing in common: as they are"


# --- the cover ---


def test_one_schedule_serves_all_within_the_tolerance():
    times = [[100, 102, 150], [140, 102, 100], [100, 102, 100]]
    assert cover(table(times), 0.03) == (1,)
    assert cover(table(times), 0.01) == (0, 2)


def test_noise_counts_as_equal():
    times = [[100, 105], [105, 100]]
    assert cover(table(times, noise_us=1.0), 0.03) == (0, 1)
    assert cover(table(times, noise_us=5.0), 0.03) == (0,), "of equal sets the first"


def test_the_smallest_set_is_found_where_the_greedy_one_is_larger():
    """The widest schedule serves 4 of 6 workloads, and then two more are needed; two others share the six."""
    good = [{0, 1, 3, 4}, {0, 1, 2}, {3, 4, 5}]
    matrix = table([[100.0 if w in served else 200.0 for served in good] for w in range(6)])
    serves = [sum(1 << w for w in served) for served in good]
    assert _greedy(matrix, serves, 0b111111) == (0, 1, 2)
    assert cover(matrix) == (1, 2)


def test_of_sets_of_one_size_the_one_that_loses_least():
    assert cover(table([[100, 101, 150], [103, 101, 150], [150, 150, 100]])) == (1, 2)


def test_an_unmeasured_schedule_serves_nothing():
    assert cover(table([[100, None], [None, 100]]), 10.0) == (0, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(st.integers(100, 106), min_size=n, max_size=n), min_size=1, max_size=7)))
def test_a_cover_is_one_and_as_small_as_can_be(times):
    matrix = table([[float(t) for t in row] for row in times])
    found = cover(matrix, 0.02)
    served = [{w for w, row in enumerate(times) if row[s] / min(row) <= 1.02 + 1e-9} for s in range(len(times[0]))]
    everything = set(range(len(times)))
    assert set().union(*(served[s] for s in found)) == everything
    smaller = itertools.combinations(range(len(served)), len(found) - 1)
    assert not any(set().union(*(served[s] for s in chosen)) == everything for chosen in smaller)


def test_a_large_table_ends_with_a_cover_all_the_same():
    """Each schedule serves a few workloads of its own: the exact search runs out of steps."""
    times = [[100.0 if (w * 7 + s * 11) % 23 < 3 else 200.0 for s in range(60)] for w in range(80)]
    found = cover(table(times))
    assert all(min(row[s] for s in found) == min(row) for row in times)
    assert found == cover(table(times))


# --- the tree ---


def points(*keys: int) -> list[Bounds]:
    return [Bounds(1, 1, 1, k) for k in keys]


def test_a_threshold_falls_on_the_geometric_mean():
    costs = [[0, 1], [0, 1], [1, 0], [1, 0]]
    tree = fit(points(512, 1024, 8192, 65536), [1] * 4, costs)
    assert tree == Split("keys", 2896, Leaf(0, (0, 1)), Leaf(1, (2, 3)))
    assert decide(tree, Bounds(1, 1, 1, 2896)).column == 0
    assert decide(tree, Bounds(1, 1, 1, 2897)).column == 1
    assert fit(points(4, 5), [1] * 2, [[0, 1], [1, 0]]).threshold == 4, "between neighbours: the lower one stays below"


def test_a_threshold_falls_on_an_edge_that_lies_between():
    def threshold(*edges: int, feature: str = "seqs") -> int:
        grid = [Bounds(1, seqs, seqs, 64) for seqs in (33, 39)]
        return fit(grid, [1] * 2, [[0, 1], [1, 0]], edges={feature: edges}).threshold

    assert threshold() == threshold(16, 32, 39, 66) == threshold(33, feature="keys") == 35, "none between: the geometric mean"
    assert threshold(16, 33, 66) == 33, "the lower of the neighbours may be one"
    assert threshold(33, 36, 38) == 36, "the one nearest to the mean"


def test_equal_columns_and_equal_splits_take_the_first():
    assert fit(points(1, 2), [1, 1], [[0.5, 0.5, 0.1], [0.5, 0.5, 0.9]]) == Split("keys", 1, Leaf(2, (0,)), Leaf(0, (1,)))
    grid = [Bounds(1, n, n, n) for n in (1, 4)]
    assert fit(grid, [1, 1], [[0, 1], [1, 0]]).feature == "seqs"
    assert fit(grid, [1, 1], [[1, 1], [1, 1]]) == Leaf(0, (0, 1))


def test_a_leaf_must_save_enough():
    costs = [[0.0, 0.003], [0.003, 0.0]]
    assert fit(points(1, 100), [1, 1], costs, min_gain=0.002) == Leaf(0, (0, 1))
    assert isinstance(fit(points(1, 100), [1, 1], costs, min_gain=0.001), Split)


def test_a_leaf_holds_so_many_points():
    """One point of six that is far better off elsewhere stays with its neighbours; three of them do not."""
    lone = [[0, 1]] * 5 + [[9, 0]]
    assert leaves(fit(points(1, 2, 3, 4, 5, 6), [1] * 6, lone, min_points=2))[-1] == Leaf(1, (4, 5))
    assert fit(points(1, 2, 3, 4, 5, 6), [1] * 6, lone, min_points=4) == Leaf(1, (0, 1, 2, 3, 4, 5))
    half = [[0, 1]] * 3 + [[1, 0]] * 3
    assert fit(points(1, 2, 3, 4, 5, 6), [1] * 6, half, min_points=3) == Split("keys", 3, Leaf(0, (0, 1, 2)), Leaf(1, (3, 4, 5)))
    assert fit(points(1, 1, 1, 6), [1] * 4, [[0, 1]] * 3 + [[1, 0]], min_points=2) == Leaf(0, (0, 1, 2, 3)), "different points"


def test_the_most_saving_split_comes_first_and_leaves_are_bounded():
    costs = [[0, 9, 9], [9, 0, 9], [9, 9, 0]]
    for row, scale in zip(costs, (1, 5, 2)):
        row[:] = [scale * cost for cost in row]
    where = points(1, 10, 100)
    assert len(leaves(fit(where, [1] * 3, costs))) == 3
    two = fit(where, [1] * 3, costs, max_leaves=2)
    assert two == Split("keys", 3, Leaf(0, (0,)), Leaf(1, (1, 2))) or two == Split("keys", 31, Leaf(1, (0, 1)), Leaf(2, (2,)))
    assert sum(costs[i][leaf.column] for leaf in leaves(two) for i in leaf.points) == min(9 * 1, 9 * 2)


def test_two_splits_that_save_only_together_are_found():
    """Few sequences with few keys, and many with many, want one schedule; the others another."""
    corners = [Bounds(1, seqs, 99, keys) for seqs in (1, 64) for keys in (100, 10_000)]
    costs = [[0, 1], [1, 0], [1, 0], [0, 1]]
    tree = fit(corners, [1] * 4, costs)
    assert len(leaves(tree)) == 4
    assert all(costs[i][decide(tree, corner).column] == 0 for i, corner in enumerate(corners))


def test_weights_decide_between_points_that_look_alike():
    alike = points(10, 10)
    assert fit(alike, [1.0, 0.25], [[0, 1], [1, 0]]) == Leaf(0, (0, 1))
    assert fit(alike, [0.25, 1.0], [[0, 1], [1, 0]]) == Leaf(1, (0, 1))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.tuples(*[st.integers(1, 4)] * 4), st.tuples(*[st.integers(0, 3)] * 3)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_a_fit_holds_every_point_once_and_never_loses_to_one_leaf(rows_, max_leaves):
    where = [Bounds(*bounds) for bounds, _ in rows_]
    costs = [list(cost) for _, cost in rows_]
    tree = fit(where, [1.0] * len(where), costs, max_leaves=max_leaves)
    assert sorted(i for leaf in leaves(tree) for i in leaf.points) == list(range(len(where)))
    assert all(decide(tree, f) is leaf for leaf in leaves(tree) for i in leaf.points for f in [where[i]])
    total = sum(costs[i][leaf.column] for leaf in leaves(tree) for i in leaf.points)
    assert total <= min(sum(column) for column in zip(*costs))
    assert len(leaves(tree)) <= max_leaves


def cheapest(where, costs, price: float, chosen: frozenset) -> float:
    """The least cost and price of leaves of any tree over some points, by trying every one."""
    best = min(sum(costs[i][c] for i in chosen) for c in range(len(costs[0]))) + price
    for feature, value in {(f, where[i][f]) for f in range(4) for i in chosen}:
        low = frozenset(i for i in chosen if where[i][feature] <= value)
        if low != chosen:
            best = min(best, cheapest(where, costs, price, low) + cheapest(where, costs, price, chosen - low))
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.tuples(*[st.integers(1, 3)] * 4), st.tuples(*[st.integers(0, 3)] * 3)), min_size=1, max_size=5))
def test_no_tree_is_cheaper(rows_):
    where = [Bounds(*bounds) for bounds, _ in rows_]
    costs = [list(cost) for _, cost in rows_]
    tree = fit(where, [1.0] * len(where), costs, min_gain=0.1, max_leaves=9)
    price = 0.1 * len(where)
    total = sum(costs[i][leaf.column] for leaf in leaves(tree) for i in leaf.points) + price * len(leaves(tree))
    assert total == pytest.approx(cheapest(where, costs, price, frozenset(range(len(where)))))


# --- boxes ---

TREES = st.recursive(
    st.sampled_from("abc"),
    lambda trees: st.builds(Split, st.sampled_from(Bounds._fields), st.integers(0, 9), trees, trees),
    max_leaves=12,
)
EVERYTHING = [
    Bounds(*values)
    for values in itertools.product(*(range(low, high + 1) for low, high in zip(*domain(LIMITS))))
]


@settings(max_examples=50, deadline=None)
@given(TREES)
def test_boxes_are_total_and_disjoint_and_say_what_the_tree_says(tree):
    found = boxes(tree, LIMITS)
    owner = {}
    for box in found:
        for bounds in itertools.product(*(range(low, high + 1) for low, high in zip(box.low, box.high))):
            assert bounds not in owner, "disjoint"
            owner[bounds] = box.leaf
    assert owner.keys() == set(EVERYTHING), "total"
    assert all(decide(tree, bounds) == owner[bounds] for bounds in EVERYTHING)


@settings(max_examples=50, deadline=None)
@given(TREES)
def test_clipping_leaves_what_can_matter(tree):
    clipped = clip(tree, LIMITS)
    assert all(decide(clipped, bounds) == decide(tree, bounds) for bounds in EVERYTHING if occurs(bounds))
    assert len(leaves(clipped)) == len(boxes(clipped, LIMITS)) <= len(boxes(tree, LIMITS))


def occurs(bounds: Bounds) -> bool:
    return bounds.query_len <= bounds.tokens and bounds.least_query_len == least_query_len(*bounds[:3])


def test_no_leaf_is_for_calls_that_cannot_be():
    """One sequence has all tokens; many of many rows have more than there may be."""
    short_rows = Split("least_query_len", 8, "some may be decode's", "whole")
    tree = Split("query_len", 8, "decode", Split("seqs", 32, "few", short_rows))
    limits = LIMITS.model_copy(update={"max_seqs": 1, "max_tokens": 64})
    assert clip(Split("query_len", 8, "decode", short_rows), limits) == Split("query_len", 8, "decode", "whole")
    many = limits.model_copy(update={"max_seqs": 64, "max_tokens": 9 * 33})
    assert clip(tree, many) == tree
    assert clip(tree, many.model_copy(update={"max_tokens": 9 * 33 - 1})).high == Split("seqs", 32, "few", "some may be decode's")


def test_leaves_are_replaced_and_merged():
    tree = Split("keys", 5, Split("seqs", 2, "a", "a"), Split("seqs", 3, "a", "b"))
    assert replace_leaves(tree, str.upper) == Split("keys", 5, Split("seqs", 2, "A", "A"), Split("seqs", 3, "A", "B"))
    assert merge(tree, lambda low, high: low if low == high else None) == Split("keys", 5, "a", Split("seqs", 3, "a", "b"))
    assert merge(tree, lambda low, high: "x") == "x"


# --- regret ---


def test_regret_is_worst_and_geometric_mean():
    found = regret([("a", 1.0), ("b", 1.21), ("c", None), ("d", 1.21)])
    assert found.geometric_mean == pytest.approx((1.21**2) ** (1 / 3))
    assert (found.worst, found.worst_workload, found.workloads, found.unmeasured) == (1.21, "b", 3, 1)
    assert regret([]) is None and regret([("a", None)]) is None
