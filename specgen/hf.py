"""import_config(path): a model's published config.json as the text of a commented spec, to be reviewed by its
user.

Imports only nouns and its own parts (hf_config, hf_facts, hf_layers, hf_models); reads the one file that it
is given.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from . import json_text
from .document import decode, parse, read_bytes, scalar
from .errors import Diagnostic, SpecError, one_line
from .fields import MAX_NAME, check_module_name
from .hf_config import Facts, Layer, Refused
from .hf_facts import read_facts
from .spec import Spec

DEFAULT_SCHEMA = "spec.schema.json"
DEFAULT_TARGETS = ("h200", "mi300x")
MAX_LINE = 160
MAX_CONFIG_BYTES = 4 << 20  # label tables make some files long


def import_config(
    path: str | PathLike[str],
    name: str | None = None,
    schema: str | None = None,
    *,
    targets: tuple[str, ...] = DEFAULT_TARGETS,
    model_type: str | None = None,
    dtype: str | None = None,
) -> str:
    """The spec text for `path`, a config.json or a folder that holds one.

    `name` is the spec's name, by default made from the model's. `schema` is what editors are pointed at, a
    path relative to the place of the spec. `model_type` and `dtype` stand in for keys that the file lacks.
    Raises SpecError with one clear line for a file that is missing or damaged, and for a model that a spec
    cannot describe, with the reason.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if file != Path(path) and not file.exists():
        raise _error(path, None, "", "is a folder without config.json; needs a model folder or a config file")
    data = read_bytes(file, MAX_CONFIG_BYTES)
    config = json_text.parse(str(file), decode(str(file), data))
    if not isinstance(config, dict):
        raise _error(file, (1, 1), "", "needs a JSON object, the content of a model's config.json")
    try:
        facts = read_facts(config, model_type, dtype)
    except Refused as refused:
        field, message = refused.key, str(refused)
        if field.startswith("inferred: "):  # a default of the model type is at odds with the rest
            field, message = "", f"{message} ({field.removeprefix('inferred: ')})"
        raise _error(file, None, field, message) from None
    origin = _origin(file, config)
    if name is None:
        name = _name(origin)
    else:
        try:
            check_module_name(name)
        except ValueError as error:
            raise _error(file, None, "name", str(error)) from None
    digest = hashlib.sha256(data).hexdigest()
    text = "\n".join(_text(facts, name, origin, digest, schema or DEFAULT_SCHEMA, targets)) + "\n"
    try:
        parse(str(file), text).validate(Spec)
    except SpecError as error:
        first = error.diagnostics[0]
        raise _error(
            file, None, "", f"a spec cannot hold this model: {first.field}: {first.message}"
        ) from None
    return text


def _error(path: object, place: tuple[int, int] | None, field: str, message: str) -> SpecError:
    line, column = place or (None, None)
    return SpecError([Diagnostic(str(path), line, column, field, message)])


def _origin(file: Path, config: Mapping[str, Any]) -> str:
    """What the model is called: its repository if the file says so, else its folder, else the file."""
    given = config.get("_name_or_path")
    if isinstance(given, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", given) and given.strip("."):
        return given
    if file.stem != "config":
        return file.stem
    for folder in file.absolute().parts[-2::-1]:
        if folder.startswith("models--"):  # the layout of the Hugging Face cache
            return folder.removeprefix("models--").replace("--", "/")
        if folder != "snapshots" and not re.fullmatch(r"[0-9a-f]{40}", folder):
            return folder
    return "model"


def _name(origin: str) -> str:
    """The last part of `origin` as a spec name."""
    words = re.findall(r"[a-z0-9]+", origin.rpartition("/")[2].lower())
    name = "_".join(words) or "model"
    if not name[0].isalpha():
        name = f"model_{name}"
    name = name[:MAX_NAME].rstrip("_")
    try:
        return check_module_name(name)
    except ValueError:
        return f"{name}_model"[:MAX_NAME]


def _text(
    facts: Facts, name: str, origin: str, digest: str, schema: str, targets: tuple[str, ...]
) -> Iterator[str]:
    notes = facts.notes
    yield f"# yaml-language-server: $schema={one_line(schema)}"
    yield f"# Attention of {one_line(origin)}."
    yield "# Written by `specgen init` from its config.json: a comment names the key that a value came from,"
    yield "# `inferred` marks what the file does not say. Review it, then it is yours."
    for remark in facts.remarks:
        yield f"# Note: {one_line(remark.removeprefix('inferred: '))}"
    yield "version: 1"
    yield f"name: {_quoted(name)}"
    yield "source:"
    yield f"  config: {_quoted(origin)}"
    yield f"  sha256: {_quoted(digest)}"
    yield _line(f"dtype: {facts.dtype}", notes.get("dtype"))
    yield "attention:"
    for label, indices, layer in _classes(facts):
        yield from _entry(label, indices, layer, facts)
    yield _line(
        f"kv_cache: {{dtype: {facts.dtype}, page_size: 16, layout: NHD}}", "chosen by init: the model's dtype"
    )
    yield _line("tensor_parallel: [1]", "chosen by init; each degree gets its own per-rank head counts")
    yield _line(f"targets: [{', '.join(targets)}]", "chosen by init: the GPUs to build for")
    yield "limits:"
    yield _line("  max_seqs: 256", "chosen by init")
    yield _line(f"  max_seq_len: {facts.max_seq_len}", notes.get("max_seq_len"))
    yield _line("  max_tokens: 16384", "chosen by init")
    yield _line("  max_spec_tokens: 8", "chosen by init")


def _entry(label: str, indices: list[int] | None, layer: Layer, facts: Facts) -> Iterator[str]:
    notes = facts.notes
    dim = str(layer.qk_dim) if layer.qk_dim == layer.v_dim else f"{{qk: {layer.qk_dim}, v: {layer.v_dim}}}"
    scale = "null" if layer.scale is None else repr(layer.scale)
    default = "null is 1/sqrt(head_dim.qk)"
    scale_note = notes.get("scale") or "not given"
    yield f"  - name: {label}"
    yield from _layers(indices, facts.count, notes.get("layers") or "the config tells no layers apart")
    yield _line(f"    query_heads: {layer.query_heads}", notes.get("query_heads"))
    yield _line(f"    kv_heads: {layer.kv_heads}", notes.get("kv_heads"))
    yield _line(f"    head_dim: {dim}", notes.get("head_dim"))
    yield _line(f"    scale: {scale}", scale_note if layer.scale else f"{scale_note}; {default}")
    yield _line(f"    mask: {layer.mask}", notes.get("mask"))
    if layer.window or (layer.kind == "global" and layer.chunk is None and "window_off" in notes):
        yield _line(
            f"    sliding_window: {layer.window or 'null'}",
            notes.get("sliding_window") or notes.get("layers"),
        )
    if layer.chunk or (layer.kind == "global" and "chunk_off" in notes):
        yield _line(f"    chunk: {layer.chunk or 'null'}", notes.get("chunk"))
    if layer.softcap:
        yield _line(f"    softcap: {layer.softcap!r}", notes.get("softcap"))
    for field in ("sinks", "alibi", "prefix_ranges", "cross"):
        if getattr(layer, field):
            yield _line(f"    {field}: true", notes.get(field) or notes.get("mask"))


def _layers(indices: list[int] | None, count: int | None, why: str) -> Iterator[str]:
    """The `layers` line, a slice where one says it, else a list wrapped to the width of the file."""
    if indices is None or count is None:
        yield _line("    layers: all", why)
        return
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    last = indices[-1]
    if len(indices) > 1 and indices == list(range(indices[0], last + 1, step)):
        stop = "" if last + step >= count else str(last + 1)
        text = f"{indices[0]}:{stop}" + (f":{step}" if step > 1 else "")
        yield _line(f'    layers: "{text}"', why)
        return
    if len(indices) <= 16:
        yield _line(f"    layers: {indices}", why)
        return
    yield _line("    layers:", why)
    rows = [", ".join(map(str, indices[i : i + 20])) for i in range(0, len(indices), 20)]
    for i, row in enumerate(rows):
        yield f"      {' ' if i else '['}{row}{']' if i == len(rows) - 1 else ','}"


def _classes(facts: Facts) -> Iterator[tuple[str, list[int] | None, Layer]]:
    """(name, layers, attention) of every layer class, in the order of first layers."""
    groups: dict[Layer, list[int]] = {}
    for index, layer in facts.layers:
        groups.setdefault(layer, []).append(index)
    labels: set[str] = set()
    kinds = [layer.kind for layer in groups]
    for layer, indices in groups.items():
        label = layer.kind if kinds.count(layer.kind) == 1 else f"{layer.kind}_kv{layer.kv_heads}"
        if label in labels:
            label = f"{label}_{indices[0]}"
        labels.add(label)
        yield label, None if facts.count is None else indices, layer


def _quoted(text: str) -> str:
    """A YAML scalar that reads back as `text`, plain where that is safe."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", text) and isinstance(scalar(text), str):
        return text
    return json.dumps(one_line(text), ensure_ascii=False)


def _line(text: str, note: str | None) -> str:
    """A line with its comment, which is cut rather than let run on."""
    if not note:
        return text
    line = f"{text:<34}  # {one_line(note)}"
    return line if len(line) <= MAX_LINE else line[: MAX_LINE - 3] + "..."
