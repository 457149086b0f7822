"""The CUDA driver and the HIP runtime, as the few calls that a launcher needs, through ctypes.

Opens libcuda.so.1 or libamdhip64.so when first asked, never at import, and never both unless asked for both.
Knows nothing of packages, kernels' arguments or torch. Every failed call raises DriverError with the driver's
own name of the error.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import NamedTuple

from .errors import DriverError

# Drivers of CUDA 12.3 and later capture programmatic dependent launches into graphs; before, such a launch fails in a capture.
_OVERLAPS_FROM = 12030
# The most dynamic shared memory that a CUDA kernel may use without asking, in bytes.
_DEFAULT_SHARED_BYTES = 48 * 1024
# Both vendors' error for the default stream, asked about while another stream is being captured.
_CAPTURE_IMPLICIT = 906


class DeviceProperties(NamedTuple):
    """What the choice of a binary needs to know of a GPU. `arch` is "sm_86" or "gfx942"; sizes are bytes and
    lanes.
    """

    name: str
    arch: str
    multiprocessors: int
    shared_memory_per_block: int
    warp_size: int


class LaunchAddresses(NamedTuple):
    """Addresses of the driver's functions for _launch.c: launch, and read, enter and leave a context (CUDA)
    or device (HIP); encode a tensor map, and launch with attributes, each 0 where the driver cannot.
    """

    launch: int
    get: int
    enter: int
    leave: int
    encode: int
    launch_with: int


class Driver:
    """A loaded driver library. Subclasses are one vendor each; `index` is the driver's device number
    everywhere.

    Handles (contexts, modules, functions, streams) are ints. Nothing is ever unloaded: a module lives as long
    as the process.
    """

    vendor: str
    launch_function: str
    capture_function: str
    encode_function: str | None = None
    launch_with_function: str | None = None
    launch_addresses: LaunchAddresses

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def call(self, function: str, *arguments) -> None:
        """Call `function`; raise DriverError unless it returns 0."""
        code = getattr(self.library, function)(*arguments)
        if code != 0:
            raise self.error(code, f"{function} failed")

    def error(self, code: int, what: str) -> DriverError:
        """The exception for `code`; `what` begins the message."""
        name = self.error_name(code)
        return DriverError(f"{what}: {name} ({code})", code, name)

    def error_name(self, code: int) -> str:
        """The driver's name of an error code, such as "CUDA_ERROR_INVALID_VALUE"."""
        raise NotImplementedError

    def scope(self, index: int) -> int:
        """What a launch on device `index` must find current: a context (CUDA) or the device number (HIP)."""
        raise NotImplementedError

    def entered(self, scope: int) -> contextlib.AbstractContextManager[None]:
        """Make `scope` current on this thread, and put the former one back at the end."""
        raise NotImplementedError

    def is_capturing(self, index: int, stream: int) -> bool:
        """Whether `stream` of device `index` is being captured into a graph; for the default stream, whether
        any other is.
        """
        status = c_int()
        with self.entered(self.scope(index)):
            code = getattr(self.library, self.capture_function)(stream, byref(status))
        if code == _CAPTURE_IMPLICIT:
            return True
        if code != 0:
            raise self.error(code, f"{self.capture_function} failed")
        return status.value != 0

    def addresses(self, launch: str, get: str, enter: str, leave: str | None) -> LaunchAddresses:
        """Addresses by names; only `encode_function` and `launch_with_function` may be missing from the library."""
        later = (self.encode_function, self.launch_with_function)
        functions = (launch, get, enter, leave, *(name if hasattr(self.library, name or "") else None for name in later))
        return LaunchAddresses(
            *(ctypes.cast(getattr(self.library, f), c_void_p).value if f else 0 for f in functions)
        )


class CudaDriver(Driver):
    """libcuda.so.1. The scope of a launch is the device's primary context, the one that torch uses."""

    vendor = "nvidia"
    launch_function = "cuLaunchKernel"
    capture_function = "cuStreamIsCapturing"
    encode_function = "cuTensorMapEncodeTiled"  # drivers of CUDA 12 and later
    launch_with_function = "cuLaunchKernelEx"

    def __init__(self, library: ctypes.CDLL):
        super().__init__(library)
        _declare(
            library,
            cuInit=[c_uint],
            cuDriverGetVersion=[c_void_p],
            cuDeviceGet=[c_void_p, c_int],
            cuDeviceGetName=[c_char_p, c_int, c_int],
            cuDeviceGetAttribute=[c_void_p, c_int, c_int],
            cuDevicePrimaryCtxRetain=[c_void_p, c_int],
            cuCtxGetCurrent=[c_void_p],
            cuCtxPushCurrent_v2=[c_void_p],
            cuCtxPopCurrent_v2=[c_void_p],
            cuModuleLoadData=[c_void_p, c_void_p],
            cuModuleGetFunction=[c_void_p, c_void_p, c_char_p],
            cuFuncGetAttribute=[c_void_p, c_int, c_void_p],
            cuFuncSetAttribute=[c_void_p, c_int, c_int],
            cuStreamIsCapturing=[c_void_p, c_void_p],
            cuLaunchKernel=[c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
            cuGetErrorName=[c_int, c_void_p],
        )
        self._contexts: dict[int, int] = {}
        self.call("cuInit", 0)
        self.launch_addresses = self.addresses(
            "cuLaunchKernel", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
        )
        if self.launch_addresses.encode:
            sizes = [c_void_p] * 4  # extents, strides, box, steps
            encode = [c_void_p, c_int, c_uint, c_void_p, *sizes, c_int, c_int, c_int, c_int]
            _declare(library, **{self.encode_function: encode})
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        if version.value < _OVERLAPS_FROM:
            self.launch_addresses = self.launch_addresses._replace(launch_with=0)
        if self.launch_addresses.launch_with:
            _declare(library, **{self.launch_with_function: [c_void_p] * 4})

    def error_name(self, code: int) -> str:
        """The name of an error code, such as "CUDA_ERROR_INVALID_VALUE"."""
        text = c_char_p()
        if self.library.cuGetErrorName(code, byref(text)) != 0 or not text.value:
            return "unknown CUDA error"
        return text.value.decode()

    def properties(self, index: int) -> DeviceProperties:
        """Properties of device `index`. `shared_memory_per_block` is the opt-in maximum."""
        device = self._device(index)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), device)
        major, minor = self._attribute(device, 75), self._attribute(device, 76)
        return DeviceProperties(
            name=name.value.decode(errors="replace"),
            arch=f"sm_{major}{minor}",
            multiprocessors=self._attribute(device, 16),
            shared_memory_per_block=self._attribute(device, 97),
            warp_size=self._attribute(device, 10),
        )

    def _device(self, index: int) -> int:
        device = c_int()
        self.call("cuDeviceGet", byref(device), index)
        return device.value

    def _attribute(self, device: int, attribute: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), attribute, device)
        return value.value

    def scope(self, index: int) -> int:
        """The primary context of device `index`, retained for the life of the process."""
        if index not in self._contexts:
            context = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", byref(context), self._device(index))
            self._contexts[index] = context.value
        return self._contexts[index]

    @contextlib.contextmanager
    def entered(self, scope: int) -> Iterator[None]:
        """Make the context `scope` current on this thread, and put the former one back."""
        current = c_void_p()
        self.call("cuCtxGetCurrent", byref(current))
        if current.value == scope:
            yield
            return
        self.call("cuCtxPushCurrent_v2", scope)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(current))

    def load(self, index: int, image: bytes, function: str, shared_bytes: int, threads: int) -> int:
        """Load `image` (a cubin) on device `index` and return the handle of its entry `function`, ready to be
        launched.

        Reserves `shared_bytes` of dynamic shared memory and checks that a block of `threads` is possible.
        Raises DriverError.
        """
        with self.entered(self.scope(index)):
            module, handle, limit = c_void_p(), c_void_p(), c_int()
            self.call("cuModuleLoadData", byref(module), image)
            self.call("cuModuleGetFunction", byref(handle), module, function.encode())
            if shared_bytes > _DEFAULT_SHARED_BYTES:
                self.call("cuFuncSetAttribute", handle, 8, shared_bytes)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
            # Reading an attribute also ends the driver's lazy loading: a launch in a capture loads nothing.
            self.call("cuFuncGetAttribute", byref(limit), 0, handle)  # MAX_THREADS_PER_BLOCK
        _check_threads(function, threads, limit.value)
        return handle.value


class HipDriver(Driver):
    """libamdhip64.so. The scope of a launch is the device number. Needs ROCm 6 or later."""

    vendor = "amd"
    launch_function = "hipModuleLaunchKernel"
    capture_function = "hipStreamIsCapturing"

    def __init__(self, library: ctypes.CDLL):
        super().__init__(library)
        _declare(
            library,
            hipInit=[c_uint],
            hipGetDevicePropertiesR0600=[c_void_p, c_int],
            hipGetDevice=[c_void_p],
            hipSetDevice=[c_int],
            hipModuleLoadData=[c_void_p, c_void_p],
            hipModuleGetFunction=[c_void_p, c_void_p, c_char_p],
            hipFuncGetAttribute=[c_void_p, c_int, c_void_p],
            hipStreamIsCapturing=[c_void_p, c_void_p],
            hipModuleLaunchKernel=[c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
            hipGetErrorName=[c_int],
        )
        library.hipGetErrorName.restype = c_char_p
        self.call("hipInit", 0)
        self.launch_addresses = self.addresses("hipModuleLaunchKernel", "hipGetDevice", "hipSetDevice", None)

    def error_name(self, code: int) -> str:
        """The name of an error code, such as "hipErrorInvalidValue"."""
        text = self.library.hipGetErrorName(code)
        return text.decode() if text else "unknown HIP error"

    def properties(self, index: int) -> DeviceProperties:
        """Properties of device `index`; `arch` is gcnArchName without its feature suffixes."""
        properties = ctypes.create_string_buffer(4096)  # hipDeviceProp_tR0600 has 1472 bytes
        self.call("hipGetDevicePropertiesR0600", properties, index)
        return DeviceProperties(
            name=ctypes.string_at(byref(properties, 0)).decode(errors="replace"),
            arch=ctypes.string_at(byref(properties, 1160)).decode(errors="replace").split(":")[0],
            multiprocessors=c_int.from_buffer(properties, 388).value,
            shared_memory_per_block=c_size_t.from_buffer(properties, 296).value,
            warp_size=c_int.from_buffer(properties, 308).value,
        )

    def scope(self, index: int) -> int:
        """The device number itself."""
        return index

    @contextlib.contextmanager
    def entered(self, scope: int) -> Iterator[None]:
        """Make device `scope` current on this thread, and put the former one back."""
        current = c_int()
        self.call("hipGetDevice", byref(current))
        if current.value == scope:
            yield
            return
        self.call("hipSetDevice", scope)
        try:
            yield
        finally:
            self.call("hipSetDevice", current)

    def load(self, index: int, image: bytes, function: str, shared_bytes: int, threads: int) -> int:
        """Load `image` (an hsaco) on device `index` and return the handle of its entry `function`, ready to
        be launched.

        Checks that a block of `threads` is possible; `shared_bytes` (LDS) needs no reservation here. Raises
        DriverError.
        """
        del shared_bytes
        with self.entered(index):
            module, handle, limit = c_void_p(), c_void_p(), c_int()
            self.call("hipModuleLoadData", byref(module), image)
            self.call("hipModuleGetFunction", byref(handle), module, function.encode())
            self.call("hipFuncGetAttribute", byref(limit), 0, handle)  # MAX_THREADS_PER_BLOCK
        _check_threads(function, threads, limit.value)
        return handle.value


def open_driver(vendor: str) -> CudaDriver | HipDriver:
    """The driver of `vendor` ("nvidia" or "amd"), opened once per library path and process.

    SPECGEN_CUDA_LIBRARY and SPECGEN_HIP_LIBRARY name another library. Raises DriverError if it cannot be
    opened or started.
    """
    variable = "SPECGEN_CUDA_LIBRARY" if vendor == "nvidia" else "SPECGEN_HIP_LIBRARY"
    path = os.environ.get(variable)
    names = (path,) if path else ("libcuda.so.1",) if vendor == "nvidia" else _hip_names()
    return _open(vendor, names, variable)


@functools.cache
def _open(vendor: str, names: tuple[str, ...], variable: str) -> CudaDriver | HipDriver:
    reasons = []
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            return (CudaDriver if vendor == "nvidia" else HipDriver)(library)
        except AttributeError as error:
            reason = f"{name} is too old for this package: {error}"
            raise DriverError(reason) from None
    tried = "; ".join(reasons)
    raise DriverError(
        f"no driver library could be opened ({tried}); install the GPU's driver, "
        f"or name the library in {variable}"
    )


def _hip_names() -> tuple[str, ...]:
    """Where the HIP runtime may be: first the one that torch has loaded already, for two of them do not share
    streams.
    """
    loaded: list[str] = []
    with contextlib.suppress(OSError), open(
        "/proc/self/maps", encoding="utf-8", errors="surrogateescape"
    ) as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if path[1] and os.path.basename(path[2]).startswith("libamdhip64.so"):
                loaded.append("/" + path[2])
    return (*dict.fromkeys(loaded), "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")


def _declare(library: ctypes.CDLL, **functions: list) -> None:
    for name, arguments in functions.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int


def _check_threads(function: str, threads: int, limit: int) -> None:
    if threads > limit:
        raise DriverError(f"{function}: a block of {threads} threads needed, {limit} possible on this device")
