"""A result on the disk: results.json, README.md with the tables, and the pictures."""

import json
from collections.abc import Mapping
from pathlib import Path

from specgen.bench.pictures import draw
from specgen.bench.report import check, markdown
from specgen.errors import SpecgenError

RESULT, TABLES = "results.json", "README.md"


def read(path: Path) -> dict:
    """The result in a JSON file; SpecgenError with the file's name if it is none."""
    try:
        return check(json.loads(path.read_text("utf-8")))
    except (ValueError, SpecgenError) as error:
        raise SpecgenError(f"{path}: {error}") from error


def write(result: Mapping, folder: Path) -> list[Path]:
    """Write all of it; the paths. The JSON comes first: it is there even where matplotlib is not."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
    (folder / TABLES).write_text(markdown(result), "utf-8")
    pictures = draw(result, folder)
    if pictures:
        shown = "\n".join(f"![{path.stem}]({path.name})" for path in pictures)
        (folder / TABLES).write_text(f"{markdown(result)}\n{shown}\n", "utf-8")
    return [folder / RESULT, folder / TABLES, *pictures]
