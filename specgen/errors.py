"""Every error specgen raises on purpose, and the one form in which a mistake in a file is shown.

Nouns only: imports nothing but the standard library, touches no file.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LINES = 100  # of one SpecError: a damaged file may have thousands of mistakes


class SpecgenError(Exception):
    """An error meant for the user; its text is complete and needs no traceback."""


class BuildError(SpecgenError):
    """A valid spec that cannot be built: an unimplemented field, an exceeded budget, a failed compile."""


class LimitsError(BuildError):
    """A batch within the spec's limits has more keys than a kernel counts to."""


class BudgetError(BuildError):
    """Compiled kernels that may not ship. `over` maps (symbol, arch) to the reason; the text has one line for each."""

    def __init__(self, over: dict[tuple[str, str], str]):
        self.over = dict(over)
        super().__init__("\n".join(f"{symbol} for {arch}: {reason}" for (symbol, arch), reason in over.items()))


@dataclass(frozen=True)
class Diagnostic:
    """One mistake in one file.

    `path` is the file as the user named it. `line` and `column` count from 1; both are None where the mistake
    has no place in the text (a missing file). `field` is the dotted path of the field, list items by index,
    or "" for the whole document. `str()` is one line: `specs/x.yaml:6:13: attention.0.kv_head: unknown field;
    did you mean 'kv_heads'?`
    """

    path: str
    line: int | None
    column: int | None
    field: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.path, self.line, self.column) if part is not None)
        text = ": ".join(part for part in (place, self.field, self.message) if part)
        return one_line(f"{text}; {self.hint}" if self.hint else text)


class SpecError(SpecgenError):
    """One or more mistakes in a file; `diagnostics` holds all of them in the order of the text."""

    def __init__(self, diagnostics: Iterable[Diagnostic]):
        self.diagnostics = tuple(sorted(diagnostics, key=lambda d: (d.line or 0, d.column or 0)))
        lines = [str(diagnostic) for diagnostic in self.diagnostics[:MAX_LINES]]
        if more := len(self.diagnostics) - len(lines):
            lines.append(f"... and {more} more mistakes")
        super().__init__("\n".join(lines))


def one_line(text: str) -> str:
    """`text` with every character that would break the line or drive a terminal written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: object, limit: int = 60) -> str:
    """A value as an error message shows it: YAML's spelling, one line, at most about `limit` characters."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        text = "'" + one_line(value) + "'"
    elif isinstance(value, int) and abs(value) >= 10**limit:
        text = "an integer of more than 60 digits"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 4] + "...'"
