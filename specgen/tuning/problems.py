"""What `specgen tune` decides: problems of schedules that compete on batches that they all serve. Pure; imports nouns and the bundle."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, inf, log

from specgen.bench.workloads import Workload
from specgen.tuning.bundle import Bundle, Candidate, Group
from specgen.tuning.records import UNMEASURED, Schedule
from specgen.tuning.trial import Kernels

OBJECTIVES = ("mean", "best")
KEPT = 4  # launches of each role that are tried together


@dataclass(frozen=True)
class Entry:
    """A schedule that competes: the symbols that it launches, and the digests of their kernels, as records have them; whether the
    product launches it without measurements, for some calls."""

    schedule: Schedule
    kernels: Kernels
    digests: tuple[str, ...]
    untuned: bool = False


@dataclass(frozen=True)
class Problem:
    """Entries that compete on the same batches of one geometry; the first is the product's untuned choice, where it compiled."""

    name: str
    group: Group
    entries: tuple[Entry, ...]
    workloads: tuple[Workload, ...]


Times = Mapping[Kernels, Mapping[str, float]]  # by kernels and by the name of a batch, microseconds


def single_problems(bundle: Bundle, group: Group, workloads: Sequence[Workload]) -> list[Problem]:
    """The problems of schedules with one launch: decode by the query rows that it takes, prefill alone, varlen."""
    found, low = [], 1
    for high in bundle.query_lens:
        taken = [w for w in workloads if low <= w.query_len <= high]
        filling = [c for c in group.of("decode", high) if not c.launch.config.shares]
        found.append((f"decode of {_rows(low, high)}", [_entry(c, high) for c in filling], taken))
        low = high + 1
    longer = [w for w in workloads if w.query_len >= low]
    whole = [w for w in longer if min(rows for rows, _ in w.seqs) >= low]
    # Where all are mixed, by those: else the launches that meet would be the first that come.
    found.append(("prefill", [_entry(c) for c in group.of("prefill", 0)], whole or longer))
    packed = [w for w in whole if all(rows == keys for rows, keys in w.seqs)]
    found.append(("varlen", [_entry(c) for c in group.of("varlen", None)], packed))
    return _posed(group, found)


def joint_problem(bundle: Bundle, group: Group, workloads: Sequence[Workload], times: Times) -> list[Problem]:
    """The problem of batches that have longer sequences than decode takes: decode and prefill together, or prefill alone.

    The launches of a schedule run one after another, so that only the best of each role need meet: by the `times` of the
    problems above KEPT of each that together lose least; what is launched without measurements, and every decode that leaves
    multiprocessors to a prefill beside it. None where the bundle lacks a role, or no batch is mixed.
    """
    most = bundle.query_lens[-1]
    decode, alone = group.of("decode", most), group.of("prefill", 0)
    behind = {c.launch: c for c in group.of("prefill", most)}
    best = together([_entry(c) for c in alone], times)
    rows = [c.launch for c in alone if c.untuned] + [entry.schedule.prefill for entry in best]
    prefill = [behind[launch] for launch in dict.fromkeys(rows) if launch in behind]
    kept = {entry.schedule.decode for entry in together([_entry(c, most) for c in decode], times)}
    chosen = [c for c in decode if c.untuned or c.launch in kept or c.launch.config.shares]
    entries = [_pair(d, p, most) for d, p in product(chosen, prefill)]
    return _posed(group, [("decode and prefill", entries and entries + best, [w for w in workloads if w.query_len > most])])


def together(entries: Sequence[Entry], times: Times, most: int = KEPT) -> list[Entry]:
    """At most so many entries: the best, then always the one with which the best of all is lowest, in the mean over the batches.

    The best few by their own means are alike: on an H200 all were for the short prompts that most batches are.
    """
    left = ranked(entries, times)
    best = best_times(entries, times)
    reached = dict.fromkeys(best, UNMEASURED)  # by the chosen: their best ratio on each batch

    def ratio(entry: Entry, batch: str) -> float:
        return times.get(entry.kernels, {}).get(batch, inf) / best[batch]

    def lost(entry: Entry) -> float:
        return round(sum(log(min(reached[batch], ratio(entry, batch))) for batch in best), 9)

    chosen: list[Entry] = []
    while left and len(chosen) < most:
        chosen.append(min(left, key=lost) if chosen else left[0])
        left.remove(chosen[-1])
        reached = {batch: min(known, ratio(chosen[-1], batch)) for batch, known in reached.items()}
    return chosen


def ranked(entries: Sequence[Entry], times: Times) -> list[Entry]:
    """Entries with times, the best first: those measured on most batches by their score, then the others.

    Where none has a time: all as they come.
    """
    measured = [entry for entry in entries if times.get(entry.kernels)]
    best = best_times(entries, times)
    most = max((len(times[entry.kernels]) for entry in measured), default=0)

    def order(entry: Entry) -> tuple[bool, float]:
        return len(times[entry.kernels]) < most, score(entry, times, best)

    return sorted(measured, key=order) or list(entries)


def score(entry: Entry, times: Times, best: Mapping[str, float], objective: str = "mean") -> float | None:
    """An entry's times over the `best` time of each batch, 1 is best; None without times.

    objective "mean": the geometric mean over its batches; "best": the smallest, for an entry that wins somewhere.
    """
    ratios = [time / best[batch] for batch, time in times.get(entry.kernels, {}).items()]
    if not ratios:
        return None
    return min(ratios) if objective == "best" else exp(sum(map(log, ratios)) / len(ratios))


def best_times(entries: Iterable[Entry], times: Times) -> dict[str, float]:
    """The best time of each batch among these entries, microseconds."""
    best: dict[str, float] = {}
    for entry in entries:
        for batch, time in times.get(entry.kernels, {}).items():
            best[batch] = min(time, best.get(batch, time))
    return best


def _posed(group: Group, parts: Iterable[tuple[str, list[Entry], list[Workload]]]) -> list[Problem]:
    """Problems of those that have something to decide."""
    label = f"{group.layer['name']} {group.layer['query_heads']}/{group.layer['kv_heads']}"
    return [
        Problem(f"{label}: {name}", group, tuple(entries), tuple(workloads))
        for name, entries, workloads in parts
        if entries and workloads
    ]


def _rows(low: int, high: int) -> str:
    return f"{high} query row{'s' * (high > 1)}" if low == high else f"{low} to {high} query rows"


def _entry(candidate: Candidate, max_query_len: int = 0) -> Entry:
    """One launch: decode of up to `max_query_len` rows, or a family that takes every sequence."""
    launch, digests = candidate.launch, (candidate.digest,)
    if candidate.role == "decode":
        return Entry(Schedule(launch, None, max_query_len), Kernels(decode=candidate.symbol), digests, candidate.untuned)
    role = {candidate.role: candidate.symbol}
    return Entry(Schedule(None, launch, 0), Kernels(**role), digests, candidate.untuned)


def _pair(decode: Candidate, prefill: Candidate, max_query_len: int) -> Entry:
    schedule = Schedule(decode.launch, prefill.launch, max_query_len)
    digests = decode.digest, prefill.digest
    return Entry(schedule, Kernels(decode.symbol, prefill.symbol), digests, decode.untuned and prefill.untuned)
