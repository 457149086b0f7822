"""The public functions of a generated package: refuse what it has not, then run eagerly or as custom
operators.

The eager bodies are in eager.py; explain, describe and the custom operators have modules of their own.
Importing it needs no GPU and opens no device.
"""

from os import environ
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from . import checks as _checks
from . import describe as _describe
from . import explain as _explain
from .eager import Eager
from .errors import CaptureError, NoBinaryError
from .operators import Operators
from .plans import DevicePlans
from .workspace import Workspace, is_capturing, narrowed

_is_compiling = torch.compiler.is_compiling
_active_modes = torch._C._len_torch_dispatch_stack
_PLAIN = (Tensor, Parameter)


def _open_device(directory: Path, manifest: dict, torch_device: torch.device):
    from .device import Device

    return Device.open(directory, manifest, torch_device)


class Package(Eager):
    """One generated package: its manifest, its dispatch table and, per device, what is loaded.

    `name` is the import name, `directory` the package's folder with manifest.json; the rows are those of
    dispatch.py. `open_device(directory, manifest, torch_device)` gives a device's launcher; tests replace it.
    """

    def __init__(self, name, directory, attention_rows, append_rows, merge_rows, *, open_device=_open_device):
        super().__init__(name, directory, attention_rows, append_rows, merge_rows, open_device)
        self._operators = Operators(self)

    def attention(
        self, q, k_cache, v_cache, *, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None,
        max_seqlen_k=None, layer=None, out=None, return_lse=False, sinks=None, alibi_slopes=None,
        prefix_ranges=None, q_scale=None, k_scale=None, v_scale=None, workspace=None, checks="shapes",
    ):  # fmt: skip
        """Attention of queries over a paged cache: prefill, decode, speculative rows and any mixture, in one
        call.

        q `[tokens, query_heads, qk_dim]`; k_cache `[pages, page_size, kv_heads, qk_dim]`, v_cache `[...,
        v_dim]`: the spec's dtype, any strides with a unit last stride. block_table int32 `[seqs, max_pages]`,
        seq_lens int32 `[seqs]` = keys per sequence, new ones included, cu_seqlens_q int32 `[seqs + 1]`. Row i
        of m queries over n keys sits at position n - m + i. `max_seqlen_q`, `max_seqlen_k`: host ints, the
        caller's upper bounds of rows and keys per sequence, for replays too; sequences with more than
        `max_seqlen_q` rows may be left out. `layer` names an attention entry, needed if there are several.
        `out` `[tokens, query_heads, v_dim]` is written and returned, else allocated; rows beyond
        cu_seqlens_q[-1] are untouched (not initialised in an allocated one). With `return_lse` the result is
        (out, lse): natural log, float32 `[tokens, query_heads]`. `checks`: "shapes" reads no device value,
        "full" synchronises and checks values, "none". Raises ArgumentError before anything is written,
        NoBinaryError or CaptureError at the first call on a device.
        """
        if (
            sinks is not None or alibi_slopes is not None or prefix_ranges is not None
            or q_scale is not None or k_scale is not None or v_scale is not None
        ):  # fmt: skip
            given = {"sinks": sinks, "alibi_slopes": alibi_slopes, "prefix_ranges": prefix_ranges}
            _checks.refuse_features(
                "attention", given | {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
            )
        traced = _is_compiling() or _active_modes() or type(q) not in _PLAIN
        return (self._traced_attention if traced else self.run_attention)(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
            out, return_lse, workspace, checks,
        )  # fmt: skip

    def append_kv(
        self, k, v, k_cache, v_cache, *, slot_mapping, layer=None, k_scale=None, v_scale=None
    ) -> None:
        """Write new keys and values into the caches, in place.

        k `[tokens, kv_heads, qk_dim]`, v `[tokens, kv_heads, v_dim]`; caches as in `attention`; slot_mapping
        int64 `[tokens]`, slot = page * page_size + offset; a negative slot is skipped, as is one past the
        pool. Raises ArgumentError before anything is written, NoBinaryError or CaptureError at the first call
        on a device.
        """
        if k_scale is not None or v_scale is not None:
            _checks.refuse_features("append_kv", {"k_scale": k_scale, "v_scale": v_scale})
        if _is_compiling() or _active_modes() or type(k) not in _PLAIN:
            _tensor("append_kv", "k", k)
            self._operators.append_kv(k, v, k_cache, v_cache, slot_mapping, layer)
        else:
            self.run_append_kv(k, v, k_cache, v_cache, slot_mapping, layer)

    def merge_states(self, out_a, lse_a, out_b, lse_b) -> tuple[Tensor, Tensor]:
        """Merge two attention results over disjoint keys of the same queries; returns new (out, lse).

        out_a, out_b `[tokens, query_heads, v_dim]` in the spec's dtype, lse_a, lse_b float32 `[tokens,
        query_heads]` in natural log; all contiguous. A state that saw no key is (0, -inf). Raises
        ArgumentError, NoBinaryError or CaptureError.
        """
        if _is_compiling() or _active_modes() or type(out_a) not in _PLAIN:
            _tensor("merge_states", "out_a", out_a)
            return self._operators.merge_states(out_a, lse_a, out_b, lse_b)
        return self.run_merge_states(out_a, lse_a, out_b, lse_b)

    def workspace(self, device=None, **limits) -> Workspace:
        """Scratch for `attention` on one device (default: the current one), owned by the caller.

        Its size is a constant of package and device, `.nbytes`. `limits` (max_seqs, max_seq_len, max_tokens,
        max_spec_tokens) narrow what a call that uses it may hold; each at most the spec's. Raises
        ArgumentError, NoBinaryError, CaptureError.
        """
        narrow = narrowed(self.limits, limits)
        plans = self._plans(device, "workspace")
        if is_capturing(plans.torch_device):
            raise CaptureError(
                "workspace: a graph is being captured; needed: make the workspace before the capture"
            )
        return Workspace(plans.torch_device, plans.size, narrow, self)

    def warmup(self, device=None) -> None:
        """Load every binary on one device (default: the current one) and allocate its workspaces; waits for
        the device.

        After it a first call inside graph capture works. Raises NoBinaryError without a GPU or a fitting
        binary, DamagedBinaryError for an altered file, CaptureError while a graph is being captured.
        """
        plans = self._plans(device, "warmup")
        if is_capturing(plans.torch_device):
            raise CaptureError("warmup: a graph is being captured; needed: call warmup() before the capture")
        plans.warm()

    def explain(
        self, q, k_cache, v_cache, *, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None,
        max_seqlen_k=None, layer=None, out=None, return_lse=False, sinks=None, alibi_slopes=None,
        prefix_ranges=None, q_scale=None, k_scale=None, v_scale=None, workspace=None, checks="shapes",
    ) -> _explain.Explanation:  # fmt: skip
        """What `attention` would do with the same arguments: specialization, row and why, grid, splits,
        bytes, floor.

        Launches nothing. Lengths are the bounds of shapes and host integers; with checks="full" it
        synchronises and counts the real ones. Raises what the checks of `attention` raise; where no binary
        runs here it says so and goes on.
        """
        given = {"sinks": sinks, "alibi_slopes": alibi_slopes, "prefix_ranges": prefix_ranges}
        _checks.refuse_features(
            "attention", given | {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        )
        call = self.bind_attention(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
            out, checks,
        )  # fmt: skip
        plans, problem = None, None
        try:
            plans = self.open(q.device)
        except NoBinaryError as error:
            problem = str(error)
        if workspace is not None:
            self.check_workspace(workspace, q.device, call[1], call[3])
        data = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | ({} if out is None else {"out": out})
        lengths = _explain.read_lengths(cu_seqlens_q, seq_lens) if checks == "full" else None
        return _explain.explain(self, plans, problem, call, data, return_lse, max_seqlen_k, lengths)

    def describe(self) -> str:
        """The package as text: layer groups, limits, targets, variants with sizes and registers, versions.
        Needs no GPU.
        """
        return _describe.describe(self.manifest, self.table)

    def _traced_attention(
        self, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
        out, return_lse, workspace, checks,
    ):  # fmt: skip
        """The call as custom operators: under torch.compile, export, fake tensors, tensor subclasses and
        dispatch modes.
        """
        _tensor("attention", "q", q)
        if workspace is not None:
            _checks.bad(
                "attention", "workspace", "is given to a traced call", "None: it uses its stream's own"
            )
        if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
            _checks.bad("attention", "q, k_cache or v_cache", "requires grad", "torch.no_grad() or .detach()")
        return self._operators.attention(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
            checks, out, return_lse,
        )  # fmt: skip

    def _plans(self, device: object, function: str) -> DevicePlans:
        if device is None:
            if torch.cuda.is_available():
                device = torch.device("cuda", torch.cuda.current_device())
            elif environ.get("TRITON_INTERPRET") == "1":
                device = torch.device("cpu")
            else:
                raise NoBinaryError(
                    f"{function}: no CUDA or HIP device is available; "
                    f"needed: a GPU of {', '.join(self.table.archs)} with its driver, "
                    "or TRITON_INTERPRET=1 for CPU tensors"
                )
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self.open(device)


def _tensor(function: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        _checks.bad(function, name, f"is {type(value).__name__}", f"a torch.Tensor {_checks.RANKS[name]}")
