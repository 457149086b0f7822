"""In which order entries are tried: all of them, or those that an optimiser asks for. Ask and tell; runs nothing itself.

The samplers are Optuna's, imported only where one is chosen.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from specgen.errors import SpecgenError
from specgen.tuning.problems import Entry
from specgen.tuning.records import ROLES

SEARCHES = ("auto", "grid", "tpe", "nsga", "random")
SMALL = 512  # entries that "auto" tries all of
_TRIES = 64  # proposals that name no new entry, before one is drawn


class Search(Protocol):
    """A way through the entries of a problem."""

    def ask(self, count: int) -> list[Entry]:
        """At most `count` entries to try next, each once; none when all were asked for."""

    def tell(self, entry: Entry, score: float | None) -> None:
        """The score of an entry, lower is better; None: it failed."""


def open_search(kind: str, entries: Sequence[Entry], seed: int = 0) -> Search:
    """A search of one of SEARCHES over `entries`. SpecgenError without Optuna where it is needed."""
    if kind == "grid" or (kind == "auto" and len(entries) <= SMALL):
        return Grid(entries)
    return Sampled("tpe" if kind == "auto" else kind, entries, seed)


class Grid:
    """Every entry, in order, all at once."""

    def __init__(self, entries: Sequence[Entry]):
        self._left = list(entries)

    def ask(self, count: int) -> list[Entry]:
        """All that is left: together they are measured batch by batch, which compares them best."""
        asked, self._left = self._left, []
        return asked

    def tell(self, entry: Entry, score: float | None) -> None:
        """Nothing depends on it."""


class Sampled:
    """An Optuna study over the axes of the entries: the untuned choice first, then what the sampler proposes.

    A proposal that is no entry (it did not compile, it fits no GPU) fails at once and another is asked for; one that was
    tried is told its score again.
    """

    def __init__(self, kind: str, entries: Sequence[Entry], seed: int):
        try:
            import optuna
        except ImportError:
            raise SpecgenError(f"--search {kind} needs Optuna: pip install 'specgen[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        samplers = {
            "tpe": lambda: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
            "nsga": lambda: optuna.samplers.NSGAIISampler(seed=seed, population_size=16),
            "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        }
        self._study = optuna.create_study(sampler=samplers[kind]())
        self._failed, self._complete = optuna.trial.TrialState.FAIL, optuna.trial.TrialState.COMPLETE
        self._points = _points(entries)
        self._entries = {point: entry for entry, point in self._points.items()}
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(values) for name, values in _axes(self._entries).items()
        }
        self._left = dict(self._entries)
        self._scores: dict[Entry, float] = {}
        self._asked: dict[Entry, object] = {}
        if entries:
            self._study.enqueue_trial(dict(self._points[entries[0]]))

    def ask(self, count: int) -> list[Entry]:
        """New entries, as the sampler proposes them."""
        asked = []
        while self._left and len(asked) < count:
            asked.append(self._propose())
        return asked

    def tell(self, entry: Entry, score: float | None) -> None:
        """Tell the study; an entry that was not asked for (an earlier sweep measured it) becomes a trial of its own."""
        self._left.pop(self._points[entry], None)
        trial = self._asked.pop(entry, None)
        if score is not None:
            self._scores[entry] = score
        if trial is not None:
            self._study.tell(trial, score, state=self._failed if score is None else self._complete)
        elif score is not None:
            self._add(entry, score)

    def _propose(self) -> Entry:
        for _ in range(_TRIES):
            trial = self._study.ask(self._distributions)
            point = tuple(sorted(trial.params.items()))
            entry = self._entries.get(point)
            if point in self._left:
                self._asked[entry] = trial
                return self._left.pop(point)
            if entry in self._scores:
                self._study.tell(trial, self._scores[entry])
            else:
                self._study.tell(trial, state=self._failed)
        point = next(iter(self._left))  # the sampler has converged: what is left, in order
        return self._left.pop(point)

    def _add(self, entry: Entry, score: float) -> None:
        from optuna.trial import create_trial

        self._study.add_trial(create_trial(params=dict(self._points[entry]), distributions=self._distributions, value=score))


Point = tuple[tuple[str, int | str], ...]  # values of all axes, sorted by the axes' names


def _points(entries: Sequence[Entry]) -> dict[Entry, Point]:
    """Each entry as values of named axes; an axis that it has not is "none" there."""
    values = {entry: _values(entry) for entry in entries}
    axes = sorted({name for own in values.values() for name in own})
    return {entry: tuple((name, own.get(name, "none")) for name in axes) for entry, own in values.items()}


def _values(entry: Entry) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for role in ROLES:
        if launch := getattr(entry.schedule, role):
            config = launch.config
            found |= {
                f"{role} family": launch.family,
                f"{role} block_m": config.block_m,
                f"{role} tile_n": config.tile_n,
                f"{role} num_warps": config.num_warps,
                f"{role} num_stages": config.num_stages,
                f"{role} ctas": config.ctas_per_multiprocessor,
                **{f"{role} {name}": value for name, value in config.options},
            }
    return found


def _axes(points: Iterable[Point]) -> dict[str, tuple[int | str, ...]]:
    """The values that each axis has somewhere, in order."""
    found: dict[str, set] = {}
    for point in points:
        for name, value in point:
            found.setdefault(name, set()).add(value)
    return {name: tuple(sorted(values, key=lambda v: (isinstance(v, str), v))) for name, values in found.items()}
