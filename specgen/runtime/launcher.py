"""Makes a loaded kernel callable: through the C extension `_launch` where it imports, else through ctypes
with one warning.

Both paths have one contract, `kernel(grid, stream, *args)`; they differ in time alone. Every error message of
a launch is made here.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from . import ctypes_launch, tensor_maps
from .arguments import Argument
from .driver import CudaDriver, HipDriver
from .errors import ArgumentError, DriverError, LaunchPathWarning
from .tensor_maps import TensorMap

_KINDS = {"pointer": "p", "i32": "i", "i64": "l"}
_NEEDED = {
    "pointer": "a tensor, or an address as an int",
    "i32": "an int of 32 bits, -2147483648 to 2147483647",
    "i64": "an int of 64 bits, -9223372036854775808 to 9223372036854775807",
}


class Launch(NamedTuple):
    """What is fixed about launching one kernel. Sizes are bytes and threads of a block; `where` names the
    device for errors.

    `call` is what a caller passes and `arguments` what the kernel takes of it, in its own order, its tensor
    maps made as `maps` says. `late`: None, or the launch may begin as soon as the programs of the one before it
    on its stream have said so (CUDA's programmatic dependent launch), and so many of its own programs then find
    no multiprocessor: a kernel that takes LATE_PROGRAMS, which waits at its end for the launch before it.
    """

    symbol: str
    function: int
    threads: int
    shared_bytes: int
    call: tuple[Argument, ...]
    arguments: tuple[Argument, ...]
    where: str
    maps: tuple[TensorMap, ...] = ()
    late: int | None = None


def bind(driver: CudaDriver | HipDriver, index: int, launch: Launch) -> Callable[..., None]:
    """The kernel as `kernel(grid, stream, *args)` on device `index`, whatever device or context the calling
    thread has current.

    `grid` is a positive int (blocks), `stream` the handle of a stream of that device as an int (0: the
    default stream), and `args` follow `launch.call`: torch tensors or addresses for pointers, ints for the
    rest; what the kernel does not take is not looked at. The call returns as soon as the launch is queued.
    Raises ArgumentError, naming the argument, and DriverError; then nothing was launched.
    """
    if launch.maps and not driver.launch_addresses.encode:
        raise DriverError(
            f"{launch.symbol} takes tensor maps, which the driver of {launch.where} cannot encode: "
            f"it has no {driver.encode_function}; needed: a later driver"
        )
    extension, reason = load_extension()
    parameters, maps = tensor_maps.resolve(launch.call, launch.arguments, launch.maps)
    needed = tensor_maps.needed(parameters, maps)
    kinds = "".join(_KINDS[each.kind] if i in needed else "-" for i, each in enumerate(launch.call))
    refuse = functools.partial(_refuse, launch)
    fail = functools.partial(_fail, driver, launch)
    if extension is None:
        _warn_once(reason)
        return ctypes_launch.bind(
            driver,
            driver.scope(index),
            launch.function,
            launch.threads,
            launch.shared_bytes,
            kinds,
            parameters,
            maps,
            launch.late,
            refuse,
            fail,
        )
    return extension.bind(
        driver.vendor,
        *driver.launch_addresses,
        driver.scope(index),
        launch.function,
        launch.threads,
        launch.shared_bytes,
        kinds,
        parameters,
        maps,
        -1 if launch.late is None else launch.late,
        refuse,
        fail,
    )


@functools.cache
def load_extension():
    """(the module `_launch`, "") or (None, why it does not import)."""
    try:
        from . import _launch
    except ImportError as error:
        return None, str(error)
    return _launch, ""


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        "kernels are launched through ctypes, several microseconds slower a call: "
        f"the C extension does not import ({reason})",
        LaunchPathWarning,
        stacklevel=2,
    )


def _refuse(launch: Launch, position: int, value: object) -> NoReturn:
    """Raise the error for a bad argument. Positions: 0.. an argument, -1 the stream, -2 the grid, -3 a wrong
    count (`value`).
    """
    if position == -3:
        names = ", ".join(argument.name for argument in launch.call)
        raise ArgumentError(
            f"{launch.symbol}: {value} arguments came, {len(launch.call) + 2} needed: "
            f"grid, stream, {names}"
        )
    if position == -2:
        raise ArgumentError(
            f"{launch.symbol}: grid: {_shown(value)} came, an int from 1 to 2147483647 needed"
        )
    if position == -1:
        raise ArgumentError(
            f"{launch.symbol}: stream: {_shown(value)} came, a stream handle as an int needed"
        )
    argument = launch.call[position]
    raise ArgumentError(
        f"{launch.symbol}: {argument.name}: {_shown(value)} came, {_NEEDED[argument.kind]} needed"
    )


def _shown(value: object) -> str:
    """The value of a number, else the type alone: printing a tensor would synchronise."""
    return repr(value) if isinstance(value, int | float) else type(value).__name__


_STAGES = (
    "launching",
    "making the device current before launching",
    "restoring the caller's device after launching",
)


def _fail(
    driver: CudaDriver | HipDriver, launch: Launch, code: int, stage: int, grid: int, stream: int
) -> NoReturn:
    """Raise the error for a failed driver call of a launch; stages after _STAGES are maps."""
    name = driver.error_name(code)
    if stage >= len(_STAGES):
        made = launch.maps[stage - len(_STAGES)]
        raise DriverError(
            f"encoding {made.name} before launching {launch.symbol} failed: {name} ({code}); "
            f"{driver.encode_function} needs {made.tensor} at a multiple of 16 bytes, strides "
            f"({', '.join(made.strides)}) of multiples of 16 bytes below 2^40, and sizes from 1 to 2^32",
            code,
            name,
        )
    raise DriverError(
        f"{_STAGES[stage]} {launch.symbol} failed: {name} ({code}); {driver.launch_function} "
        f"with grid {grid}, {launch.threads} threads, {launch.shared_bytes} bytes of shared memory, "
        f"stream {stream:#x}, on {launch.where} (the error may be of an earlier kernel on this device)",
        code,
        name,
    )
