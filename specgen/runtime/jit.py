"""Compiles a shipped Triton module for the GPU at hand, where the wheel has no binary for it.

The compiler gets what the ahead-of-time build gave it: the same signature, promises of alignment and options,
so that one compile serves every call, and the result goes through the same launcher. Needs no C compiler and
no GPU. Imports Triton, but only inside its functions: nothing here runs where a binary fits.
"""

import os
from types import ModuleType
from typing import NamedTuple

from .arguments import variant_arguments
from .choice import vendor_of
from .driver import DeviceProperties
from .errors import NoBinaryError

OLDEST_TRITON = (3, 6)

_TYPES = {"bf16": "bf16", "f32": "fp32", "i32": "i32", "i64": "i64"}
_DATA = {"bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float32": ("fp32", 4)}


class Compiled(NamedTuple):
    """A kernel compiled just in time: the binary, its entry's name, and what a launch needs, in bytes and
    threads per block.
    """

    image: bytes
    function: str
    shared_bytes: int
    threads: int


def refusal() -> str | None:
    """Why nothing can be compiled just in time in this process, or None."""
    if os.environ.get("SPECGEN_NO_JIT") == "1":
        return "SPECGEN_NO_JIT=1 forbids compiling just in time"
    needed = ".".join(map(str, OLDEST_TRITON))
    try:
        import triton
    except ImportError as error:
        return f"Triton >= {needed}, to compile just in time, does not import ({error})"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton is {triton.__version__}, and >= {needed} is needed to compile just in time"
    return None


def signature(variant: dict) -> tuple[str, ...]:
    """Triton's types of the arguments, in order, such as "*bf16" or "i32"."""
    data, _ = _DATA[variant["dtype"]]
    return tuple(
        f"*{_TYPES.get(argument.dtype, data)}" if argument.kind == "pointer" else argument.kind
        for argument in variant_arguments(variant)
    )


def divisibility(variant: dict) -> tuple[tuple[int, int], ...]:
    """(argument, divisor) promised to the compiler: bytes for pointers, elements for strides."""
    if not variant["aligned"]:
        return ()
    _, itemsize = _DATA[variant["dtype"]]
    elements = variant["alignment"] // itemsize
    promised = (
        (i, 16 if argument.kind == "pointer" else elements)
        for i, argument in enumerate(variant_arguments(variant))
        if argument.aligned
    )
    return tuple((i, divisor) for i, divisor in promised if divisor > 1)


def compile_kernel(
    module: ModuleType, symbol: str, variant: dict, arch: str, properties: DeviceProperties
) -> Compiled:
    """Compile the function `symbol` of `module` for the GPU of `properties`.

    `variant` is the manifest's entry, `arch` the architecture it was tuned for: compiler options of one
    vendor stay with it. Raises NoBinaryError if the kernel needs more shared memory than the GPU has, or
    scratch memory, or does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, symbol)
    if not isinstance(function, triton.runtime.JITFunction):
        raise NoBinaryError(
            f"{symbol}: {module.__name__} was imported under TRITON_INTERPRET=1; unset it to use the GPU"
        )
    vendor = vendor_of(properties.arch)
    target = (
        GPUTarget("cuda", int(properties.arch.removeprefix("sm_")), properties.warp_size)
        if vendor == "nvidia"
        else GPUTarget("hip", properties.arch, properties.warp_size)
    )
    options = {"num_warps": variant["num_warps"], "num_stages": variant["num_stages"]}
    if vendor == vendor_of(arch):
        options |= dict(variant.get("options") or {})
    types = dict(zip(function.arg_names, signature(variant), strict=True))
    attributes = {(i,): [["tt.divisibility", divisor]] for i, divisor in divisibility(variant)}
    source = ASTSource(function, types, attrs=attributes)
    try:
        kernel = triton.compile(source, target=target, options=options)
    except Exception as error:
        raise NoBinaryError(
            f"{symbol} does not compile for {properties.arch} with Triton {triton.__version__}: {error}"
        ) from error
    needed, available = kernel.metadata.shared, properties.shared_memory_per_block
    if needed > available:
        raise NoBinaryError(
            f"{symbol}, compiled for {properties.name} ({properties.arch}), needs {needed} bytes of shared "
            f"memory per block; the GPU has {available}"
        )
    if any(getattr(kernel.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        raise NoBinaryError(
            f"{symbol}, compiled for {properties.arch}, needs scratch memory, which a launch does not give"
        )
    image = kernel.asm["cubin" if vendor == "nvidia" else "hsaco"]
    return Compiled(image, kernel.metadata.name, needed, kernel.metadata.num_warps * properties.warp_size)
