"""Which configurations a specialization may take, in order of preference. Reads configs.yaml; pure after that."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

from specgen.target import Target
from specgen.variant import Config, Geometry, next_power_of_two

_FILE = Path(__file__).with_name("configs.yaml")


@cache
def _rows() -> dict:
    return YAML(typ="safe", pure=True).load(_FILE.read_text(encoding="utf-8"))


def candidates(
    family: str, geometry: Geometry, target: Target, aligned: bool, max_query_len: int | None
) -> list[Config]:
    """Configurations of `family` for this geometry on `target`, the preferred first. Never empty for a legal geometry."""
    found = []
    for row in _rows().get(family, ()):
        if not holds(row["for"], family, geometry, target, aligned, max_query_len):
            continue
        block_m = row["block_m"]
        if family == "decode":
            block_m = min(block_m, max(16, next_power_of_two(geometry.group * max_query_len)))
        options = tuple(sorted(row.get("options", {}).items()))
        found.append(
            Config(block_m, row["tile_n"], row["num_warps"], row["num_stages"], row["ctas"], options, row["origin"])
        )
    return found


def holds(
    when: Mapping, family: str, geometry: Geometry, target: Target, aligned: bool, max_query_len: int | None
) -> bool:
    """Whether the `for` of a row of configs.yaml or space.yaml takes in this case."""
    # Merging reads no key: its choice may not depend on qk_dim, or two kernels would claim one dispatch row.
    v_width = sum(geometry.v_tiles)
    widest = v_width if family == "merge_states" else max(sum(geometry.qk_tiles), v_width)
    facts = {
        "arch": target.arch,
        "vendor": target.vendor,
        "itemsize": geometry.itemsize,
        "aligned": aligned,
        "plain": geometry.plain,
        "rows": min(32, max(16, next_power_of_two(geometry.group * (max_query_len or 1)))),
    }
    when = dict(when)
    if not when.pop("min_dim", widest) <= widest <= when.pop("max_dim", widest):
        return False
    return all(facts[name] in (value if isinstance(value, list) else [value]) for name, value in when.items())
