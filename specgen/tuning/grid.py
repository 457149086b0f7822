"""The batches that `specgen tune` measures: a geometric grid within a spec's limits, or what a trace file saw.

Pure but for reading the trace. Names of the grid are those of bench/workloads.py, which reads them back.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import isqrt
from pathlib import Path

from specgen import json_text
from specgen.bench.workloads import KINDS, Workload, parse, random_workloads, spell
from specgen.dtypes import DTYPES
from specgen.errors import Diagnostic, SpecError, shown

STEP = 4  # factor between neighbours of the grid
SHORTEST = 16  # keys of the smallest batches
RANDOM = 16  # of each kind, beside a grid of STEP; fewer beside a coarser one
_RANDOM_SEED = 2
_COARSE = 2  # the exponent of the factor where three lengths vary at once
_RAGGED_SEED = 1
_FEW_ROWS = (16, 64, 256)
HELD_OUT = 8  # of each kind
_HELD_OUT_SEED = 1


def grid(limits: Mapping[str, int], step: int = STEP) -> list[Workload]:
    """Decode, speculative, prefill, chunked and mixed batches within `limits` (those of a manifest), `step` apart.

    Lengths go down from the limits in powers of `step`; where three of them vary at once, in powers of step squared (not the keys of
    speculative rows). Decode, chunked
    and mixed batches have the middles between these too, and up to RANDOM batches of each kind are drawn: what a tree learned from
    even batches alone was up to 2.3 times behind the best on uneven ones on an H200.
    """
    most = limits["max_spec_tokens"]
    coarse = step**_COARSE
    drawn = max(1, RANDOM * STEP // step)
    found = [
        *_decode(limits, step, coarse),
        *_spec(limits, most, step, coarse),
        *_prefill(limits, most, step, coarse),
        *_mixed(limits, most, coarse),
        *(workload.name for kind in KINDS for workload in random_workloads(kind, drawn, limits, _RANDOM_SEED)),
    ]
    workloads = (parse(name) for name in dict.fromkeys(found))
    return [workload for workload in workloads if workload.beyond(limits) is None]


def held_out(limits: Mapping[str, int]) -> list[Workload]:
    """Random batches of every kind that judge a tree and are never fitted to: measured like the grid's, which they are none of."""
    known = {workload.seqs for workload in grid(limits)}
    drawn = (workload for kind in KINDS for workload in random_workloads(kind, HELD_OUT, limits, _HELD_OUT_SEED))
    return [workload for workload in drawn if workload.seqs not in known]


def _decode(limits: Mapping, step: int, coarse: int) -> Iterator[str]:
    for seqs, keys in _fives(_counts(limits["max_seqs"], step), _lengths(limits["max_seq_len"], step)):
        yield f"dec b{seqs} k{spell(keys)}"
    for seqs in _counts(limits["max_seqs"], coarse):
        for keys in _lengths(limits["max_seq_len"] // 16, coarse):  # the longest of a ragged batch has 16 medians
            if seqs > 1:
                yield f"dec b{seqs} ragged k{spell(keys)} s{_RAGGED_SEED}"


def _spec(limits: Mapping, most: int, step: int, coarse: int) -> Iterator[str]:
    # Keys in steps as for decode: where one tile of rows gives way to another lay between coarse ones, and cost up to 26 % on an H200.
    for rows in sorted({2, most}):
        if 1 < rows <= most:
            for seqs in _counts(limits["max_seqs"], coarse):
                for keys in _lengths(limits["max_seq_len"], step):
                    if keys >= rows:
                        yield f"spec b{seqs} q{rows} k{spell(keys)}"


def _prefill(limits: Mapping, most: int, step: int, coarse: int) -> Iterator[str]:
    longest = min(limits["max_tokens"], limits["max_seq_len"])
    for rows in _lengths(longest, step):
        for seqs in _counts(limits["max_seqs"], step):
            if rows > most:
                yield f"pre b{seqs} {spell(rows)}"
    counts, lengths = _counts(limits["max_seqs"], coarse), _lengths(limits["max_seq_len"], coarse)
    for rows, keys, seqs in _fives(_lengths(longest, coarse), lengths, counts):
        if most < rows < keys:
            yield f"chunk b{seqs} q{spell(rows)} of {spell(keys)}"
    # Few rows behind many keys, one user's next turn: where it pays to cut keys among programs.
    for rows, keys, seqs in product(_FEW_ROWS, lengths, _counts(min(limits["max_seqs"], 4), step)):
        if most < rows < keys and rows * seqs <= longest:
            yield f"chunk b{seqs} q{spell(rows)} of {spell(keys)}"


def _mixed(limits: Mapping, most: int, coarse: int) -> Iterator[str]:
    longest = min(limits["max_tokens"] // 2, limits["max_seq_len"])
    counts, lengths = _counts(limits["max_seqs"] - 1, coarse), _lengths(limits["max_seq_len"] // 4, coarse)
    for rows, keys, seqs in _fives(_lengths(longest, coarse), lengths, counts):
        if rows > most and seqs > 1:
            yield f"mixed pre b1 {spell(rows)} + dec b{seqs} k{spell(keys)}"


def _fives(*axes: list[int]) -> Iterator[tuple[int, ...]]:
    """The points of a grid, then the middles of its cells, geometric means rounded down: as the five of a die lies.

    How evenly sequences fill a GPU's programs changes with every count: on an H200 a decode table from the points alone was up
    to 6 % behind the untuned one between them.
    """
    yield from product(*axes)
    yield from product(*([isqrt(low * high) for low, high in zip(axis, axis[1:])] for axis in axes))


def _counts(most: int, step: int) -> list[int]:
    """From 1 up to `most` in powers of `step`, `most` included."""
    found, count = [], 1
    while count < most:
        found.append(count)
        count *= step
    return [*found, max(1, most)]


def _lengths(most: int, step: int) -> list[int]:
    """From `most` down in powers of `step`, SHORTEST at least; `most` alone where it is shorter. In rising order."""
    found, length = [], most
    while length >= SHORTEST:
        found.append(length)
        length //= step
    return sorted(found) or [max(1, most)]


def ordered(
    workloads: Iterable[Workload], layer: Mapping, target: Mapping, cache_bytes: float, most_us: float
) -> list[Workload]:
    """Those whose keys and values fit `cache_bytes` and that a GPU like `target` needs no more than `most_us` for, at best.

    Ordered so that each beginning covers small and large: by bisecting the order of that time. `layer` and `target` as in a
    manifest: a rank's layer, and the bandwidth and matrix rate of the GPU.
    """
    per_key = layer["kv_heads"] * (layer["qk_dim"] + layer["v_dim"]) * DTYPES[layer["dtype"]].itemsize
    rates = target["memory_bandwidth_GBps"], target["matrix_rate_TFLOPs"]
    fitting = [w for w in workloads if sum(keys for _, keys in w.seqs) * per_key <= cache_bytes]
    floors = {workload: workload.floor_us(layer, *rates) for workload in fitting}
    by_time = sorted((w for w in fitting if floors[w] <= most_us), key=lambda w: (floors[w], w.name))
    return [by_time[place] for place in _bisected(len(by_time))]


def _bisected(count: int) -> list[int]:
    """0 to count - 1: the ends, then the middle, then the middles of the halves, and so on."""
    places, spans = [0, count - 1][:count], [(0, count - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            places.append(middle)
            spans += [(low, middle), (middle, high)]
    return places


def read_trace(path: Path, limits: Mapping[str, int]) -> list[Workload]:
    """The batches of a trace, the most frequent first. SpecError with the place of every line that is wrong.

    JSON Lines, one batch a line: {"seqs": [[query_len, kv_len], ...], "count": 12}; `count`, how often it came, may be
    left out. Equal batches are counted together; each is named after its line.
    """
    counts: dict[tuple, int] = {}
    names: dict[tuple, str] = {}
    mistakes = []
    for number, line in enumerate(json_text.read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            seqs, count = _batch(json_text.loads(line))
        except ValueError as error:
            mistakes.append(Diagnostic(str(path), number, *json_text.place_in_line(error), str(error)))
            continue
        workload = Workload(names.setdefault(seqs, f"trace {path.stem} {number}"), seqs)
        if reason := workload.beyond(limits):
            mistakes.append(Diagnostic(str(path), number, None, "seqs", reason))
        counts[seqs] = counts.get(seqs, 0) + count
    if not counts and not mistakes:
        mistakes.append(Diagnostic(str(path), None, None, "", "holds no batch"))
    if mistakes:
        raise SpecError(mistakes)
    return [Workload(names[seqs], seqs) for seqs in sorted(counts, key=lambda seqs: -counts[seqs])]


def _batch(line: object) -> tuple[tuple[tuple[int, int], ...], int]:
    """(seqs, count) of a trace's line."""
    needed = '{"seqs": [[query_len, kv_len], ...], "count": how often}'
    if not isinstance(line, dict) or set(line) - {"seqs", "count"} or not isinstance(line.get("seqs"), list):
        raise ValueError(f"needs {needed}, got {shown(line)}")
    count = line.get("count", 1)
    if not _natural(count) or count < 1:
        raise ValueError(f"count: needs an integer of at least 1, got {shown(count)}")
    seqs = []
    for place, pair in enumerate(line["seqs"]):
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_natural, pair)):
            raise ValueError(f"seqs.{place}: needs [query_len, kv_len], got {json.dumps(pair)[:60]}")
        seqs.append(tuple(pair))
    if not any(rows for rows, _ in seqs) or not any(keys for _, keys in seqs):
        raise ValueError("seqs: needs a query row and a key somewhere")
    return tuple(seqs), count


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
