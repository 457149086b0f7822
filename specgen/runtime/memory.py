"""Which tensors share memory: what a kernel writes must not lie over what it reads, nor over itself.

Reads shapes, strides, dtypes and addresses only; an element shared is found, not just ranges that cross.
"""

from functools import lru_cache
from itertools import islice

from torch import Tensor

from .refusals import bad

_MOST = 4096  # differences of addresses that `_meet` follows


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


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether an element of `a` and one of `b` have a byte in common, where both have memory. Views that
    interleave in the usual ways are told apart; those too entangled to tell are taken to share.
    """
    (a_start, a_stop), (b_start, b_stop) = _span(a), _span(b)
    if a_start >= b_stop or b_start >= a_stop:
        return False
    return _meet(b_start - a_start, a.shape, a.stride(), a.itemsize, b.shape, b.stride(), b.itemsize)


def clear(starts: list[int], sizes: tuple[int, ...], k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the caches of an append_kv call, by ranges of bytes, cross none of its other tensors, and share nothing
    with each other. Ranges are those of k, v, k_cache, v_cache, slot_mapping.

    Made for the path of every call: where it says False, `refuse_shared` finds out.
    """
    k, v, k_start, v_start, slots = starts
    k_size, v_size, k_cache_size, v_cache_size, slots_size = sizes
    k_stop, v_stop = k_start + k_cache_size, v_start + v_cache_size
    for start, stop in ((k, k + k_size), (v, v + v_size), (slots, slots + slots_size)):
        if start < k_stop and k_start < stop or start < v_stop and v_start < stop:
            return False
    if k_start >= v_stop or v_start >= k_stop:
        return True
    dims = k_cache.shape, k_cache.stride(), k_cache.itemsize, v_cache.shape, v_cache.stride(), v_cache.itemsize
    return not _meet(v_start - k_start, *dims)


def refuse_shared(function: str, tensors: dict[str, Tensor], written: tuple[str, ...]) -> None:
    """Raise ArgumentError for the first tensor of those `written` that shares memory with another. Names that are not
    among the tensors are left out.
    """
    spans = {name: _span(tensor) for name, tensor in tensors.items()}
    for name in written:
        start, stop = spans.pop(name, (0, 0))
        for other, (other_start, other_stop) in spans.items():
            if start < other_stop and other_start < stop and share_memory(tensors[name], tensors[other]):
                why = "both are written" if other in written else f"{other} is read while {name} is written"
                bad(function, name, f"overlaps {other}", f"memory of its own: {why}")


def refuse_out(function: str, out: Tensor, q: Tensor, others: dict[str, Tensor | None]) -> None:
    """Raise ArgumentError where the output of an attention call shares memory with what the call reads: q and the
    `others` that are given. It may be q itself, element for element: a row of q is read before the same row of out is
    written.
    """
    in_place = out.data_ptr() == q.data_ptr() and out.shape == q.shape and _same_strides(out, q)
    read = {name: tensor for name, tensor in {"q": None if in_place else q, **others}.items() if tensor is not None}
    refuse_shared(function, {"out": out, **read}, ("out",))


def _same_strides(a: Tensor, b: Tensor) -> bool:
    return all(size <= 1 or ours == theirs for size, ours, theirs in zip(a.shape, a.stride(), b.stride()))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one behind the last; (0, 0) without elements."""
    reach = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        if not size:
            return 0, 0
        reach += (size - 1) * stride
    start = tensor.data_ptr()
    return start, start + reach * tensor.itemsize


@lru_cache(maxsize=1024)
def _meet(distance: int, a_shape, a_strides, a_size: int, b_shape, b_strides, b_size: int) -> bool:
    """Whether `a` and `b`, which begins `distance` bytes behind it, share a byte.

    A byte of `a` less one of `b` is a sum of strides, each times a factor that both shapes bound. From the
    longest stride on, only the factors stay from which the shorter ones can still reach the distance.
    """
    least, most = {1: 1 - b_size}, {1: a_size - 1}  # of the factor of a stride in bytes
    for bound, sign, shape, strides, size in ((most, 1, a_shape, a_strides, a_size), (least, -1, b_shape, b_strides, b_size)):
        for count, stride in zip(shape, strides):
            bound[stride * size] = bound.get(stride * size, 0) + sign * (count - 1)
    strides = sorted((least | most).keys() - {0}, reverse=True)
    left = {distance}
    lows = [least.get(stride, 0) * stride for stride in strides]
    highs = [most.get(stride, 0) * stride for stride in strides]
    for i, stride in enumerate(strides):
        low, high = sum(lows[i + 1 :]), sum(highs[i + 1 :])
        factors = (
            (
                rest,
                range(
                    max(least.get(stride, 0), -((high - rest) // stride)),
                    min(most.get(stride, 0), (rest - low) // stride) + 1,
                ),
            )
            for rest in left
        )
        found = list(islice((rest - factor * stride for rest, each in factors for factor in each), _MOST + 1))
        if len(found) > _MOST:
            return True
        left = set(found)
    return bool(left)
