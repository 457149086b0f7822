"""The choice for a dispatch group: when it leaves the default, what it may launch where, its evidence, and unknown GPUs."""

import time
from dataclasses import replace
from itertools import product
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import GEOMETRY, H200, SETTING, both, failure, measurement, rows, table

from specgen.runtime.table import Bounds
from specgen.spec import Limits
from specgen.target import load_targets
from specgen.tuning.choose import (
    ALONE_KEYS,
    ALONE_KEYS_OF_MANY,
    ALONE_KEYS_SPREAD,
    MANY_SEQS,
    choose,
    replaces,
)
from specgen.tuning.records import Gpu, Launch, Schedule
from specgen.tuning.relatives import identify, nearest
from specgen.tuning.tree import MAX_LEAVES, boxes, decide
from specgen.variant import Config

TARGETS = load_targets()
LIMITS = Limits(max_seqs=64, max_seq_len=32768, max_tokens=4096, max_spec_tokens=8)
DEFAULTS = ((1, rows(64)), (8, rows(64, 8)), (4096, both(64, 64)))
KEYS = (512, 2048, 8192, 32768)


def batch(seqs: int, keys: int, query_len: int = 1):
    return ((query_len, keys),) * seqs


def mixed(seqs: int, keys: int, query_len: int):
    """One sequence of so many rows, the others of one."""
    return batch(1, keys, query_len) + batch(seqs - 1, keys)


def chosen(measurements, targets=("h200",), **changes):
    options = dict(geometry=GEOMETRY, aligned=True, limits=LIMITS, defaults=DEFAULTS, known=TARGETS) | changes
    return choose(measurements, targets=[TARGETS[name] for name in targets], **options)


def decode_times(times: dict, query_len: int = 1, noise_us: float = 0.0, made=batch):
    """Measurements of {schedule: function of (sequences, keys)} over a grid of batches, `made` of sequences, keys and rows."""
    return [
        measurement(
            made(seqs, keys, query_len), schedule, of(seqs, keys), noise_us=noise_us, name=f"b{seqs} q{query_len} k{keys}"
        )
        for schedule, of in times.items()
        for seqs in (1, 8, 64)
        for keys in KEYS
    ]


# --- leaving the default ---


@pytest.mark.parametrize("wide, bound", [((1, 2, 8, 16, 32, 64), 16), ((1, 2, 8, 17, 40, 64), 17)])
def test_sequences_beyond_one_item_a_multiprocessor_are_another_matter(wide, bound):
    """8 key/value heads on 132 multiprocessors: of 17 sequences of one row some program has two items."""
    found = chosen(
        [
            measurement(batch(seqs, 512), schedule, us, name=f"b{seqs}")
            for seqs in wide
            for schedule, us in ((rows(64), 30.0), (rows(16), 10.0 if seqs <= bound else 20.0), (rows(32), 15.0))
        ]
    )

    def tile(seqs: int) -> int:
        return decide(found.tree, Bounds(1, seqs, seqs, 512, 1)).schedule.decode.config.tile_n

    assert tile(bound) == 16 and tile(wide[wide.index(bound) + 1]) == 32
    # Between 16 and 32 the jump is known; where a batch of 17 says otherwise it is not believed.
    assert (tile(bound + 1) == 32) == (bound == 16)


def test_a_schedule_replaces_another_only_beyond_noise_and_without_a_loss():
    matrix = table([[100, 99, 90, 90, None], [100, 99, 100, 104, 80]], noise_us=2.0)
    assert not replaces(matrix, 1, 0, [0, 1]), "faster everywhere, but within noise"
    assert replaces(matrix, 2, 0, [0, 1])
    assert not replaces(matrix, 2, 0, [1]), "no gain there"
    assert not replaces(matrix, 3, 0, [0, 1]), "a loss beyond noise"
    assert replaces(matrix, 3, 0, [0])
    assert not replaces(matrix, 4, 0, [0, 1]), "not measured where the other was"
    assert replaces(matrix, 0, 4, [0]) and not replaces(matrix, 0, 4, [0, 1])
    assert not replaces(matrix, 0, 0, [0, 1])


def test_noise_keeps_the_default():
    times = {rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 99.0, rows(32): lambda s, k: 98.5}
    choice = chosen(decode_times(times, noise_us=1.5))
    assert decide(choice.tree, Bounds(1, 8, 8, 512)).schedule == rows(64)
    quiet = chosen(decode_times(times, noise_us=0.1))
    assert decide(quiet.tree, Bounds(1, 8, 8, 512)).schedule == rows(32)
    assert quiet.default.geometric_mean == pytest.approx(100 / 98.5)
    assert quiet.training.worst == quiet.held_out.worst == 1.0


def test_nothing_gets_slower_than_the_default():
    """A schedule that is far better with few keys and a little worse with many takes only the few."""
    times = {rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 60.0 if k < 5000 else 102.0}
    choice = chosen(decode_times(times))
    assert [decide(choice.tree, Bounds(1, 8, 8, k)).schedule for k in KEYS] == [rows(16)] * 2 + [rows(64)] * 2
    assert choice.training.worst == 1.0 < choice.default.worst
    assert choice.gpu == H200 and choice.source == "h200" and choice.warnings == ()


def test_a_gain_that_one_schedule_gives_to_some_and_takes_from_others_is_split():
    times = {
        rows(64): lambda s, k: 100.0 + s,
        rows(16): lambda s, k: 50.0 if s == 1 else 200.0,
        rows(128): lambda s, k: 50.0 if s == 64 and k > 5000 else 200.0,
    }
    choice = chosen(decode_times(times))
    assert choice.training.worst == 1.0
    assert decide(choice.tree, Bounds(1, 1, 1, 32768)).schedule == rows(16)
    assert decide(choice.tree, Bounds(1, 8, 8, 32768)).schedule == rows(64)
    assert decide(choice.tree, Bounds(1, 64, 64, 8192)).schedule == rows(128)
    assert decide(choice.tree, Bounds(1, 64, 64, 2048)).schedule == rows(64)


def test_calls_without_a_bound_on_keys_pull_where_nothing_was_measured():
    """Limits beyond the longest measured workload: there the unbounded calls decide, and lose to the default nowhere."""
    limits = LIMITS.model_copy(update={"max_seq_len": 131072})
    times = {
        rows(64): lambda s, k: 100.0,
        rows(16): lambda s, k: 60.0 if k < 30000 else 130.0,
        rows(32): lambda s, k: 90.0,
    }
    choice = chosen(decode_times(times), limits=limits)
    assert decide(choice.tree, Bounds(1, 8, 8, 512)).schedule == rows(16)
    assert decide(choice.tree, Bounds(1, 8, 8, 131072)).schedule == rows(32)


# --- what may be launched where ---


def test_query_lengths_without_measurements_keep_the_default_and_say_so():
    choice = chosen(decode_times({rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0}))
    alone = Schedule(None, both(64, 64).prefill, 0)
    for length, schedule in ((1, rows(16)), (2, rows(64, 8)), (8, rows(64, 8)), (9, alone), (4096, alone)):
        assert decide(choice.tree, Bounds(length, 1, length, 512, length)).schedule == schedule
    assert decide(choice.tree, Bounds(2048, 3, 4096, 512)).schedule == both(64, 64)
    assert decide(choice.tree, Bounds(2, 1, 2, 512)).evidence == "default: nothing measured here on NVIDIA H200"


def test_rows_that_need_a_second_row_block_are_a_part_of_their_own():
    """Of 4 query heads a key/value head, 16 rows are 4 tokens: what is measured of 4 says nothing of 5, and the other way."""
    short = decode_times({rows(64, 8): lambda s, k: 100.0, rows(16, 8): lambda s, k: 50.0, rows(32, 8): lambda s, k: 80.0}, query_len=4)
    choice = chosen(short)
    for length, schedule in ((2, rows(16, 8)), (4, rows(16, 8)), (5, rows(64, 8)), (8, rows(64, 8))):
        assert decide(choice.tree, Bounds(length, 1, length, 512)).schedule == schedule
    long = decode_times({rows(64, 8): lambda s, k: 100.0, rows(16, 8): lambda s, k: 90.0, rows(32, 8): lambda s, k: 40.0}, query_len=5)
    choice = chosen([*short, *long])
    for length, schedule in ((2, rows(16, 8)), (4, rows(16, 8)), (5, rows(32, 8)), (8, rows(32, 8))):
        assert decide(choice.tree, Bounds(length, 1, length, 512)).schedule == schedule


def test_decode_alone_stays_within_its_rows():
    """Decode for six rows is the fastest of all, and illegal for the calls of up to eight rows that share its part."""
    times = {rows(64, 8): lambda s, k: 100.0, rows(16, 6): lambda s, k: 10.0, rows(32, 8): lambda s, k: 90.0}
    choice = chosen(decode_times(times, query_len=6))
    assert decide(choice.tree, Bounds(6, 8, 48, 2048)).schedule == rows(32, 8)
    for box in boxes(choice.tree, LIMITS):
        assert box.leaf.schedule.legal(box.high.query_len)


def test_several_sequences_with_long_caches_are_never_left_to_prefill_alone():
    """Faster wherever it was measured; but the longest cache may be a single row's."""
    alone = Schedule(None, both(64, 64).prefill, 0)
    choice = chosen(decode_times({both(64, 64): lambda s, k: 100.0, alone: lambda s, k: 90.0}, query_len=256, made=mixed))
    for seqs, keys, schedule in (
        (1, 32768, alone),
        (8, ALONE_KEYS, alone),
        (8, ALONE_KEYS + 1, both(64, 64)),
        (2, 32768, both(64, 64)),
        (MANY_SEQS, 513, alone),
        (MANY_SEQS + 1, ALONE_KEYS_OF_MANY + 1, both(64, 64)),
    ):
        assert decide(choice.tree, Bounds(256, seqs, 255 + seqs, keys)).schedule == schedule, (seqs, keys)


def test_sequences_none_of_which_may_be_decodes_are_left_to_prefill_alone_where_it_is_faster():
    """Decode would be launched in vain. The host knows it of sequences of about the same number of rows."""
    alone = Schedule(None, both(64, 64).prefill, 0)
    times = {both(64, 64): lambda s, k: 100.0, alone: lambda s, k: 90.0}
    tree = chosen(decode_times(times, query_len=256)).tree
    for seqs, keys in product((2, 8), (700, 32768)):
        assert decide(tree, Bounds(256, seqs, 256 * seqs, keys, 256)).schedule == alone
        assert decide(tree, Bounds(256, seqs, 255 * seqs, keys, 9)).schedule == alone
        assert decide(tree, Bounds(256, seqs, 255 * seqs, keys, 8)).schedule == both(64, 64), "measured on others alone"
    hot = chosen(decode_times({both(64, 64): lambda s, k: 90.0, alone: lambda s, k: 100.0}, query_len=256)).tree
    assert decide(hot, Bounds(256, 8, 2048, 700, 256)).schedule == alone, "a decode in vain saves nothing: the clock was another"
    assert decide(hot, Bounds(256, 1, 256, 700, 256)).schedule == alone


@pytest.mark.parametrize(("query_heads", "served"), [(4, True), (6, False)])
def test_long_caches_may_be_left_to_a_prefill_that_cuts_them_and_reads_them_once(query_heads, served):
    """Six heads share a key/value head: row blocks of two heads would read the cache three times."""
    cuts = Launch("prefill_ws", Config(64, 64, 4, 2, 2, (("maxnreg", 128), ("split", 1))))
    alone = Schedule(None, cuts, 0)
    geometry = replace(GEOMETRY, query_heads=query_heads, kv_heads=1)
    found = decode_times({both(64, 64): lambda s, k: 100.0, alone: lambda s, k: 90.0}, query_len=256, made=mixed)
    found = [replace(m, setting=replace(m.setting, geometry=geometry)) for m in found]
    tree = chosen(found, geometry=geometry).tree
    for keys in (ALONE_KEYS + 1, ALONE_KEYS_SPREAD):
        assert decide(tree, Bounds(256, 8, 263, keys)).schedule == (alone if served else both(64, 64)), keys
    assert decide(tree, Bounds(256, 8, 263, ALONE_KEYS_SPREAD + 1)).schedule == both(64, 64), "too long for what a batch leaves"


def test_workloads_on_which_the_best_may_be_missing_are_not_fitted_to():
    """A sweep that ended early: of long caches the default and the other decode were left out, and prefill alone, which is far faster
    there, may not serve; of one batch nothing but the slowest was measured."""
    alone, slow = Schedule(None, both(64, 64).prefill, 0), both(16, 64)
    usual = {both(64, 64): lambda s, k: 100.0, both(32, 64): lambda s, k: 95.0, slow: lambda s, k: 120.0, alone: lambda s, k: 60.0}
    found = [m for m in decode_times(usual, query_len=256, made=mixed) if m.seqs[0][1] < 32768 or m.schedule in (slow, alone)]
    tree = chosen(found).tree
    assert decide(tree, Bounds(256, 8, 263, 8192)).schedule == both(32, 64)
    assert decide(tree, Bounds(256, 8, 263, 32768)).schedule == both(32, 64), "not the slow one, which alone was measured there"
    lone = measurement(mixed(2, 700, 256), slow, 300.0, name="cut off")
    assert decide(chosen([*found, lone]).tree, Bounds(256, 2, 257, 700)).schedule == alone


def test_schedules_that_do_not_fit_are_left_out():
    found = decode_times({rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0, rows(32): lambda s, k: 60.0})
    choice = chosen(found, fits=lambda schedule: "too large" if schedule == rows(16) else None)
    assert decide(choice.tree, Bounds(1, 1, 1, 1)).schedule == rows(32)
    assert choice.training.worst == 1.0, "regret is against what can be launched"


def test_a_kernel_that_gave_a_wrong_answer_is_never_chosen():
    found = decode_times({rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0})
    choice = chosen([*found, failure(rows(16), "wrong", seqs=((1, 77),))])
    assert decide(choice.tree, Bounds(1, 1, 1, 1)).schedule == rows(64)


def test_workloads_beyond_the_limits_do_not_count():
    times = {rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0 if k > 10_000 else 200.0}
    short = LIMITS.model_copy(update={"max_seq_len": 8192})
    alone = Schedule(None, both(64, 64).prefill, 0)
    assert chosen(decode_times(times), limits=short).schedules == (rows(64), rows(64, 8), alone, both(64, 64))


def test_the_defaults_must_serve_every_query_length():
    with pytest.raises(ValueError, match="end at 8 query rows per sequence, limits.max_tokens is 4096"):
        chosen([], defaults=DEFAULTS[:2])
    with pytest.raises(ValueError, match="'q1 decode m16n64w4s3c2' cannot serve 4096"):
        chosen([], defaults=((4096, rows(64)),))
    with pytest.raises(ValueError, match="rising bounds, got 1 after 8"):
        chosen([], defaults=(DEFAULTS[1], DEFAULTS[0], DEFAULTS[2]))


def test_only_measurements_of_the_geometry_and_the_guard_count():
    found = decode_times({rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0})
    other = replace(GEOMETRY, page_size=32)
    assert chosen(found, geometry=other).gpu is None
    assert chosen(found, aligned=False).gpu is None
    assert chosen(found, geometry=replace(GEOMETRY, rotary_dim=128, rotary_style="half")).gpu == H200


# --- what a choice says ---


def test_evidence_names_workloads_times_lead_and_measurements():
    found = decode_times({rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0 + s})
    leaf = decide(chosen(found).tree, Bounds(1, 8, 8, 2048))
    ids = {m.workload: m.id for m in found if m.schedule == rows(16)}
    few = {name: ids[name] for name in ("b1 q1 k512", "b1 q1 k2048", "b1 q1 k8192", "b1 q1 k32768")}
    assert set(few.values()) <= set(leaf.measurements) <= set(ids.values())
    assert leaf.evidence.startswith(
        f"NVIDIA H200: b1 q1 k512 51.0 us ({ids['b1 q1 k512']}), b1 q1 k2048 51.0 us ({ids['b1 q1 k2048']}), "
    )
    assert " and " in leaf.evidence and leaf.evidence.endswith("ahead of q1 decode m16n64w4s3c2")


def test_a_lead_within_noise_is_called_so():
    times = {rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 99.0}
    leaf = decide(chosen(decode_times(times, noise_us=2.0)).tree, Bounds(1, 1, 1, 1))
    assert leaf.evidence.endswith("at most 1.0% behind the best, 1.0% behind q1 decode m16n16w4s3c2, within noise")


def test_held_out_workloads_judge_and_do_not_teach():
    times = {rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0 if k < 30000 else 120.0}
    names = {f"b{seqs} q1 k32768" for seqs in (1, 8, 64)}
    choice = chosen(decode_times(times), held_out=names)
    assert choice.training.workloads == 9 and choice.training.worst == 1.0
    assert choice.held_out.workloads == 3 and choice.held_out.worst == pytest.approx(1.2)
    assert choice.held_out.worst_workload in names


def test_without_a_list_each_workload_is_judged_by_a_tree_that_never_saw_it():
    """One workload stands alone in wanting another schedule: only the fit that saw it knows."""
    times = {rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0 if (s, k) == (8, 2048) else 120.0}
    choice = chosen(decode_times(times))
    assert choice.training.worst == 1.0
    assert choice.held_out.workloads == 12 and choice.held_out.worst_workload == "b8 q1 k2048"
    assert choice.held_out.worst == pytest.approx(2.0)


def test_a_sparse_table_is_never_read_as_fast():
    """Schedules that were tried on one workload each give no tree that launches them elsewhere."""
    found = decode_times({rows(64): lambda s, k: 100.0})
    found.append(measurement(batch(8, 2048), rows(16), 10.0, name="b8 q1 k2048"))
    choice = chosen(found)
    assert decide(choice.tree, Bounds(1, 8, 8, 2048)).schedule == rows(16)
    assert choice.training.unmeasured == 0 and choice.training.worst == 1.0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(80, 125), min_size=12, max_size=12), min_size=1, max_size=4), st.integers(0, 6))
def test_whatever_the_times_nothing_measured_loses_to_the_default_beyond_noise(times, noise):
    schedules = [rows(16 * n) for n in range(1, len(times) + 1)]
    grid = [(seqs, keys) for seqs in (1, 8, 64) for keys in KEYS]
    of = {s: dict(zip(grid, column)) for s, column in zip(schedules, times)} | {rows(64): dict.fromkeys(grid, 100)}
    found = decode_times({s: (lambda seqs, keys, t=t: float(t[seqs, keys])) for s, t in of.items()}, noise_us=noise)
    choice = chosen(found)
    for seqs, keys in grid:
        leaf = decide(choice.tree, Bounds(1, seqs, seqs, keys))
        assert of[leaf.schedule][seqs, keys] <= 100 + noise + 1e-6
    again = chosen(found[::-1])
    assert again == choice, "the order of records never decides"


def test_a_fit_takes_about_a_second_at_most():
    """56 workloads by 60 schedules; each schedule is best for its own number of sequences and keys."""
    grid = [(seqs, keys) for seqs in (1, 2, 4, 8, 16, 32, 64) for keys in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)]

    def time_us(n: int, seqs: int, keys: int) -> float:
        distance = abs(log2(seqs) - n % 7) + abs(log2(keys) - 8 - n % 8)
        return 5 + seqs * keys / 1000 * (1 + 0.01 * (distance + n % 5))

    found = [
        measurement(batch(seqs, keys), rows(16 * n), time_us(n, seqs, keys), noise_us=0.02, name=f"b{seqs} k{keys}")
        for seqs, keys in grid
        for n in range(1, 61)
    ]
    start = time.process_time()
    choice = chosen(found)
    assert time.process_time() - start < 3.0, "a third of it on a quiet machine"
    assert choice.held_out.geometric_mean < 1.03 and choice.held_out.worst < 1.10
    assert len(choice.decisions) <= MAX_LEAVES + 2


# --- GPUs without measurements ---


@pytest.mark.parametrize(
    ("name", "arch", "multiprocessors", "target"),
    [
        ("NVIDIA H200", "sm_90", 132, "h200"),
        ("NVIDIA H100 80GB HBM3", "sm_90", 132, "h100_sxm"),
        ("NVIDIA H100 PCIe", "sm_90", 114, "h100_pcie"),
        ("NVIDIA GH200 480GB", "sm_90", 132, "gh200"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", 108, "a100_sxm"),
        ("NVIDIA A100 80GB PCIe", "sm_80", 108, "a100_pcie"),
        ("NVIDIA B200", "sm_100", 148, "b200"),
        ("NVIDIA L40S", "sm_89", 142, "l40s"),
        ("NVIDIA L4", "sm_89", 58, "l4"),
        ("NVIDIA GeForce RTX 4090", "sm_89", 128, "rtx_4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120", 188, "rtx_pro_6000"),
        ("AMD Instinct MI300X", "gfx942", 304, "mi300x"),
        ("AMD Instinct MI355X", "gfx950", 256, "mi355x"),
        ("NVIDIA H800", "sm_90", 132, None),
        ("NVIDIA GeForce RTX 3090", "sm_86", 82, None),
    ],
)
def test_a_measured_gpu_is_recognised(name, arch, multiprocessors, target):
    found = identify(Gpu(name, arch, multiprocessors, 80 << 30), TARGETS)
    assert (found and found.id) == target


A100 = Gpu("NVIDIA A100-SXM4-80GB", "sm_80", 108, 80 << 30)
H100_PCIE = Gpu("NVIDIA H100 PCIe", "sm_90", 114, 80 << 30)
MI300X = Gpu("AMD Instinct MI300X", "gfx942", 304, 192 << 30)


@pytest.mark.parametrize(
    ("target", "measured", "source"),
    [
        ("h200", [A100, H100_PCIE, H200], "h200"),
        ("h100_sxm", [A100, H100_PCIE, H200], "h200"),
        ("h100_pcie", [A100, H200], "h200"),
        ("a100_pcie", [A100, H200], "a100_sxm"),
        ("l40s", [A100, H200], "a100_sxm"),
        ("b200", [A100, H200, MI300X], "h200"),
        ("mi355x", [H200, MI300X], "mi300x"),
        ("mi300x", [H200, A100], None),
        ("h200", [], None),
    ],
)
def test_the_nearest_relative(target, measured, source):
    for order in (measured, measured[::-1]):
        found = nearest(TARGETS[target], order, TARGETS)
        assert (found and found.name) == source


def test_the_one_warning():
    assert nearest(TARGETS["h200"], [H200], TARGETS).warning is None
    assert nearest(TARGETS["h100_sxm"], [H200], TARGETS).warning == (
        "h100_sxm: no measurements of its own; uses those of h200 (same sm_90, 132 multiprocessors, 3350 against 4800 GB/s, "
        "232448 bytes of shared memory per block)"
    )
    assert "(sm_80, the family of sm_89, 142 against 108 multi" in nearest(TARGETS["l40s"], [A100], TARGETS).warning
    assert "(sm_90, the same vendor, 148 against 132 multi" in nearest(TARGETS["b200"], [H200], TARGETS).warning
    unlisted = Gpu("NVIDIA H800", "sm_90", 132, 80 << 30)
    assert nearest(TARGETS["h200"], [unlisted], TARGETS).warning == (
        "h200: no measurements of its own; uses those of NVIDIA H800 (same sm_90, 132 multiprocessors)"
    )


def test_h200_data_serve_h100_and_say_so():
    found = decode_times({rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0})
    choice = chosen(found, ("h100_sxm",))
    assert decide(choice.tree, Bounds(1, 1, 1, 1)).schedule == rows(16)
    assert choice.source == "h200" and choice.warnings[0].startswith("h100_sxm: no measurements of its own; uses those of h200")


def test_gpus_that_share_a_table_each_get_their_warning():
    times = {rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0}
    found = decode_times(times)
    pcie = [replace(m, setting=replace(SETTING, gpu=H100_PCIE)) for m in found]
    assert [w.split(":")[0] for w in chosen(found, ("h200", "h100_sxm", "gh200")).warnings] == ["h100_sxm", "gh200"]
    assert chosen([*found, *pcie], ("h200", "h100_pcie")).warnings == (
        "h100_pcie: shares the table of h200, from measurements of h200",
    )


def test_nothing_related_leaves_the_conservative_rows_and_says_so():
    found = decode_times({rows(64): lambda s, k: 100.0, rows(16): lambda s, k: 50.0})
    choice = chosen(found, ("mi300x",))
    assert choice.warnings == (
        "mi300x: no measurements of its own nor of a relative for this geometry and aligned tensors; "
        "uses the conservative configurations of specgen/tuning/configs.yaml",
    )
    alone = Schedule(None, both(64, 64).prefill, 0)
    found = [(box.low.query_len, box.high.query_len, box.low.least_query_len, box.leaf.schedule) for box in boxes(choice.tree, LIMITS)]
    assert found == [(1, 1, 1, rows(64)), (2, 8, 1, rows(64, 8)), (9, 4096, 1, both(64, 64)), (9, 4096, 9, alone)]
    unaligned = chosen([], ("mi300x",), aligned=False)
    assert unaligned.schedules == (rows(64), rows(64, 8), both(64, 64)), "few calls: no kernel more for them"
    assert choice.training is choice.held_out is choice.default is choice.gpu is None
    assert choice.decisions[0].measurements == ()
