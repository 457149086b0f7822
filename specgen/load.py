"""load(path): a spec file as a checked Spec, with the place of every field.

Imports only nouns; reads the one file that it is given.
"""

from dataclasses import dataclass
from os import PathLike

from .document import Document, Position, dotted, parse, read
from .spec import Spec


@dataclass(frozen=True)
class Loaded:
    """A spec and the text it came from.

    `path` is the file as named by the caller. `positions` maps a dotted field path ("attention.0.kv_heads",
    "targets.1") to the line and column, from 1, where the field begins; a field left to its default is
    absent.
    """

    spec: Spec
    path: str
    text: str
    positions: dict[str, Position]


def load(path: str | PathLike[str]) -> Loaded:
    """The spec in the YAML file `path`; raises SpecError with every mistake of the file in one go."""
    return _loaded(read(path))


def loads(text: str, path: str = "<spec>") -> Loaded:
    """The same for a text that is already in memory; `path` is what errors call it."""
    return _loaded(parse(path, text))


def _loaded(document: Document) -> Loaded:
    spec = document.validate(Spec)
    positions = {dotted(path): place for path, place in document.positions.items() if path}
    return Loaded(spec, document.path, document.text, positions)
