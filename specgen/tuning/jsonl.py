"""Measurements <-> JSON Lines: the form in which they live in git. Pure text; imports nouns and records.

One JSON object per line, sorted keys. The first line names the format. Then what measurements refer to, each once:
`setting`, `workload` (lengths as [sequences, query_len, kv_len], neighbours that are alike counted together) and `schedule`
lines; then `measurement` lines, which hold their references. Lines of a kind are sorted, so that a new measurement is one
more line of a diff. Times are microseconds.
"""

from collections.abc import Iterable
from itertools import groupby
from os import PathLike

from specgen import json_text
from specgen.errors import Diagnostic, SpecError, shown
from specgen.tuning.records import (
    Measurement,
    Setting,
    attention_part,
    bounds_of,
    canonical,
    measurement_of,
    schedule_fields,
    schedule_of,
    setting_fields,
    setting_of,
)
from specgen.variant import Geometry

VERSION = 1
_HEADER = {"format": "specgen measurements", "version": VERSION}
MOST_SEQUENCES = 1 << 20  # of a batch: a damaged count must not take all memory
_BOUNDS = ("query_len", "seqs", "tokens", "keys")
# What reading a line of another shape raises.
DAMAGE = (ValueError, TypeError, AttributeError, LookupError)
# A measurement's own fields, in the words of the dataclass; the others are reached through its references.
_OWN = ("status", "samples_us", "empty_us", "error", "when", "run", "detail")


def dumps(measurements: Iterable[Measurement]) -> str:
    """The text of measurements: the same set gives the same text, whatever its order. Of equal ids the later counts."""
    unique = unique_by_id(measurements)
    settings, workloads, schedules, lines = {}, {}, {}, []
    for m in unique:
        setting, schedule, workload = m.key
        if setting not in settings:
            settings[setting] = {"setting": setting, **setting_fields(m.setting)}
        if schedule not in schedules:
            schedules[schedule] = {"schedule": schedule, **schedule_fields(m.schedule, m.digests)}
        if workload and workload not in workloads:
            workloads[workload] = {"workload": workload, **_batch(m.workload, m.seqs)}
        own = own_fields(m)
        lines.append({"measurement": m.id, "setting": setting, "schedule": schedule, "workload": workload, **own})
    lines.sort(key=lambda line: (line["setting"], line["workload"], line["schedule"], line["when"], line["measurement"]))
    parts = [part[name] for part in (settings, workloads, schedules) for name in sorted(part)]
    return "".join(canonical(line) + "\n" for line in (_HEADER, *parts, *lines))


def loads(text: str, path: str, geometry: Geometry | None = None) -> list[Measurement]:
    """The measurements of a text (of one geometry), in its order. Raises SpecError with `path:line` for every line that is wrong."""
    geometry = geometry and attention_part(geometry)
    lines, mistakes = _parsed(text, path)
    parts: dict[str, dict] = {"setting": {}, "workload": {}, "schedule": {}}
    found = []
    readers = {"setting": setting_of, "workload": _workload_of, "schedule": schedule_of}
    for number, line in lines:  # what is referred to may stand anywhere: two files are merged by joining them
        kind = next((kind for kind in ("measurement", *parts) if kind in line), None)
        if kind in parts:
            name = line.pop(kind)
            try:
                parts[kind][str(name)] = readers[kind](line)
            except DAMAGE as error:
                mistakes.append(Diagnostic(path, number, None, f"{kind} {name}", _said(error)))
            if not isinstance(name, str):
                mistakes.append(Diagnostic(path, number, None, kind, f"needs a name, got {shown(name)}"))
        elif kind is None and line != _HEADER:
            mistakes.append(Diagnostic(path, number, None, "", f"not a line of this format, version {VERSION}"))
    if mistakes:
        raise SpecError(mistakes)
    for number, line in lines:
        setting = line.get("setting")
        if "measurement" not in line or isinstance(setting, str) and not _is_of(parts["setting"].get(setting), geometry):
            continue
        try:
            found.append(_measurement(line, parts))
        except DAMAGE as error:
            mistakes.append(Diagnostic(path, number, None, f"measurement {line['measurement']}", _said(error)))
    if mistakes:
        raise SpecError(mistakes)
    return found


def geometries(path: str | PathLike) -> frozenset[Geometry]:
    """The geometries that a sound file has measurements of, without reading these."""
    lines = (json_text.loads(line) for line in json_text.read_text(path).splitlines() if '"geometry": {' in line)
    settings = ({name: value for name, value in line.items() if name != "setting"} for line in lines if "setting" in line)
    return frozenset(setting_of(fields).geometry for fields in settings)


def read(path: str | PathLike, geometry: Geometry | None = None) -> list[Measurement]:
    """The measurements of a file (of one geometry). Raises SpecError if it cannot be read, or with the place of every line that is wrong."""
    return loads(json_text.read_text(path), str(path), geometry)


def unique_by_id(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One measurement per id, sorted by id: the latest; of equal times the one whose text is last, whatever the order."""
    unique: dict[str, Measurement] = {}
    for m in sorted(measurements, key=lambda m: (m.id, m.when, canonical(own_fields(m)))):
        unique[m.id] = m
    return list(unique.values())


def own_fields(m: Measurement) -> dict:
    """What a measurement line holds besides references, as JSON values; an empty `detail` or `samples_us` is left out."""
    fields = {name: getattr(m, name) for name in _OWN}
    return {name: list(v) if name == "samples_us" else v for name, v in fields.items() if v not in ("", ())}


def run_lengths(seqs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """[(query_len, kv_len), ...] -> [[sequences, query_len, kv_len], ...]; `sequences` is the inverse."""
    return [[len(list(alike)), *lengths] for lengths, alike in groupby(seqs)]


def sequences(lengths: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    """[[sequences, query_len, kv_len], ...] -> ((query_len, kv_len), ...)."""
    return tuple((query_len, kv_len) for count, query_len, kv_len in lengths for _ in range(count))


def _parsed(text: str, path: str) -> tuple[list[tuple[int, dict]], list[Diagnostic]]:
    lines, mistakes = [], []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json_text.loads(line)
        except json_text.NotJson as error:
            mistakes.append(Diagnostic(path, number, *json_text.place_in_line(error), str(error)))
            continue
        if isinstance(value, dict):
            lines.append((number, value))
        else:
            mistakes.append(Diagnostic(path, number, None, "", f"needs a JSON object, got {shown(value)}"))
    if not mistakes and (not lines or lines[0][1] != _HEADER):
        came = shown(text.splitlines()[0]) if lines else "nothing"
        mistakes.append(Diagnostic(path, 1, None, "", f"needs {canonical(_HEADER)}, got {came}"))
    return lines, mistakes


def _said(error: Exception) -> str:
    """What is wrong with a line, of an error that may hold a key alone."""
    return f"has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)


def _batch(name: str, seqs: tuple[tuple[int, int], ...]) -> dict:
    """The fields of a batch: its lengths, and beside them those bounds that a reader looks for."""
    bounds = bounds_of(seqs)
    return {"name": name, "lengths": run_lengths(seqs), **{field: getattr(bounds, field) for field in _BOUNDS}}


def _workload_of(fields: dict) -> tuple[str, tuple[tuple[int, int], ...]]:
    """(name, seqs) of a workload line."""
    if (count := sum(count for count, *_ in fields["lengths"])) > MOST_SEQUENCES:
        raise ValueError(f"lengths: {count} sequences; at most {MOST_SEQUENCES} are read")
    seqs = sequences(fields["lengths"])
    named = _batch(fields["name"], seqs)
    if named != fields:
        raise ValueError(f"does not fit its lengths: needs {canonical(named)}")
    return fields["name"], seqs


def _is_of(setting: Setting | None, geometry: Geometry | None) -> bool:
    """Whether a setting has the geometry; a missing one is for `_measurement` to report."""
    return setting is None or geometry is None or setting.geometry == geometry


def _measurement(line: dict, parts: dict[str, dict]) -> Measurement:
    line = dict(line)
    stated = line.pop("measurement")
    references = {kind: line.pop(kind, None) for kind in parts}
    for kind, name in references.items():
        if not isinstance(name, str) or name not in parts[kind] and (kind, name) != ("workload", ""):
            raise ValueError(f"no {kind} line {shown(name)} in this file")
    name, seqs = parts["workload"].get(references["workload"], ("", ()))
    schedule = parts["schedule"][references["schedule"]]
    m = measurement_of({"workload": name, **line}, parts["setting"][references["setting"]], schedule, seqs)
    actual = dict(zip(("setting", "schedule", "workload"), m.key), measurement=m.id)
    for kind, name in {**references, "measurement": stated}.items():
        if actual[kind] != name:
            raise ValueError(f"{kind} {shown(name)} is not what its content says: {actual[kind]}")
    return m
