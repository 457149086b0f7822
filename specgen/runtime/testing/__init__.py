"""Helpers of generated tests: a stub is one `Case` (data) and calls of `check_*`.

`Case`, `Batch` and the batches live in cases.py, static poisoned buffers in pools.py (paged) and packed.py
(contiguous), guarded workspaces in scratch.py, the checks in checks.py and invariance.py. Nothing here is imported by the
package's own functions. Needs torch; on a CPU, Triton for its interpreter.
"""

from .cases import BATCHES, Batch, Case, edge_batches, fit
from .checks import (
    assert_matches,
    batches,
    check_append_kv,
    check_attention,
    check_graph_replay,
    check_merge_states,
    check_varlen,
    device_for,
    open_device,
    skip_reason,
    token_counts,
)
from .invariance import check_batch_invariance
from .packed import PackedPool
from .pools import CANARY, LAYOUTS, Pool, bits
from .scratch import assert_scratch_sound, poisoned_workspace

__all__ = [
    "BATCHES",
    "CANARY",
    "LAYOUTS",
    "Batch",
    "Case",
    "PackedPool",
    "Pool",
    "assert_matches",
    "assert_scratch_sound",
    "batches",
    "bits",
    "check_append_kv",
    "check_attention",
    "check_batch_invariance",
    "check_graph_replay",
    "check_merge_states",
    "check_varlen",
    "device_for",
    "edge_batches",
    "fit",
    "open_device",
    "poisoned_workspace",
    "skip_reason",
    "token_counts",
]
