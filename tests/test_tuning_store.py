"""The database of measurements: what it keeps, for whom, what it refuses; many writers; a killed one loses nothing."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from measurements import GEOMETRY, H200, SETTING, both, failure, measurement, prefill, rows

from specgen.errors import SpecError, SpecgenError
from specgen.tuning import jsonl, shipped
from specgen.tuning.records import Gpu, Schedule
from specgen.tuning.store import VERSION, Store

DECODE = ((1, 4096),) * 32
A100 = Gpu("NVIDIA A100-SXM4-80GB", "sm_80", 108, 85_000_000_000)


def some():
    return [
        measurement(DECODE, rows(64), 120.0, noise_us=1.5, name="dec b32 k4k"),
        measurement(((700, 900),), both(64, 32), 30.0),
        measurement(DECODE, rows(64), 170.0, setting=replace(SETTING, gpu=A100)),
        measurement(DECODE, rows(64), 60.0, setting=replace(SETTING, geometry=replace(GEOMETRY, query_heads=64))),
        failure(Schedule(None, prefill(64, options=(("waves_per_eu", 2),)), 0), "budget"),
        failure(rows(256), "wrong"),
    ]


def test_what_goes_in_comes_out(tmp_path):
    found = some()
    with Store(tmp_path / "new folder" / "tune.db") as store:
        store.add(*found)
        store.add(found[0])
        assert store.measurements() == sorted(found, key=lambda m: m.id)
    with Store(tmp_path / "new folder" / "tune.db") as store:
        assert store.measurements() == sorted(found, key=lambda m: m.id)


def test_queries(tmp_path):
    with Store(tmp_path / "tune.db") as store:
        store.add(*some())
        assert len(store.measurements(geometry=replace(GEOMETRY, rotary_dim=64))) == 5
        assert len(store.measurements(gpu="NVIDIA H200")) == 5
        assert [m.time_us for m in store.measurements(arch="sm_80")] == [170.0]
        assert [m.status for m in store.measurements(status="wrong")] == ["wrong"]
        assert store.measurements(gpu=A100.name, arch="sm_90") == []


def test_the_schema_can_be_asked_in_sql(tmp_path):
    with Store(tmp_path / "tune.db") as store:
        store.add(*some())
    with sqlite3.connect(tmp_path / "tune.db") as db:
        query = (
            "SELECT DISTINCT gpu, multiprocessors, memory_bytes, triton, ptxas, driver, torch, decode_digest, name, status"
            " FROM measurements m JOIN settings s ON s.reference = m.setting JOIN schedules c ON c.reference = m.schedule"
            " JOIN workloads w ON w.reference = m.workload WHERE arch = 'sm_80'"
        )
        row = db.execute(query).fetchall()
    assert row == [
        (A100.name, 108, A100.memory_bytes, "3.7.1", "12.8.93", "580.159.04", "2.11.0+cu130",
         "1 decode m16n64w4s3c2", f"batch {DECODE}", "ok"),
    ]  # fmt: skip


def test_of_one_id_the_latest_stays_whatever_the_order(tmp_path):
    old = measurement(DECODE, rows(64), 120.0)
    new = measurement(DECODE, rows(64), 110.0, when="2025-01-02T00:00:00Z")
    twin = measurement(DECODE, rows(64), 115.0, when="2025-01-02T00:00:00Z")
    for number, order in enumerate([(old, new, twin), (twin, new, old), (new, twin, old)]):
        with Store(tmp_path / f"{number}.db") as store:
            for m in order:
                store.add(m)
            assert store.measurements() == jsonl.unique_by_id([old, new, twin])


def test_an_addition_is_all_or_nothing(tmp_path):
    with Store(tmp_path / "tune.db") as store:
        with pytest.raises(AttributeError):
            store.add(some()[0], None)
        assert store.measurements() == []
        store.add(some()[0])  # and the store goes on
        assert len(store.measurements()) == 1


def test_export_and_import(tmp_path):
    found = some()
    text = tmp_path / "h200.jsonl"
    with Store(tmp_path / "a.db") as a, Store(tmp_path / "b.db") as b:
        a.add(*found)
        assert a.export_jsonl(text) == len(found)
        assert text.read_text() == jsonl.dumps(found)
        assert b.import_jsonl(text) == len(found) == b.import_jsonl(text)
        assert b.measurements() == a.measurements()
        assert a.export_jsonl(tmp_path / "part.jsonl", a.measurements(arch="sm_80")) == 1
        text.write_text(text.read_text().replace('"status": "wrong"', '"status": "fast"'))
        with pytest.raises(SpecError, match=r"h200.jsonl:\d+: measurement .*status"):
            b.import_jsonl(text)
        with pytest.raises(SpecgenError, match="x.jsonl: cannot be written: File exists"):
            a.export_jsonl(text / "x.jsonl")
    assert sorted(path.suffix for path in tmp_path.glob("*.jsonl*")) == [".jsonl", ".jsonl"], "no temporary file stays"


def test_another_version_is_refused_with_a_way_out(tmp_path):
    path = tmp_path / "tune.db"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(SpecgenError, match=rf"tune.db: schema version {VERSION + 1}, this specgen reads {VERSION}; export it"):
        Store(path)


def test_a_database_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE things (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(SpecgenError, match="other.db: a database of something else"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["text", "truncated", "overwritten", "record"])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "tune.db"
    with Store(path) as store:
        store.add(*[measurement(DECODE, rows(16 * n), 100.0 + n) for n in range(1, 200)])
    whole = path.read_bytes()
    if damage == "text":
        path.write_text("not a database at all\n" * 100)
    elif damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "overwritten":
        path.write_bytes(whole[:4096] + os.urandom(len(whole) - 8192) + whole[-4096:])
    else:
        with sqlite3.connect(path) as db:
            db.execute("UPDATE measurements SET content = '{\"status\": 7}'")
    with pytest.raises(SpecgenError, match="tune.db: a damaged store of measurements .*; move it away and import"):
        Store(path).measurements()


def test_a_place_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecgenError, match="file/tune.db: the store of measurements cannot be used"):
        Store(tmp_path / "file" / "tune.db")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecgenError, match="folder: the store of measurements cannot be used: unable to open"):
        Store(tmp_path / "folder")


def test_a_full_disk_is_called_by_its_name(tmp_path):
    with Store(tmp_path / "tune.db") as store:
        store.add(some()[0])
        store._db.execute(f"PRAGMA max_page_count = {store._pragma('page_count')}")  # the next page is one too many
        with pytest.raises(SpecgenError, match="tune.db: the store of measurements cannot be used: database or disk is full"):
            store.add(*[measurement(DECODE, rows(16 * n), 100.0 + n) for n in range(1, 200)])
        assert store.measurements() == [some()[0]]


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_store_that_cannot_be_written_is_read(tmp_path, monkeypatch, place):
    path = tmp_path / "odd ?#%20 name" / "tune.db"
    with Store(path) as store:
        store.add(*some())
    closed = path if place == "file" else path.parent
    real = os.access
    monkeypatch.setattr(os, "access", lambda where, mode: Path(where) != closed and real(where, mode))
    before = sorted(path.parent.iterdir())
    with Store(path) as store:
        assert len(store.measurements()) == len(some())
        with pytest.raises(SpecgenError, match="cannot be used: attempt to write a readonly database"):
            store.add(some()[0])
    assert sorted(path.parent.iterdir()) == before
    path.with_name("tune.db-wal").write_text("of a writer")
    with pytest.raises(SpecgenError, match="tune.db: .* in use; copy it with tune.db-wal to a folder that can be written"):
        Store(path)


@pytest.mark.parametrize(("old", "new"), [(b"samples_us", b"sample\xff_us"), (b"NVIDIA H200", b"NVIDIA \xffH20"),
                                          (b"CREATE TABLE settings (", b"CREATE TABLE sett\xffngs (")])  # fmt: skip
def test_text_that_is_not_utf8_is_damage(tmp_path, old, new):
    path = tmp_path / "tune.db"
    with Store(path) as store:
        store.add(*some())
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new[: len(old)]))
    with pytest.raises(SpecgenError, match="tune.db: a damaged store of measurements .*; move it away and import"):
        with Store(path) as store:
            store.measurements()


def test_a_name_with_a_nul_is_refused():
    with pytest.raises(SpecgenError, match=r"a\\x00b: the store of measurements cannot be used: a NUL in its name"):
        Store("a\0b")


@pytest.mark.parametrize("changes", [{"detail": 5}, {"run": None}, {"workload": "\ud800"}, {"seqs": ((1.0, 4096),)}])
def test_what_could_not_be_read_back_is_not_added(tmp_path, changes):
    with Store(tmp_path / "tune.db") as store:
        with pytest.raises(SpecgenError, match="tune.db: a measurement that cannot be kept: "):
            store.add(some()[0], replace(some()[1], **changes))
        assert store.measurements() == []


WRITER = """
import sys
from measurements import measurement, rows
from specgen.tuning.store import Store
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Store(path) as store:
    for n in range(first, first + count):
        store.add(measurement(((1, 4096),), rows(16 * n), float(n)))
        print(n, flush=True)
"""


def writer(path: Path, first: int, count: int) -> subprocess.Popen:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(first), str(count)],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_many_processes_write_at_once(tmp_path):
    """They also all make the file: none finds it half made."""
    writers = [writer(tmp_path / "tune.db", first, 25) for first in (1, 101, 201)]
    assert [(process.communicate()[0].count("\n"), process.returncode) for process in writers] == [(25, 0)] * 3
    with Store(tmp_path / "tune.db") as store:
        assert len(store.measurements()) == 75


OPENER = """
import sys, time
from specgen.tuning.store import Store
start = float(sys.argv[1])
for n, path in enumerate(sys.argv[2:]):
    while time.time() < start + n / 50:
        pass
    with Store(path) as store:
        assert store.measurements() == []
"""


def test_many_processes_make_the_file_at_the_same_moment(tmp_path):
    paths = [str(tmp_path / f"{n}.db") for n in range(50)]
    command = [sys.executable, "-c", OPENER, str(time.time() + 2), *paths]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    openers = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[1] for process in openers] == [""] * 4


def test_many_threads_share_a_store(tmp_path):
    with Store(tmp_path / "tune.db") as store:

        def add(first: int) -> None:
            for n in range(first, first + 20):
                store.add(measurement(((1, 4096),), rows(16 * n), float(n)))

        threads = [threading.Thread(target=add, args=(first,)) for first in (1, 101, 201, 301)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.measurements()) == 80


def test_a_killed_writer_loses_nothing_that_it_added(tmp_path):
    process = writer(tmp_path / "tune.db", 1, 100_000)
    added = [int(process.stdout.readline()) for _ in range(10)]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with Store(tmp_path / "tune.db") as store:
        times = {m.time_us for m in store.measurements()}
    assert times >= set(map(float, added))
    assert times == set(map(float, range(1, len(times) + 1)))


def test_shipped_data_is_read_whole_and_by_geometry(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "DIRECTORY", tmp_path)
    found = some()
    (tmp_path / "h200_one.jsonl").write_text(jsonl.dumps(found[:3]))
    (tmp_path / "h200_two.jsonl").write_text(jsonl.dumps(found[2:]))
    shipped.shipped.cache_clear()
    assert shipped.shipped() == tuple(sorted(found, key=lambda m: m.id))
    assert len(shipped.shipped(GEOMETRY)) == 5
    shipped.shipped.cache_clear()


def test_the_data_in_the_repository_is_canonical():
    """What `export_jsonl` writes, so that a new measurement is a small difference."""
    for path in sorted(shipped.DIRECTORY.glob("*.jsonl")):
        text = path.read_text(encoding="utf-8")
        assert jsonl.dumps(jsonl.loads(text, path.name)) == text, path.name


def test_settings_differ_by_gpu(tmp_path):
    with Store(tmp_path / "tune.db") as store:
        store.add(*some())
        assert {m.setting.gpu for m in store.measurements()} == {H200, A100}
