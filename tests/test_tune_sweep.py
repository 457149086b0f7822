"""The measure stage of `specgen tune` on bundles of hand-made kernels: what it finds, and what cannot stop it."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_bundle import GEOMETRY, launched, make_bundle

from specgen import tune_measure
from specgen.errors import SpecgenError
from specgen.tune_measure import Where, measure
from specgen.tuning.bundle import read_bundle
from specgen.tuning.current import Blocklist
from specgen.tuning.executors import LocalExecutor, open_executor, run_trial
from specgen.tuning.store import Store
from specgen.tuning.sweep import FINALS, Plan

QUICK = Plan(rounds=2, trial_s=30)


@pytest.fixture(autouse=True)
def _one_cpu_worker(monkeypatch):
    """Without a GPU a sweep runs on the CPU alone where Triton's interpreter would; the kernels here need none."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def kept(store: Path, status=None):
    with Store(store) as opened:
        return opened.measurements(status=status)


def by_symbol(measurements, status=None):
    """digest -> measurements; the digests of hand-made kernels name their symbols."""
    found = {}
    for m in measurements:
        if status is None or m.status == status:
            found.setdefault(m.digests[-1].removeprefix("digest of "), []).append(m)
    return found


def test_the_best_is_found_and_every_measurement_kept(tmp_path):
    bundle = make_bundle(tmp_path / "b", decode=("right_40ms", "right_8ms", "right_300ms"))
    calls, store = [], tmp_path / "m.sqlite"
    (summary,) = measure([bundle], store, plan=QUICK, report=lambda *call: calls.append(call))
    assert summary.complete and summary.best == "q1 decode m32n16w4s2c1"
    assert (summary.entries, summary.batches, summary.dropped, summary.failed) == (3, 3, 1, 0)
    assert 2 < summary.gain < 5.1
    found = kept(store)
    assert {m.status for m in found} == {"ok"} and {m.setting.geometry for m in found} == {GEOMETRY}
    assert all(m.error < 5e-6 and m.time_us > 8000 and m.schedule.max_query_len == 1 for m in found)
    screened = [m for m in found if not m.run.endswith(FINALS)]
    assert len(screened) == 9 and len({m.run for m in screened}) == 1
    finals = [m for m in found if m.run.endswith(FINALS)]
    assert {len(m.samples_us) for m in screened} == {2} and {len(m.samples_us) for m in finals} == {6}
    assert len(finals) == 6, "the best of each batch beside the untuned choice"
    assert calls[-1][1] == summary.measured == 15 and all(done <= total for _, done, total in calls)


def test_what_is_launched_untuned_is_measured_on_every_batch(tmp_path):
    """Of several launches, each for calls of its own, one may be far behind on the first batches: that of long prompts on short ones."""
    behaviours = ("right_8ms", "right_60ms", "right_61ms")
    bundle = make_bundle(tmp_path / "b", prefill=behaviours, untuned=2, workloads=[f"pre b{seqs} 8" for seqs in (1, 2, 3, 4, 5)])
    alone = measure([bundle], tmp_path / "m.sqlite", plan=QUICK)[0]
    assert alone.complete and alone.dropped == 1
    screened = by_symbol(m for m in kept(tmp_path / "m.sqlite") if not m.run.endswith(FINALS))
    assert [len(screened[f"prefill_q0_{i}_{name}"]) for i, name in enumerate(behaviours)] == [5, 5, 3]


BAD = {
    "wrong": ("wrong", "relative error"),
    "hang": ("hang", "no answer within 4 s"),
    "killed": ("crash", "was killed by SIGKILL"),
    "raises": ("crash", "RuntimeError: an illegal memory access was encountered"),
    "large": ("budget", "needs 262144 bytes of shared memory"),
}


def test_bad_candidates_are_logged_and_blocked_and_the_sweep_goes_on(tmp_path):
    failed = [("compile", "in 's = q': no such thing"), ("budget", "spills registers in a main loop: 16 bytes")]
    bundle = make_bundle(tmp_path / "b", decode=("right_30ms", *BAD, "right_8ms"), failed=failed, workloads=("dec b2 k16", "dec b1 k64"))
    store = tmp_path / "m.sqlite"
    (summary,) = measure([bundle], store, plan=Plan(rounds=2, trial_s=4))
    assert summary.complete and summary.failed == len(BAD)
    found = by_symbol(kept(store))
    for number, (behaviour, (status, reason)) in enumerate(BAD.items(), 1):
        (m,) = found[f"decode_q1_{number}_{behaviour}"]
        assert m.status == status and reason in m.detail and m.setting.software.triton == "3.7.1"
        assert bool(m.seqs) == (status not in ("compile", "budget"))
    assert found["decode_q1_1_wrong"][0].error > 5e-6
    for symbol, (status, reason) in zip(("decode_q1_7_failed", "decode_q1_8_failed"), failed):
        (m,) = found[symbol]
        assert (m.status, m.detail, m.seqs) == (status, reason, ())
    assert len(found["decode_q1_0_right_30ms"]) == 4
    assert len(Blocklist(kept(store))) == len(BAD) + len(failed)

    before = launched(bundle)
    (again,) = measure([bundle], store, plan=Plan(rounds=2, trial_s=4))
    assert again.complete and (again.measured, again.known, again.failed) == (0, 4, len(BAD))
    assert launched(bundle) == before
    assert len(kept(store)) == 4 + 4 + len(BAD) + len(failed)


def test_a_trial_whose_process_was_killed_is_tried_again(tmp_path):
    bundle = make_bundle(tmp_path / "b", decode=("once", "right_1ms"), workloads=("dec b2 k16",))
    (summary,) = measure([bundle], tmp_path / "m.sqlite", plan=QUICK)
    assert summary.complete and summary.failed == 0
    assert set(by_symbol(kept(tmp_path / "m.sqlite"), "ok")) == {"decode_q1_0_once", "decode_q1_1_right_1ms"}


def test_a_killed_tuner_goes_on_where_it_ended(tmp_path):
    bundle = make_bundle(tmp_path / "b", decode=[f"right_{i}ms" for i in (60, 61, 62, 63)], workloads=("dec b2 k16", "dec b1 k64"))
    store = tmp_path / "m.sqlite"
    program = (
        "from pathlib import Path; from specgen.tuning.bundle import read_bundle; from specgen.tune_measure import *\n"
        f"measure([read_bundle(Path({str(bundle.folder)!r}))], Path({str(store)!r}), plan=Plan(rounds=2))"
    )
    paths = os.pathsep.join(sys.path)
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths})
    deadline = time.monotonic() + 120
    while not store.exists() or len(kept(store)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    known = len(kept(store))
    assert 2 <= known < 8
    (summary,) = measure([bundle], store, plan=QUICK)
    assert summary.complete and summary.known == len(kept(store, "ok")) - summary.measured
    assert summary.known >= known
    screened = [m for m in kept(store) if not m.run.endswith(FINALS)]
    assert [len(found) for symbol, found in sorted(by_symbol(screened).items())][1:] == [2, 2, 2]
    for m in screened:  # the untuned choice is in each run that measured a batch: it makes runs comparable
        assert any((other.run, other.seqs) == (m.run, m.seqs) for other in by_symbol(screened)["decode_q1_0_right_60ms"])


def test_the_time_ends_a_sweep_and_the_next_one_completes_it(tmp_path):
    bundle = make_bundle(tmp_path / "b", decode=[f"right_{i}ms" for i in (100, 101, 102)])
    store = tmp_path / "m.sqlite"
    (first,) = measure([bundle], store, plan=QUICK, seconds=0.2)
    assert not first.complete and first.measured <= 2
    (second,) = measure([bundle], store, plan=QUICK)
    assert second.complete and second.known == first.measured
    assert "not complete" in str(first) and "not complete" not in str(second)


def test_decode_and_prefill_meet_where_batches_need_both(tmp_path):
    workloads = ("spec b2 q3 k16", "pre b1 20", "mixed pre b1 20 + dec b2 k16")
    bundle = make_bundle(tmp_path / "b", decode=("right_40ms", "right_8ms"), prefill=("right_90ms", "right_8ms"), workloads=workloads)
    summaries = measure([bundle], tmp_path / "m.sqlite", plan=QUICK)
    assert [summary.problem.split(": ")[1] for summary in summaries] == [
        "decode of 2 to 4 query rows",
        "prefill",
        "decode and prefill",
    ]
    joint = summaries[-1]
    assert joint.complete and joint.entries == 6 and joint.batches == 2
    assert joint.best == "prefill m32n16w4s2c1", "alone it launches less"
    both = [m for m in kept(tmp_path / "m.sqlite") if len(m.digests) == 2]
    assert both and all(m.digests[0].startswith("digest of decode_q4") for m in both)
    assert all(m.digests[1].startswith("digest of prefill_q4") and m.schedule.max_query_len == 4 for m in both)


def test_varlen_kernels_get_the_keys_contiguous(tmp_path):
    workloads = ("pre b2 20", "pre b3 ragged 9", "chunk q8 of 16", "dec b2 k16")
    bundle = make_bundle(tmp_path / "b", varlen=("right_40ms", "right_8ms", "wrong"), workloads=workloads)
    (summary,) = measure([bundle], tmp_path / "m.sqlite", plan=QUICK)
    assert summary.problem.endswith("varlen") and summary.batches == 2 and summary.failed == 1
    assert summary.best == "varlen m32n16w4s2c1"
    good = kept(tmp_path / "m.sqlite", "ok")
    assert {m.schedule.prefill.family for m in good} == {"varlen"} and all(m.error < 5e-6 for m in good)


@pytest.mark.parametrize("search", ["tpe", "nsga", "random"])
def test_samplers_find_it_too(tmp_path, search):
    pytest.importorskip("optuna")
    bundle = make_bundle(tmp_path / "b", decode=("right_90ms", "right_50ms", "right_5ms"), workloads=("dec b2 k16",))
    (summary,) = measure([bundle], tmp_path / "m.sqlite", plan=Plan(search=search, rounds=2))
    assert summary.best == "q1 decode m64n16w4s2c1" and summary.complete


def test_a_trace_takes_the_place_of_the_grid(tmp_path):
    bundle = make_bundle(tmp_path / "b", decode=("right_1ms", "right_2ms"))
    trace = tmp_path / "day.jsonl"
    trace.write_text('{"seqs": [[1, 30], [1, 7]]}\n{"seqs": [[1, 5]], "count": 9}\n')
    (summary,) = measure([bundle], tmp_path / "m.sqlite", plan=QUICK, trace=trace)
    assert summary.batches == 2
    assert {m.seqs for m in kept(tmp_path / "m.sqlite")} == {((1, 5),), ((1, 30), (1, 7))}
    assert {m.workload for m in kept(tmp_path / "m.sqlite")} == {"trace day 1", "trace day 2"}


def test_two_workers_share_a_sweep_and_one_killed_midway_loses_nothing(tmp_path):
    bundle = make_bundle(tmp_path / "b", decode=[f"right_{i}ms" for i in (40, 41, 42, 43)])
    store = tmp_path / "m.sqlite"
    log = bundle.folder / "launched"

    def kill_one():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            pids = [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
            if len(set(pids)) == 2:
                os.kill(int(pids[-1]), signal.SIGKILL)
                return pids
            time.sleep(0.01)
        raise AssertionError("two workers never ran")

    with ThreadPoolExecutor(1) as killer:
        killed = killer.submit(kill_one)
        (summary,) = measure([bundle], store, where=Where(gpus=("0", "1")), plan=QUICK)
        killed.result()
    assert summary.complete and summary.failed == 0
    screened = [m for m in kept(store) if not m.run.endswith(FINALS)]
    assert sorted(len(found) for found in by_symbol(screened, "ok").values()) == [3, 3, 3, 3]
    assert len({line.split()[0] for line in log.read_text().splitlines()}) == 3


def test_workers_see_their_own_gpu(tmp_path):
    bundle = make_bundle(tmp_path / "b", decode=("right_1ms",))
    device = bundle.folder / bundle.package / "runtime" / "device.py"
    device.write_text(device.read_text() + "\nimport os; Device.seen = os.environ['CUDA_VISIBLE_DEVICES']\n"
                      "open(os.path.join(os.path.dirname(__file__), Device.seen), 'w')\n")
    with open_executor("local", ("3", "5")) as (executor, workers):
        assert workers == 2 and isinstance(executor, LocalExecutor)
        trial = tune_measure._nothing(bundle)
        list(executor.map(run_trial, [trial] * 4, [0.0] * 4))
    assert {path.name for path in device.parent.iterdir()} >= {"3", "5"}


def test_an_interrupted_sweep_ends_its_processes(tmp_path):
    bundle = make_bundle(tmp_path / "b", decode=("hang", "hang"), workloads=("dec b2 k16",))
    log = bundle.folder / "launched"

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ThreadPoolExecutor(1) as other:

            def send():
                while not log.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGUSR1)

            other.submit(send)
            with pytest.raises(KeyboardInterrupt):
                measure([bundle], tmp_path / "m.sqlite", plan=Plan(trial_s=600))
    finally:
        signal.signal(signal.SIGUSR1, previous)
    pid = int(log.read_text().split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_dask_workers(tmp_path):
    distributed = pytest.importorskip("distributed")
    bundle = make_bundle(tmp_path / "b", decode=("right_2ms", "right_1ms", "once", "wrong"), workloads=("dec b2 k16",))
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        where = Where(executor=cluster.scheduler_address.replace("tcp://", "dask://"))
        (summary,) = measure([bundle], tmp_path / "m.sqlite", where=where, plan=QUICK)
    assert summary.complete and summary.failed == 1
    assert len(by_symbol(kept(tmp_path / "m.sqlite"), "ok")) == 3


def test_what_cannot_run_says_why(tmp_path, monkeypatch):
    bundle = make_bundle(tmp_path / "b", decode=("right_1ms",))
    store = tmp_path / "m.sqlite"
    with pytest.raises(SpecgenError, match="needs local or dask://HOST:PORT, got 'slurm'"):
        measure([bundle], store, where=Where("slurm"))
    with pytest.raises(SpecgenError, match="no Dask scheduler answers there"):
        pytest.importorskip("distributed")
        measure([bundle], store, where=Where("dask://localhost:1"))
    with pytest.raises(SpecgenError, match="--search: needs one of auto, grid, tpe, nsga, random, got 'bayes'"):
        Plan(search="bayes")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(SpecgenError, match="no GPU is visible here; `specgen tune SPEC --compile-only`"):
        measure([bundle], store)
    device = bundle.folder / bundle.package / "runtime" / "device.py"
    device.write_text("class Device:\n    def open(*_): raise RuntimeError('no binary for this GPU')\n")
    with pytest.raises(SpecgenError, match="runs no bundle of bad: they are for sm_90; no binary for this GPU"):
        measure([bundle], store, where=Where(gpus=("0",)))
    device.write_text("import os; os._exit(3)\n")
    with pytest.raises(SpecgenError, match="no trial can run on GPU 0: its process ended with status 3"):
        measure([bundle], store, where=Where(gpus=("0",)))


@pytest.mark.parametrize(("field", "value"), [("limits", None), ("targets", []), ("targets", 7), ("targets", [{"arch": "sm_80"}])])
def test_a_damaged_manifest_of_a_bundle_is_named(tmp_path, field, value):
    bundle = make_bundle(tmp_path / "b", decode=("right_1ms",))
    path = bundle.folder / bundle.package / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(SpecgenError, match="manifest.json: needs limits and a target of sm_90; make the bundle anew"):
        measure([read_bundle(bundle.folder)], tmp_path / "m.sqlite")


def test_the_measure_stage_imports_no_generator(tmp_path):
    """It runs where no Triton is, on what compiled elsewhere."""
    names = ["triton", "jinja2", "black", "optuna", "distributed"]
    program = f"import sys; sys.modules.update(dict.fromkeys({names!r})); import specgen.tune_measure, specgen.tuning.trial_worker"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(tune_measure.__file__).parents[1])
