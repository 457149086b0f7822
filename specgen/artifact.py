"""One file of the generated tree. Frozen data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Artifact:
    """A file to write: path relative to the tree's root (POSIX), its template (None: copied as it is), its content."""

    path: str
    template: str | None
    content: bytes = b""
    context: object = None
