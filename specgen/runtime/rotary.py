"""Rotary embedding fused into append_kv: the queries, positions and tables that a call takes besides keys and values.

Checks them by shape, dtype, stride and device, and lays them out as launch arguments, in the order of
arguments.py. Runs only for layers with `rotary`, and for calls that give one of these tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedError
from .geometry import Geometry
from .memory import overlaps
from .refusals import bad, check_tensor, diagnose


class Rotary(NamedTuple):
    """What `append_kv` takes to rotate: see its docstring."""

    q: Tensor | None
    positions: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    q_out: Tensor | None


def check_presence(geometry: Geometry, rotary: Rotary | None) -> None:
    """Raise for tensors that a layer without rotary has no use for, and for one that a rotary layer lacks."""
    if geometry.rotary_dim is None:
        if rotary is not None:
            names = ", ".join(name for name, tensor in zip(Rotary._fields, rotary) if tensor is not None)
            raise UnsupportedError(
                f"append_kv: {names} given; needed: None, layer {geometry.layer!r} has no rotary embedding"
            )
        return
    for name in ("q", "positions", "cos", "sin"):
        if rotary is None or getattr(rotary, name) is None:
            bad("append_kv", name, "is None", f"a tensor, layer {geometry.layer!r} has rotary embedding")


def check_rotary(
    geometry: Geometry, rotary: Rotary, k: Tensor, tokens: int
) -> tuple[int, tuple[int, ...]]:
    """Check the tensors of a rotary layer beside keys that are already checked.

    Returns (stride bits, strides of q and q_out), those of a missing q_out contiguous.
    """
    q, positions, cos, sin, q_out = rotary
    queries = (tokens, geometry.query_heads, geometry.qk_dim)
    diagnose("append_kv", {"cos": cos})
    table = (cos.shape[0], geometry.rotary_dim // 2)
    out = () if q_out is None else (("q_out", q_out, geometry.dtype, queries),)
    for name, tensor, dtype, shape in (
        ("q", q, geometry.dtype, queries),
        *out,
        ("positions", positions, torch.int64, (tokens,)),
        ("cos", cos, torch.float32, table),
        ("sin", sin, torch.float32, table),
    ):
        strided = name in ("q", "q_out")
        check_tensor("append_kv", name, tensor, (dtype,), shape, ("k", k), contiguous=not strided)
    if not table[0]:
        bad("append_kv", "cos", "has no rows", "a row for every position")
    if q_out is None:
        strides = (*q.stride()[:2], geometry.query_heads * geometry.qk_dim, geometry.qk_dim)
    else:
        if overlaps(*zip(q_out.shape, q_out.stride())):
            came = f"has strides {q_out.stride()} that overlap"
            bad("append_kv", "q_out", came, "every element at its own address")
        strides = (*q.stride()[:2], *q_out.stride()[:2])
    return strides[0] | strides[1] | strides[2] | strides[3], strides


def launch_arguments(rotary: Rotary, strides: tuple) -> tuple:
    """The arguments that follow those of append_kv."""
    q, positions, cos, sin, q_out = rotary
    return q, q_out, positions, cos, sin, cos.shape[0], *strides
