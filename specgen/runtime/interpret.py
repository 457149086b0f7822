"""Kernels in Triton's interpreter: what it computes right, and how one is called there. CPU tensors, for tests.

Imports Triton, but only inside its functions. Touches what a kernel's caller gives it.
"""

import os
import sys
import threading
from collections.abc import Callable

from .arguments import ROLES, variant_arguments, variant_call_arguments
from .errors import NoBinaryError

WRONG_DTYPE = "bfloat16"
WHY = f"Triton's interpreter multiplies {WRONG_DTYPE} operands of tl.dot as bit patterns"
_MULTIPROCESSORS = 3
_DOTS = (*ROLES, "varlen")  # families whose kernels multiply matrices


def refusal(variant: dict) -> str | None:
    """Why the interpreter gives a wrong result for a variant (manifest entry), or None."""
    return WHY if variant["family"] in _DOTS and variant["dtype"] == WRONG_DTYPE else None


def hint(manifest: dict) -> str:
    """How a package is tested without a GPU, as the end of a message; "" where the interpreter would refuse it."""
    if any(refusal(variant) for variant in manifest["variants"].values()):
        return ""
    return ", or, to test without one, CPU tensors and TRITON_INTERPRET=1 set before the process starts"


def multiprocessors() -> int:
    """SPECGEN_INTERPRET_MULTIPROCESSORS, or 3: few, so that programs take several items each."""
    text = os.environ.get("SPECGEN_INTERPRET_MULTIPROCESSORS", str(_MULTIPROCESSORS))
    if not text.isdecimal() or int(text) < 1:
        raise NoBinaryError(f"SPECGEN_INTERPRET_MULTIPROCESSORS: {text!r} came, a positive integer needed")
    return int(text)


def bind(function, variant: dict) -> Callable[..., None]:
    """An interpreted function of the shipped source as kernel(grid, stream, *args), as launcher.bind has it; tensors only."""
    call = variant_call_arguments(variant)
    taken = [(call.index(argument), argument.kind == "i64") for argument in variant_arguments(variant)]
    # The interpreter patches triton.language for the time of a call: one call at a time in the process.
    # Its own module keeps the lock, as each package has a runtime of its own.
    lock = vars(sys.modules[type(function).__module__]).setdefault("_specgen_lock", threading.Lock())

    def kernel(grid: int, stream: int, *args) -> None:
        with lock:
            function[(grid,)](*(_int64(args[i]) if is_int64 else args[i] for i, is_int64 in taken))

    return kernel


def _int64(value: int):
    """A host int as the kernel's signature has it. The interpreter gives a small one 32 bits, in which a product wraps."""
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(numpy.array([value], dtype=numpy.int64), tl.int64), tl.int64)
