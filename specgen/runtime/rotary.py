"""Rotary embedding fused into append_kv: the queries, positions and tables that a call takes besides keys and values.

Checks them by shape, dtype, stride and device, and lays them out as launch arguments, in the order of
arguments.py. Runs only for layers with `rotary`, and for calls that give one of these tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedError
from .geometry import Geometry
from .refusals import bad, refuse_grad


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


def check_rotary(geometry: Geometry, rotary: Rotary, k: Tensor, tokens: int) -> tuple[int, tuple]:
    """Check the tensors of a rotary layer, q_out included; return (stride bits, strides of q and q_out)."""
    q, positions, cos, sin, q_out = rotary
    queries = (tokens, geometry.query_heads, geometry.qk_dim)
    half = geometry.rotary_dim // 2
    rows = cos.shape[0] if isinstance(cos, Tensor) and cos.dim() == 2 else 0
    wanted = (
        ("q", q, geometry.dtype, queries),
        ("q_out", q_out, geometry.dtype, queries),
        ("positions", positions, torch.int64, (tokens,)),
        ("cos", cos, torch.float32, (rows, half)),
        ("sin", sin, torch.float32, (rows, half)),
    )
    for name, tensor, dtype, shape in wanted:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            bad("append_kv", name, f"is {type(tensor).__name__}", "a dense torch.Tensor")
        if tensor.dtype is not dtype:
            bad("append_kv", name, f"has dtype {tensor.dtype}", dtype)
        if tensor.shape != shape:
            bad("append_kv", name, f"has shape {list(tensor.shape)}", list(shape) if rows else ["positions", half])
        if tensor.device != k.device:
            bad("append_kv", name, f"is on {tensor.device}", f"k's device {k.device}")
        if tensor.stride(-1) != 1 or (name in ("positions", "cos", "sin") and not tensor.is_contiguous()):
            need = "a unit last stride" if name in ("q", "q_out") else "a contiguous tensor; call .contiguous()"
            bad("append_kv", name, f"has strides {tensor.stride()}", need)
        if tensor.requires_grad and torch.is_grad_enabled():
            refuse_grad("append_kv", {name: tensor})
    if not rows:
        bad("append_kv", "cos", "has no rows", "a row for every position")
    if tokens and _overlap(q, q_out):
        bad("append_kv", "q_out", "overlaps q", "memory of its own: partners of an element are read while others are written")
    strides = (*q.stride()[:2], *q_out.stride()[:2])
    return strides[0] | strides[1] | strides[2] | strides[3], strides


def launch_arguments(rotary: Rotary, strides: tuple) -> tuple:
    """The arguments that follow those of append_kv."""
    q, positions, cos, sin, q_out = rotary
    return q, q_out, positions, cos, sin, cos.shape[0], *strides


def _overlap(a: Tensor, b: Tensor) -> bool:
    (a_start, a_end), (b_start, b_end) = _extent(a), _extent(b)
    return a_start < b_end and b_start < a_end


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
