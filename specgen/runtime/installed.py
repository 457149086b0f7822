"""Reads what an installed package says of itself: manifest.json and dispatch.py. A file that is damaged is named.

Imports dispatch.py; touches nothing else.
"""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from .errors import DamagedBinaryError
from .table import Table

FORMAT = 1  # of manifest.json
TABLES = ("ATTENTION_ROWS", "APPEND_ROWS", "MERGE_ROWS", "VARLEN_ROWS", "SELECTORS")

_SIZE = int | None
_MANIFEST = {"package": str, "distribution": str, "version": str, "specgen": str, "triton": str, "spec": dict} | {
    "limits": dict, "targets": list, "layers": list, "variants": dict,
}  # fmt: skip
_TARGET = {"id": str, "arch": str, "multiprocessors": int, "shared_memory_per_block": int}
_HEADS = {"query_heads": int, "kv_heads": int, "qk_dim": int, "v_dim": int, "page_size": int}
_LAYER = {"name": str, **_HEADS, "scale": int | float, "mask": str, "dtype": str}
_VARIANT = {"family": str, "module": str, "dtype": str, **_HEADS, "max_query_len": _SIZE, "block_m": _SIZE, "tile_n": _SIZE} | {
    "num_warps": int, "num_stages": int, "ctas_per_multiprocessor": int, "aligned": bool, "alignment": int, "binaries": dict,
}  # fmt: skip
_BINARY = {"file": str, "sha256": str, "function": str, "shared_bytes": int, "num_threads": int}


def read_manifest(directory: Path, limits: tuple[str, ...]) -> dict:
    """manifest.json of the package in `directory`, with limits of these names. Raises DamagedBinaryError unless it has
    what the runtime reads.
    """
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        damaged(path, "is missing")
    except OSError as error:
        damaged(path, f"cannot be read ({error.strerror})")
    except ValueError as error:  # no JSON, or no UTF-8
        damaged(path, f"is damaged: {error}")
    if isinstance(manifest, dict) and manifest.get("format", FORMAT) != FORMAT:
        damaged(path, f"has format {manifest['format']!r}, and this package's runtime reads {FORMAT}: the files are of two builds")
    _check(path, "", manifest, {"format": int, **_MANIFEST})
    _check(path, "limits", manifest["limits"], dict.fromkeys(limits, int))
    for place, target in enumerate(manifest["targets"]):
        _check(path, f"targets.{place}", target, _TARGET)
    for place, layer in enumerate(manifest["layers"]):
        _check(path, f"layers.{place}", layer, _LAYER)
    for symbol, variant in manifest["variants"].items():
        _check(path, f"variants.{symbol}", variant, _VARIANT)
        for arch, binary in variant["binaries"].items():
            _check(path, f"variants.{symbol}.binaries.{arch}", binary, _BINARY)
    return manifest


def read_dispatch(name: str, directory: Path) -> ModuleType:
    """dispatch.py of the package `name`, imported. Raises DamagedBinaryError unless it has its TABLES."""
    path = directory / "dispatch.py"
    if not path.is_file():
        damaged(path, "is missing")
    try:
        dispatch = importlib.import_module(f"{name}.dispatch")
    except Exception as error:  # half a file may raise anything
        damaged(path, f"is damaged: {type(error).__name__}: {error}", error)
    if lacking := [table for table in TABLES if not hasattr(dispatch, table)]:
        damaged(path, f"is damaged: it lacks {', '.join(lacking)}")
    return dispatch


def check_rows(directory: Path, manifest: dict, table: Table) -> None:
    """Raise DamagedBinaryError unless the rows are numbered in order, of kernels that the manifest has. Before the first use
    of a device, not at import: a bundle of `specgen tune` holds some of the table's kernels, and takes rows of its own.
    """
    path = directory / "dispatch.py"
    for rows in (table.attention_rows, table.append_rows, table.merge_rows, table.varlen_rows):
        for place, row in enumerate(rows):
            if row.index != place:
                damaged(path, f"is damaged: {type(row).__name__} {row.index} stands at place {place}")
            for symbol in row.symbols:
                if symbol not in manifest["variants"]:
                    damaged(path, f"names the kernel {symbol}, which manifest.json has not")


def damaged(path: Path, reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise DamagedBinaryError of a file of a package; `path` is in the package's folder."""
    raise DamagedBinaryError(f"{path} {reason}; reinstall {path.parent.name.replace('_', '-')}") from cause


def _check(path: Path, where: str, entry: object, fields: dict) -> None:
    """Raise unless an entry of the manifest is a dictionary with these fields, each of its type."""
    if not isinstance(entry, dict):
        damaged(path, f"is damaged: {where or 'it'} is {type(entry).__name__}, an object is needed")
    for name, kind in fields.items():
        field = f"{where}.{name}" if where else name
        if name not in entry:
            damaged(path, f"is damaged: it lacks {field}")
        if not isinstance(entry[name], kind):
            damaged(path, f"is damaged: {field} is {entry[name]!r:.60}")
