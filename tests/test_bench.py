"""Workloads, batches and timing of the bench: counts by brute force, names, errors, interleaving."""

import itertools
from importlib import import_module
from pathlib import Path

import pytest
import torch

from specgen.bench import timing
from specgen.bench.batch import PIECE, PIECES, Batch
from specgen.bench.timing import Samples
from specgen.bench.workloads import (
    DECODE_KEYS,
    KINDS,
    LENGTHS,
    MAIN,
    NO_LIMIT,
    OF_HEADS,
    SHARES,
    STANDARD,
    STEPS,
    Workload,
    loguniform,
    parse,
    ragged,
    random_decode,
    random_prefill,
    random_workloads,
    select,
    standard,
)
from specgen.errors import SpecgenError
from specgen.load import load
from specgen.runtime import reference

LAYER = {
    "name": "global",
    "query_heads": 4,
    "kv_heads": 2,
    "qk_dim": 32,
    "v_dim": 16,
    "scale": 32**-0.5,
    "mask": "causal",
    "page_size": 4,
    "dtype": "float32",
}
LLAMA = LAYER | {
    "query_heads": 32,
    "kv_heads": 8,
    "qk_dim": 128,
    "v_dim": 128,
    "page_size": 16,
    "dtype": "bfloat16",
}
FEATURES = (
    {},
    {"sliding_window": 9},
    {"chunk": 16},
    {"mask": "bidirectional"},
    {"layout": "HND", "softcap": 20.0, "sinks": True, "alibi": True},
    {"mask": "bidirectional", "alibi": True},
)
SMALL = (
    "dec b3 k21",
    "dec b4 ragged k20 s2",
    "spec b2 q4 k19",
    "pre b2 37",
    "chunk b2 q9 of 23",
    "mixed pre b1 7 + dec b2 k33",
)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_work_is_what_brute_force_counts(name, features):
    layer, workload = LAYER | features, parse(name)
    group, dims = layer["query_heads"] // layer["kv_heads"], layer["qk_dim"] + layer["v_dim"]
    keys = pairs = pages = 0
    for rows, length in workload.seqs:
        positions = torch.arange(length - rows, length)
        rule = (layer["mask"], layer.get("sliding_window"), layer.get("chunk"))
        seen = reference.visible(positions, length, *rule)
        pairs += int(seen.sum())
        used = seen.any(0).nonzero()[:, 0]
        keys += len(used)
        pages += len(set((used // layer["page_size"]).tolist()))
    assert workload.operations(layer) == 2 * pairs * layer["kv_heads"] * group * dims
    values = workload.tokens * layer["query_heads"] * dims + keys * layer["kv_heads"] * dims
    assert workload.bytes(layer) == 4 * (values + pages + 2 * len(workload.seqs) + 1)
    assert workload.floor_us(layer, 1000.0, 1e-9) == workload.bytes(layer) / 1e6, "float32 has no matrix rate"


@pytest.mark.parametrize(
    "name, seqs",
    [
        ("dec b32 k4k", ((1, 4096),) * 32),
        ("dec b1 k32k + b15 k512", ((1, 32768), *((1, 512),) * 15)),
        ("spec b16 q4 k4k", ((4, 4096),) * 16),
        ("pre b1 2k", ((2048, 2048),)),
        ("pre b2 700", ((700, 700),) * 2),
        ("chunk q2k of 16k", ((2048, 16384),)),
        ("chunk b2 q10 of 50", ((10, 50),) * 2),
        ("mixed pre b1 2k + dec b32 k4k", ((2048, 2048), *((1, 4096),) * 32)),
    ],
)
def test_a_name_says_the_lengths(name, seqs):
    workload = parse(f"  {name.replace(' ', '  ')} ")
    assert workload == Workload(name, seqs)
    assert workload.kind == name.split()[0]
    assert workload.tokens == sum(rows for rows, _ in seqs)
    assert (workload.query_len, workload.keys) == tuple(map(max, zip(*seqs)))
    assert workload.uniform == (seqs[0] if len(set(seqs)) == 1 else None)


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "begins with one of dec, spec, pre, chunk, mixed"),
        ("decode b1 k4k", "begins with one of"),
        ("dec b1", "form such as 'dec b32 k4k'"),
        ("dec b1 4k", "form such as 'dec b32 k4k'"),
        ("pre b1 k4k", "form such as 'pre b8 2k'"),
        ("dec b1 k4096", "4096 is spelled 4k"),
        ("dec b1 k04", "04 is spelled 4"),
        ("dec b0 k4k", "a number is 0"),
        ("dec b2 k0", "a number is 0"),
        ("spec b2 q0 k4", "a number is 0"),
        ("dec b2 k4k s1", "a seed is for ragged and loguniform lengths"),
        ("chunk q2 of 4 s1", "a seed is for ragged and loguniform lengths"),
        ("chunk b2 ragged q2 of 4", "form such as 'chunk q2k of 16k'"),
        ("chunk b2 loguniform q20 of 10 s1", "20 query rows of 10 keys"),
        ("chunk q20 of 10", "20 query rows of 10 keys"),
        ("mixed pre b1 2k", "mixed needs several parts"),
        ("mixed pre b1 2k + b32 k4k", "begins with one of"),
    ],
)
def test_what_is_no_workload(name, message):
    with pytest.raises(SpecgenError, match=message):
        parse(name)


def test_ragged_lengths_are_the_same_everywhere():
    assert ragged(5, 2048) == ragged(5, 2048, 0) == (1767, 2101, 3582, 1896, 6345)
    assert ragged(5, 2048, 1) != ragged(5, 2048)
    drawn = ragged(4000, 100)
    assert min(drawn) >= 16 and max(drawn) <= 1600 and 95 < sorted(drawn)[2000] < 105
    prefill = parse("pre b8 ragged 300 s5")
    assert [rows for rows, _ in prefill.seqs] == [keys for _, keys in prefill.seqs] == list(ragged(8, 300, 5))


def test_log_uniform_lengths_are_the_same_everywhere():
    assert loguniform(5, 1 << 17) == loguniform(5, 1 << 17, 0) == (20957, 7565, 141, 21, 413)
    drawn = sorted(loguniform(4000, 1 << 16, 1))
    assert drawn[0] == 1 and drawn[-1] <= 1 << 16 and 200 < drawn[2000] < 330
    assert max(loguniform(1000, 1)) == 1
    assert parse("dec b3 loguniform k64k s9").seqs == tuple((1, keys) for keys in loguniform(3, 1 << 16, 9))
    assert parse("spec b9 loguniform q4 k9 s9").seqs == tuple((min(4, n), n) for n in loguniform(9, 9, 9))


def test_log_uniform_chunks():
    chunks = parse("chunk b900 loguniform q8 of 40 s3").seqs
    assert chunks == parse("chunk b900 loguniform q8 of 40 s3").seqs
    assert chunks != parse("chunk b900 loguniform q8 of 40 s4").seqs
    assert {rows for rows, _ in chunks} == set(range(1, 9))
    prefixes = [keys - rows for rows, keys in chunks]
    assert min(prefixes) == 0 and max(prefixes) == 32 and 400 < prefixes.count(0) < 500
    assert parse("chunk b9 loguniform q8 of 8").seqs == tuple(
        (n, n) for n, _ in parse("chunk b9 loguniform q8 of 8").seqs
    )
    scaled = parse("chunk b60 loguniform q8k of 8k")
    assert 16300 < scaled.tokens <= 16384 and min(rows for rows, _ in scaled.seqs) == 1
    assert parse("chunk b20000 loguniform q8k of 8k").tokens == 20000, "a row each, and no less"


def test_random_lists_are_what_the_issues_ask_for():
    decode, prefill = random_decode(), random_prefill()
    assert [len(w.seqs) for w in decode] == [n for n in (1, 3, 17, 256, 1000) for _ in range(8)]
    assert len({w.name for w in (*decode, *prefill)}) == 80
    assert all(w.query_len == 1 and w.keys <= 131072 for w in decode)
    assert max(sum(keys for _, keys in w.seqs) for w in decode) <= DECODE_KEYS
    assert DECODE_KEYS * 8 * (128 + 128) * 2 <= 60e9
    assert decode[-1].name == "dec b1000 loguniform k128k s39", "no seed was passed over"
    assert len(prefill) == 40 and {len(w.seqs) for w in prefill} == {1, 3, 8, 23, 64}
    assert all(w.tokens <= 16384 and w.query_len <= 8192 for w in prefill)
    assert all(keys - rows <= 32768 for w in prefill for rows, keys in w.seqs)
    assert all(parse(w.name) == w for w in (*decode, *prefill))
    limits = {"max_seqs": 1024, "max_seq_len": 131072, "max_tokens": 16384}
    assert all(w.beyond(limits) is None for w in (*decode, *prefill))


def test_lists_hold_distinct_workloads():
    for rows in (STANDARD, LENGTHS, SHARES, STEPS):
        assert len({workload.name for workload in rows}) == len(rows)
        assert all(workload.beyond(NO_LIMIT) is None for workload in rows)
    assert standard(LLAMA) == MAIN == standard(LLAMA | {"query_heads": 24})
    assert [w.name for w in standard(LLAMA | {"kv_heads": 32})] == ["dec b16 k2k"]
    for keys, of_length in itertools.groupby(sorted(SHARES, key=lambda w: w.keys), key=lambda w: w.keys):
        shares = {
            sum(rows == 1 for rows, _ in w.seqs) / len(w.seqs): sum(k for _, k in w.seqs) for w in of_length
        }
        assert shares == {0.0: 8 * keys, 0.5: 8 * keys, 1.0: 8 * keys}


@pytest.mark.parametrize("kind", ["dec", "spec", "pre", "chunk", "mixed"])
def test_random_workloads_of_limits_without_room_end(kind):
    limits = {"max_seqs": 1, "max_seq_len": 1, "max_tokens": 1}
    found = random_workloads(kind, 4, limits)
    assert len(found) == (0 if kind == "mixed" else 4) and all(w.beyond(limits) is None for w in found)


@pytest.mark.parametrize("kind", KINDS)
def test_random_workloads(kind):
    limits = {"max_seqs": 40, "max_seq_len": 3000, "max_tokens": 2000}
    found = random_workloads(kind, 30, limits)
    assert found == random_workloads(kind, 30, limits) != random_workloads(kind, 30, limits, seed=1)
    for workload in found:
        assert workload.kind == kind and workload.beyond(limits) is None
        assert parse(workload.name) == workload
        assert all(1 <= rows <= keys for rows, keys in workload.seqs)


def test_choosing_rows():
    assert select("standard", LLAMA, NO_LIMIT) == MAIN
    assert [w.name for w in select("pre b1 *", LLAMA, NO_LIMIT)] == [
        f"pre b1 {k}" for k in ("512", "2k", "8k", "16k", "4k")
    ]
    assert select("dec b3 k77", LLAMA, NO_LIMIT) == (parse("dec b3 k77"),)
    assert {w.kind for w in select("random", LLAMA, NO_LIMIT)} == set(KINDS)
    assert select("random-decode", LLAMA, NO_LIMIT) == random_decode()
    assert select("random-prefill", LLAMA, NO_LIMIT) == random_prefill()
    with pytest.raises(SpecgenError, match="no standard row is named so; rows: dec b1 k512, "):
        select("nothing*", LLAMA, NO_LIMIT)


def test_beyond_limits():
    limits = {"max_seqs": 4, "max_seq_len": 100, "max_tokens": 8}
    assert parse("dec b4 k100").beyond(limits) is None
    assert parse("dec b5 k100").beyond(limits) == "needs max_seqs 5, the package has 4"
    assert parse("dec b4 k101").beyond(limits) == "needs max_seq_len 101, the package has 100"
    assert parse("pre b1 9").beyond(limits) == "needs max_tokens 9, the package has 8"


def run_reference(batch):
    """What a right kernel leaves in `out`."""
    names = ("mask", "scale", "sliding_window", "chunk", "softcap", "layout")
    formula = {name: batch.layer[name] for name in names if name in batch.layer}
    caches = {
        name: batch.arguments[name]
        for name in ("k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    }
    out, _ = reference.attention(batch.q, **caches, **formula, **batch.features)
    batch.out.copy_(out)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_error_of_a_batch(name, features):
    batch = Batch(parse(name), LAYER | features, "cpu", seed=3)
    assert (
        sorted(batch.features)
        == ["alibi_slopes", "sinks"][0 if features.get("alibi") else 1 : 2 if features.get("sinks") else 1]
    )
    batch.poison()
    assert batch.error() == float("inf"), "nothing was written"
    run_reference(batch)
    assert batch.errors().within(reference.tolerance(torch.float32)) and batch.error() < 1e-7
    batch.out[-1] *= 1.1
    assert batch.error() > 1e-3 and not batch.errors().within(reference.tolerance(torch.float32))
    assert batch.error(batch.out / 2) > 0.4


def test_long_batches_are_checked_in_pieces():
    batch = Batch(parse("chunk b2 q200 of 300"), LAYER, "cpu")
    assert batch._pieces == [(s, r, min(r + PIECE, 200)) for s in (0, 1) for r in (0, 64, 128, 192)]
    run_reference(batch)
    assert batch.error() < 1e-7
    many = Batch(parse("dec b500 k2"), LAYER, "cpu")
    assert len(many._pieces) == len(set(many._pieces)) == PIECES and many._pieces[-1] == (499, 0, 1)
    run_reference(many)
    assert many.error() < 1e-7


def test_tensors_of_a_batch():
    layer = LAYER | {"layout": "HND"}
    batch, again, other = (Batch(parse("dec b3 ragged k20"), layer, "cpu", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(batch.k_cache, again.k_cache) and not torch.equal(batch.k_cache, other.k_cache)
    used = [batch.block_table[seq, :pages].tolist() for seq, pages in enumerate(batch.pages)]
    assert sorted(itertools.chain(*used)) == list(range(sum(batch.pages))) and used[0] != sorted(used[0])
    assert batch.k_cache.shape == (sum(batch.pages), 2, 4, 32) and batch.caches[1].shape == (
        sum(batch.pages),
        4,
        2,
        16,
    )
    given = torch.zeros(3, 4, 32)
    batch = Batch(parse("dec b3 k20"), LAYER, "cpu", q=given)
    assert batch.q is given and batch.arguments["max_seqlen_q"] == 1 and batch.arguments["max_seqlen_k"] == 20


class FakeTimer:
    """Runs calls at once and says that each took what it returned."""

    def __init__(self):
        self.rounds, self.now = [], []

    def enqueue(self, call):
        self.now.append(call())

    def collect(self):
        self.rounds.append(self.now)
        self.now = []
        return [float(value) for value in self.rounds[-1]]


def test_rounds_are_interleaved():
    timer, counts = FakeTimer(), itertools.count()
    calls = {"a": lambda: 100 + next(counts), "b": lambda: 200, "c": lambda: 300}
    found = timing.measure(calls, rounds=12, timer=timer)
    assert len(timer.rounds) == 13 and all(len(of_round) == 3 for of_round in timer.rounds)
    assert found["a"].values == tuple(101.0 + i for i in range(12)), "the first round is not counted"
    assert found["b"].values == (200.0,) * 12
    assert len({tuple(value // 100 for value in of_round) for of_round in timer.rounds}) > 3, "orders differ"
    assert timing.measure({}, rounds=2, timer=FakeTimer()) == {}


def test_rounds_end_with_the_time(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(clock))
    counted = [
        len(timing.measure({"a": lambda: 1}, 20, FakeTimer(), until)["a"].values)
        for until in (None, -1, 4.5, 99)
    ]
    assert counted == [20, timing.LEAST_ROUNDS, 9, 20]


def test_statistics():
    samples = Samples(tuple(float(value) for value in (5, 1, 3, 2, 4, 9, 8, 7, 6, 10, 100)))
    assert samples.median == 6 and samples.spread == (2, 10)
    assert Samples((4.0, 2.0)).median == 3 and Samples((1.0,)).spread == (1, 1)
    times = {
        "empty": Samples((4.0,)),
        "read": Samples((1004.0,)),
        "copy": Samples((2004.0,)),
        "matmul": Samples((1604.0,)),
    }
    found = timing.rates(times)
    assert found["read_GBs"] == found["copy_GBs"] == pytest.approx(4.294967e3)
    assert found["matmul_TFLOPs"] == pytest.approx(687.2, rel=1e-3) and found["empty_us"] == 4


def test_host_time_is_the_median_of_loops():
    clock = iter([0.0, 1.0, 1.0, 11.0, 20.0, 22.0])
    calls, waits = [], []
    found = timing.host_us(
        lambda: calls.append(1), calls=10, loops=3, clock=lambda: next(clock), wait=lambda: waits.append(1)
    )
    assert found == pytest.approx(2e5) and len(calls) == 30 and len(waits) == 4


def test_specs_of_the_gpu_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "gpu")
    written = import_module("bench_specs").all_specs()
    loaded = {}
    for name, text in written.items():
        (tmp_path / name).write_text(text, "utf-8")
        loaded[name] = load(tmp_path / name).spec
    long = loaded["llama_long.yaml"].limits.model_dump()
    assert all(w.beyond(long) is None for w in (*random_decode(), *random_prefill()))
    heads = [(e.query_heads, e.kv_heads, e.head_dim.qk) for e in loaded["heads.yaml"].attention]
    assert heads == list(OF_HEADS)
    limits = loaded["heads.yaml"].limits.model_dump()
    assert all(w.beyond(limits) is None for rows in OF_HEADS.values() for w in rows)
