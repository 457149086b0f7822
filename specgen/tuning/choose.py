"""Measurements -> the decision tree of one dispatch group, with its evidence and its regret. Pure; imports the parts of tuning.

The range of query lengths is cut where decode's bounds and its first full row block lie, and where decode and prefill share a call also
by whether there are several or many sequences, and long caches; each part gets a tree of its own over the schedules that are legal in
all of it. A schedule takes the place of the default only where that makes no measured workload slower beyond noise and one of them faster.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import median

from specgen.runtime.table import Bounds
from specgen.spec import Limits
from specgen.target import Target
from specgen.tuning import evidence
from specgen.tuning.cover import TOLERANCE, cover
from specgen.tuning.matrix import Matrix, is_faster, tabulate
from specgen.tuning.parts import Part, by_row_block, divided, joined
from specgen.tuning.records import Gpu, Measurement, Schedule, attention_part
from specgen.tuning.regret import Regret, regret
from specgen.tuning.relatives import alone, nearest
from specgen.tuning.tree import MAX_LEAVES, Leaf, Split, clip, decide, domain, fit, leaves, merge, replace_leaves
from specgen.variant import Geometry

# A workload counts once as it was measured, and this much for calls that give no bound on keys.
UNBOUNDED_WEIGHT = 0.25
# Sequences, and keys above which as many or fewer, and above which more, are never left to prefill alone. Bounds do not tell
# whose cache is the longest: if it is that of a single row, prefill alone takes several times as long, and decode launched in
# vain little: docs/tuning.md has the table. The last is for a prefill that cuts a cache and so spreads it over the GPU, of which a
# batch leaves less the more it holds, and that reads it once, for all heads of a group.
MANY_SEQS = 32
ALONE_KEYS = 2048
ALONE_KEYS_OF_MANY = 512
ALONE_KEYS_SPREAD = 8192
# Query rows of several sequences, up to which prefill cuts keys where their caches may be long: uncut, one row block of such a cache
# takes as long as all others together, or longer. It holds where what is launched without measurements cuts keys, too.
FEW_TOKENS = 1024
# For a workload to be fitted to: the part of the usual number of schedules that were measured on it, and by what factor decode must pay
# where the default was not.
LEAST_SHARE = 0.5
AHEAD = 1.05
# Slowdown that no workload should pass, and what passing it costs beside its logarithm.
WORST = 1.20
_WORST_COST = 0.2
_WORSE_THAN_DEFAULT = 1000.0
# The noise-free logarithm breaks ties between schedules that noise does not tell apart.
_TIE = 0.01
FOLDS = 5
# Different points of a leaf at least, where there are so many points for each of them: from one alone a leaf learns what may be all
# wrong beside it. Of 1 to 6 tried, 4 had the least regret on workloads left out.
MIN_POINTS = 4
POINTS_FOR_EACH = 25


@dataclass(frozen=True)
class Decision:
    """A leaf: what to launch and why. `measurements` are the ids behind it, none for a default that was not measured."""

    schedule: Schedule
    evidence: str
    measurements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """The tree of one dispatch group; its leaves are Decisions.

    gpu: whose measurements it is from, None if there were none; source: that GPU's target id. warnings: one for each target
    that has no measurements of its own. training: regret on the workloads it was fitted to; held_out: on workloads left
    out of a fit; default: of the default schedules on the same workloads; each None without measurements.
    """

    tree: object
    gpu: Gpu | None
    source: str | None
    warnings: tuple[str, ...]
    training: Regret | None
    held_out: Regret | None
    default: Regret | None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The leaves, lowest first."""
        return tuple(leaves(self.tree))

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules of the leaves, each once."""
        return tuple(dict.fromkeys(decision.schedule for decision in self.decisions))


def choose(
    measurements: Iterable[Measurement],
    *,
    geometry: Geometry,
    aligned: bool,
    targets: Sequence[Target],
    limits: Limits,
    defaults: Sequence[tuple[int, Schedule]],
    known: Mapping[str, Target],
    fits: Callable[[Schedule], str | None] = lambda schedule: None,
    held_out: Collection[str] = (),
    tolerance: float = TOLERANCE,
    max_leaves: int = MAX_LEAVES,
    refused: str = "",
) -> Choice:
    """The tree for a geometry on `targets`, GPUs of one architecture that share a table; the first decides whose data serve.

    measurements: usable ones (current.usable), of any geometry and GPU. defaults: (bound, schedule) by rising bound on query
    rows per sequence, the last at least limits.max_tokens: what is launched without measurements; each must be legal up to
    its bound. known: every target, to recognise measured GPUs. fits: the reason why a schedule cannot be used, or None; it also
    turns away the families of another call, such as varlen. held_out: names of workloads to judge by instead of fitting to;
    without any, every workload is left out of one of FOLDS fits. max_leaves: for each part.
    refused: why measurements may not choose, if that is so: the defaults serve, without a warning. Raises
    ValueError for defaults that leave a call without a schedule.
    """
    shape = attention_part(geometry)
    may_be_alone = aligned and not refused
    parts = divided(
        defaults,
        limits,
        lambda schedule: may_be_alone and fits(schedule) is None,
        ALONE_KEYS_SPREAD if shape.packed_heads == shape.group else 0,
    )
    own = [m for m in measurements if m.setting.geometry == shape and m.setting.aligned == aligned]
    relative = nearest(targets[0], {m.setting.gpu for m in own}, known)
    if relative is None or refused:
        reason = f"default: {refused or 'nothing measured for this geometry on this or a related GPU'}"
        tree = joined(parts, [part.untuned(lambda schedule: Decision(schedule, reason)) for part in parts])
        warnings = () if refused else tuple(alone(target, aligned) for target in targets)
        return Choice(clip(tree, limits), None, None, warnings, None, None, None)
    parts = by_row_block(parts, shape, relative.gpu.multiprocessors)
    model = _model(relative.gpu)
    untuned = list(dict.fromkeys(schedule for part in parts for schedule in (part.default, part.whole_default)))
    matrix = tabulate((m for m in own if _model(m.setting.gpu) == model), also=untuned)
    matrix = _within(matrix, limits, fits, untuned)
    given = {w for w, workload in enumerate(matrix.workloads) if workload.name in held_out}
    rows = [w for w in range(len(matrix.workloads)) if w not in given]
    options = (limits, tolerance, max_leaves)
    tree = _whole(matrix, rows, parts, *options)
    judged = _on(matrix, sorted(given), tree) if given else _cross_validated(matrix, parts, *options)
    named = replace_leaves(tree, lambda leaf: _decision(matrix, leaf, relative.gpu.name))
    defaults_tree = joined(parts, [part.untuned(lambda schedule: Leaf(matrix.schedules.index(schedule), ())) for part in parts])
    return Choice(
        clip(named, limits),
        relative.gpu,
        relative.name,
        _warnings(targets, own, relative, known),
        regret(_on(matrix, rows, tree)),
        regret(judged),
        regret(_on(matrix, rows, defaults_tree)),
    )


def replaces(matrix: Matrix, new: int, old: int, workloads: Iterable[int]) -> bool:
    """Whether schedule `new` may take the place of `old`: no workload gets slower beyond noise, and one gets faster.

    A time that is missing counts against a schedule where the other has one.
    """
    gains = False
    for w in workloads:
        ours, theirs = matrix.cells[w][new], matrix.cells[w][old]
        if theirs and (ours is None or is_faster(theirs, ours)):
            return False
        gains |= ours is not None and (theirs is None or is_faster(ours, theirs))
    return gains


def _decodes(schedule: Schedule) -> bool:
    return schedule.decode is not None


def _cuts(schedule: Schedule) -> bool:
    return schedule.prefill is not None and schedule.prefill.config.cuts


def _model(gpu: Gpu) -> tuple:
    """What makes two devices one model; the memory that a driver reports varies."""
    return gpu.name, gpu.arch, gpu.multiprocessors


def _within(matrix: Matrix, limits: Limits, fits, defaults: Collection[Schedule]) -> Matrix:
    """The part of the table that can occur: workloads within the limits, schedules that fit."""
    _, most = domain(limits)
    rows = [w for w, workload in enumerate(matrix.workloads) if all(a <= b for a, b in zip(workload.bounds, most))]
    columns = [s for s, schedule in enumerate(matrix.schedules) if schedule in defaults or fits(schedule) is None]
    return matrix.only(rows, columns)


def _whole(matrix: Matrix, rows: Sequence[int], parts: Sequence[Part], limits, tolerance, max_leaves) -> object:
    """The tree over all parts; its leaves are tree.Leaf, columns and points by index in `matrix`."""
    options = (limits, tolerance, max_leaves)
    return joined(parts, [_part_tree(matrix, rows, part, *options) for part in parts])


def _part_tree(matrix: Matrix, rows: Sequence[int], part: Part, *options) -> object:
    """The tree over a range of query lengths; `options` as in `_whole`."""

    def fitted(
        default: Schedule, inside: Callable[[Bounds], bool], allowed: Callable[[Schedule], bool] = lambda schedule: True
    ) -> object:
        return _fitted(matrix, rows, part, default, inside, allowed, *options)

    if part.default.decode is None or part.default.prefill is None:
        return fitted(part.default, lambda bounds: True)

    def suits_whole(schedule: Schedule) -> bool:
        """Whether no decode is launched in vain, which is no faster than without, whatever a run says."""
        return part.alone is None or not _decodes(schedule)

    def guarded(whole: bool, least: int, most: float, keys: int) -> Split:
        """So many sequences, all `whole` or some perhaps decode's: with more keys than that over schedules that spread a cache, and the
        latter with many more over those with a decode."""

        def within(above: float, up_to: float, allowed: Callable[[Schedule], bool], fewest: float = 0, tokens: float = inf) -> object:
            def inside(b: Bounds) -> bool:
                there = least <= b.seqs <= most and above < b.keys <= up_to and fewest < b.tokens <= tokens
                return there and (b.least_query_len > part.default.max_query_len) == whole

            return fitted(part.whole_default if whole else part.default, inside, allowed)

        def long_caches(above: float, up_to: float, allowed: Callable[[Schedule], bool]) -> object:
            if not _cuts(part.default):
                return within(above, up_to, allowed)
            few = within(above, up_to, lambda schedule: allowed(schedule) and _cuts(schedule), tokens=FEW_TOKENS)
            return Split("tokens", FEW_TOKENS, few, within(above, up_to, allowed, fewest=FEW_TOKENS))

        if whole:
            return Split("keys", keys, within(0, keys, suits_whole), long_caches(keys, inf, suits_whole))
        short = within(0, keys, lambda schedule: True)
        spread = max(keys, part.spread_keys)
        middle = long_caches(keys, spread, lambda schedule: _decodes(schedule) or _cuts(schedule))
        long = long_caches(spread, inf, _decodes)
        return Split("keys", keys, short, Split("keys", spread, middle, long))

    def several(whole: bool) -> Split:
        few, many = guarded(whole, 2, MANY_SEQS, ALONE_KEYS), guarded(whole, MANY_SEQS + 1, inf, ALONE_KEYS_OF_MANY)
        return Split("seqs", MANY_SEQS, few, many)

    # A sequence alone is whole.
    one = fitted(part.whole_default, lambda bounds: bounds.seqs == 1, suits_whole)
    shared = Split("least_query_len", part.default.max_query_len, several(False), several(True))
    return merge(Split("seqs", 1, one, shared), _same)


def _fitted(matrix: Matrix, rows, part: Part, untuned: Schedule, inside, allowed, limits, tolerance, max_leaves) -> object:
    """The tree for those calls of a part whose bounds are `inside`, `untuned` where nothing is better, over the schedules that are
    legal there and `allowed`."""
    default = matrix.schedules.index(untuned)
    legal = [s for s, schedule in enumerate(matrix.schedules) if schedule.legal(part.high) and allowed(schedule)]
    rows = [w for w in rows if part.low <= matrix.workloads[w].bounds.query_len <= part.high]
    bounds = {w: matrix.workloads[w].bounds for w in _telling(matrix, rows, part, legal, default)}
    # The same workloads again, as a call looks that gives no bound on keys: they pull, but promise nothing.
    unbound = {w: each._replace(keys=limits.max_seq_len) for w, each in bounds.items()}
    measured = [w for w in bounds if inside(bounds[w])]
    pulling = [w for w in bounds if inside(unbound[w])]
    rows = [w for w in bounds if w in measured or w in pulling]
    if not rows:
        return Leaf(default, ())
    table = matrix.only(rows, legal)
    costs = _costs(table, legal.index(default))
    columns = _candidates(table, costs, legal.index(default), tolerance)
    weights = [1.0] * len(measured) + [UNBOUNDED_WEIGHT] * len(pulling)
    places = {w: i for i, w in enumerate(rows)}
    losses = [[loss + _TIE * log(s) for loss, s in zip(table.losses[i], table.slowdowns[i])] for i in map(places.get, pulling)]
    charged = [[row[s] for s in columns] for row in [*(costs[places[w]] for w in measured), *losses]]
    points = [*(bounds[w] for w in measured), *(unbound[w] for w in pulling)]
    behind = [*measured, *pulling]  # the workload of each point
    fewest = min(MIN_POINTS, 1 + len(points) // POINTS_FOR_EACH)
    grown = fit(points, weights, charged, max_leaves=max_leaves, min_points=fewest, edges={"seqs": part.full_seqs})

    def settled(leaf: Leaf) -> Leaf:
        """The cheapest column that may take the place of the default, over the workloads measured there if there are any."""
        sums = [sum(weights[i] * charged[i][c] for i in leaf.points) for c in range(len(columns))]
        here = [i for i in leaf.points if i < len(measured)]
        workloads = tuple(sorted({behind[i] for i in here or leaf.points}))
        ranked = [legal[columns[c]] for c in sorted(range(len(columns)), key=lambda c: (c != leaf.column, round(sums[c], 9), c))]
        return Leaf(next(s for s in ranked if s == default or replaces(matrix, s, default, workloads)), workloads)

    return merge(replace_leaves(grown, settled), _same)


def _telling(matrix: Matrix, rows: Sequence[int], part: Part, legal: Sequence[int], default: int) -> list[int]:
    """The workloads that tell which of these columns is best. On others a sweep that did not end may have left out the best: few
    columns were measured there, beside what is usual; or, where not every prefill may serve alone, the default was not, and
    no decode beside a prefill is ahead of every prefill alone."""
    measured = {w: [s for s in legal if matrix.cells[w][s]] for w in rows}
    usual = median(map(len, measured.values())) if measured else 0
    alone = [s for s, schedule in enumerate(matrix.schedules) if schedule.legal(part.high) and not _decodes(schedule)]
    all_serve = set(alone) <= set(legal)

    def best(w: int, columns: Sequence[int]) -> float:
        return min((matrix.slowdowns[w][s] for s in columns if matrix.cells[w][s]), default=inf)

    def tells(w: int) -> bool:
        compared = default in measured[w] or all_serve or AHEAD * best(w, legal) <= best(w, alone) < inf
        return compared and len(measured[w]) >= max(1, LEAST_SHARE * usual)

    return [w for w in rows if tells(w)]


def _same(low: Leaf, high: Leaf) -> Leaf | None:
    if low.column != high.column:
        return None
    return Leaf(low.column, tuple(sorted({*low.points, *high.points})))


def _costs(table: Matrix, default: int) -> list[list[float]]:
    """[workload][schedule]: the log slowdown beyond noise, and what is not to happen if it can be helped."""
    costs = []
    for w, row in enumerate(table.cells):
        costs.append([])
        for s, cell in enumerate(row):
            slowdown = table.slowdowns[w][s]
            cost = table.losses[w][s] + _TIE * log(slowdown) + _WORST_COST * (slowdown > WORST)
            if row[default] and (cell is None or is_faster(row[default], cell)):
                cost += _WORSE_THAN_DEFAULT
            costs[-1].append(cost)
    return costs


def _candidates(table: Matrix, costs: list[list[float]], default: int, tolerance: float) -> list[int]:
    """The columns a tree may use: the default, the one that is best over all, and the cover of the workloads."""
    sums = [round(sum(column), 9) for column in zip(*costs)]
    return list(dict.fromkeys([default, sums.index(min(sums)), *cover(table, tolerance)]))


def _on(matrix: Matrix, rows: Iterable[int], tree: object) -> list[tuple[str, float | None]]:
    """(workload, slowdown of what the tree launches for it, None if not measured) for rows of `matrix`."""
    found = []
    for w in rows:
        workload = matrix.workloads[w]
        column = decide(tree, workload.bounds).column
        found.append((workload.name, matrix.slowdowns[w][column] if matrix.cells[w][column] else None))
    return found


def _cross_validated(matrix: Matrix, parts, limits, tolerance, max_leaves) -> list[tuple[str, float | None]]:
    """Like `_on` for every workload, each under a tree that was fitted without it."""
    rows, found = range(len(matrix.workloads)), []
    folds = min(FOLDS, len(rows))
    for fold in range(folds):
        left_out = rows[fold::folds]
        others = [w for w in rows if w not in left_out]
        found += _on(matrix, left_out, _whole(matrix, others, parts, limits, tolerance, max_leaves))
    return found


def _decision(matrix: Matrix, leaf: Leaf, gpu: str) -> Decision:
    schedule = matrix.schedules[leaf.column]
    cells = [cell for w in leaf.points if (cell := matrix.cells[w][leaf.column])]
    return Decision(schedule, evidence.text(matrix, leaf.column, leaf.points, gpu), tuple(cell.id for cell in cells))


def _warnings(targets: Sequence[Target], own: Sequence[Measurement], relative, known) -> tuple[str, ...]:
    """One line for each target that the table's measurements are not of."""
    found = [relative.warning]
    gpus = {m.setting.gpu for m in own}
    for target in targets[1:]:
        theirs = nearest(target, gpus, known)
        if theirs.warning is None and _model(theirs.gpu) != _model(relative.gpu):
            found.append(f"{target.id}: shares the table of {targets[0].id}, from measurements of {relative.name}")
        else:
            found.append(nearest(target, [relative.gpu], known).warning)
    return tuple(warning for warning in found if warning)
