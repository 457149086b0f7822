"""Measurements made up for tests: what is not asked for stays the same from one to the next."""

from dataclasses import replace

from specgen.runtime.table import Bounds
from specgen.tuning.matrix import Cell, Matrix, Workload
from specgen.tuning.records import Gpu, Launch, Measurement, Schedule, Setting, Software
from specgen.variant import Config, Geometry

GEOMETRY = Geometry(32, 8, 128, 128, "bfloat16", 16, 128**-0.5, "causal")
H200 = Gpu("NVIDIA H200", "sm_90", 132, 150_754_820_096)
SOFTWARE = Software("3.7.1", "12.8.93", "580.159.04", "2.11.0+cu130")
SETTING = Setting(GEOMETRY, True, 256, H200, SOFTWARE)
EMPTY_US = 4.0


def decode(tile_n: int, **changes) -> Launch:
    """A decode launch that `tile_n` tells from others."""
    return Launch("decode", replace(Config(16, tile_n, 4, 3, 2), **changes))


def prefill(tile_n: int, **changes) -> Launch:
    """A prefill launch that `tile_n` tells from others."""
    return Launch("prefill", replace(Config(128, tile_n, 8, 3, 1), **changes))


def rows(tile_n: int, query_rows: int = 1) -> Schedule:
    """Decode alone for sequences of at most `query_rows` query rows."""
    return Schedule(decode(tile_n), None, query_rows)


def both(decode_n: int, prefill_n: int, query_rows: int = 8) -> Schedule:
    """Decode for at most `query_rows` query rows, prefill for more."""
    return Schedule(decode(decode_n), prefill(prefill_n), query_rows)


def digests(schedule: Schedule) -> tuple[str, ...]:
    """What the kernels of a schedule would digest to: their labels."""
    return tuple(f"{schedule.max_query_len} {launch.label}" for launch in schedule.launches)


def measurement(
    seqs, schedule: Schedule, time_us: float, *, noise_us: float = 0.0, name: str | None = None, **changes
) -> Measurement:
    """A good trial: nine samples around `time_us` whose 10th and 90th percentile lie `noise_us` away from it."""
    spread = (-1.0, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 1.0)
    samples = tuple(EMPTY_US + time_us + noise_us * part for part in spread)
    fields = dict(
        setting=SETTING, workload=name or f"batch {seqs}", seqs=tuple(seqs), schedule=schedule, digests=digests(schedule),
        status="ok", samples_us=samples, empty_us=EMPTY_US, error=2e-3, when="2025-01-01T00:00:00Z", run="run 1",
    )
    return Measurement(**{**fields, **changes})


def failure(schedule: Schedule, status: str, seqs=((1, 4096),), **changes) -> Measurement:
    """A bad trial."""
    batch = ("", ()) if status in ("compile", "budget") else ("a batch", tuple(seqs))
    return measurement(
        batch[1], schedule, 1.0,
        **{"workload": batch[0], "samples_us": (), "error": None, "status": status, "detail": f"a {status}", **changes},
    )  # fmt: skip


def table(times: list[list[float | None]], noise_us: float = 0.0, schedules=None) -> Matrix:
    """A Matrix of the given times; workload w has w + 1 sequences of one row."""
    schedules = schedules or [rows(16 * (s + 1)) for s in range(len(times[0]))]
    cells = [
        tuple(None if t is None else Cell(t, noise_us, f"{w}.{s}") for s, t in enumerate(row)) for w, row in enumerate(times)
    ]
    workloads = [Workload(f"w{w}", Bounds(1, w + 1, w + 1, 4096)) for w in range(len(times))]
    return Matrix(tuple(workloads), tuple(schedules), tuple(cells))
