"""A YAML file as plain data that remembers where every field stands, and its check against a Pydantic model.

The subset is what configuration needs: one document, YAML 1.2 core scalars, no tags, anchors or aliases, text
keys, each key once. The nesting depth and the size are bounded, so a hostile file costs no more than its own
length. Imports only nouns; reads the one file that it is given.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from .errors import Diagnostic, SpecError, shown
from .explanations import explain, meant

MAX_BYTES = 64 << 10  # a spec has a few KB; what a hostile file can cost is bounded by this
MAX_DEPTH = 16

Position = tuple[int, int]  # line and column, from 1
FieldPath = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

_NULL = re.compile(r"|~|null|Null|NULL")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,64}|0o[0-7]{1,64}|0x[0-9a-fA-F]{1,64}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """A parsed file. `data` holds dict, list, str, int, float, bool and None only.

    `positions` gives where a field begins: the key for an entry of a mapping, the value for an item of a
    list. `values` gives where its value begins. The keys of both are paths such as ("attention", 0,
    "kv_heads"); the root is (). `problems` are mistakes found while reading that did not stop it (duplicate
    keys).
    """

    path: str
    text: str
    data: object
    positions: dict[FieldPath, Position]
    values: dict[FieldPath, Position]
    problems: tuple[Diagnostic, ...]

    def validate(self, model: type[Model], **extra: object) -> Model:
        """The document as a `model`, with the fields of `extra` added to its root; raises SpecError with
        every mistake.
        """
        problems = list(self.problems)
        if not isinstance(self.data, dict):
            came = "the file is empty" if self.data is None else f"got {shown(self.data)}"
            line, column = self.values.get((), (1, 1))
            raise SpecError(
                [*problems, Diagnostic(self.path, line, column, "", f"needs a mapping of fields; {came}")]
            )
        try:
            result = model.model_validate(self.data | extra)
        except ValidationError as error:
            problems.extend(self._diagnostics(error, model))
        if problems:
            raise SpecError(problems)
        return result

    def _diagnostics(self, error: ValidationError, model: type[BaseModel]) -> Iterator[Diagnostic]:
        mistakes = error.errors(include_url=False)
        misspelt = {meant(mistake, model) for mistake in mistakes}
        for mistake in mistakes:
            path = mistake["loc"]
            if mistake["type"] == "missing" and path in misspelt:
                continue
            message, hint = explain(mistake, model)
            where = self.positions if mistake["type"] == "extra_forbidden" else self.values
            known = path
            while known not in where and known:
                known = known[:-1]
            line, column = where.get(known, (1, 1))
            yield Diagnostic(self.path, line, column, dotted(path), message, hint)


def dotted(path: FieldPath) -> str:
    """("attention", 0, "kv_heads") as "attention.0.kv_heads"."""
    return ".".join(str(part) for part in path)


def read(path: str | PathLike[str]) -> Document:
    """The YAML file `path` as a Document; raises SpecError with one line where that cannot be."""
    name = str(path)
    return parse(name, decode(name, read_bytes(path)))


def _fault(name: str, message: str) -> SpecError:
    return SpecError([Diagnostic(name, None, None, "", message)])


def read_bytes(path: str | PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """The bytes of `path`, at most `limit`; raises SpecError where it is missing, a folder, unreadable or
    too large.
    """
    name = str(path)
    try:
        if Path(path).is_dir():
            raise _fault(name, "is a folder; needs a file")
        with open(path, "rb") as stream:
            data = stream.read(limit + 1)
    except FileNotFoundError:
        raise _fault(name, "no such file") from None
    except (OSError, ValueError) as error:
        raise _fault(name, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > limit:
        raise _fault(name, f"is larger than {limit} bytes")
    return data


def decode(name: str, data: bytes) -> str:
    """UTF-8 bytes as text, a byte order mark left out; raises SpecError that gives line and column of the
    first bad byte.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        line, column = place_of(before)
        message = f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8 text"
        raise SpecError([Diagnostic(name, line, column, "", message, "save the file as UTF-8")]) from None


def place_of(before: str) -> Position:
    """Line and column, from 1, of the character that follows the text `before`."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def parse(name: str, text: str) -> Document:
    """YAML text as a Document (`name` is the path that its errors give); raises SpecError where it is not in
    the subset.
    """
    builder = _Builder(name)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            builder.take(event)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        context = f" ({error.context})" if error.context else ""
        hint = "indent with spaces" if "'\\t'" in str(error.problem) else None
        message = f"not valid YAML: {error.problem or error.context}{context if error.problem else ''}"
        builder.stop(Diagnostic(name, line, column, "", message, hint))
    except ReaderError as error:
        line, column = place_of(text[: error.position])
        builder.stop(
            Diagnostic(
                name, line, column, "", f"not valid YAML: character {error.character!r} is not allowed"
            )
        )
    except (YAMLError, ValueError, AttributeError, NotImplementedError) as error:
        builder.stop(Diagnostic(name, 1, 1, "", f"not valid YAML: {error}"))
    return Document(name, text, builder.root, builder.positions, builder.values, tuple(builder.problems))


@dataclass
class _Open:
    """A mapping or list whose end has not come yet; `key` is the mapping key that waits for its value."""

    value: dict | list
    path: FieldPath
    key: str | None = None
    awaits_key: bool = True
    skip: bool = False


@dataclass
class _Builder:
    """Turns parser events into data without recursion; keeps positions and the mistakes on the way."""

    name: str
    root: object = None
    positions: dict[FieldPath, Position] = field(default_factory=dict)
    values: dict[FieldPath, Position] = field(default_factory=dict)
    problems: list[Diagnostic] = field(default_factory=list)
    _stack: list[_Open] = field(default_factory=list)
    _documents: int = 0

    def stop(self, diagnostic: Diagnostic) -> None:
        raise SpecError([*self.problems, diagnostic]) from None

    def take(self, event: object) -> None:
        if isinstance(event, DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                self._refuse(event, "a second document; needs exactly one")
        elif isinstance(event, AliasEvent):
            self._refuse(event, "anchors and aliases are not allowed", "write the value out")
        elif isinstance(event, ScalarEvent | MappingStartEvent | SequenceStartEvent):
            self._begin(event)
        elif isinstance(event, MappingEndEvent | SequenceEndEvent):
            self._stack.pop()
            if self._stack:
                self._finished()

    def _refuse(self, event: object, message: str, hint: str | None = None) -> None:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        self.stop(Diagnostic(self.name, line, column, dotted(self._path()), message, hint))

    def _path(self) -> FieldPath:
        if not self._stack:
            return ()
        top = self._stack[-1]
        if isinstance(top.value, list):
            return (*top.path, len(top.value))
        return top.path if top.key is None else (*top.path, top.key)

    def _begin(self, event: object) -> None:
        if event.anchor is not None:
            self._refuse(event, "anchors and aliases are not allowed", "write the value out")
        if event.tag is not None:
            self._refuse(event, f"the tag {event.tag} is not allowed")
        if len(self._stack) >= MAX_DEPTH:
            self._refuse(event, f"is nested deeper than {MAX_DEPTH} levels")
        top = self._stack[-1] if self._stack else None
        if top is not None and isinstance(top.value, dict) and top.awaits_key:
            self._take_key(top, event)
            return
        path, place = self._path(), (event.start_mark.line + 1, event.start_mark.column + 1)
        if top is None or not top.skip:
            self.values[path] = place
            self.positions.setdefault(path, place)
        if isinstance(event, ScalarEvent):
            self._attach(top, scalar(event.value) if event.style in (None, "") else event.value)
            self._finished()
            return
        value: dict | list = {} if isinstance(event, MappingStartEvent) else []
        self._attach(top, value)
        self._stack.append(_Open(value, path, skip=top.skip if top else False))

    def _take_key(self, top: _Open, event: object) -> None:
        if not isinstance(event, ScalarEvent):
            self._refuse(event, "a key needs to be text")
        key = event.value
        path, place = (*top.path, key), (event.start_mark.line + 1, event.start_mark.column + 1)
        if key in top.value:
            if not top.skip:
                line, column = self.positions[path]
                message = f"duplicate key; it is given first at {line}:{column}"
                self.problems.append(
                    Diagnostic(self.name, *place, dotted(path), message, "keep one of the two")
                )
            top.skip = True
        elif not top.skip:
            self.positions[path] = place
        top.key, top.awaits_key = key, False

    def _attach(self, top: _Open | None, value: object) -> None:
        if top is None:
            self.root = value
        elif isinstance(top.value, list):
            top.value.append(value)
        else:
            top.value.setdefault(top.key, value)

    def _finished(self) -> None:
        if self._stack and isinstance(self._stack[-1].value, dict):
            top = self._stack[-1]
            top.key, top.awaits_key = None, True
            top.skip = len(self._stack) > 1 and self._stack[-2].skip


def scalar(text: str) -> object:
    """A plain scalar by the YAML 1.2 core schema: `1e-4` is a float, `no` and `1_000` are text, `.nan` is a
    float.
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text[0] in "tT"
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text)
    if special := _SPECIAL.fullmatch(text):
        return float((special[1] or "") + "inf") if special[2] else float("nan")
    return text
