"""A Pydantic mistake in the words of this project: what came, what is needed, and a hint for a misspelt
field.

Nouns only: imports Pydantic and errors.py, touches no file.
"""

import types
import typing
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from .errors import shown

# What the same thing is called in model configs and in other engines.
OTHER_NAMES = {
    "num_attention_heads": "query_heads",
    "num_query_heads": "query_heads",
    "num_heads": "query_heads",
    "n_heads": "query_heads",
    "num_key_value_heads": "kv_heads",
    "num_kv_heads": "kv_heads",
    "head_size": "head_dim",
    "attn_logit_softcapping": "softcap",
    "attention_chunk_size": "chunk",
    "window": "sliding_window",
    "block_size": "page_size",
    "torch_dtype": "dtype",
    "causal": "mask",
    "is_causal": "mask",
    "tp": "tensor_parallel",
    "gpus": "targets",
}

_NEEDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
    "dict_type": "a mapping of fields",
    "finite_number": "a finite number",
}

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "less_than_equal": ("le", "at most"),
    "greater_than": ("gt", "more than"),
    "less_than": ("lt", "less than"),
    "multiple_of": ("multiple_of", "a multiple of"),
}


def explain(mistake: ErrorDetails, model: type[BaseModel]) -> tuple[str, str | None]:
    """(message, hint) for one entry of `ValidationError.errors()` raised by `model`."""
    kind, context, path, came = mistake["type"], mistake.get("ctx", {}), mistake["loc"], mistake.get("input")
    if kind == "extra_forbidden":
        return "unknown field", _field_hint(str(path[-1]), _model_at(model, path[:-1]), model)
    if kind == "missing":
        return "missing field", None
    if kind == "value_error":
        message, _, hint = str(context["error"]).partition("; ")
        return message, hint or None
    if kind in _NEEDS:
        return f"needs {_needed(model, path, _NEEDS[kind])}, got {shown(came)}", _off_hint(model, path, came)
    if kind == "literal_error":
        allowed = [choice.strip("'") for choice in _choices(context["expected"])]
        return f"needs {_or(allowed)}, got {shown(came)}", (
            near(came, allowed) if isinstance(came, str) else None
        )
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"needs {words} {context[key]:g}, got {shown(came)}", _off_hint(model, path, came)
    if kind in ("too_short", "too_long", "string_too_long", "string_too_short"):
        unit = "characters" if kind.startswith("string") else "items"
        word, key = ("at least", "min_length") if kind.endswith("short") else ("at most", "max_length")
        count = context[key]
        return f"needs {word} {count} {unit if count != 1 else unit[:-1]}", None
    return mistake["msg"][:1].lower() + mistake["msg"][1:], None


def meant(mistake: ErrorDetails, model: type[BaseModel]) -> tuple[str | int, ...] | None:
    """The path of the field that an unknown one was meant to be, where its name tells; its absence is no
    second mistake.
    """
    path = mistake["loc"]
    here = _model_at(model, path[:-1]) if mistake["type"] == "extra_forbidden" else None
    names = _meant_here(str(path[-1]), list(here.model_fields)) if here else []
    return (*path[:-1], names[0]) if names else None


def near(word: str, candidates: Iterable[str]) -> str | None:
    """A hint with the candidates that `word` may stand for, or None."""
    close = _close(word, list(candidates))
    return f"did you mean {_or([repr(c) for c in close])}?" if close else None


def _close(word: str, candidates: list[str]) -> list[str]:
    folded = word.lower().replace("-", "_").replace(" ", "_")
    close = [c for c in candidates if folded == c.lower()]
    close = close or [c for c in candidates if len(folded) > 1 and c.startswith(folded + "_")]
    return close or get_close_matches(folded, candidates, n=1, cutoff=0.72)


def _meant_here(name: str, fields: list[str]) -> list[str]:
    other = OTHER_NAMES.get(name.lower())
    return [other] if other in fields else _close(name, fields)


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _choices(expected: str) -> list[str]:
    return expected.replace(" or ", ", ").split(", ")


def _field_hint(name: str, here: type[BaseModel] | None, root: type[BaseModel]) -> str | None:
    fields = list(here.model_fields) if here else []
    if names := _meant_here(name, fields):
        return f"did you mean {_or([repr(other) for other in names])}?"
    for path, model in _nested(root):
        if model is not here and name in model.model_fields:
            return f"it is a field of {path}"
    return f"known here: {', '.join(fields)}" if fields else None


def _nested(model: type[BaseModel], path: str = "the top level") -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, info in model.model_fields.items():
        for inner in _models(info.annotation):
            yield from _nested(inner, repr(name))


def _models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _model_at(model: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel] | None:
    for part in path:
        if isinstance(part, str):
            info = model.model_fields.get(part)
            inner = _models(info.annotation) if info else []
            if not inner:
                return None
            model = inner[0]
    return model


def _optional(model: type[BaseModel], path: tuple[str | int, ...]) -> bool:
    """Whether the field at `path` may be null."""
    owner = _model_at(model, path[:-1]) if path else None
    info = owner.model_fields.get(str(path[-1])) if owner else None
    return info is not None and types.NoneType in typing.get_args(info.annotation)


def _needed(model: type[BaseModel], path: tuple[str | int, ...], words: str) -> str:
    return f"{words} or null" if _optional(model, path) else words


def _off_hint(model: type[BaseModel], path: tuple[str | int, ...], came: object) -> str | None:
    off = came in (0, -1, False) or (
        isinstance(came, str) and came.lower() in ("none", "off", "no", "false", "null", "nil")
    )
    return "write null to switch it off" if off and _optional(model, path) else None
