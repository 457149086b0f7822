"""Launches a loaded kernel through ctypes: the path of hosts whose wheel has no C extension. Same contract as
_launch.c, slower.

Touches only the driver that it is given. Packed arguments live in buffers that are taken from a pool for the
time of a call, so that threads, and a launch inside a launch (from a finalizer), never share one.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from .driver import CudaDriver, HipDriver

_FORMATS = {
    "p": "Q",
    "i": "i4x",
    "l": "q",
}  # every value in 8 bytes of its own, in the byte order of the host


class _Buffer:
    """The values of one launch, 8 bytes each, and the array of pointers to them that the driver reads."""

    def __init__(self, slots: int):
        self.values = ctypes.create_string_buffer(8 * slots)
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * slots)(*(base + 8 * i for i in range(slots)))


def bind(
    driver: CudaDriver | HipDriver,
    scope: int,
    function: int,
    threads: int,
    shared_bytes: int,
    kinds: str,
    scratch: int,
    refuse: Callable[[int, object], Any],
    fail: Callable[[int, int, int, int], Any],
) -> Callable[..., None]:
    """The kernel as `kernel(grid, stream, *args)`; the parameters are those of `_launch.bind`.

    `kinds` has one of "p" (pointer), "i" (int32), "l" (int64) per argument; `scratch` null pointers follow.
    `refuse` raises the error of a bad argument and `fail` that of a failed driver call.
    """
    launch = getattr(driver.library, driver.launch_function)
    cuda = driver.vendor == "nvidia"
    current_type = ctypes.c_void_p if cuda else ctypes.c_int
    get = driver.library.cuCtxGetCurrent if cuda else driver.library.hipGetDevice
    enter = driver.library.cuCtxPushCurrent_v2 if cuda else driver.library.hipSetDevice
    count = len(kinds)
    positions = tuple(i for i, kind in enumerate(kinds) if kind == "p")
    pack = struct.Struct("=" + "".join(_FORMATS[kind] for kind in kinds)).pack_into
    pool: list[_Buffer] = []

    def blame(args: tuple) -> None:
        """Find the argument that does not pack, and refuse it."""
        for i, (kind, value) in enumerate(zip(kinds, args, strict=True)):
            limits = {"p": (0, 1 << 64), "i": (-(1 << 31), 1 << 31), "l": (-(1 << 63), 1 << 63)}[kind]
            if kind == "p" and hasattr(value, "data_ptr"):
                value = value.data_ptr()
            if not isinstance(value, int) or not limits[0] <= value < limits[1]:
                refuse(i, args[i])

    def kernel(grid: int, stream: int, *args) -> None:
        if len(args) != count:
            refuse(-3, len(args) + 2)
        if not isinstance(grid, int) or not 1 <= grid < 1 << 31:
            refuse(-2, grid)
        if not isinstance(stream, int) or not 0 <= stream < 1 << 64:
            refuse(-1, stream)
        values = list(args)
        for i in positions:
            if not isinstance(values[i], int):
                try:
                    values[i] = values[i].data_ptr()
                except AttributeError:
                    refuse(i, args[i])
        for i, value in enumerate(values):
            if not isinstance(value, int):  # struct would take a tensor of one element, and synchronise
                refuse(i, args[i])
        try:
            buffer = pool.pop()
        except IndexError:
            buffer = _Buffer(count + scratch)
        try:
            pack(buffer.values, 0, *values)
        except struct.error:
            blame(args)
            raise

        current = current_type()
        code, stage = get(ctypes.byref(current)), 1
        former = (current.value or 0) if cuda else current.value
        switched = code == 0 and former != scope
        if switched:
            code = enter(scope)
        if code == 0:
            stage = 0
            code = launch(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, buffer.pointers, None)
            if switched:
                left = driver.library.cuCtxPopCurrent_v2(ctypes.byref(current)) if cuda else enter(former)
                if code == 0 and left != 0:
                    code, stage = left, 2
        pool.append(buffer)
        if code != 0:
            fail(code, stage, grid, stream)

    return kernel
