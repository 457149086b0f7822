"""Whose measurements serve a GPU that has none: the nearest measured relative, and the one warning. Pure; imports nouns, records.

Nearest: of the same architecture, else of the same family, else of the same vendor; among those, least different in
multiprocessors, memory bandwidth and shared memory (the sum of the absolute logarithms of the ratios).
"""

import re
from collections.abc import Iterable, Mapping
from math import log
from typing import NamedTuple

from specgen.target import ARCHS, Target
from specgen.tuning.records import Gpu

# What is compared: (Target's field, words after the number).
_NUMBERS = (
    ("multiprocessors", "multiprocessors"),
    ("memory_bandwidth", "GB/s"),
    ("shared_memory_per_block", "bytes of shared memory per block"),
)


class Relative(NamedTuple):
    """A measured GPU that serves a target. `name`: its target id, else its product name; `warning`: None if it is the target."""

    gpu: Gpu
    name: str
    warning: str | None


def identify(gpu: Gpu, targets: Mapping[str, Target]) -> Target | None:
    """The target that a GPU is, by its architecture, the words of its product name and its multiprocessors; None if none is.

    A model name must agree: a word of letters and digits, such as "H200" or "4090", that begins a word of the GPU's name.
    """
    words = _words(gpu.name)

    def shared(target: Target) -> list[str]:
        return [w for w in _words(target.name) if any(word.startswith(w) for word in words)]

    def is_model(word: str) -> bool:
        return bool(re.search(r"\d", word)) and not word.endswith("gb")

    fitting = [t for t in targets.values() if t.arch == gpu.arch and any(map(is_model, shared(t)))]
    if not fitting:
        return None
    return min(fitting, key=lambda t: (abs(t.multiprocessors - gpu.multiprocessors), -len(shared(t)), t.id))


def nearest(target: Target, measured: Iterable[Gpu], targets: Mapping[str, Target]) -> Relative | None:
    """The measured GPU whose data serve `target`, itself if it was measured; None if nothing of its vendor was."""
    related = []
    for gpu in sorted(set(measured), key=lambda gpu: (gpu.name, gpu.multiprocessors, gpu.memory_bytes)):
        row = identify(gpu, targets)
        degree = _degree(target.arch, gpu.arch)
        if degree is not None:
            is_itself = row is not None and row.id == target.id
            related.append((not is_itself, degree, row is None, _distance(target, row or gpu), len(related), gpu, row))
    if not related:
        return None
    is_other, degree, *_, gpu, row = min(related)
    name = row.id if row else gpu.name
    return Relative(gpu, name, _warning(target, name, degree, row or gpu) if is_other else None)


def alone(target: Target, aligned: bool) -> str:
    """The warning where nothing related was measured for a geometry, with or without the promise of alignment."""
    tensors = "aligned" if aligned else "unaligned"
    what = f"{target.id}: no measurements of its own nor of a relative for this geometry and {tensors} tensors"
    return f"{what}; uses the conservative configurations of specgen/tuning/configs.yaml"


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _degree(arch: str, other: str) -> int | None:
    """0 for the same architecture, 1 for the same family, 2 for the same vendor, else None."""
    if arch == other:
        return 0
    if _family(arch) == _family(other):
        return 1
    return 2 if other in ARCHS and ARCHS[arch].vendor == ARCHS[other].vendor else None


def _family(arch: str) -> str:
    """sm_80 and sm_89 are of sm_8 (the major of the compute capability); gfx90a, gfx942 and gfx950 of gfx9."""
    return arch[:-1] if arch.startswith("sm_") else arch[:-2]


def _distance(target: Target, other: Target | Gpu) -> float:
    pairs = [(getattr(target, name), getattr(other, name, None)) for name, _ in _NUMBERS]
    return round(sum(abs(log(ours / theirs)) for ours, theirs in pairs if theirs), 9)


def _warning(target: Target, name: str, degree: int, other: Target | Gpu) -> str:
    relation = (f"same {target.arch}", f"{other.arch}, the family of {target.arch}", f"{other.arch}, the same vendor")
    facts = [relation[degree]]
    for field, unit in _NUMBERS:
        ours, theirs = getattr(target, field), getattr(other, field, None)
        if theirs:
            facts.append(f"{ours:g} {unit}" if ours == theirs else f"{ours:g} against {theirs:g} {unit}")
    return f"{target.id}: no measurements of its own; uses those of {name} ({', '.join(facts)})"
