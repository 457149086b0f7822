"""The element types that a spec may name, and how each is called elsewhere.

Nouns only: imports nothing but the standard library.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """An element type: `name` in specs and in torch, `short` in symbols, `triton` in kernel signatures; bytes
    each.
    """

    name: str
    short: str
    triton: str
    itemsize: int


def _table(*rows: DType) -> dict[str, DType]:
    return {row.name: row for row in rows}


# What queries, keys, values and outputs may be.
DTYPES: dict[str, DType] = _table(
    DType("bfloat16", "bf16", "bf16", 2),
    DType("float16", "fp16", "fp16", 2),
    DType("float32", "fp32", "fp32", 4),
)

# What only a KV cache may be. A spec may name them; rules.py says whether a template implements them.
FP8_DTYPES: dict[str, DType] = _table(
    DType("float8_e4m3fn", "fp8e4m3", "fp8e4nv", 1),
    DType("float8_e4m3fnuz", "fp8e4m3fnuz", "fp8e4b8", 1),
    DType("float8_e5m2", "fp8e5m2", "fp8e5", 1),
)

CACHE_DTYPES: dict[str, DType] = DTYPES | FP8_DTYPES
