"""What a run leaves: one JSON document, a row for each workload. Pure: turns samples into JSON values.

Top level: device, software, peers (name -> title and version, or the reason why it is not here), regret
(package -> its dispatch trees that were measured: layer, arch, measured_on, and what the manifest says of each
set of batches), command, track, rounds, seed, read_GBs, copy_GBs, matmul_TFLOPs, empty_us (the whole run's),
rows, skipped (row -> reason). A row: workload, geometry (in words), rounds, bytes, operations, floor_us, and by contender: times_us
(medians), spread_us ([p10, p90]), host_us, error (relative L2 to float64), ways (where a contender was
measured in several: the best is in times_us), notes (why it is missing). Times are as measured: an empty
graph's replay, empty_us, is in them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from specgen.bench.workloads import Workload, floor_us, spell_geometry

if TYPE_CHECKING:  # a report is rendered where there is no torch
    from specgen.bench.timing import Samples

SUBJECT = "specgen"  # the first package of a geometry
REST = "rest"  # a step without attention: no contender, but timed beside them
Entry = tuple[str, str]  # a contender and its way


@dataclass
class Outcome:
    """One workload's measurements while they come in."""

    times: "dict[Entry, Samples]" = field(default_factory=dict)
    errors: dict[Entry, float] = field(default_factory=dict)
    host: dict[Entry, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, way: str, text: str) -> None:
        """Keep why a contender, or one way of it, is missing."""
        note = f"{way}: {text}" if way else text
        self.notes[name] = f"{self.notes[name]}; {note}" if name in self.notes else note

    @property
    def rounds(self) -> int:
        """Rounds that were timed; 0 where no contender was."""
        return min((len(samples.values) for samples in self.times.values()), default=0)

    def fields(self) -> dict:
        """The row's fields by contender."""
        ways: dict[str, dict[str, float]] = {}
        for (name, way), samples in self.times.items():
            ways.setdefault(name, {})[way] = round(samples.median, 3)
        best = {name: (name, min(of_name, key=of_name.get)) for name, of_name in ways.items()}
        return {
            "times_us": {name: ways[name][way] for name, (_, way) in best.items()},
            "spread_us": {
                n: [round(edge, 3) for edge in self.times[entry].spread] for n, entry in best.items()
            },
            "host_us": {
                name: round(self.host[entry], 2) for name, entry in best.items() if entry in self.host
            },
            "error": {name: float(f"{self.errors[e]:.3g}") for name, e in best.items() if e in self.errors},
            "ways": {name: of_name for name, of_name in ways.items() if len(of_name) > 1},
            "notes": dict(self.notes),
        }


def row(workload: Workload, layer: Mapping, moved: int, operations: int, outcome: Outcome) -> dict:
    """One row; its floor is of the rates that were measured in its own rounds. `moved` is in bytes."""
    rates = outcome.rates
    floor = floor_us(layer, moved, operations, rates["read_GBs"], rates["matmul_TFLOPs"])
    return {
        "workload": workload.name,
        "geometry": spell_geometry(layer),
        "rounds": outcome.rounds,
        "bytes": moved,
        "operations": operations,
        "floor_us": round(floor, 3),
        **outcome.fields(),
        "rates": {name: round(value, 2) for name, value in rates.items()},
    }


def medians(rows: Iterable[Mapping]) -> dict[str, float]:
    """The rates of a run: medians over its rows."""
    found: dict[str, list[float]] = {}
    for each in rows:
        for name, value in each["rates"].items():
            found.setdefault(name, []).append(value)
    return {name: median(values) for name, values in found.items()}


def line(row: Mapping) -> str:
    """A row as one line of progress."""
    times = row["times_us"]
    parts = [f"{name} {time:.1f} ({row['floor_us'] / time:.2f})" for name, time in times.items()]
    missing = [f"{name} -" for name in row["notes"] if name not in times]
    what = f"{row['workload']} [{row['geometry'].split(',')[0]}]"
    return f"{what:<50} floor {row['floor_us']:8.1f}  " + "  ".join(parts + missing)


def ratio(row: Mapping, name: str, other: str) -> float | None:
    """Time of one contender over that of another in a row; None where one is missing."""
    times = row["times_us"]
    return times[name] / times[other] if name in times and other in times else None


def contenders(result: Mapping, rows: Iterable[Mapping] | None = None) -> list[str]:
    """Every contender with a time in the rows (default: all), in the order in which the run knew them."""
    present = {name for row in (result["rows"] if rows is None else rows) for name in row["times_us"]}
    return [name for name in result["peers"] if name in present]
