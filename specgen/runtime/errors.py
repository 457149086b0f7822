"""The named errors of a generated package.

Every error that the runtime raises on purpose derives from `KernelPackageError`, so that a server can catch
one class. Each message says what was being done, what came, and what is needed. Nouns only: imports nothing.
"""


class KernelPackageError(RuntimeError):
    """Base of every error that a generated kernel package raises."""


class NoBinaryError(KernelPackageError):
    """This device cannot run the package: no binary fits and none can be compiled just in time.

    The message lists the architectures in the wheel and what the device needs. Raised by `warmup()` or the
    first call.
    """


class DamagedBinaryError(KernelPackageError):
    """A file of the package is missing, empty, altered, or refused by the driver.

    The message names the file, and the expected and actual sha256 where the bytes differ. Reinstall the
    wheel.
    """


class CaptureError(KernelPackageError):
    """A kernel is not loaded yet and a graph is being captured; call `warmup()` before the capture. Nothing
    was captured.
    """


class DriverError(KernelPackageError):
    """A call of the CUDA or HIP driver failed.

    `.code` is the driver's number of the error and `.name` its name, such as "CUDA_ERROR_INVALID_VALUE"; both
    None if the library could not be opened at all.
    """

    def __init__(self, message: str, code: int | None = None, name: str | None = None):
        super().__init__(message)
        self.code = code
        self.name = name

    def __reduce__(self):
        return type(self), (str(self), self.code, self.name)


class ArgumentError(KernelPackageError, ValueError):
    """An argument of a public function is wrong: the message names it, what came, and what is needed. Nothing
    was written.
    """


class UnsupportedError(ArgumentError):
    """The arguments are well formed, but the package has no kernel for them; the message lists its own."""


class LaunchPathWarning(RuntimeWarning):
    """A slower way of launching is in use: kernels compiled just in time, launched through ctypes, or chosen for another GPU."""
