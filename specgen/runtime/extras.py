"""The tensors of features that one call takes besides the batch: attention sinks, ALiBi slopes, prefix
ranges.

Checks them by shape, dtype, stride and device, and lays them out as launch arguments, in the order of
arguments.py. Runs only for layers that have such a feature and for calls that give one; allocates nothing.
"""

import torch
from torch import Tensor

from .errors import UnsupportedError
from .geometry import Geometry
from .refusals import bad, check_tensor, diagnose

ABSENT = (None, None, None)  # sinks, alibi_slopes, prefix_ranges
NAMES = ("sinks", "alibi_slopes", "prefix_ranges")

_SINK_DTYPES = (torch.bfloat16, torch.float32)


def check_extras(function: str, geometry: Geometry, extras: tuple | None, q: Tensor, seqs: int) -> None:
    """Check the feature tensors of an `attention` or `attention_varlen` call whose batch is already checked.

    Raises UnsupportedError for one that the layer has not, ArgumentError for one that is missing or unfit.
    """
    check_presence(function, geometry, extras)
    sinks, slopes, ranges = extras or ABSENT
    heads, beside = (geometry.query_heads,), ("q", q)
    if sinks is not None:
        check_tensor(function, "sinks", sinks, _SINK_DTYPES, heads, beside)
    if slopes is not None:
        check_tensor(function, "alibi_slopes", slopes, (torch.float32,), heads, beside)
    if ranges is not None:
        diagnose(function, {"prefix_ranges": ranges})
        shape = (seqs, ranges.shape[1], 2)
        check_tensor(function, "prefix_ranges", ranges, (torch.int32,), shape, beside)


def check_presence(function: str, geometry: Geometry, extras: tuple | None) -> None:
    """Raise for a tensor that the layer has no use for, and for one that it cannot do without."""
    features = geometry.extras
    given = extras or ABSENT
    for name, has, tensor in zip(NAMES, features or (False,) * 3, given):
        if tensor is not None and not has:
            raise UnsupportedError(
                f"{function}: {name} is given; needed: None, layer {geometry.layer!r} has no such feature"
            )
    if features is None:
        return
    if features.sinks and given[0] is None:
        need = f"bfloat16 or float32 [{geometry.query_heads}], layer {geometry.layer!r} has sinks"
        bad(function, "sinks", "is None", need)
    if features.alibi and given[1] is None and geometry.degree > 1:
        model = geometry.query_heads * geometry.degree
        need = (
            f"this rank's slopes, float32 [{geometry.query_heads}]: q has {geometry.query_heads} of the "
            f"model's {model} query heads, and which ones is not known here"
        )
        bad(function, "alibi_slopes", "is None", need)


def launch_arguments(geometry: Geometry, extras: tuple | None, plans, unused: Tensor) -> tuple:
    """The arguments that follow the strides, for a layer whose `geometry.extras` is not None.

    `plans` gives the model's own slopes where none came; `unused` stands for pointers that nobody reads.
    """
    features = geometry.extras
    sinks, slopes, ranges = extras or ABSENT
    arguments = ()
    if features.sinks:
        arguments = (unused, sinks, 1) if sinks.dtype is torch.float32 else (sinks, unused, 0)
    if features.alibi:
        arguments += (plans.alibi_slopes(geometry.query_heads) if slopes is None else slopes,)
    if features.prefix_ranges:
        arguments += (unused, 0) if ranges is None else (ranges, ranges.shape[1])
    return arguments


def model_slopes(heads: int) -> list[float]:
    """ALiBi slopes of a model with so many heads, as Press et al. (2022), BLOOM and MPT compute them.

    For n heads, n a power of two, head h = 1 .. n has 2^(-8 h / n). Otherwise the slopes of p heads, the next
    lower power of two, then every other one of 2p heads, from the first.
    """
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * head / lower) for head in range(1, lower + 1)]
    between = [2.0 ** (-4 * head / lower) for head in range(1, 2 * lower + 1, 2)]
    return slopes + between[: heads - lower]
