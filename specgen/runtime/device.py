"""One torch device as the package sees it: which architecture's dispatch rows serve it, and its kernels,
loaded when first used.

Three modes. "binary": the wheel's own binaries, checked against the manifest; Triton is never imported.
"jit": no binary fits, the shipped Triton source is compiled, with one warning. "interpret": CPU tensors under
TRITON_INTERPRET=1, for tests.

A Device may be used by any thread. It does not survive a fork, as no CUDA or HIP handle does: use the spawn
start method.
"""

import hashlib
import importlib
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from . import choice, interpret, jit, launcher, sizes
from .arguments import can_overlap, variant_arguments, variant_call_arguments
from .driver import CudaDriver, DeviceProperties, HipDriver, open_driver
from .errors import CaptureError, DamagedBinaryError, DriverError, LaunchPathWarning, NoBinaryError, UnsupportedError
from .tensor_maps import variant_maps

Kernel = Callable[..., None]


class Device:
    """A device and its kernels. `Device.open` chooses the subclass; the caller keeps one object per torch
    device.

    arch: the architecture whose dispatch rows are used, such as "sm_90". mode: "binary", "jit" or
    "interpret". multiprocessors: of this device, an int; the grid derives from it. index: torch's device
    index, 0 for the CPU. name: of the GPU, for messages. note: why this architecture.
    """

    mode: str

    def __init__(
        self,
        package_dir: Path,
        manifest: dict,
        index: int,
        name: str,
        arch: str,
        multiprocessors: int,
        note: str,
    ):
        self.package_dir = package_dir
        self.manifest = manifest
        self.index = index
        self.name = name
        self.arch = arch
        self.multiprocessors = multiprocessors
        self.note = note
        self._kernels: dict[str, Kernel] = {}
        self._beside: dict[tuple[str, int], Kernel] = {}
        self._lock = threading.RLock()
        self._process = os.getpid()

    @staticmethod
    def open(package_dir: str | os.PathLike, manifest: dict, torch_device: torch.device) -> "Device":
        """The Device for `torch_device` ("cuda" without an index: the current one).

        Raises NoBinaryError if it can run nothing of the wheel, DriverError if the GPU's driver cannot be
        used.
        """
        torch_device = torch.device(torch_device)
        if torch_device.type == "cpu":
            return InterpretDevice(Path(package_dir), manifest)
        if torch_device.type != "cuda":
            raise NoBinaryError(
                f"{manifest['package']} runs on CUDA and HIP devices ({', '.join(choice.archs(manifest))}); "
                f"came {torch_device}"
            )
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        driver = open_driver("amd" if torch.version.hip else "nvidia")
        properties = driver.properties(index)
        chosen = choice.choose(manifest, properties)
        kind = BinaryDevice if chosen.binary else JitDevice
        return kind(Path(package_dir), manifest, index, driver, properties, chosen)

    def kernel(self, symbol: str) -> Kernel:
        """The kernel `symbol` as kernel(grid, stream, *args): see launcher.bind; under "interpret", tensors
        only.

        Loads it if this is the first use. Raises CaptureError if that first use is inside a graph capture,
        DamagedBinaryError, NoBinaryError or DriverError.
        """
        kernel = self._kernels.get(symbol)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(symbol)
                if kernel is None:
                    if symbol not in self.manifest["variants"]:
                        raise NoBinaryError(f"{self.manifest['package']} has no kernel {symbol}")
                    self._refuse_fork(symbol)
                    self._refuse_capture(symbol)
                    kernel = self._kernels[symbol] = self._load(symbol, self.manifest["variants"][symbol])
        return kernel

    def beside(self, symbol: str, late: int) -> Kernel:
        """The kernel `symbol` as `kernel` gives it, for a launch that may begin while the one before it on its
        stream runs and leaves it all but `late` multiprocessors.
        """
        kernel = self._beside.get((symbol, late))
        if kernel is None:
            loaded = self.kernel(symbol)
            kernel = self._beside.setdefault((symbol, late), self._overlapping(symbol, late) or loaded)
        return kernel

    def _overlapping(self, symbol: str, late: int) -> Kernel | None:
        """A loaded kernel bound to overlap; None where it cannot."""

    def serving(self, symbol: str) -> str:
        """The symbol that runs here for `symbol` of a table row: itself, or where kernels are compiled or
        interpreted, the plain-Triton one that stands in for a kernel that ships as a binary only.
        """
        return self.manifest["variants"].get(symbol, {}).get("stand_in") or symbol

    def load_all(self) -> None:
        """Load every kernel of `arch`, so that no later call loads one. Raises what `kernel` raises."""
        for symbol in choice.symbols(self.manifest, self.arch):
            self.kernel(self.serving(symbol))

    def _load(self, symbol: str, variant: dict) -> Kernel:
        raise NotImplementedError

    def _refuse_capture(self, symbol: str) -> None:
        """Raise CaptureError if the current stream is being captured."""

    def _refuse_fork(self, symbol: str) -> None:
        if os.getpid() != self._process:
            raise DriverError(
                f"{symbol} cannot be loaded on {self.name}: the process was forked after the device "
                "was opened; use the spawn start method"
            )

    def _import(self, symbol: str, variant: dict) -> ModuleType:
        """The shipped module of `symbol`, which holds the kernel."""
        path, advice = self.package_dir / variant["module"], f"reinstall {self.manifest['distribution']}"
        if not path.is_file():
            raise DamagedBinaryError(f"{path} is missing; {advice}")
        try:
            module = importlib.import_module(f"..kernels.{symbol}", __package__)
        except (SyntaxError, NameError) as error:
            raise DamagedBinaryError(f"{path} is damaged: {error}; {advice}") from error
        if not hasattr(module, symbol):
            raise DamagedBinaryError(f"{path} is damaged: it has no {symbol}; {advice}")
        return module


class _Gpu(Device):
    """What both GPU modes share: a driver, the device's properties, and binding a loaded binary."""

    def __init__(
        self,
        package_dir: Path,
        manifest: dict,
        index: int,
        driver: CudaDriver | HipDriver,
        properties: DeviceProperties,
        chosen: choice.Choice,
    ):
        super().__init__(
            package_dir,
            manifest,
            index,
            properties.name,
            chosen.arch,
            properties.multiprocessors,
            chosen.note,
        )
        self.driver = driver
        self.properties = properties
        self._launches: dict[str, launcher.Launch] = {}

    @property
    def where(self) -> str:
        """The GPU for messages: "NVIDIA H200 (device 0, sm_90)"."""
        return f"{self.name} (device {self.index}, {self.properties.arch})"

    def _refuse_capture(self, symbol: str) -> None:
        stream = torch.cuda.current_stream(self.index).cuda_stream
        if self.driver.is_capturing(self.index, stream):
            raise CaptureError(
                f"{symbol} is not loaded on {self.where}, and the current stream is being captured into a "
                f"graph: call {self.manifest['package']}.warmup() before the capture. "
                "Nothing was captured by this call."
            )

    def _refuse_shared(self, symbol: str, needed: int) -> None:
        available = self.properties.shared_memory_per_block
        if needed > available:
            raise NoBinaryError(
                f"{symbol} for {self.arch} needs {needed} bytes of shared memory per block; "
                f"{self.where} has {available}"
            )

    def _bind(
        self, symbol: str, variant: dict, image: bytes, function: str, shared_bytes: int, threads: int
    ) -> Kernel:
        handle = self.driver.load(self.index, image, function, shared_bytes, threads)
        call, arguments = variant_call_arguments(variant), variant_arguments(variant)
        launch = launcher.Launch(
            symbol, handle, threads, shared_bytes, call, arguments, self.where, variant_maps(variant)
        )
        self._launches[symbol] = launch
        return launcher.bind(self.driver, self.index, launch)

    def _overlapping(self, symbol: str, late: int) -> Kernel | None:
        launch = self._launches[symbol]
        if not can_overlap(launch.arguments):
            return None
        programs = sizes.grid(late, self.manifest["variants"][symbol]["ctas_per_multiprocessor"])
        return launcher.bind(self.driver, self.index, launch._replace(late=programs))


class BinaryDevice(_Gpu):
    """A GPU that runs the wheel's binaries. Imports no Triton. One that is no target of the wheel is told so, once."""

    mode = "binary"

    def __init__(self, package_dir: Path, manifest: dict, index: int, driver, properties: DeviceProperties, chosen: choice.Choice):
        super().__init__(package_dir, manifest, index, driver, properties, chosen)
        if unlisted := choice.unlisted(manifest, chosen.arch, properties):
            warnings.warn(f"{manifest['package']}: {self.where} {unlisted}", LaunchPathWarning, stacklevel=2)

    def serving(self, symbol: str) -> str:
        """`symbol` itself: every kernel of a row has a binary."""
        return symbol

    def _load(self, symbol: str, variant: dict) -> Kernel:
        binary = variant["binaries"].get(self.arch)
        if binary is None:
            held = ", ".join(variant["binaries"]) or "nothing"
            raise NoBinaryError(
                f"{symbol}: the wheel has binaries for {held}; {self.where} needs {self.arch}"
            )
        self._refuse_shared(symbol, binary["shared_bytes"])
        image = self._read(binary)
        facts = binary["function"], binary["shared_bytes"], binary["num_threads"]
        try:
            return self._bind(symbol, variant, image, *facts)
        except DriverError as error:
            oldest = self.manifest["oldest_driver"].get(self.arch)
            hint = f" (binaries for {self.arch} need driver {oldest} or later)" if oldest else ""
            message = f"{symbol}: {binary['file']} does not load on {self.where}: {error}{hint}"
            raise DriverError(message, error.code, error.name) from error

    def _read(self, binary: dict) -> bytes:
        """The bytes of a binary, if they are those that the manifest names."""
        path = self.package_dir / binary["file"]
        advice = f"reinstall {self.manifest['distribution']}"
        try:
            image = path.read_bytes()
        except OSError as error:
            reason = (
                "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            )
            raise DamagedBinaryError(
                f"{path} {reason}; its sha256 should be {binary['sha256']}; {advice}"
            ) from error
        digest = hashlib.sha256(image).hexdigest()
        if digest != binary["sha256"]:
            raise DamagedBinaryError(
                f"{path} is damaged: its {len(image)} bytes have sha256 {digest}, the manifest says "
                f"{binary['sha256']}; {advice}"
            )
        return image


class JitDevice(_Gpu):
    """A GPU that no binary of the wheel fits: kernels are compiled from the shipped source, or refused by
    name.
    """

    mode = "jit"

    def __init__(
        self,
        package_dir: Path,
        manifest: dict,
        index: int,
        driver,
        properties: DeviceProperties,
        chosen: choice.Choice,
    ):
        super().__init__(package_dir, manifest, index, driver, properties, chosen)
        held = ", ".join(choice.archs(manifest))
        self._lacks = (
            f"{manifest['package']} has no binary for {self.name} ({properties.arch}, "
            f"{properties.shared_memory_per_block} bytes of shared memory per block): the wheel holds {held}"
            + (f" ({chosen.note})" if chosen.note else "")
        )
        self._warned = False
        refusal = jit.refusal()
        if refusal is not None:
            raise NoBinaryError(
                f"{self._lacks}; {refusal}. Needed: a wheel built with a target of {properties.arch}, "
                f"or Triton >= {'.'.join(map(str, jit.OLDEST_TRITON))} with SPECGEN_NO_JIT unset"
            )

    def _load(self, symbol: str, variant: dict) -> Kernel:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._lacks}; its kernels are compiled just in time from the shipped Triton source, "
                f"with the launch facts of {self.arch}. SPECGEN_NO_JIT=1 makes this an error.",
                LaunchPathWarning,
                stacklevel=2,
            )
        recorded = variant["binaries"].get(self.arch)
        if recorded and choice.vendor_of(self.arch) == choice.vendor_of(self.properties.arch):
            self._refuse_shared(symbol, recorded["shared_bytes"])
        compiled = jit.compile_kernel(
            self._import(symbol, variant), symbol, variant, self.arch, self.properties
        )
        return self._bind(symbol, variant, *compiled)


class InterpretDevice(Device):
    """The CPU: kernels run in Triton's interpreter, one program after the other. For tests; interpret.py says what it
    computes right, the rest is refused.
    """

    mode = "interpret"

    def __init__(self, package_dir: Path, manifest: dict):
        if os.environ.get("TRITON_INTERPRET") != "1":
            held = ", ".join(choice.archs(manifest))
            raise NoBinaryError(
                f"the tensors are on the CPU; needed: tensors on a GPU ({manifest['package']} has binaries for {held})"
                + interpret.hint(manifest)
            )
        super().__init__(
            package_dir, manifest, 0, "CPU", choice.archs(manifest)[0], interpret.multiprocessors(), "interpreter"
        )

    def _load(self, symbol: str, variant: dict) -> Kernel:
        if reason := interpret.refusal(variant):
            raise UnsupportedError(
                f"{symbol}: TRITON_INTERPRET=1 is set, and {reason}, so its results would be wrong; "
                "needed: tensors on a GPU, or a package of float16 or float32"
            )
        try:
            function = getattr(self._import(symbol, variant), symbol)
        except ModuleNotFoundError as error:
            raise NoBinaryError(f"TRITON_INTERPRET=1 needs Triton >= 3.6, which does not import: {error}") from error
        if type(function).__name__ != "InterpretedFunction":
            raise NoBinaryError(
                f"{symbol} was imported before TRITON_INTERPRET=1 was set; set it before the process starts"
            )
        return interpret.bind(function, variant)
