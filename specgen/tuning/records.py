"""What a measurement is: where, what batch, what launches, what times. Frozen data; imports only nouns, touches nothing.

A measurement refers to three things that many share: a Setting (geometry, GPU, software), a workload (a batch by lengths)
and a Schedule (the kernels of one attention call). Each has a reference: a readable label and eight digits of its content.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from datetime import datetime
from functools import cache, cached_property
from hashlib import sha256
from math import isfinite
from statistics import median, quantiles
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from specgen.runtime.table import Bounds, least_query_len
from specgen.variant import Config, Geometry

# What a trial may come to. "compile" and "budget" concern the kernels alone: such a record names no batch.
STATUSES = ("ok", "compile", "budget", "wrong", "crash", "hang")
WITHOUT_BATCH = ("compile", "budget")
ROLES = ("decode", "prefill")  # in the order of Schedule.launches
# How much slower than the best a schedule counts on a workload that it was not measured on: never assumed to be good.
UNMEASURED = 4.0
ORIGIN = "a candidate of `specgen tune`"  # of a configuration that no default chose
# Fields of a Geometry that no attention kernel reads: append_kv rotates.
_NOT_READ = {"rotary_dim": None, "rotary_style": None}
# By hand: the standard tokenizer takes 90 ms for a kernel, and other versions of Python see other tokens in a string.
_STRING_OR_COMMENT = re.compile(r"""(?P<quote>\"{3}|'{3}|"|')(?:\\.|.)*?(?P=quote)|#[^\n]*""", re.DOTALL)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+00:00)", re.ASCII)
_SHARED = ("setting", "seqs", "schedule", "digests")  # fields of a Measurement that stand in lines of their own
_DIGITS = 8  # of a content's sha256 in a reference
_RESOLUTION_US = 2  # decimals of a stored time


def attention_part(geometry: Geometry) -> Geometry:
    """`geometry` as measurements know it: without what no attention kernel reads."""
    return replace(geometry, **_NOT_READ)


def bounds_of(seqs: tuple[tuple[int, int], ...]) -> Bounds:
    """The tightest Bounds, what the host knows of a call, for a batch given as (query_len, kv_len) per sequence."""
    queries, keys = zip(*seqs)
    known = max(queries), len(seqs), sum(queries)
    return Bounds(*known, max(keys), least_query_len(*known))


@dataclass(frozen=True, order=True)
class Launch:
    """One kernel launch: a kernel family in a configuration."""

    family: str
    config: Config

    @property
    def label(self) -> str:
        """Such as "decode m16n64w4s3c2"; different configurations have different labels."""
        c = self.config
        options = "".join(f" {name}={value}" for name, value in c.options)
        return f"{self.family} m{c.block_m}n{c.tile_n}w{c.num_warps}s{c.num_stages}c{c.ctas_per_multiprocessor}{options}"


@dataclass(frozen=True)
class Schedule:
    """What one attention call launches. `max_query_len`: query rows of a sequence that decode takes, 0 without decode.

    Both: prefill takes the longer sequences. Prefill alone takes every one. Decode alone is legal for calls whose query_len
    is at most max_query_len.
    """

    decode: Launch | None
    prefill: Launch | None
    max_query_len: int

    def __post_init__(self):
        if not self.launches:
            raise ValueError("a schedule launches something: needs decode, prefill or both")
        if (self.max_query_len >= 1) != (self.decode is not None):
            what = "at least 1 with decode, 0 without it"
            raise ValueError(f"max_query_len: needs {what}, got {self.max_query_len}")

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What it launches: decode, then prefill."""
        return tuple(launch for launch in (self.decode, self.prefill) if launch)

    @property
    def label(self) -> str:
        """Such as "q8 decode m16n64w4s3c2 + prefill m128n64w8s3c1"; different schedules have different labels."""
        rows = f"q{self.max_query_len} " if self.decode else ""
        return rows + " + ".join(launch.label for launch in self.launches)

    def legal(self, query_len: int) -> bool:
        """Whether it serves every call whose sequences have at most `query_len` query rows."""
        return self.prefill is not None or query_len <= self.max_query_len


@dataclass(frozen=True)
class Gpu:
    """A GPU as the runtime queries it: product name, "sm_90" or "gfx942", multiprocessors or compute units, bytes."""

    name: str
    arch: str
    multiprocessors: int
    memory_bytes: int


@dataclass(frozen=True)
class Software:
    """Versions: of the Triton and ptxas that compiled the kernels, of the driver and torch that ran them; "" where there is none."""

    triton: str
    ptxas: str
    driver: str
    torch: str


@dataclass(frozen=True)
class Setting:
    """Where measurements hold: the per-rank geometry, whether alignment is promised, limits.max_seqs (kernels plan that many),
    GPU, software. The geometry keeps what attention kernels read: rotary is dropped.
    """

    geometry: Geometry
    aligned: bool
    max_seqs: int
    gpu: Gpu
    software: Software

    def __post_init__(self):
        object.__setattr__(self, "geometry", attention_part(self.geometry))

    @cached_property
    def reference(self) -> str:
        g = self.geometry
        label = f"{self.gpu.name} {g.query_heads}/{g.kv_heads} heads of {g.qk_dim} {g.dtype} {g.mask}"
        return _reference(label, setting_fields(self))


@dataclass(frozen=True)
class Measurement:
    """One trial: a schedule on a batch in a setting.

    workload: the batch's name; seqs: (query_len, kv_len) per sequence; both empty where the status is one of WITHOUT_BATCH.
    digests: `kernel_digest` of each of schedule.launches. samples_us: times of single graph replays as read, microseconds,
    in order, kept to 0.01. empty_us: median replay of an empty graph in the same run. error: relative L2 error against
    float64, None if there was no answer. when: UTC, ISO 8601, to the second. detail: for a bad trial, what came.
    run: names one process of a sweep on one device. Times of one run compare as they are; those of two runs only by
    what both measured (clocks and temperature differ).
    """

    setting: Setting
    workload: str
    seqs: tuple[tuple[int, int], ...]
    schedule: Schedule
    digests: tuple[str, ...]
    status: str
    samples_us: tuple[float, ...]
    empty_us: float
    error: float | None
    when: str
    run: str
    detail: str = ""

    def __post_init__(self):
        samples = tuple(round(float(sample), _RESOLUTION_US) for sample in self.samples_us)
        object.__setattr__(self, "samples_us", samples)
        object.__setattr__(self, "empty_us", round(float(self.empty_us), _RESOLUTION_US))
        if self.error is not None:
            object.__setattr__(self, "error", float(f"{self.error:.2e}"))
        for fault in self._faults():
            raise ValueError(fault)

    def _faults(self):
        if self.status not in STATUSES:
            yield f"status: needs one of {', '.join(STATUSES)}, got {self.status!r}"
        if len(self.digests) != len(self.schedule.launches):
            yield f"digests: needs one for each of {len(self.schedule.launches)} launches, got {len(self.digests)}"
        if bool(self.seqs) == (self.status in WITHOUT_BATCH) or bool(self.seqs) != bool(self.workload):
            needed = "no workload" if self.status in WITHOUT_BATCH else "a workload with its seqs"
            yield f"status {self.status!r} needs {needed}, got {self.workload!r} with {len(self.seqs)} seqs"
        if any(min(lengths) < 0 for lengths in self.seqs) or (self.seqs and min(self.bounds) < 1):
            yield "seqs: needs lengths of at least 0, and a query row and a key somewhere"
        if self.seqs and not self.schedule.legal(self.bounds.query_len):
            yield f"{self.schedule.label!r} cannot serve {self.bounds.query_len} query rows per sequence"
        if (self.status == "ok") != bool(self.samples_us):
            yield f"samples_us: status {self.status!r} with {len(self.samples_us)} samples"
        if not all(map(isfinite, (*self.samples_us, self.empty_us, self.error or 0.0))):
            yield "samples_us, empty_us and error: need finite numbers"
        if self.samples_us and min(self.samples_us) <= 0:
            yield f"samples_us: needs times above 0, got {min(self.samples_us)}"
        if not _is_time(self.when):
            yield f"when: needs UTC to the second as ISO 8601 writes it, such as 2026-01-31T12:00:00+00:00, got {self.when!r}"
        if self.samples_us and self.time_us <= 0:
            yield f"samples_us: the median {median(self.samples_us)} is not above an empty graph's {self.empty_us}"

    @cached_property
    def bounds(self) -> Bounds:
        """The values of a tree's inputs that the measurement holds for."""
        return bounds_of(self.seqs)

    @cached_property
    def time_us(self) -> float:
        """The time of this trial, microseconds: the median replay less the empty graph's. The one place that subtracts."""
        return median(self.samples_us) - self.empty_us

    @cached_property
    def noise_us(self) -> float:
        """Half the distance between the 10th and 90th percentile of the samples, microseconds; 0 for a single sample."""
        if len(self.samples_us) < 2:
            return 0.0
        tenths = quantiles(self.samples_us, n=10, method="inclusive")
        return (tenths[-1] - tenths[0]) / 2

    @property
    def workload_reference(self) -> str:
        """What the workload is called in a file and a store; "" without a batch."""
        return _workload_reference(self.workload, self.seqs) if self.seqs else ""

    @property
    def schedule_reference(self) -> str:
        """What the schedule with its kernels is called in a file and a store: another kernel is another schedule there."""
        return _schedule_reference(self.schedule, self.digests)

    @property
    def key(self) -> tuple[str, str, str]:
        """What was tried: references of setting, schedule and workload. The latest of a key counts."""
        return self.setting.reference, self.schedule_reference, self.workload_reference

    @cached_property
    def id(self) -> str:
        """Twelve hexadecimal digits of the sha256 of key and run: one run has one measurement of a key."""
        return sha256(canonical([*self.key, self.run]).encode()).hexdigest()[:12]


def _is_time(when: object) -> bool:
    if not isinstance(when, str) or not _TIME.fullmatch(when):
        return False
    try:
        datetime.fromisoformat(when)
    except ValueError:  # the 32nd of January
        return False
    return True


def checked(m: Measurement) -> Measurement:
    """`m` as a file or a store gives it back; ValueError says what of it would be refused there."""
    setting, schedule = setting_of(setting_fields(m.setting)), schedule_of(schedule_fields(m.schedule, m.digests))
    own = {field.name: getattr(m, field.name) for field in fields_of(m) if field.name not in _SHARED}
    return measurement_of(own, setting, schedule, m.seqs)


def canonical(value: object) -> str:
    """The one JSON text of a value: sorted keys, one line, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(", ", ": "), allow_nan=False)


def _reference(label: str, content: dict) -> str:
    return f"{label} #{sha256(canonical(content).encode()).hexdigest()[:_DIGITS]}"


@cache
def _workload_reference(name: str, seqs: tuple[tuple[int, int], ...]) -> str:
    return _reference(name, {"seqs": seqs})


@cache
def _schedule_reference(schedule: Schedule, digests: tuple[str, ...]) -> str:
    return _reference(schedule.label, schedule_fields(schedule, digests))


def setting_fields(setting: Setting) -> dict:
    """A Setting as nested dicts of JSON values; the inverse is `setting_of`. What a geometry leaves off is left out."""
    return asdict(setting) | {"geometry": _named(setting.geometry)}


def schedule_fields(schedule: Schedule, digests: tuple[str, ...]) -> dict:
    """A Schedule and its kernels' digests as nested dicts of JSON values; the inverse is `schedule_of`."""
    fields: dict = {"max_query_len": schedule.max_query_len, "decode": None, "prefill": None}
    rest = iter(digests)
    for role in ROLES:
        if launch := getattr(schedule, role):
            config = _named(replace(launch.config, origin=""))  # what chooses a configuration is what records are for
            if "options" in config:
                config["options"] = dict(config["options"])
            fields[role] = {"family": launch.family, **config, "digest": next(rest)}
    return fields


def _named(value: Geometry | Config) -> dict:
    """Fields by name, those at their default left out: a field that is added later leaves the older records as they are."""
    return {field.name: v for field in fields_of(value) if (v := getattr(value, field.name)) != field.default}


def setting_of(fields: Mapping) -> Setting:
    """The Setting of `setting_fields`; ValueError names a field that is unknown, missing or of another type."""
    parts = {"geometry": Geometry, "gpu": Gpu, "software": Software}
    return build(Setting, {n: build(parts[n], value) if n in parts else value for n, value in fields.items()})


def schedule_of(fields: Mapping) -> tuple[Schedule, tuple[str, ...]]:
    """(Schedule, digests) of `schedule_fields`; ValueError names a field that is unknown, missing or of another type."""
    fields, digests = dict(fields), []
    for role in ROLES:
        if launch := fields.get(role):
            config = dict(launch)
            family = config.pop("family", None)
            digests.append(config.pop("digest", None))
            config["options"] = tuple(sorted(config.get("options", {}).items()))
            fields[role] = build(Launch, {"family": family, "config": build(Config, config)})
    return build(Schedule, fields), tuple(digests)


def measurement_of(
    fields: Mapping, setting: Setting, schedule: tuple[Schedule, tuple[str, ...]], seqs: Iterable[Iterable[int]]
) -> Measurement:
    """A Measurement from its own fields and what it refers to; ValueError says what is wrong with it."""
    fields = {**fields, "samples_us": tuple(fields.get("samples_us", ())), "seqs": tuple(map(tuple, seqs))}
    return build(Measurement, {**fields, "setting": setting, "schedule": schedule[0], "digests": schedule[1]})


def build(kind: type, values: Mapping, place: str = ""):
    """`kind(**values)`, with names and types checked: the values come from a file. ValueError names the field, at `place` in the file."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{place or kind.__name__}: needs a mapping of fields, got {values!r}")
    place = place or kind.__name__
    known = _adapters(kind)
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{place}: unknown field {name!r}")
        try:
            known[name].validate_python(value, strict=True)
        except ValidationError as error:
            raise ValueError(f"{place}.{name}: {error.errors()[0]['msg']}, got {value!r}") from None
    try:
        return kind(**values)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error).replace("__init__() ", "")) from None


@cache
def _adapters(kind: type) -> dict[str, TypeAdapter]:
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(kind).items()}


def kernel_digest(source: str) -> str:
    """Sixteen hexadecimal digits of the sha256 of the code of a rendered, unformatted kernel module.

    Comments, docstrings and blank lines are left out: they name the spec and the tuning that chose the kernel and explain
    it; what is left decides the instructions. ValueError if the text is not that of a Python module.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"not a Python module: {error}") from None
    lines = _STRING_OR_COMMENT.sub(lambda found: found[0] if found["quote"] else "", source).splitlines()
    for node in (tree, *tree.body):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    code = [line.rstrip() for line in lines if line.strip()]
    return sha256("\n".join(code).encode()).hexdigest()[:16]
