"""Bounds and value checks of single spec fields.

Nouns only: imports nothing but errors.py, touches no file. A check returns the value in canonical form or
raises ValueError whose text says what is needed and what came.
"""

import keyword
import re
from typing import Any

from .errors import shown

HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 512, 4
MAX_SEQ_LEN = 1 << 24
MAX_LAYERS = 1024
MAX_NAME = 48

_IDENTIFIER = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_SLICE = re.compile(r"([0-9]{0,4}):([0-9]{0,4})(?::([0-9]{0,4}))?")

LAYERS_SCHEMA = {
    "anyOf": [
        {"const": "all"},
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": MAX_LAYERS - 1},
            "minItems": 1,
        },
        {"type": "string", "pattern": "^[0-9]*:[0-9]*(:[0-9]*)?$"},
    ]
}


def check_identifier(name: str) -> str:
    """A name that may become part of an identifier in generated code: lower case words joined by single
    underscores.
    """
    if len(name) > MAX_NAME:
        raise ValueError(f"needs at most {MAX_NAME} characters, got {len(name)}")
    if not _IDENTIFIER.fullmatch(name):
        needed = "lower case letters, digits and single underscores between them, a letter first"
        raise ValueError(f"needs {needed}, got {shown(name)}")
    return name


def check_module_name(name: str) -> str:
    """A name that may stand alone in generated code: an identifier that is no Python keyword."""
    if keyword.iskeyword(check_identifier(name)):
        raise ValueError(f"{name!r} is a Python keyword; needs another name")
    return name


def check_version(version: int) -> int:
    """The version of the spec format that this release reads: 1."""
    if version != 1:
        raise ValueError(f"needs 1, got {shown(version)}; this release reads version 1 only")
    return version


def listed(value: object) -> object:
    """A list as the tuple that a strict model takes."""
    return tuple(value) if isinstance(value, list) else value


def check_layers(value: object) -> str | tuple[int, ...]:
    """`layers` in canonical form: "all", a tuple of distinct indices, or a slice text that selects at least
    one layer.
    """
    if value == "all" and isinstance(value, str):
        return value
    if isinstance(value, str):
        if _slice(value) is None:
            raise ValueError(f"needs all, a list of indices or a slice such as 0::6, got {shown(value)}")
        if not layer_indices(value):
            raise ValueError(f"the slice {shown(value)} selects no layer")
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"needs all, a list of indices or a slice such as 0::6, got {shown(value)}")
    for index in value:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < MAX_LAYERS:
            raise ValueError(f"needs indices from 0 to {MAX_LAYERS - 1}, got {shown(index)}")
    if not value:
        raise ValueError("needs at least one layer, got an empty list")
    if len(set(value)) < len(value):
        twice = next(index for i, index in enumerate(value) if index in value[:i])
        raise ValueError(f"layer {twice} is listed twice")
    return tuple(value)


def _slice(text: str) -> slice | None:
    match = _SLICE.fullmatch(text)
    if not match:
        return None
    start, stop, step = (int(part) if part else None for part in match.groups())
    if step == 0 or max(start or 0, stop or 0) > MAX_LAYERS:
        return None
    return slice(start, stop, step)


def layer_indices(layers: Any, count: int = MAX_LAYERS) -> set[int]:
    """The layers that a checked `layers` value selects in a model of `count` layers."""
    if layers == "all":
        return set(range(count))
    if isinstance(layers, str):
        return set(range(count)[_slice(layers) or slice(0, 0)])
    return {index for index in layers if index < count}
