"""The embedded database of measurements: SQLite, one file, any number of processes. Touches only that file and JSON Lines.

A record is committed as it is added, so a killed sweep loses nothing. What still counts is for current.py to say; this
module keeps everything, the latest of each id.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from specgen import json_text
from specgen.errors import SpecgenError, one_line
from specgen.tuning import jsonl
from specgen.tuning.records import (
    Measurement,
    attention_part,
    canonical,
    checked,
    measurement_of,
    schedule_fields,
    schedule_of,
    setting_fields,
    setting_of,
)
from specgen.variant import Geometry
from specgen.write import write_file

VERSION = 1  # of the schema, in PRAGMA user_version
_APPLICATION = 0x73706763  # "spgc", in PRAGMA application_id
_PATIENCE = 60  # seconds that a writer waits for another

# `content` is the JSON of what a reference names; the columns beside it are read from it, for queries.
_SCHEMA = """
CREATE TABLE settings (
    reference TEXT PRIMARY KEY,
    content TEXT NOT NULL,
    geometry TEXT AS (json_extract(content, '$.geometry')),
    gpu TEXT AS (json_extract(content, '$.gpu.name')),
    arch TEXT AS (json_extract(content, '$.gpu.arch')),
    multiprocessors INTEGER AS (json_extract(content, '$.gpu.multiprocessors')),
    memory_bytes INTEGER AS (json_extract(content, '$.gpu.memory_bytes')),
    triton TEXT AS (json_extract(content, '$.software.triton')),
    ptxas TEXT AS (json_extract(content, '$.software.ptxas')),
    driver TEXT AS (json_extract(content, '$.software.driver')),
    torch TEXT AS (json_extract(content, '$.software.torch'))
);
CREATE TABLE schedules (
    reference TEXT PRIMARY KEY,
    content TEXT NOT NULL,
    decode_digest TEXT AS (json_extract(content, '$.decode.digest')),
    prefill_digest TEXT AS (json_extract(content, '$.prefill.digest'))
);
CREATE TABLE workloads (
    reference TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    lengths TEXT NOT NULL
);
CREATE TABLE measurements (
    id TEXT PRIMARY KEY,
    setting TEXT NOT NULL REFERENCES settings (reference),
    schedule TEXT NOT NULL REFERENCES schedules (reference),
    workload TEXT REFERENCES workloads (reference),
    status TEXT NOT NULL,
    taken TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX measurements_by_setting ON measurements (setting);
"""


class Store:
    """The measurements in the file `path`, which is made if it is not there. Use it in a `with` block, from any thread.

    A file that cannot be written is only read. Every method raises SpecgenError, naming the file, if it is damaged, of another
    version, or cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], object] = {}  # of references that were read before
        if "\0" in str(path):
            raise SpecgenError(f"{one_line(str(path))}: the store of measurements cannot be used: a NUL in its name")
        with self._translated():
            self._db = self._connected()
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; the Store is of no use afterwards."""
        self._db.close()

    def add(self, *measurements: Measurement) -> None:
        """Keeps measurements, all or none, on disk when this returns. Of one id the latest stays, in whatever order they come.

        Refuses, as everything here, what it could not give back.
        """
        self._keep(measurements, checked)

    def measurements(
        self,
        *,
        geometry: Geometry | None = None,
        gpu: str | None = None,
        arch: str | None = None,
        status: str | None = None,
    ) -> list[Measurement]:
        """Measurements sorted by id: of a geometry, of GPUs of this product name or arch, with this status; None is any."""
        wanted = {"gpu": gpu, "arch": arch, "status": status}
        where = [f"{column} = ?" for column, value in wanted.items() if value is not None]
        query = (
            "SELECT m.setting, settings.content, m.schedule, schedules.content, m.workload, name, lengths, m.content"
            " FROM measurements m JOIN settings ON settings.reference = m.setting"
            " JOIN schedules ON schedules.reference = m.schedule LEFT JOIN workloads ON workloads.reference = m.workload"
            + (f" WHERE {' AND '.join(where)}" if where else "")
            + " ORDER BY id"
        )
        with self._translated(), self._lock:
            rows = self._db.execute(query, [value for value in wanted.values() if value is not None]).fetchall()
            found = [self._read(*row) for row in rows]
        return [m for m in found if geometry is None or m.setting.geometry == attention_part(geometry)]

    def export_jsonl(self, path: str | os.PathLike, measurements: Iterable[Measurement] | None = None) -> int:
        """Writes measurements (default: all) as JSON Lines, replacing the file at once; how many there were."""
        chosen = self.measurements() if measurements is None else list(measurements)
        write_file(Path(path), jsonl.dumps(chosen))
        return len(chosen)

    def import_jsonl(self, path: str | os.PathLike) -> int:
        """Adds the measurements of a JSON Lines file, all or none; how many it has. SpecError names each wrong line."""
        found = jsonl.read(path)
        self._keep(found, lambda m: m)
        return len(found)

    def _keep(self, measurements: Iterable[Measurement], check: Callable[[Measurement], Measurement]) -> None:
        with self._transaction():
            for m in measurements:
                try:
                    self._add(check(m))
                except (ValueError, TypeError) as error:
                    raise SpecgenError(f"{self.path}: a measurement that cannot be kept: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        how = {"timeout": _PATIENCE, "isolation_level": None, "check_same_thread": False}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._writable = not self.path.is_file() or all(os.access(place, os.W_OK) for place in (self.path, self.path.parent))
        if self._writable:
            return sqlite3.connect(self.path, **how)
        log = self.path.with_name(f"{self.path.name}-wal")
        if log.is_file() and log.stat().st_size:
            advice = f"copy it with {log.name} to a folder that can be written"
            raise SpecgenError(f"{self.path}: the store of measurements cannot be written, nor read as it is in use; {advice}")
        return sqlite3.connect(f"{self.path.absolute().as_uri()}?immutable=1", uri=True, **how)  # takes no locks, which are files

    def _open(self) -> None:
        with self._transaction(self._writable):  # of what several processes make at once, each sees nothing or the whole
            if self._pragma("schema_version") == self._pragma("application_id") == self._pragma("user_version") == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            application, version = self._pragma("application_id"), self._pragma("user_version")
        if application != _APPLICATION:
            raise SpecgenError(f"{self.path}: a database of something else than measurements")
        if version != VERSION:
            advice = "export it as JSON Lines with the specgen that wrote it, and import that into a new file"
            raise SpecgenError(f"{self.path}: schema version {version}, this specgen reads {VERSION}; {advice}")
        if (health := self._pragma("quick_check")) != "ok":
            raise sqlite3.DatabaseError(health)
        self._db.execute("PRAGMA foreign_keys = ON")
        if not self._writable:
            return
        with contextlib.suppress(sqlite3.OperationalError):  # for speed (0.9 ms instead of 2.5 to add one); if the file
            self._db.execute("PRAGMA journal_mode = WAL")  # is in use, SQLite does not wait: a later opener's will do

    def _pragma(self, name: str):
        return self._db.execute(f"PRAGMA {name}").fetchone()[0]

    def _add(self, m: Measurement) -> None:
        setting, schedule, workload = m.key
        parts = [
            ("settings (reference, content)", setting, canonical(setting_fields(m.setting))),
            ("schedules (reference, content)", schedule, canonical(schedule_fields(m.schedule, m.digests))),
        ]
        if workload:
            lengths = canonical(jsonl.run_lengths(m.seqs))
            parts.append(("workloads (reference, name, lengths)", workload, m.workload, lengths))
        for table, *values in parts:
            marks = ", ".join("?" * len(values))
            self._db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", values)
        self._db.execute(
            "INSERT INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE"
            " SET status = excluded.status, taken = excluded.taken, content = excluded.content"
            " WHERE (excluded.taken, excluded.content) > (taken, content)",
            (m.id, setting, schedule, workload or None, m.status, m.when, canonical(jsonl.own_fields(m))),
        )

    def _read(self, setting, setting_text, schedule, schedule_text, workload, name, lengths, text) -> Measurement:
        try:
            settings = self._part(setting_of, setting, setting_text)
            schedules = self._part(schedule_of, schedule, schedule_text)
            seqs = self._part(jsonl.sequences, workload, lengths) if workload else ()
            return measurement_of({"workload": name or "", **json_text.loads(text)}, settings, schedules, seqs)
        except jsonl.DAMAGE as error:
            raise sqlite3.DatabaseError(f"a record that cannot be read: {error}") from None

    def _part(self, read, reference: str, text: str):
        key = (read.__name__, reference)
        if key not in self._parts:
            self._parts[key] = read(json_text.loads(text))
        return self._parts[key]

    @contextlib.contextmanager
    def _transaction(self, writes: bool = True) -> Iterator[None]:
        with self._translated(), self._lock:
            self._db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk ends it
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """SQLite's and the file system's errors in the words of this project."""
        try:
            yield
        except (sqlite3.OperationalError, UnicodeDecodeError) as error:
            if "decode" in str(error):  # text that is not UTF-8
                raise self._damaged(error) from error
            raise SpecgenError(f"{self.path}: the store of measurements cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise SpecgenError(f"{self.path}: the store of measurements cannot be used: {error.strerror}") from error

    def _damaged(self, error: Exception) -> SpecgenError:
        advice = "move it away and import the JSON Lines that were exported from it"
        return SpecgenError(f"{self.path}: a damaged store of measurements ({one_line(str(error))}); {advice}")
