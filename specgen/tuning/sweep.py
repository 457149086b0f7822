"""One problem at a time: asks a search what to try, hands trials to an executor, keeps every result at once.

Touches the store and the executor that it is given. What the store already knows is not tried again, so a sweep that was
killed goes on where it ended.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from specgen.bench.workloads import Workload
from specgen.errors import SpecgenError
from specgen.tuning.bundle import Bundle, Candidate, Group
from specgen.tuning.current import Blocklist, comparable, latest
from specgen.tuning.executors import run_trial
from specgen.tuning.problems import OBJECTIVES, Entry, Problem, best_times, score
from specgen.tuning.records import WITHOUT_BATCH, Measurement, Schedule, Setting, Software
from specgen.tuning.search import SEARCHES, open_search
from specgen.tuning.store import Store
from specgen.tuning.trial import Answer, Kernels, Outcome, Trial
from specgen.variant import Geometry

FAR = 1.5  # an entry that is this many times slower than the best on each of its first batches is dropped,
FIRST = 3  # after so many, but for what is launched untuned: the others are judged by it, and that of long prompts is far behind on short ones
ASKED = 16  # entries that a sampler is asked for at once: they are measured batch by batch
NEAR = 1.1  # entries within this factor of a batch's best are timed once more, side by side
FINALISTS = 4  # of them at most, besides the untuned choice
FINALS = "finals"  # ends the `run` of those measurements

Report = Callable[[str, int, int], None]  # problem, trials done, trials planned


@dataclass(frozen=True)
class Plan:
    """How a sweep goes: search and objective by name, rounds of a timing, seconds that one trial may take."""

    search: str = "auto"
    objective: str = "mean"
    rounds: int = 10
    trial_s: float = 60.0
    seed: int = 0

    def __post_init__(self):
        for name, known in (("search", SEARCHES), ("objective", OBJECTIVES)):
            if (value := getattr(self, name)) not in known:
                raise SpecgenError(f"--{name}: needs one of {', '.join(known)}, got {value!r}")

    @property
    def final_rounds(self) -> int:
        """Of the timings that decide."""
        return 3 * self.rounds


@dataclass
class Summary:
    """What became of one problem: `entries` that competed, of which `dropped` were far from the best and `failed` have a bad
    outcome; trials that were `measured` now and `known` before; whether all was tried. `best` and its ratio to `untuned`.
    """

    problem: str
    batches: int
    entries: int
    dropped: int = 0
    failed: int = 0
    measured: int = 0
    known: int = 0
    complete: bool = False
    best: str = ""
    gain: float | None = None  # geometric mean of untuned times over the best time of each batch

    def __str__(self) -> str:
        trials = f"{self.measured} trials" + (f" and {self.known} known" if self.known else "")
        lines = [f"{self.problem}: {self.entries} schedules, {self.batches} batches, {trials}"]
        lines[0] += "" if self.complete else ", not complete"
        if self.failed or self.dropped:
            lines.append(f"  {self.failed} failed, {self.dropped} dropped as far from the best")
        if self.best:
            lines.append(f"  best over all batches: {self.best}")
        if self.gain:
            lines.append(f"  the best of each batch over the untuned choice: {self.gain:.3f}x")
        return "\n".join(lines)


class Sweep:
    """Trials of one bundle on the workers of an executor.

    `hello` is a worker's answer to a trial of no kernels: all workers must have its GPU. Deadlines are of time.monotonic, None
    is never. `times` holds what was measured, by kernels and by the name of a batch.
    """

    def __init__(
        self, bundle: Bundle, store: Store, executor: Executor, workers: int, hello: Answer, plan: Plan, report: Report
    ):
        self._bundle, self._store, self._plan, self._report = bundle, store, plan, report
        self._executor, self._workers, self._hello = executor, workers, hello
        self.times: dict[Kernels, dict[str, float]] = {}
        self._own: set[tuple[Kernels, str]] = set()  # what was timed in this sweep
        self._bad: set[tuple[str, ...]] = set()
        self._stored: dict[Geometry, list[Measurement]] = {}  # when the sweep began

    def refuse(self, group: Group) -> None:
        """Keeps the candidates of a group that did not compile as measurements that block them."""
        blocked = Blocklist(self._known(group))
        new = [c for c in group.candidates if c.status != "ok" and blocked.bad((c.digest,)) is None]
        self._store.add(*(self._refusal(group, candidate) for candidate in new))

    def run(self, problem: Problem, deadline: float | None) -> Summary:
        """Tries the entries of a problem until all are measured, dropped or failed, or until the deadline."""
        summary = Summary(problem.name, len(problem.workloads), len(problem.entries))
        finals = self._recall(problem)
        batches = {workload.name for workload in problem.workloads}
        summary.known = sum(len(self._of(entry)) for entry in problem.entries)
        search = open_search(self._plan.search, problem.entries, self._plan.seed)
        for entry in problem.entries:
            if self._of(entry).keys() >= batches:
                search.tell(entry, self._score(problem, entry))
        ended = False
        while not ended and (asked := search.ask(ASKED)):
            ended = self._compare(problem, asked, summary, deadline)
            for entry in asked:
                search.tell(entry, None if self._blocked(entry) else self._score(problem, entry))
        if not ended:
            ended = self._finals(problem, finals, summary, deadline)
        summary.complete = not ended
        self._conclude(problem, summary)
        return summary

    def _compare(self, problem: Problem, entries: Sequence[Entry], summary: Summary, deadline: float | None) -> bool:
        """Measures entries batch by batch, dropping those that stay far from the best; whether the time ended first."""
        alive = [entry for entry in entries if not self._blocked(entry)]
        summary.failed += len(entries) - len(alive)
        for place, workload in enumerate(problem.workloads):
            todo = [entry for entry in alive if workload.name not in self._of(entry)]
            if todo and self._lacks_anchor(problem, workload, todo):
                todo.insert(0, problem.entries[0])
            planned = summary.measured + len(todo) + len(alive) * (len(problem.workloads) - place - 1)
            trials = ((entry,) for entry in todo)
            for (entry,), answer in self._answers(problem.group, workload, trials, self._plan.rounds, deadline):
                summary.measured += 1
                for outcome in answer.outcomes:
                    self._keep(problem.group, workload, entry, answer, outcome)
                self._report(problem.name, summary.measured, planned)
            if _over(deadline):
                return True
            sound = [entry for entry in alive if not self._blocked(entry)]
            summary.failed += len(alive) - len(sound)
            alive = sound
            if place + 1 >= FIRST:
                best = best_times(problem.entries, self.times)
                near = {entry.kernels for entry in sound if (score(entry, self.times, best, "best") or 1.0) <= FAR}
                alive = [entry for entry in sound if entry is problem.entries[0] or entry.untuned or entry.kernels in near]
                summary.dropped += len(sound) - len(alive)
        return False

    def _lacks_anchor(self, problem: Problem, workload: Workload, todo: Sequence[Entry]) -> bool:
        """Whether the untuned choice must be timed again: what two runs measured of a batch makes their times comparable."""
        untuned = problem.entries[0]
        return untuned not in todo and (untuned.kernels, workload.name) not in self._own and not self._blocked(untuned)

    def _finals(self, problem: Problem, finals: set, summary: Summary, deadline: float | None) -> bool:
        """Times the best few of each batch side by side, with the untuned choice; whether the time ended first."""
        best = best_times(problem.entries, self.times)
        for workload in problem.workloads:
            contest = self._contest(problem, workload.name, best)
            if len(contest) < 2 or all((entry.kernels, workload.name) in finals for entry in contest):
                continue
            for entries, answer in self._answers(problem.group, workload, [contest], self._plan.final_rounds, deadline):
                answer = replace(answer, run=f"{answer.run} {FINALS}")
                for entry, outcome in zip(entries, answer.outcomes):
                    if outcome.status in ("ok", "wrong"):  # who crashed or hung among several is not known
                        self._keep(problem.group, workload, entry, answer, outcome)
                summary.measured += len(answer.outcomes)
                self._report(problem.name, summary.measured, summary.measured)
            if _over(deadline):
                return True
        return False

    def _contest(self, problem: Problem, batch: str, best: dict[str, float]) -> tuple[Entry, ...]:
        """The entries that come near the best of a batch, and the untuned choice."""
        measured = [entry for entry in problem.entries if batch in self._of(entry)]
        order = sorted(measured, key=lambda entry: self._of(entry)[batch])
        near = [entry for entry in order if self._of(entry)[batch] <= NEAR * best[batch]][:FINALISTS]
        return tuple(near + [entry for entry in measured if entry is problem.entries[0] and entry not in near])

    def _answers(
        self, group: Group, workload: Workload, trials: Iterable[tuple[Entry, ...]], rounds: int, deadline: float | None
    ) -> Iterator[tuple[tuple[Entry, ...], Answer]]:
        """Answers as they come; no trial is begun after the deadline. Two trials wait for each worker."""
        waiting: dict[Future, tuple[Entry, ...]] = {}
        left = iter(trials)
        more = True
        while more or waiting:
            while more and len(waiting) < 2 * self._workers:
                entries = next(left, None)
                more = entries is not None and not _over(deadline)
                if more:
                    trial = self._trial(group, workload, tuple(entry.kernels for entry in entries), rounds)
                    waiting[self._executor.submit(run_trial, trial, self._plan.trial_s)] = entries
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield waiting.pop(future), self._checked(future)

    def _trial(self, group: Group, workload: Workload, kernels: tuple[Kernels, ...], rounds: int) -> Trial:
        b = self._bundle
        return Trial(str(b.folder.resolve()), b.stamp, b.package, b.arch, group.layer, workload, kernels, rounds, self._plan.seed)

    def _checked(self, future: Future) -> Answer:
        """A future's answer. A worker that was lost, and its replacements, is a crash of the trial."""
        error = future.exception()
        if error is None:
            answer, ours = future.result(), self._hello.gpu
            if (answer.gpu.name, answer.gpu.multiprocessors) != (ours.name, ours.multiprocessors):
                raise SpecgenError(f"the workers have different GPUs, {ours.name} and {answer.gpu.name}; needs one model")
            return answer
        if type(error).__name__ == "KilledWorker":  # Dask gave the trial to several workers, and each died of it
            return replace(self._hello, outcomes=(Outcome("crash", detail=f"the Dask workers died: {error}"[:300]),))
        raise error

    def _keep(self, group: Group, workload: Workload, entry: Entry, answer: Answer, outcome: Outcome) -> None:
        """Stores an outcome; remembers its time, or that the entry is blocked."""
        without = outcome.status in WITHOUT_BATCH
        measurement = Measurement(
            setting=self._setting(group, answer),
            workload="" if without else workload.name,
            seqs=() if without else workload.seqs,
            schedule=entry.schedule,
            digests=entry.digests,
            status=outcome.status,
            samples_us=outcome.samples_us,
            empty_us=outcome.empty_us,
            error=outcome.error,
            when=_now(),
            run=answer.run,
            detail=outcome.detail,
        )
        self._store.add(measurement)
        if outcome.status == "ok":
            self.times.setdefault(entry.kernels, {})[workload.name] = measurement.time_us
            self._own.add((entry.kernels, workload.name))
        else:
            self._bad.add(entry.digests)

    def _refusal(self, group: Group, candidate: Candidate) -> Measurement:
        rows = candidate.max_query_len if candidate.role == "decode" else 0
        launches = {"decode": candidate.launch, "prefill": None} if rows else {"decode": None, "prefill": candidate.launch}
        return Measurement(
            setting=self._setting(group, self._hello),
            workload="",
            seqs=(),
            schedule=Schedule(**launches, max_query_len=rows),
            digests=(candidate.digest,),
            status=candidate.status,
            samples_us=(),
            empty_us=0.0,
            error=None,
            when=_now(),
            run=self._hello.run,
            detail=candidate.detail,
        )

    def _setting(self, group: Group, answer: Answer) -> Setting:
        b = self._bundle
        software = Software(b.triton, b.ptxas, answer.driver, answer.torch)
        return Setting(group.geometry, b.aligned, b.limits["max_seqs"], answer.gpu, software)

    def _known(self, group: Group) -> list[Measurement]:
        """What the store had of this geometry, GPU model and compiler when the sweep began."""
        if group.geometry not in self._stored:
            setting = self._setting(group, self._hello)
            found = self._store.measurements(geometry=group.geometry, gpu=setting.gpu.name)
            self._stored[group.geometry] = [m for m in found if comparable(m.setting, setting)]
        return self._stored[group.geometry]

    def _recall(self, problem: Problem) -> set[tuple[Kernels, str]]:
        """Reads what the store has for a problem: times, and what is blocked. Returns what was timed in finals."""
        known = self._known(problem.group)
        self._bad |= {m.digests for m in latest(known) if m.status not in ("ok", "compile")}  # the bundle's have compiled
        entries = {(entry.schedule, entry.digests): entry for entry in problem.entries}
        batches = {workload.seqs: workload.name for workload in problem.workloads}
        finals = set()
        for m in sorted(known, key=lambda m: (m.when, m.run.endswith(FINALS))):
            entry, batch = entries.get((m.schedule, m.digests)), batches.get(m.seqs)
            if m.status == "ok" and entry is not None and batch is not None:
                self.times.setdefault(entry.kernels, {})[batch] = m.time_us
                if m.run.endswith(FINALS):
                    finals.add((entry.kernels, batch))
        return finals

    def _of(self, entry: Entry) -> dict[str, float]:
        return self.times.get(entry.kernels, {})

    def _score(self, problem: Problem, entry: Entry) -> float | None:
        return score(entry, self.times, best_times(problem.entries, self.times), self._plan.objective)

    def _blocked(self, entry: Entry) -> bool:
        return entry.digests in self._bad or any((digest,) in self._bad for digest in entry.digests)

    def _conclude(self, problem: Problem, summary: Summary) -> None:
        """Names the best entry over all batches, and what choosing per batch gains over the untuned choice."""
        batches = {workload.name for workload in problem.workloads}
        whole = [entry for entry in problem.entries if self._of(entry).keys() >= batches]
        if whole:
            summary.best = min(whole, key=lambda entry: self._score(problem, entry)).schedule.label
        if problem.entries[0] in whole:
            summary.gain = self._score(problem, problem.entries[0])


def _over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
