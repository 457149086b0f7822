"""A caller's workspace that shows what a launch does to it: canary bytes in its scratch, and behind each array.

Touches only tensors it allocates.
"""

import torch

from .pools import CANARY

GUARD_BYTES = 1 << 16  # behind each array: a state of 128 rows of 128 float32


def poisoned_workspace(package, device: torch.device):
    """A caller-owned workspace whose scratch holds canary bytes, as does what lies behind each of its arrays; counters and
    tickets are zero, as the contract wants them.
    """
    workspace = package.workspace(device)
    workspace.hold(*map(_guarded, workspace.scratch))
    workspace.reset()
    return workspace


def _guarded(array: torch.Tensor) -> torch.Tensor:
    """An array like it of canary bytes, in front of more of them."""
    memory = torch.full((array.nbytes + GUARD_BYTES,), CANARY, dtype=torch.uint8, device=array.device)
    return memory[: array.nbytes].view(array.dtype)


def assert_scratch_sound(workspace, label: str) -> None:
    """Assert that every kernel reset the counters and tickets it used, and wrote nothing behind an array."""
    for name in ("counters", "tickets"):
        assert not getattr(workspace, name).any(), f"{label}: {name} of the workspace are not zero after the launch"
    for array in workspace.scratch:
        guard = torch.empty(0, dtype=torch.uint8, device=array.device).set_(array.untyped_storage())[array.nbytes :]
        assert guard.eq(CANARY).all(), f"{label}: bytes behind an array of {array.nbytes} bytes of the workspace were written"
