"""The measurements that come with specgen: data/<gpu>_<spec>.jsonl beside this module, one file per GPU and spec. Reads only those."""

from functools import cache
from pathlib import Path

from specgen.tuning import jsonl
from specgen.tuning.records import Measurement, attention_part
from specgen.variant import Geometry

DIRECTORY = Path(__file__).parent / "data"


@cache
def shipped(geometry: Geometry | None = None) -> tuple[Measurement, ...]:
    """The measurements of every file (of one geometry), one per id, sorted by id. Raises SpecError if a file is damaged."""
    files = sorted(DIRECTORY.glob("*.jsonl"))
    if geometry is not None:
        files = [path for path in files if attention_part(geometry) in _geometries(path)]
    return tuple(jsonl.unique_by_id(m for path in files for m in jsonl.read(path, geometry)))


@cache
def _geometries(path: Path) -> frozenset[Geometry]:
    return jsonl.geometries(path)
