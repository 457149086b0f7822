"""What tune may try: the space of configurations, the grid of batches, traces, problems and searches. No kernel runs here."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from specgen import rules
from specgen.bench.workloads import Workload, parse
from specgen.errors import SpecError, SpecgenError
from specgen.spec import Limits
from specgen.target import load_targets
from specgen.tuning import candidates, grid, space
from specgen.tuning.bundle import Bundle, Candidate, Group
from specgen.tuning.problems import Entry, best_times, joint_problem, ranked, score, single_problems, together
from specgen.tuning.records import ORIGIN, Launch, Schedule
from specgen.tuning.search import SMALL, Grid, open_search
from specgen.tuning.trial import Kernels
from specgen.variant import GLUON_FAMILIES, FAMILIES, Config, Geometry

TARGETS = load_targets()
LIMITS = Limits(max_seqs=256, max_seq_len=131072, max_tokens=16384, max_spec_tokens=8)
LLAMA = Geometry(32, 8, 128, 128, "bfloat16", 16, 128**-0.5, "causal")
LAYER = {"name": "a", "query_heads": 32, "kv_heads": 8, "qk_dim": 128, "v_dim": 128, "dtype": "bfloat16", "page_size": 16}
LAYER |= {"mask": "causal", "scale": 128**-0.5, "layout": "NHD"}
H200 = {"memory_bandwidth_GBps": 4800, "matrix_rate_TFLOPs": 989.4}
BOUNDS = {"decode": (1, 8), "prefill": (0, 8), "varlen": (None,)}
SHAPES = {
    "llama": LLAMA,
    "narrow": Geometry(14, 2, 64, 64, "float16", 16, 0.125, "causal"),
    "wide": Geometry(8, 4, 256, 256, "bfloat16", 16, 0.0625, "causal", softcap=50.0, sliding_window=4096),
    "single precision": Geometry(8, 8, 128, 128, "float32", 16, 0.1, "bidirectional"),
}


def entries_of(count, **axes):
    """Entries that differ in tile_n, or in the given axes."""
    found = []
    for number in range(count):
        config = Config(16, 16 << number, 4, 2, 1)
        config = replace(config, **{name: values[number] for name, values in axes.items()})
        found.append(Entry(Schedule(Launch("decode", config), None, 1), Kernels(decode=f"d{number}"), (f"{number}",)))
    return found


# The space


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_role_has_legal_configurations_on_every_target(name, target):
    shape, gpu = SHAPES[name], TARGETS[target]
    for role, bounds in BOUNDS.items():
        for family in space.families(role):
            assert family in FAMILIES
            for rows in bounds:
                found = space.space(family, shape, [gpu], LIMITS, rows)
                symbols = [variant.symbol for variant in found.variants]
                least = 0 if family in GLUON_FAMILIES else 4  # those are for one architecture and for what TMA can copy
                assert len(symbols) == len(set(symbols)) >= least, (family, rows, found.dropped)
                assert not set(symbols) & {symbol for symbol, _ in found.dropped}
                for variant in found.variants:
                    assert rules.why_not(variant, gpu, LIMITS) is None
                    assert variant.aligned and variant.max_query_len == rows and variant.config.origin
                preferred = candidates(family, shape, gpu, True, rows)
                legal = [config for config in preferred if any(v.config == config for v in found.variants)]
                assert [v.config for v in found.variants][: len(dict.fromkeys(legal))] == list(dict.fromkeys(legal))


def test_what_a_gpu_cannot_hold_is_dropped_with_the_reason():
    dropped = space.space("prefill", SHAPES["wide"], [TARGETS["l4"]], LIMITS, 8).dropped
    kinds = Counter(words for _, reason in dropped for words in ("l4 has 101376", "a thread has 255") if words in reason)
    assert kinds.total() == len(dropped) and min(kinds.values()) >= 1
    both = space.space("prefill", LLAMA, [TARGETS["h200"], TARGETS["l4"]], LIMITS, 8)
    alone = space.space("prefill", LLAMA, [TARGETS["h200"]], LIMITS, 8)
    assert {v.symbol for v in both.variants} < {v.symbol for v in alone.variants}
    registers = Geometry(8, 1, 512, 512, "bfloat16", 16, 0.04, "causal")
    dropped = dict(space.space("prefill", registers, [TARGETS["h200"]], LIMITS, 8).dropped)
    assert any(r.startswith("the accumulator takes 512 registers of each of 128 threads") for r in dropped.values())


def test_warps_that_share_an_accumulator_are_not_counted_by_their_number():
    wide = Geometry(8, 4, 256, 256, "bfloat16", 16, 0.0625, "causal")
    assert space.space("prefill_ws", wide, [TARGETS["h200"]], LIMITS, 8).variants
    assert space.space("decode_ws", wide, [TARGETS["h200"]], LIMITS, 1).variants
    assert not space.space("prefill_ws", wide, [TARGETS["a100_sxm"]], LIMITS, 8).variants


def test_one_group_with_two_programs_a_multiprocessor_is_tried():
    tried = [v.config for v in space.space("prefill_ws", LLAMA, [TARGETS["h200"]], LIMITS, 8).variants]
    assert [config.block_m for config in tried[:2]] == [64, 128], "what is known comes first"
    one = [config for config in tried if config.block_m == 64]
    assert {dict(config.options).get("loaders") for config in one} == {None, 2}
    assert {(config.tile_n, config.num_stages, config.ctas_per_multiprocessor) for config in one} == {(64, 2, 2)}


def test_decode_takes_no_more_rows_than_it_has():
    assert {v.config.block_m for v in space.space("decode", LLAMA, [TARGETS["h200"]], LIMITS, 1).variants} == {16}
    assert {v.config.block_m for v in space.space("decode", LLAMA, [TARGETS["h200"]], LIMITS, 8).variants} == {16, 32}


def test_options_are_axes():
    amd = space.space("prefill", LLAMA, [TARGETS["mi300x"]], LIMITS, 8).variants
    assert {dict(v.config.options).get("matrix_instr_nonkdim") for v in amd[1:]} >= {16, 32}
    assert {dict(v.config.options).get("waves_per_eu") for v in amd[1:]} == {None, 1, 2}
    plain = space.space("decode", LLAMA, [TARGETS["h200"]], LIMITS, 1).variants
    bound = space.space("decode", LLAMA, [TARGETS["h200"]], LIMITS, 1, max_registers=(96, 128)).variants
    assert {dict(v.config.options).get("maxnreg") for v in bound} == {None, 96, 128}
    assert len({v.symbol for v in bound}) == len(bound)
    without = {v for v in bound if "maxnreg" not in dict(v.config.options)}
    assert without == set(plain) and len(bound) > 2.9 * len(plain)
    assert space.space("decode", LLAMA, [TARGETS["mi300x"]], LIMITS, 1, max_registers=(96,)) == space.space(
        "decode", LLAMA, [TARGETS["mi300x"]], LIMITS, 1
    ), "AMD's compiler has no such option"


def test_samples_keep_the_first_and_the_order():
    items = list(range(100))
    chosen = space.sample(items, 10, seed=3)
    assert chosen[0] == 0 and len(chosen) == 10 and chosen == sorted(set(chosen))
    assert chosen == space.sample(items, 10, seed=3) != space.sample(items, 10, seed=4)
    assert space.sample(items, None) == items == space.sample(items, 100) and space.sample(items, 1) == [0]


# Batches


@pytest.mark.parametrize(
    "limits",
    [LIMITS, Limits(max_seqs=4, max_seq_len=100, max_tokens=20, max_spec_tokens=4), Limits(max_seqs=1, max_seq_len=1, max_tokens=1, max_spec_tokens=1)],
)
def test_the_grid_stays_within_the_limits_and_its_names_say_its_lengths(limits):
    limits = limits.model_dump()
    found = grid.grid(limits)
    assert found and len({w.name for w in found}) == len(found)
    for workload in found:
        assert workload.beyond(limits) is None and parse(workload.name) == workload
    assert max(w.keys for w in found) == limits["max_seq_len"]
    assert max(len(w.seqs) for w in found) == limits["max_seqs"]


def test_a_larger_step_is_a_coarser_grid():
    limits = LIMITS.model_dump()
    sizes = [len(grid.grid(limits, step)) for step in (4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 200 and sizes[-1] < sizes[0] // 3
    kinds = Counter(w.kind for w in grid.grid(limits))
    assert set(kinds) == {"dec", "spec", "pre", "chunk", "mixed"} and min(kinds.values()) >= 8


def test_batches_that_do_not_fit_or_take_too_long_are_left_out():
    found = grid.grid(LIMITS.model_dump(), 16)
    fits = grid.ordered(found, LAYER, H200, 8e9, float("inf"))
    assert all(sum(keys for _, keys in w.seqs) * 4096 <= 8e9 for w in fits) and len(fits) < len(found)
    quick = grid.ordered(found, LAYER, H200, float("inf"), 100.0)
    assert {w.name for w in quick} >= {"dec b1 k512", "pre b1 64"} and "dec b16 k128k" not in {w.name for w in quick}


def test_each_beginning_of_the_order_spreads_over_the_sizes():
    ordered = grid.ordered(grid.grid(LIMITS.model_dump(), 16), LAYER, H200, 8e9, 4000)
    assert len({w.name for w in ordered}) == len(ordered) > 15
    times = [w.floor_us(LAYER, 4800, 989.4) for w in ordered]
    ranks = [sorted(times).index(time) / (len(times) - 1) for time in times[:3]]
    assert ranks[:2] == [0, 1] and 0.4 < ranks[2] < 0.6
    assert [grid._bisected(count) for count in range(5)] == [[], [0], [0, 1], [0, 2, 1], [0, 3, 1, 2]]


def test_traces_are_counted_and_ordered(tmp_path):
    path = tmp_path / "monday.jsonl"
    lines = [{"seqs": [[1, 9], [20, 20]]}, {"seqs": [[1, 5]], "count": 3}, {"seqs": [[1, 9], [20, 20]], "count": 4}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = grid.read_trace(path, LIMITS.model_dump())
    assert found == [Workload("trace monday 1", ((1, 9), (20, 20))), Workload("trace monday 2", ((1, 5),))]


def test_mistakes_of_a_trace_are_named_by_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        'nonsense\n{"seqs": [[1, 2, 3]]}\n{"seqs": [[1, -2]]}\n{"seqs": [[0, 0]]}\n{"seqs": [[1, 2]], "count": 0}\n'
        '{"seqs": [[1, 200000]]}\n[1]\n{"seqs": [[1, 2]], "often": 1}\n'
    )
    with pytest.raises(SpecError) as caught:
        grid.read_trace(path, LIMITS.model_dump())
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines] == [str(number) for number in range(1, 9)]
    for line, words in zip(lines, ("Expecting value", "seqs.0: needs", "seqs.0: needs", "needs a query row and a key", "count: needs",
                                   "needs max_seq_len 200000, the package has 131072", "needs {", "needs {")):  # fmt: skip
        assert words in line
    path.write_text('{"seqs": [[1, 1]], "seqs": [[2, 2]]}\n' + "[" * 100_000 + "\n")
    with pytest.raises(SpecError) as caught:
        grid.read_trace(path, LIMITS.model_dump())
    assert str(caught.value).splitlines() == [
        f"{path}:1: seqs: duplicate key; keep one of the two",
        f"{path}:2: not valid JSON: nested too deeply",
    ]
    with pytest.raises(SpecError, match="embedded null byte"):
        grid.read_trace(Path("a\0b"), LIMITS.model_dump())
    with pytest.raises(SpecError, match="no such file"):
        grid.read_trace(tmp_path / "none.jsonl", LIMITS.model_dump())
    path.write_text("\n")
    with pytest.raises(SpecError, match="holds no batch"):
        grid.read_trace(path, LIMITS.model_dump())


def test_held_out_batches_are_drawn_within_the_limits_and_none_of_the_grid():
    limits = LIMITS.model_dump()
    found = grid.held_out(limits)
    assert found == grid.held_out(limits) and all(workload.beyond(limits) is None for workload in found)
    assert Counter(workload.kind for workload in found) == dict.fromkeys(("dec", "spec", "pre", "chunk", "mixed"), grid.HELD_OUT)
    assert not {workload.seqs for workload in found} & {workload.seqs for workload in grid.grid(limits)}


# Problems


def bundle_of(decode=2, prefill=3):
    found = []
    for number in range(max(decode, prefill)):
        config = Config(16 << number, 64, 4, 3, 2, (), ORIGIN if number else "a default")
        rows = [("decode", 1), ("decode", 8)] * (number < decode) + [("prefill", 0), ("prefill", 8)] * (number < prefill)
        found += [Candidate(role, Launch(role, config), n, f"{role}{n}_{number}", f"{role}{n}{number}") for role, n in rows]
    found.append(Candidate("decode", Launch("decode", Config(16, 16, 1, 1, 1)), 1, "bad", "bad", "budget", "spills"))
    group = Group(LLAMA, LAYER, tuple(found))
    workloads = ("dec b1 k4k", "spec b2 q4 k4k", "pre b1 2k", "chunk q64 of 2k", "mixed pre b1 2k + dec b4 k4k")
    bundle = Bundle(None, "p", "s", "0", "sm_90", "3", "12", True, (1, 8), (group,), workloads)
    return bundle, group, [parse(name) for name in workloads]


def test_schedules_compete_where_all_are_legal():
    bundle, group, workloads = bundle_of()
    problems = single_problems(bundle, group, workloads)
    assert [(p.name.split(": ")[1], len(p.entries), [w.name for w in p.workloads]) for p in problems] == [
        ("decode of 1 query row", 2, ["dec b1 k4k"]),
        ("decode of 2 to 8 query rows", 2, ["spec b2 q4 k4k"]),
        ("prefill", 3, ["pre b1 2k", "chunk q64 of 2k"]),
    ]
    for problem in problems:
        assert all(entry.schedule.legal(w.query_len) for entry in problem.entries for w in problem.workloads)
        assert problem.entries[0].kernels in (Kernels(decode="decode1_0"), Kernels(decode="decode8_0"), Kernels(prefill="prefill0_0"))


def test_where_all_batches_are_mixed_prefill_is_compared_on_them():
    bundle, group, workloads = bundle_of()
    (problem,) = single_problems(bundle, group, workloads[-1:])
    assert problem.name.endswith(": prefill") and len(problem.entries) == 3 and list(problem.workloads) == workloads[-1:]


def test_the_best_of_each_role_meet_and_the_untuned_pair_comes_first():
    bundle, group, workloads = bundle_of(decode=6, prefill=6)
    times = {Kernels(decode=f"decode8_{n}"): {"spec b2 q4 k4k": 10.0 - n} for n in range(6)}
    times |= {Kernels(prefill=f"prefill0_{n}"): {"pre b1 2k": 20.0 - n} for n in range(6)}
    (problem,) = joint_problem(bundle, group, workloads, times)
    pairs = [entry.kernels for entry in problem.entries if entry.kernels.decode]
    assert pairs[0] == Kernels("decode8_0", "prefill8_0")
    assert {k.decode for k in pairs} == {"decode8_0", *(f"decode8_{n}" for n in (2, 3, 4, 5))}
    assert {k.prefill for k in pairs} == {"prefill8_0", *(f"prefill8_{n}" for n in (2, 3, 4, 5))}
    assert len(pairs) == 25 and all(entry.schedule.max_query_len == 8 for entry in problem.entries if entry.schedule.decode)
    alone = [entry.kernels.prefill for entry in problem.entries if not entry.kernels.decode]
    assert alone == ["prefill0_5", "prefill0_4", "prefill0_3", "prefill0_2"]
    assert [w.name for w in problem.workloads] == ["pre b1 2k", "chunk q64 of 2k", "mixed pre b1 2k + dec b4 k4k"]
    assert all(len(entry.digests) == len(entry.schedule.launches) for entry in problem.entries)


def test_a_decode_that_leaves_multiprocessors_competes_only_beside_a_prefill():
    bundle, group, workloads = bundle_of(decode=6)
    launch = Launch("decode_ws", Config(16, 64, 4, 6, 1, (("share", 50),)))
    group = replace(group, candidates=(*group.candidates, Candidate("decode", launch, 8, "shares", "shares")))
    assert all(entry.kernels.decode != "shares" for p in single_problems(bundle, group, workloads) for entry in p.entries)
    times = {Kernels(decode=f"decode8_{n}"): {"spec b2 q4 k4k": 10.0 - n} for n in range(6)}
    (problem,) = joint_problem(bundle, group, workloads, times)
    beside = [entry for entry in problem.entries if entry.kernels.decode == "shares"]
    assert len(beside) == 3 and all(entry.schedule.prefill for entry in beside)


def test_a_bundle_of_one_role_has_no_joint_problem():
    bundle, group, workloads = bundle_of(decode=0)
    assert joint_problem(bundle, group, workloads, {}) == []
    assert [p.name.split(": ")[1] for p in single_problems(bundle, group, workloads)] == ["prefill"]
    assert single_problems(*bundle_of(prefill=0)[:2], []) == []


def test_scores_are_means_of_ratios():
    a, b, c, d = entries_of(4)
    times = {a.kernels: {"x": 10.0, "y": 40.0}, b.kernels: {"x": 20.0, "y": 20.0}, c.kernels: {"x": 11.0}}
    best = best_times([a, b, c, d], times)
    assert best == {"x": 10.0, "y": 20.0}
    assert score(a, times, best) == pytest.approx(2**0.5) == score(b, times, best)
    assert score(c, times, best) == pytest.approx(1.1) and score(d, times, best) is None
    assert score(b, times, best, "best") == 1.0 and score(c, times, best, "best") == pytest.approx(1.1)
    assert ranked([c, a, b, d], times) == [a, b, c], "those measured on most batches come first"
    assert ranked([d], times) == [d]


def test_those_that_meet_are_good_together_not_each_alone():
    short, alike, long, slow = entries_of(4)
    times = {
        short.kernels: {"a": 10.0, "b": 10.0, "c": 30.0},
        alike.kernels: {"a": 10.1, "b": 10.1, "c": 31.0},
        long.kernels: {"a": 30.0, "b": 30.0, "c": 10.0},
        slow.kernels: {"a": 40.0},
    }
    entries = [slow, alike, long, short]
    assert together(entries, times, 2) == [short, long] and ranked(entries, times)[:2] == [short, alike]
    assert together(entries, times, 9) == [short, long, alike, slow]
    assert together(entries, {}, 3) == [slow, alike, long], "as they come, without times"


# Searches


def test_the_grid_is_everything_once():
    entries = entries_of(5)
    search = open_search("auto", entries)
    assert isinstance(search, Grid) and search.ask(2) == entries and search.ask(2) == []


@pytest.mark.parametrize("kind", ["tpe", "nsga", "random"])
def test_samplers_propose_each_entry_once_the_untuned_first(kind):
    pytest.importorskip("optuna")
    axes = {"tile_n": [16, 32, 64, 16, 32, 64, 16, 32, 64, 128], "num_warps": [1, 1, 1, 2, 2, 2, 4, 4, 4, 4]}
    entries = entries_of(10, **axes)
    search = open_search(kind, entries, seed=1)
    search.tell(entries[7], 1.5)  # an earlier sweep knew it
    asked = []
    while some := search.ask(3):
        assert len(some) <= 3
        for entry in some:
            search.tell(entry, None if entry is entries[4] else 1 + abs(entries.index(entry) - 6))
        asked += some
    assert asked[0] is entries[0] and len(asked) == 9
    assert {entry.kernels for entry in asked} == {entry.kernels for entry in entries} - {entries[7].kernels}


def test_tpe_finds_good_entries_early():
    pytest.importorskip("optuna")
    axes = {
        "tile_n": [16 << (n % 5) for n in range(200)],
        "num_warps": [1 << (n // 5 % 4) for n in range(200)],
        "num_stages": [1 + n // 20 % 10 for n in range(200)],
    }
    entries = entries_of(200, **axes)

    def cost(entry):
        config = entry.schedule.decode.config
        return 1 + abs(config.tile_n.bit_length() - 7) + abs(config.num_warps.bit_length() - 2) + 0.3 * abs(config.num_stages - 5)

    search, asked = open_search("tpe", entries, seed=0), []
    while len(asked) < 64:
        for entry in search.ask(16):
            search.tell(entry, cost(entry))
            asked.append(entry)
    assert min(map(cost, asked)) == min(map(cost, entries))


def test_a_joint_entry_has_the_axes_of_both_launches():
    pytest.importorskip("optuna")
    bundle, group, workloads = bundle_of()
    (problem,) = joint_problem(bundle, group, workloads, {})
    search = open_search("random", problem.entries)
    asked = [entry for _ in range(20) for entry in search.ask(2)]
    assert {entry.kernels for entry in asked} == {entry.kernels for entry in problem.entries}


def test_many_entries_call_for_a_sampler(monkeypatch):
    pytest.importorskip("optuna")
    many = entries_of(SMALL + 1, tile_n=list(range(SMALL + 1)))
    assert not isinstance(open_search("auto", many), Grid) and isinstance(open_search("grid", many), Grid)
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(SpecgenError, match="--search tpe needs Optuna: pip install 'specgen.tune.'"):
        open_search("tpe", many)
