"""What is measured: batches by their lengths, each with a name that says them; standard lists.

Nouns: host integers and words. Bytes and operations are counted by the runtime's explain, for a layer as the
`layers` entries of a package's manifest describe it. A name is a workload in words, and `parse` reads it
back:

    dec b32 k4k                        32 sequences of one query row over 4096 keys
    dec b64 ragged k2k s1              64 of lognormal lengths: median 2048, sigma 0.8, seed 1 (default 0)
    dec b17 loguniform k128k s5        17 of lengths log-uniform from 1 to 131072, seed 5
    dec b1 k32k + b15 k512             both together
    spec b16 q4 k4k                    16 sequences of 4 query rows (speculative tokens) over 4096 keys
    pre b8 2k                          8 first prefills of 2048 rows
    chunk q2k of 16k                   the last 2048 rows of a prefill of 16384; of 4: `chunk b4 q2k of 16k`
    chunk b9 loguniform q8k of 40k s5  9 of rows log-uniform from 1 to 8192, half of them behind a cached prefix
    mixed pre b1 2k + dec b32 k4k      kinds together

k stands for 1024, and a multiple of it is spelled so.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from random import Random

from specgen.errors import SpecgenError

KINDS = ("dec", "spec", "pre", "chunk", "mixed")
FORMS = {
    "dec": r"b(?P<seqs>\d+) (?P<drawn>(ragged|loguniform) )?k(?P<keys>\d+k?)( s(?P<seed>\d+))?",
    "spec": r"b(?P<seqs>\d+) (?P<drawn>(ragged|loguniform) )?q(?P<rows>\d+k?) k(?P<keys>\d+k?)( s(?P<seed>\d+))?",
    "pre": r"b(?P<seqs>\d+) (?P<drawn>(ragged|loguniform) )?(?P<keys>\d+k?)( s(?P<seed>\d+))?",
    "chunk": r"(b(?P<seqs>\d+) )?(?P<drawn>loguniform )?q(?P<rows>\d+k?) of (?P<keys>\d+k?)( s(?P<seed>\d+))?",
}
SIGMA, SHORTEST, LONGEST = 0.8, 16, 16  # ragged lengths: keys at least, and medians at most
MOST_ROWS = 1 << 14  # query rows of a log-uniform chunk batch, all sequences together


@dataclass(frozen=True)
class Workload:
    """A batch by lengths: `seqs` holds (query rows, keys) of each sequence, the rows' own keys included."""

    name: str
    seqs: tuple[tuple[int, int], ...]

    @property
    def kind(self) -> str:
        """One of KINDS: the first word of the name."""
        return self.name.split()[0]

    @property
    def tokens(self) -> int:
        """Query rows of all sequences."""
        return sum(rows for rows, _ in self.seqs)

    @property
    def query_len(self) -> int:
        """Query rows of the sequence that has most."""
        return max(rows for rows, _ in self.seqs)

    @property
    def keys(self) -> int:
        """Keys of the longest sequence."""
        return max(keys for _, keys in self.seqs)

    @property
    def uniform(self) -> tuple[int, int] | None:
        """(query rows, keys) where all sequences are alike, else None."""
        return self.seqs[0] if len(set(self.seqs)) == 1 else None

    def bytes(self, layer: Mapping) -> int:
        """Bytes that attention must move: queries, visible keys and values, tables, outputs."""
        return self._work(layer)[0]

    def operations(self, layer: Mapping) -> int:
        """Multiplications and additions of the attention of `layer`, over visible keys alone."""
        return self._work(layer)[1]

    def floor_us(self, layer: Mapping, read_GBs: float, matmul_TFLOPs: float) -> float:
        """The floor in microseconds: the larger of bytes / bandwidth and operations / rate."""
        return floor_us(layer, *self._work(layer), read_GBs, matmul_TFLOPs)

    def beyond(self, limits: Mapping) -> str | None:
        """Why a package of these limits (of its manifest) does not serve it; None if it does."""
        for name, value in (
            ("max_seqs", len(self.seqs)),
            ("max_seq_len", self.keys),
            ("max_tokens", self.tokens),
        ):
            if value > limits[name]:
                return f"needs {name} {value}, the package has {limits[name]}"
        return None

    def _work(self, layer: Mapping) -> tuple[int, int]:
        from specgen.runtime.explain import work  # torch: not needed to name workloads

        lengths = [(rows, keys, None) for rows, keys in self.seqs]
        return work(_geometry(layer), self.tokens, len(self.seqs), self.keys, None, lengths, False)


def _geometry(layer: Mapping):
    from specgen.runtime.geometry import geometry_of

    return geometry_of(layer, layer["query_heads"], layer["kv_heads"])


def floor_us(layer: Mapping, moved: int, operations: int, read_GBs: float, matmul_TFLOPs: float) -> float:
    """Microseconds that so many bytes and operations need at least, in a layer's dtype."""
    from specgen.runtime import explain

    return explain.floor_us(_geometry(layer), moved, operations, read_GBs, matmul_TFLOPs)


def parse(text: str) -> Workload:
    """The workload that a name says; SpecgenError with the forms there are if it is none."""
    name = " ".join(text.split())
    kind, _, rest = name.partition(" ")
    if kind == "mixed":
        parts = [parse(part) for part in rest.split(" + ")]
        if len(parts) < 2:
            raise SpecgenError(
                f"{text!r}: mixed needs several parts, such as 'mixed pre b1 2k + dec b32 k4k'"
            )
        return Workload(name, tuple(seq for part in parts for seq in part.seqs))
    if kind not in FORMS:
        raise SpecgenError(f"{text!r}: a workload begins with one of {', '.join(KINDS)}")
    return Workload(name, tuple(seq for part in rest.split(" + ") for seq in _part(text, kind, part)))


def _part(text: str, kind: str, part: str) -> list[tuple[int, int]]:
    match = re.fullmatch(FORMS[kind], part)
    if match is None:
        like = {
            "dec": "dec b32 k4k",
            "spec": "spec b16 q4 k4k",
            "pre": "pre b8 2k",
            "chunk": "chunk q2k of 16k",
        }
        raise SpecgenError(f"{text!r}: not a workload; needs a form such as '{like[kind]}'")
    found = match.groupdict()
    seqs, keys, seed = int(found["seqs"] or 1), _length(text, found["keys"]), int(found["seed"] or 0)
    rows = 1 if kind == "dec" else _length(text, found["rows"]) if "rows" in found else None
    if not seqs or not keys or rows == 0:
        raise SpecgenError(f"{text!r}: a number is 0; needs at least 1")
    if found["seed"] and not found["drawn"]:
        raise SpecgenError(f"{text!r}: a seed is for ragged and loguniform lengths; this batch is uniform")
    if rows and rows > keys:
        raise SpecgenError(f"{text!r}: {rows} query rows of {keys} keys; their own keys are among them")
    if kind == "chunk" and found["drawn"]:
        return loguniform_chunks(seqs, rows, keys, seed)
    draw = {"ragged": ragged, "loguniform": loguniform}.get((found["drawn"] or "").strip())
    lengths = draw(seqs, keys, seed) if draw else (keys,) * seqs
    return [(min(rows or length, length), length) for length in lengths]


def _length(text: str, word: str) -> int:
    length = int(word.removesuffix("k")) * (1024 if word.endswith("k") else 1)
    if word != spell(length):
        raise SpecgenError(f"{text!r}: {word} is spelled {spell(length)}")
    return length


def spell(length: int) -> str:
    """A length as names spell it: 512, 4k."""
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def ragged(seqs: int, median: int, seed: int = 0) -> tuple[int, ...]:
    """Lognormal lengths, sigma 0.8, from 16 to 16 medians; the same for the same seed, on any machine."""
    random = Random(seed)
    drawn = (int(random.lognormvariate(math.log(median), SIGMA)) for _ in range(seqs))
    return tuple(max(SHORTEST, min(LONGEST * median, length)) for length in drawn)


def loguniform(seqs: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, even on a logarithmic scale; the same for the same seed, on any machine."""
    random = Random(seed)
    return tuple(_loguniform(random, longest) for _ in range(seqs))


def loguniform_chunks(seqs: int, rows: int, keys: int, seed: int = 0) -> list[tuple[int, int]]:
    """(query rows, keys) of chunks: rows log-uniform from 1 to `rows`, half of them (a coin is tossed for each)
    behind a cached prefix, log-uniform from 1 to `keys` - `rows`.

    In a batch of more than MOST_ROWS rows they are scaled down to these; each sequence keeps one at least.
    """
    random = Random(seed)
    drawn = [
        (
            _loguniform(random, rows),
            _loguniform(random, keys - rows) if rows < keys and random.random() < 0.5 else 0,
        )
        for _ in range(seqs)
    ]
    total, most = sum(count for count, _ in drawn), max(MOST_ROWS, seqs)
    if total > most:
        drawn = [(1 + (count - 1) * (most - seqs) // (total - seqs), prefix) for count, prefix in drawn]
    return [(count, count + prefix) for count, prefix in drawn]


def _loguniform(random: Random, longest: int) -> int:
    return min(longest, int(math.exp(random.uniform(0, math.log(longest + 1)))))


def _all(*names: str) -> tuple[Workload, ...]:
    return tuple(parse(name) for name in names)


MAIN = _all(
    *("dec b1 k512", "dec b1 k4k", "dec b1 k32k", "dec b1 k128k", "dec b8 k4k", "dec b32 k1k", "dec b32 k4k"),
    *("dec b128 k2k", "dec b64 ragged k2k", "dec b1 k32k + b15 k512", "spec b16 q4 k4k"),
    *("pre b1 512", "pre b1 2k", "pre b1 8k", "pre b1 16k", "pre b8 2k", "chunk q2k of 16k"),
    "mixed pre b1 2k + dec b32 k4k",
)
# Geometries with rows of their own in the standard table: (query heads, kv heads, head dim).
OF_HEADS = {
    (32, 32, 128): _all("dec b16 k2k"),
    (32, 1, 128): _all("dec b16 k8k"),
    (14, 2, 64): _all("dec b32 k2k", "pre b1 4k", "pre b8 2k"),
    (8, 4, 256): _all("dec b16 k4k", "pre b1 4k", "pre b4 2k"),
}
STANDARD = tuple(dict.fromkeys((*MAIN, *(workload for rows in OF_HEADS.values() for workload in rows))))
# Facets: one thing varies. LENGTHS: the keys. SHARES: of 8 sequences, 0, half or all decode, at equal keys.
LENGTHS = _all(
    *(f"dec b16 k{keys}" for keys in ("512", "1k", "2k", "4k", "8k", "16k", "32k")),
    *(f"pre b1 {keys}" for keys in ("512", "1k", "2k", "4k", "8k", "16k")),
)
SHARES = _all(
    *(f"{kind}{keys}" for keys in ("512", "1k", "2k") for kind in ("pre b8 ", "dec b8 k")),
    *(f"mixed pre b4 {keys} + dec b4 k{keys}" for keys in ("512", "1k", "2k")),
)
# Of the end-to-end track: one token for each of a batch.
STEPS = _all(
    *("dec b1 k1k", "dec b1 k8k", "dec b1 k32k", "dec b8 k4k", "dec b32 k1k", "dec b32 k2k", "dec b32 k4k"),
)
NO_LIMIT = {"max_seqs": 256, "max_seq_len": 131072, "max_tokens": 16384}
_TRIES = 50  # draws for each random workload
MOST_KEYS = 1 << 19  # of a random batch, all sequences together: 2 GiB of cache at 8 kv heads of 128
# Of the lists random-decode and random-prefill: EACH batches of each of so many sequences.
EACH, DECODE_SEQS, PREFILL_SEQS = 8, (1, 3, 17, 256, 1000), (1, 3, 8, 23, 64)
DECODE_KEYS = 60 * 10**9 // 4096  # of a batch, all sequences together: 60 GB at 8 kv heads of 128 in 16 bits


def geometry(layer: Mapping) -> dict:
    """A layer's entry without its name and its indices: layers of equal geometry compare in one row."""
    return {
        field: value
        for field, value in layer.items()
        if field not in ("name", "layers") and value is not None
    }


def spell_geometry(layer: Mapping) -> str:
    """A layer's geometry in words: "32/8 heads of 128, bfloat16, pages of 16, window 1024"."""
    from specgen.runtime.geometry import features

    dims = (
        str(layer["qk_dim"])
        if layer["qk_dim"] == layer["v_dim"]
        else f"{layer['qk_dim']} (v {layer['v_dim']})"
    )
    words = [
        f"{layer['query_heads']}/{layer['kv_heads']} heads of {dims}",
        layer["dtype"],
        f"pages of {layer['page_size']}",
    ]
    words += [layer["mask"]] * (layer["mask"] != "causal") + [features(layer)] * bool(features(layer))
    return ", ".join(words)


def standard(layer: Mapping) -> tuple[Workload, ...]:
    """The standard rows of a layer: its geometry's own where there are such, else all."""
    return OF_HEADS.get((layer["query_heads"], layer["kv_heads"], layer["qk_dim"]), MAIN)


def random_workloads(
    kind: str, count: int, limits: Mapping = NO_LIMIT, seed: int = 0
) -> tuple[Workload, ...]:
    """`count` random workloads of a kind within a package's limits, the same for the same seed; fewer, perhaps none, where
    the limits have hardly room for the kind, such as two sequences in calls of one token.

    Batch sizes and lengths are drawn evenly on a logarithmic scale; half of the decode and prefill batches
    are ragged. Their names say their lengths, so `parse` reads them back.
    """
    random, found = Random(f"{kind} {seed}"), []
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        name = (
            _random_mixed(random, limits)
            if kind == "mixed"
            else f"{kind} {_random_part(kind, random, limits)}"
        )
        workload = parse(name)
        if workload.beyond(limits) is None and sum(keys for _, keys in workload.seqs) <= MOST_KEYS:
            found.append(workload)
    return tuple(found)


def _random_mixed(random: Random, limits: Mapping) -> str:
    return " + ".join(
        ["mixed pre " + _random_part("pre", random, limits), "dec " + _random_part("dec", random, limits)]
    )


def _random_part(kind: str, random: Random, limits: Mapping) -> str:
    def between(low: int, high: int) -> int:
        return max(low, min(high, round(math.exp(random.uniform(math.log(low), math.log(max(low, high)))))))

    seqs = between(1, limits["max_seqs"] if kind in ("dec", "spec") else min(16, limits["max_seqs"]))
    keys = between(min(SHORTEST, limits["max_seq_len"]), limits["max_seq_len"])
    rows, seed = between(2, 8), random.randrange(1000)
    unequal, tail = ("ragged ", f" s{seed}") if random.random() < 0.5 else ("", "")
    if kind == "chunk":
        return f"b{seqs} q{spell(min(between(2, keys), keys))} of {spell(keys)}"
    if kind == "spec":
        return f"b{seqs} q{min(rows, keys)} k{spell(keys)}"
    return f"b{seqs} {unequal}{'k' * (kind == 'dec')}{spell(keys)}{tail}"


@cache
def random_decode() -> tuple[Workload, ...]:
    """40 decode batches of 1 to 1000 sequences of log-uniform lengths up to 128k, of the seeds 0 and on.

    A seed whose batch has more than DECODE_KEYS keys is passed over: the batch is drawn anew from the next.
    """
    found, seed = [], 0
    for seqs in DECODE_SEQS:
        of_size = 0
        while of_size < EACH:
            workload = parse(f"dec b{seqs} loguniform k128k s{seed}")
            if sum(keys for _, keys in workload.seqs) <= DECODE_KEYS:
                found.append(workload)
                of_size += 1
            seed += 1
    return tuple(found)


@cache
def random_prefill() -> tuple[Workload, ...]:
    """40 batches of 1 to 64 chunks of up to 8k rows behind up to 32k cached keys, at most 16,384 rows a batch."""
    names = (
        f"chunk b{seqs} loguniform q8k of 40k s{EACH * i + each}"
        for i, seqs in enumerate(PREFILL_SEQS)
        for each in range(EACH)
    )
    return _all(*names)


def sets(layer: Mapping, limits: Mapping) -> dict[str, tuple[Workload, ...]]:
    """Lists of workloads by the name under which `specgen bench --rows` knows them."""
    drawn = (workload for kind in KINDS for workload in random_workloads(kind, 4, limits))
    return {
        "standard": standard(layer),
        "lengths": LENGTHS,
        "shares": SHARES,
        "steps": STEPS,
        "random": tuple(drawn),
        "random-decode": random_decode(),
        "random-prefill": random_prefill(),
    }


def select(chosen: str, layer: Mapping, limits: Mapping) -> tuple[Workload, ...]:
    """The workloads of a list's name, of a glob over the standard rows, or of one workload in words."""
    known = sets(layer, limits)
    if chosen in known:
        return known[chosen]
    if any(character in chosen for character in "*?["):
        found = tuple(workload for workload in STANDARD if fnmatchcase(workload.name, chosen))
        if not found:
            raise SpecgenError(
                f"--rows {chosen!r}: no standard row is named so; rows: {', '.join(w.name for w in STANDARD)}"
            )
        return found
    return (parse(chosen),)
