"""Scratch of the attention kernels: one caller-owned object, and the pool that keeps one per stream by default.

Allocates on a device and zeroes counters; launches nothing. Sizes come from sizes.py and are constants of
package and device.
"""

import threading

import torch

from .errors import ArgumentError, CaptureError
from .geometry import Limits
from .refusals import bad
from .sizes import WorkspaceSize


class Workspace:
    """Scratch for `attention` on one device, of a constant size.

    `partial_acc`, `partial_ml` and `prefill_partial` are float32, `counters` and `tickets` int32, each flat. The kernels leave counters
    and tickets zero, so one workspace serves any number of calls that run one after another; calls that may run at once,
    as two graphs that may replay at once, need two. `limits` holds what a call that uses it may hold at most.
    """

    __slots__ = (
        *WorkspaceSize._fields, "scratch", "addresses", "device", "limits", "nbytes", "_owner",
    )  # fmt: skip

    def __init__(self, device: torch.device, size: WorkspaceSize, limits: Limits, owner: object):
        self.device = device
        self.limits = limits
        self.nbytes = size.nbytes
        self._owner = owner
        with torch.inference_mode(False):
            self.hold(
                torch.empty(size.partial_acc, dtype=torch.float32, device=device),
                torch.empty(size.partial_ml, dtype=torch.float32, device=device),
                torch.zeros(size.counters, dtype=torch.int32, device=device),
                torch.zeros(size.tickets, dtype=torch.int32, device=device),
                torch.empty(size.prefill_partial, dtype=torch.float32, device=device),
            )

    def hold(self, *scratch: torch.Tensor) -> None:
        """Take these arrays, in the order of a launch: that of WorkspaceSize."""
        self.partial_acc, self.partial_ml, self.counters, self.tickets, self.prefill_partial = self.scratch = scratch
        self.addresses = tuple(tensor.data_ptr() for tensor in scratch)

    def reset(self) -> None:
        """Zero counters and tickets on the current stream of the device: needed after a launch was aborted midway."""
        self.counters.zero_()
        self.tickets.zero_()

    @property
    def owner(self) -> object:
        """The package that made it."""
        return self._owner

    def __repr__(self) -> str:
        return f"Workspace(device={str(self.device)!r}, nbytes={self.nbytes})"


class WorkspacePool:
    """The default workspaces of one device: one per stream, made at the stream's first call.

    While a graph is being captured nothing may be made: a stream without one takes the spare, which `warmup`
    makes and later calls outside a capture renew.
    """

    __slots__ = ("by_stream", "spare_wanted", "_spare", "_make", "_device", "_lock")

    def __init__(self, device: torch.device, make):
        self.by_stream: dict[int, Workspace] = {}
        self.spare_wanted = False
        self._spare: Workspace | None = None
        self._make = make
        self._device = device
        self._lock = threading.Lock()

    def missing(self, stream: int) -> Workspace:
        """The workspace of a stream that has none yet. Raises CaptureError during a capture that finds no
        spare.
        """
        with self._lock:
            found = self.by_stream.get(stream)
            if found is None:
                if not is_capturing(self._device):
                    found = self._make()
                elif self._spare is not None:
                    found, self._spare, self.spare_wanted = self._spare, None, True
                else:
                    raise CaptureError(
                        "attention: a graph is being captured on a stream that has no workspace; "
                        "needed: call warmup() before the capture, or pass workspace="
                    )
                self.by_stream[stream] = found
        return found

    def renew_spare(self) -> None:
        """Make the spare that a capture took, unless a graph is being captured now."""
        with self._lock:
            if self._spare is None and not is_capturing(self._device):
                self._spare = self._make()
                self.spare_wanted = False


def is_capturing(device: torch.device) -> bool:
    """Whether a graph is being captured on the current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_workspace(workspace: object, package, device: torch.device, tokens: int, seqs: int) -> None:
    """Raise ArgumentError unless a caller's workspace serves an `attention` call of the package: so many rows of q and
    sequences, on that device.
    """
    owner = getattr(workspace, "owner", None)
    if owner is not package:
        came = f"is {type(workspace).__name__}"
        if type(workspace).__name__ == Workspace.__name__ and owner is not None:  # each package has a class of its own
            came = f"is of another package, {owner.name}"
        bad("attention", "workspace", came, f"one that {package.name}.workspace() returned, or None")
    if workspace.device != device:
        bad("attention", "workspace", f"is on {workspace.device}", f"q's device {device}")
    for name, needed in (("max_tokens", tokens), ("max_seqs", seqs)):
        if needed > (most := getattr(workspace.limits, name)):
            bad("attention", "workspace", f"was made for {name} {most}", needed)


def narrowed(limits: Limits, overrides: dict[str, object]) -> Limits:
    """The limits with overrides by name; each a host int from 1 to the spec's value. Raises ArgumentError."""
    for name, value in overrides.items():
        if name not in Limits._fields:
            raise ArgumentError(f"workspace: {name} is no limit; needed: one of {', '.join(Limits._fields)}")
        most = getattr(limits, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentError(
                f"workspace: {name} is {type(value).__name__}; needed: a host int from 1 to {most}"
            )
        if not 1 <= value <= most:
            raise ArgumentError(f"workspace: {name} is {value}; needed: 1 to {most}, the spec's limit")
    return limits._replace(**overrides)
