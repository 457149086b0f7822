"""Guarded workspaces of generated tests: what is written behind an array, or left in a counter, is seen."""

from types import SimpleNamespace

import pytest
import torch

from specgen.runtime.sizes import WorkspaceSize
from specgen.runtime.testing import assert_scratch_sound, poisoned_workspace
from specgen.runtime.workspace import Workspace


@pytest.fixture
def workspace():
    size = WorkspaceSize(partial_acc=48, partial_ml=6, counters=3, tickets=2, prefill_partial=5)
    package = SimpleNamespace(workspace=lambda device: Workspace(device, size, None, None))
    return poisoned_workspace(package, torch.device("cpu"))


def test_an_untouched_one_is_sound(workspace):
    assert_scratch_sound(workspace, "nothing ran")
    assert workspace.addresses == tuple(array.data_ptr() for array in workspace.scratch)
    assert all(not address % 16 for address in workspace.addresses)


@pytest.mark.parametrize("name", WorkspaceSize._fields)
def test_a_write_behind_an_array_is_seen(workspace, name):
    array = getattr(workspace, name)
    memory = torch.empty(0, dtype=torch.uint8).set_(array.untyped_storage())
    memory[array.nbytes + 3] = 0
    with pytest.raises(AssertionError, match=f"label: bytes behind an array of {array.nbytes} bytes"):
        assert_scratch_sound(workspace, "label")


@pytest.mark.parametrize("name", ["counters", "tickets"])
def test_what_is_left_in_a_counter_is_seen(workspace, name):
    getattr(workspace, name)[1] = 1
    with pytest.raises(AssertionError, match=f"{name} of the workspace are not zero"):
        assert_scratch_sound(workspace, "label")
