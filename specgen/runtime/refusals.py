"""How a wrong argument is refused: the shapes that messages name, and the errors that every checker raises.

Reads shapes, strides, dtypes and devices only. The errors are ArgumentErrors that name the argument, what
came and what is needed.
"""

from typing import NoReturn

import torch
from torch import Tensor

from .errors import ArgumentError, UnsupportedError

RANKS = {
    "q": "[tokens, query_heads, qk_dim]",
    "k": "[tokens, kv_heads, qk_dim]",
    "v": "[tokens, kv_heads, v_dim]",
    "k_cache": "[pages, page_size, kv_heads, qk_dim]",
    "v_cache": "[pages, page_size, kv_heads, v_dim]",
    "block_table": "[seqs, max_pages]",
    "seq_lens": "[seqs]",
    "cu_seqlens_q": "[seqs + 1]",
    "slot_mapping": "[tokens]",
    "out": "[tokens, query_heads, v_dim]",
    "out_a": "[tokens, query_heads, v_dim]",
    "out_b": "[tokens, query_heads, v_dim]",
    "lse_a": "[tokens, query_heads]",
    "lse_b": "[tokens, query_heads]",
    "sinks": "[query_heads]",
    "alibi_slopes": "[query_heads]",
    "prefix_ranges": "[seqs, ranges, 2]",
}
HND_RANKS = {
    "k_cache": "[pages, kv_heads, page_size, qk_dim]",
    "v_cache": "[pages, kv_heads, page_size, v_dim]",
}


def bad(function: str, argument: str, came: object, need: object) -> NoReturn:
    """Raise the ArgumentError of one argument."""
    raise ArgumentError(f"{function}: {argument} {came}; needed: {need}")


def diagnose(function: str, tensors: dict[str, object], hnd: bool = False) -> None:
    """Raise for the first argument that is no plain strided tensor of its rank; return if all are.

    Called after reading an argument failed, so that the caller sees a name instead of an AttributeError.
    `hnd`: caches lie in that layout.
    """
    ranks = RANKS | HND_RANKS if hnd else RANKS
    for name, tensor in tensors.items():
        shape = ranks[name]
        if not isinstance(tensor, Tensor):
            bad(function, name, f"is {type(tensor).__name__}", f"a torch.Tensor {shape}")
        if tensor.is_nested or tensor.layout is not torch.strided:
            came = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}"
            bad(function, name, came, f"a dense strided tensor {shape}")
        if tensor.is_meta:
            bad(function, name, "is a meta tensor", "a tensor with storage (meta goes through torch.ops)")
        if tensor.ndim != shape.count(",") + 1:
            bad(function, name, f"has shape {list(tensor.shape)}", shape)


def refuse_no_memory(function: str, tensors: dict[str, Tensor]) -> None:
    """Raise for the first tensor of elements without an address; return if there is none.

    Called after reading an address failed or gave 0, as it does for an empty tensor too.
    """
    for name, tensor in tensors.items():
        try:
            missing = not tensor.data_ptr() and tensor.numel()
        except RuntimeError:
            missing = True
        if missing:
            came = "has no memory: its storage is freed, or it stands for another under vmap, jvp or functionalize"
            bad(function, name, came, "a plain tensor; call it outside of such a transform")


def refuse_features(function: str, features: dict[str, object]) -> None:
    """Raise for the first feature that is given: the package's spec has none of them."""
    for name, value in features.items():
        if value is not None:
            raise UnsupportedError(
                f"{function}: {name} is given; needed: None, this package's spec has no such feature"
            )


def host_bound(name: str, value: object) -> None:
    """Raise unless value is a host integer of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        bad("attention", name, f"is {type(value).__name__}", "a host int (an upper bound) or None")
    if value < 0:
        bad("attention", name, f"is {value}", "at least 0")


def bad_strides(function: str, name: str, tensor: Tensor) -> None:
    """Raise for a last stride other than 1; one element or none has no stride to speak of."""
    diagnose(function, {name: tensor})
    if tensor.stride()[-1] != 1 and tensor.shape[-1] > 1:
        bad(function, name, f"has strides {tensor.stride()}", "a last stride of 1")


def same_device(function: str, tensors: dict[str, Tensor]) -> None:
    """Raise for the first tensor that is not on the device of the first."""
    first, anchor = next(iter(tensors.items()))
    diagnose(function, {first: anchor})
    for name, tensor in tensors.items():
        if tensor.device != anchor.device:
            bad(function, name, f"is on {tensor.device}", f"{first}'s device {anchor.device}")


def refuse_grad(function: str, tensors: dict[str, Tensor]) -> None:
    """Raise for the first tensor that requires grad."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            bad(
                function,
                name,
                "requires grad",
                "inference: torch.no_grad(), inference_mode() or .detach(), no backward exists",
            )


def overlaps(*dims: tuple[int, int]) -> bool:
    """Whether two indices of (size, stride) dims may share an address; dims that nest in any order do not."""
    reach = 0
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if size == 0:
            return False
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
