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
    "cu_seqlens_k": "[seqs + 1]",
    "slot_mapping": "[tokens]",
    "out": "[tokens, query_heads, v_dim]",
    "out_a": "[tokens, query_heads, v_dim]",
    "out_b": "[tokens, query_heads, v_dim]",
    "lse_a": "[tokens, query_heads]",
    "lse_b": "[tokens, query_heads]",
    "sinks": "[query_heads]",
    "alibi_slopes": "[query_heads]",
    "prefix_ranges": "[seqs, ranges, 2]",
    "q_out": "[tokens, query_heads, qk_dim]",
    "positions": "[tokens]",
    "cos": "[positions, rotary_dim / 2]",
    "sin": "[positions, rotary_dim / 2]",
}
HND_RANKS = {
    "k_cache": "[pages, kv_heads, page_size, qk_dim]",
    "v_cache": "[pages, kv_heads, page_size, v_dim]",
}
VARLEN_RANKS = {"k": "[key_tokens, kv_heads, qk_dim]", "v": "[key_tokens, kv_heads, v_dim]"}


def bad(function: str, argument: str, came: object, need: object) -> NoReturn:
    """Raise the ArgumentError of one argument."""
    raise ArgumentError(f"{function}: {argument} {came}; needed: {need}")


def diagnose(function: str, tensors: dict[str, object], hnd: bool = False) -> None:
    """Raise for the first argument that is no plain strided tensor of its rank; return if all are.

    Called after reading an argument failed, so that the caller sees a name instead of an AttributeError.
    `hnd`: caches lie in that layout.
    """
    ranks = RANKS | (HND_RANKS if hnd else {}) | (VARLEN_RANKS if function == "attention_varlen" else {})
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


def addresses(function: str, tensors: dict[str, Tensor]) -> list[int]:
    """Where the tensors begin, 0 for those without elements. Raises for one of elements without an address."""
    try:
        found = [tensor.data_ptr() for tensor in tensors.values()]
    except RuntimeError:
        found = [0]
    if not all(found):
        for name, tensor in tensors.items():
            try:
                missing = not tensor.data_ptr() and tensor.numel()
            except RuntimeError:
                missing = True
            if missing:
                came = "has no memory: its storage is freed, or it stands for another under vmap, jvp or functionalize"
                bad(function, name, came, "a plain tensor; call it outside of such a transform")
    return found


def refuse_features(function: str, features: dict[str, object]) -> None:
    """Raise for the first feature that is given: the package's spec has none of them."""
    for name, value in features.items():
        if value is not None:
            raise UnsupportedError(
                f"{function}: {name} is given; needed: None, this package's spec has no such feature"
            )


def host_bound(function: str, name: str, value: object) -> None:
    """Raise unless value is a host integer of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        bad(function, name, f"is {type(value).__name__}", "a host int (an upper bound) or None")
    if value < 0:
        bad(function, name, f"is {value}", "at least 0")


def check_tensor(
    function: str,
    name: str,
    tensor: object,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    beside: tuple[str, Tensor],
    contiguous: bool = True,
) -> None:
    """Raise unless a tensor of a feature has one of the dtypes, this shape, the device of `beside` (name and
    tensor) and a unit last stride (`contiguous`: every stride so), and needs no grad.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        diagnose(function, {name: tensor})
    if tensor.dtype not in dtypes:
        bad(function, name, f"has dtype {tensor.dtype}", " or ".join(map(str, dtypes)))
    if tensor.shape != shape:
        bad(function, name, f"has shape {list(tensor.shape)}", list(shape))
    if contiguous and not tensor.is_contiguous():
        bad(function, name, f"has strides {tensor.stride()}", "a contiguous tensor; call .contiguous()")
    other, anchor = beside
    if tensor.device != anchor.device:
        bad(function, name, f"is on {tensor.device}", f"{other}'s device {anchor.device}")
    if tensor.stride()[-1] != 1:
        bad_strides(function, name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        refuse_grad(function, {name: tensor})


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
