"""The measurements that come with specgen: data/<gpu>_<spec>.jsonl beside this module, one file per GPU and spec. Reads only those."""

from functools import cache
from pathlib import Path

from specgen.tuning import jsonl
from specgen.tuning.records import Measurement
from specgen.variant import Geometry

DIRECTORY = Path(__file__).parent / "data"


@cache
def shipped(geometry: Geometry | None = None) -> tuple[Measurement, ...]:
    """The measurements of every file (of one geometry), one per id, sorted by id. Raises SpecError if a file is damaged."""
    found = [m for path in sorted(DIRECTORY.glob("*.jsonl")) for m in jsonl.read(path, geometry)]
    return tuple(jsonl.unique_by_id(found))
