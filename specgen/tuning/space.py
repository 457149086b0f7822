"""What `specgen tune` may try: every legal configuration of each kernel family for a geometry. Reads space.yaml; pure after that."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from ruamel.yaml import YAML

from specgen.rules import why_not
from specgen.runtime.arguments import ROLES
from specgen.spec import Limits
from specgen.target import Target
from specgen.tuning import candidates, holds
from specgen.tuning.records import ORIGIN
from specgen.variant import GLUON_FAMILIES, Config, Geometry, Variant, next_power_of_two

_FILE = Path(__file__).with_name("space.yaml")
# 32-bit registers of a thread at most: CUDA C++ Programming Guide, compute capabilities 3.5 and later; CDNA ISA guides.
_THREAD_REGISTERS = {"nvidia": 255, "amd": 512}


@cache
def _families() -> dict:
    return YAML(typ="safe", pure=True).load(_FILE.read_text(encoding="utf-8"))


def families(role: str) -> tuple[str, ...]:
    """The kernel families that can be the `role` of a schedule: "decode", "prefill" or "varlen"."""
    return tuple(family for family in _families() if ROLES.get(family, family) == role)


@dataclass(frozen=True)
class Space:
    """Configurations of one family that every target holds, as variants, and (symbol, reason) of those that one cannot."""

    variants: tuple[Variant, ...]
    dropped: tuple[tuple[str, str], ...]


def space(
    family: str,
    geometry: Geometry,
    targets: Sequence[Target],
    limits: Limits,
    max_query_len: int | None,
    max_registers: Sequence[int] = (),
) -> Space:
    """What may be tried for `targets`, GPUs of one arch; first what the product would take untuned, in order of preference.

    `max_query_len` as in Variant: rows that decode takes, that prefill leaves to decode (0: none), None for other families.
    `max_registers`: each is tried as a bound on the registers of a thread, beside none; NVIDIA's compiler alone has one, and
    a family whose rows state it keeps theirs.
    All promise alignment: the untuned choices serve tensors without it.
    """
    aligned = True
    extra = {"maxnreg": [None, *max_registers]} if max_registers and targets[0].vendor == "nvidia" else {}
    preferred = candidates(family, geometry, targets[0], aligned, max_query_len)
    variants, dropped = {}, {}
    for config in [*preferred, *_crossed(family, geometry, targets[0], max_query_len, extra)]:
        variant = Variant(family, geometry, config, aligned, limits.max_seqs, max_query_len)
        reasons = [reason for target in targets if (reason := _reason(variant, target, limits))]
        if reasons:
            dropped[variant.symbol] = reasons[0]
        else:
            variants.setdefault(variant.symbol, variant)
    return Space(tuple(variants.values()), tuple(dropped.items()))


def sample(items: Sequence, most: int | None, seed: int = 0) -> list:
    """At most `most` of them, the first and a random choice of the others, in their order; all where `most` is None."""
    if most is None or len(items) <= most:
        return list(items)
    kept = {0, *random.Random(seed).sample(range(1, len(items)), most - 1)}
    return [item for place, item in enumerate(items) if place in kept]


def _crossed(
    family: str, geometry: Geometry, target: Target, max_query_len: int | None, extra: Mapping[str, list]
) -> Iterator[Config]:
    rows_taken = None
    if ROLES.get(family) == "decode":
        rows_taken = max(16, next_power_of_two(geometry.group * max_query_len))
    for row in _families()[family]:
        if not holds(row["for"], family, geometry, target, True, max_query_len):
            continue
        block_ms = row["block_m"]
        if rows_taken is not None:
            block_ms = sorted({min(block_m, rows_taken) for block_m in block_ms})
        axes = (block_ms, row["tile_n"], row["num_warps"], row["num_stages"], row["ctas"])
        for values in product(*axes):
            for options in _options({**extra, **row.get("options", {})}):
                yield Config(*values, options, ORIGIN)


def _options(axes: Mapping[str, list]) -> Iterator[tuple[tuple[str, int], ...]]:
    for values in product(*axes.values()):
        yield tuple(sorted((name, value) for name, value in zip(axes, values) if value is not None))


def _reason(variant: Variant, target: Target, limits: Limits) -> str | None:
    """Why the kernel cannot run, as far as that is known before it is compiled."""
    if reason := why_not(variant, target, limits):
        return reason
    if variant.family in GLUON_FAMILIES:  # their warps divide the work, and what each holds, among roles
        return None
    threads = variant.config.num_warps * target.warp_size
    registers = variant.config.block_m * sum(variant.geometry.v_tiles) // threads
    if registers > (most := _THREAD_REGISTERS[target.vendor]):
        return f"the accumulator takes {registers} registers of each of {threads} threads, a thread has {most}"
    return None
