"""Where the data files are: beside the package in a checkout, inside it in an installed wheel."""

from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).parent


def _find(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


TEMPLATES = _find("templates")
SPECS = _find("specs")


def license_text() -> bytes:
    """The license that generated packages carry: the checkout's, or what the installed distribution was given."""
    checkout = _PACKAGE.parent / "LICENSE"
    if checkout.is_file():
        return checkout.read_bytes()
    return (metadata.distribution("specgen").read_text("licenses/LICENSE") or "").encode()
