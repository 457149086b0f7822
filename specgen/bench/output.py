"""A result on the disk: results.json, README.md with the tables, and the pictures."""

import json
from collections.abc import Mapping
from pathlib import Path

from specgen import json_text
from specgen.bench.pictures import draw
from specgen.bench.report import check, markdown
from specgen.errors import SpecgenError
from specgen.write import write_file

RESULT, TABLES = "results.json", "README.md"


def read(path: Path) -> dict:
    """The result in a JSON file; SpecgenError with the file's name if it is none."""
    found = json_text.read(path)
    try:
        return check(found)
    except SpecgenError as error:
        raise SpecgenError(f"{path}: {error}") from error


def write(result: Mapping, folder: Path) -> list[Path]:
    """Write all of it; the paths. The JSON comes first: it is there even where matplotlib is not."""
    write_file(folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")
    write_file(folder / TABLES, markdown(result))
    pictures = draw(result, folder)
    if pictures:
        shown = "\n".join(f"![{path.stem}]({path.name})" for path in pictures)
        write_file(folder / TABLES, f"{markdown(result)}\n{shown}\n")
    return [folder / RESULT, folder / TABLES, *pictures]
