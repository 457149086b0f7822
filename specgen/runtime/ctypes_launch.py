"""Launches a loaded kernel through ctypes: the path of hosts whose wheel has no C extension. Same contract as
_launch.c, slower.

Touches only the driver that it is given. Packed arguments live in buffers that are taken from a pool for the
time of a call, so that threads, and a launch inside a launch (from a finalizer), never share one. Tensor maps
are kept by what they are made of.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from .driver import CudaDriver, HipDriver
from .tensor_maps import FIRST_MAP, LATE, MAP_BYTES, ZERO

_FORMATS = {
    "p": "Q",
    "i": "i4x",
    "l": "q",
    "-": "8x",
}  # every value in 8 bytes of its own, in the byte order of the host
_MAP_ALIGNMENT = 64
_MAPS_KEPT = 256  # per kernel
# CU_TENSOR_MAP_INTERLEAVE_NONE, FLOAT_OOB_FILL_NONE, as in _tensor_maps.h.
_INTERLEAVE, _FILL = 0, 0
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("allowed", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class _Buffer:
    """The values of one launch, 8 bytes each, a zero and `late`, its maps, and the pointers to them that the driver reads."""

    def __init__(self, count: int, parameters: tuple[int, ...], maps: int, late: int):
        size = 8 * (count + 2)
        self.values = ctypes.create_string_buffer(size + _MAP_ALIGNMENT + MAP_BYTES * maps)
        base = ctypes.addressof(self.values)
        first = -(-(base + size) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self.maps = [first + MAP_BYTES * i for i in range(maps)]
        struct.pack_into("=Q", self.values, 8 * (count + 1), late)
        constants = {ZERO: base + 8 * count, LATE: base + 8 * (count + 1)}
        where = [base + 8 * i if i >= 0 else constants.get(i) or self.maps[FIRST_MAP - i] for i in parameters]
        self.pointers = (ctypes.c_void_p * len(where))(*where)


class _Maps:
    """Encodes the maps of one kernel, and keeps them."""

    def __init__(self, driver: CudaDriver, maps: tuple[tuple, ...]):
        self._encode = getattr(driver.library, driver.encode_function) if maps else None
        self._maps = maps
        self._kept: dict[tuple, bytes] = {}

    def write(self, values: list[int], addresses: list[int]) -> tuple[int, int]:
        """Write the map of every argument to its address: (error code, which map failed)."""
        for number, (address, made) in enumerate(zip(addresses, self._maps)):
            tensor, data_type, itemsize, swizzle, promotion, extents, strides, box = made
            sizes = [values[-1 - extent] if extent < 0 else extent for extent in extents]
            steps = [values[position] * itemsize for position in strides]
            key = (number, values[tensor], *sizes, *steps)
            kept = self._kept.get(key)
            if kept is None:
                rank = len(box)
                code = self._encode(
                    address, data_type, rank, values[tensor], (ctypes.c_uint64 * rank)(*sizes),
                    (ctypes.c_uint64 * rank)(*steps), (ctypes.c_uint * rank)(*box), (ctypes.c_uint * rank)(*[1] * rank),
                    _INTERLEAVE, swizzle, promotion, _FILL,
                )  # fmt: skip
                if code != 0:
                    return code, number
                if len(self._kept) >= _MAPS_KEPT:
                    self._kept.clear()
                self._kept[key] = ctypes.string_at(address, MAP_BYTES)
            else:
                ctypes.memmove(address, kept, MAP_BYTES)
        return 0, 0


def _launch(driver: CudaDriver | HipDriver, overlaps: bool) -> Callable[..., int]:
    """launch(function, grid, threads, shared_bytes, stream, parameters) -> the driver's error code."""
    if overlaps and driver.launch_addresses.launch_with:
        launch_with = getattr(driver.library, driver.launch_with_function)

        def overlapping(function, grid, threads, shared_bytes, stream, parameters) -> int:
            attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, allowed=1)
            config = _Config(grid, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.pointer(attribute), 1)
            return launch_with(ctypes.byref(config), function, parameters, None)

        return overlapping
    plain = getattr(driver.library, driver.launch_function)

    def launch(function, grid, threads, shared_bytes, stream, parameters) -> int:
        return plain(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, None)

    return launch


def bind(
    driver: CudaDriver | HipDriver,
    scope: int,
    function: int,
    threads: int,
    shared_bytes: int,
    kinds: str,
    parameters: tuple[int, ...],
    maps: tuple[tuple, ...],
    late: int | None,
    refuse: Callable[[int, object], Any],
    fail: Callable[[int, int, int, int], Any],
) -> Callable[..., None]:
    """The kernel as `kernel(grid, stream, *args)`; the parameters are those of `_launch.bind`.

    `kinds` has one of "p" (pointer), "i" (int32), "l" (int64) per argument, "-" for one that no parameter
    needs; `parameters` and `maps` are as tensor_maps.resolve gives them, `late` is launcher.Launch's. `refuse` raises the error of a bad argument and `fail` that of a failed driver call.
    """
    launch = _launch(driver, late is not None)
    cuda = driver.vendor == "nvidia"
    current_type = ctypes.c_void_p if cuda else ctypes.c_int
    get = driver.library.cuCtxGetCurrent if cuda else driver.library.hipGetDevice
    enter = driver.library.cuCtxPushCurrent_v2 if cuda else driver.library.hipSetDevice
    count = len(kinds)
    positions = tuple(i for i, kind in enumerate(kinds) if kind == "p")
    packed = tuple(i for i, kind in enumerate(kinds) if kind != "-")
    encoder = _Maps(driver, maps)
    pack = struct.Struct("=" + "".join(_FORMATS[kind] for kind in kinds)).pack_into
    pool: list[_Buffer] = []

    def blame(args: tuple) -> None:
        """Find the argument that does not pack, and refuse it."""
        for i, (kind, value) in enumerate(zip(kinds, args, strict=True)):
            if kind == "-":
                continue
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
        for i in packed:
            if not isinstance(values[i], int):  # struct would take a tensor of one element, and synchronise
                refuse(i, args[i])
        try:
            buffer = pool.pop()
        except IndexError:
            buffer = _Buffer(count, parameters, len(maps), late or 0)
        try:
            pack(buffer.values, 0, *(values[i] for i in packed))
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
            code, number = encoder.write(values, buffer.maps)
            stage = 3 + number
            if code == 0:
                stage = 0
                code = launch(function, grid, threads, shared_bytes, stream, buffer.pointers)
            if switched:
                left = driver.library.cuCtxPopCurrent_v2(ctypes.byref(current)) if cuda else enter(former)
                if code == 0 and left != 0:
                    code, stage = left, 2
        pool.append(buffer)
        if code != 0:
            fail(code, stage, grid, stream)

    return kernel
