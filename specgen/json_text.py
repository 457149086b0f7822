"""JSON from files that anyone may have written: each key once, nested no deeper than Python reads, mistakes with their place.

Nouns only; reads the one file that it is given.
"""

import json
from os import PathLike
from typing import Any

from specgen.document import decode, read_bytes
from specgen.errors import Diagnostic, SpecError

MAX_BYTES = 1 << 28


class NotJson(ValueError):
    """Text that is no JSON value; `line` and `column` count from 1, None where the mistake has no place; `key` as in Diagnostic."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None, key: str = ""):
        self.line, self.column, self.key = line, column, key
        super().__init__(message)


def loads(text: str) -> Any:
    """The value of a JSON text; NotJson if it is none."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        end = text.rstrip()
        cut = "; it ends too early" if error.pos >= len(end) or error.msg.startswith("Unterminated") else ""
        message = f"not valid JSON: {error.msg}{cut}" if end else "is empty; needs a JSON value"
        raise NotJson(message, error.lineno, error.colno) from None
    except RecursionError:
        raise NotJson("not valid JSON: nested too deeply") from None
    except NotJson:
        raise
    except ValueError as error:  # a number of too many digits
        raise NotJson(f"not valid JSON: {str(error).partition(';')[0]}") from None


def parse(path: str, text: str) -> Any:
    """The value of a text that came from `path`; SpecError, with the place, if it is none."""
    try:
        return loads(text)
    except NotJson as error:
        raise SpecError([Diagnostic(path, error.line, error.column, error.key, str(error))]) from None


def read(path: str | PathLike[str]) -> Any:
    """The value in a JSON file; SpecError if the file cannot be read or holds none."""
    return parse(str(path), read_text(path))


def read_text(path: str | PathLike[str]) -> str:
    """The text of a UTF-8 file; SpecError if it cannot be read."""
    return decode(str(path), read_bytes(path, MAX_BYTES))


def place_in_line(error: ValueError) -> tuple[int | None, str]:
    """(column, key) of a mistake in the value of one line of JSON Lines."""
    return (error.column, error.key) if isinstance(error, NotJson) else (None, "")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise NotJson("duplicate key; keep one of the two", key=twice)
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
