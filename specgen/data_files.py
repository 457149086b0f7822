"""Where the data files are: beside the package in a checkout, inside it in an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def _find(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.exists() else _PACKAGE.parent / name


TEMPLATES = _find("templates")
SPECS = _find("specs")
LICENSE = _find("LICENSE")
