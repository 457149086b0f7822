"""The public functions of a generated package: check, choose the table row, launch.

Composes the runtime: checks, table, plans, workspace; explain, describe and the custom operators have modules of their own.
Importing it needs no GPU and opens no device. The body of `attention` is the host cost of every call: no formatting, no
allocation but the output, no device value read.
"""

import json
from os import environ
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from . import checks as _checks
from . import describe as _describe
from . import explain as _explain
from .errors import ArgumentError, CaptureError, NoBinaryError
from .geometry import Geometries, Geometry, Limits
from .operators import Operators
from .plans import DevicePlans
from .table import Table
from .values import check_values
from .workspace import Workspace, is_capturing, narrowed

_is_compiling = torch.compiler.is_compiling
_active_modes = torch._C._len_torch_dispatch_stack
_PLAIN = (Tensor, Parameter)
_NOT_READABLE = (AttributeError, RuntimeError, TypeError, ValueError)


def _open_device(directory: Path, manifest: dict, torch_device: torch.device):
    from .device import Device

    return Device.open(directory, manifest, torch_device)


class Package:
    """One generated package: its manifest, its dispatch table and, per device, what is loaded.

    `name` is the import name, `directory` the package's folder with manifest.json; the rows are those of dispatch.py.
    `open_device(directory, manifest, torch_device)` gives a device's launcher; tests replace it.
    """

    def __init__(self, name, directory, attention_rows, append_rows, merge_rows, *, open_device=_open_device):
        self.name = name
        self.directory = Path(directory)
        self.manifest = json.loads((self.directory / "manifest.json").read_text(encoding="utf-8"))
        self.version = self.manifest["version"]
        self.limits = Limits(*(self.manifest["limits"][field] for field in Limits._fields))
        self.table = Table(attention_rows, append_rows, merge_rows)
        self.geometries = Geometries(self.manifest, self.table)
        self._by_heads = self.geometries.by_heads
        self._devices: dict[torch.device, DevicePlans] = {}
        self._open_device = open_device
        self._operators = Operators(self)

    def attention(
        self, q, k_cache, v_cache, *, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None, max_seqlen_k=None, layer=None,
        out=None, return_lse=False, sinks=None, alibi_slopes=None, prefix_ranges=None, q_scale=None, k_scale=None, v_scale=None,
        workspace=None, checks="shapes",
    ):  # fmt: skip
        """Attention of queries over a paged cache: prefill, decode, speculative rows and any mixture, in one call.

        q `[tokens, query_heads, qk_dim]`; k_cache `[pages, page_size, kv_heads, qk_dim]`, v_cache `[..., v_dim]`: the spec's
        dtype, any strides with a unit last stride. block_table int32 `[seqs, max_pages]`, seq_lens int32 `[seqs]` = keys per
        sequence, new ones included, cu_seqlens_q int32 `[seqs + 1]`. Row i of m queries over n keys sits at position n - m + i.
        `max_seqlen_q`, `max_seqlen_k`: host ints, the caller's upper bounds of rows and keys per sequence, for replays too;
        sequences with more than `max_seqlen_q` rows may be left out. `layer` names an attention entry, needed if there are
        several. `out` `[tokens, query_heads, v_dim]` is written and returned, else allocated; rows beyond cu_seqlens_q[-1] are
        untouched (not initialised in an allocated one). With `return_lse` the result is (out, lse): natural log, float32
        `[tokens, query_heads]`. `checks`: "shapes" reads no device value, "full" synchronises and checks values, "none".
        Raises ArgumentError before anything is written, NoBinaryError or CaptureError at the first call on a device.
        """
        if (
            sinks is not None or alibi_slopes is not None or prefix_ranges is not None
            or q_scale is not None or k_scale is not None or v_scale is not None
        ):  # fmt: skip
            given = {"sinks": sinks, "alibi_slopes": alibi_slopes, "prefix_ranges": prefix_ranges}
            _checks.refuse_features("attention", given | {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale})
        call = self._traced_attention if _is_compiling() or _active_modes() or type(q) not in _PLAIN else self._attention
        return call(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer, out, return_lse,
            workspace, checks,
        )  # fmt: skip

    def _attention(
        self, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer, out, return_lse,
        workspace, checks,
    ):  # fmt: skip
        geometry, tokens, bound, seqs, max_pages, bits, strides = self._bound_attention(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer, out, checks
        )
        plans = self._devices.get(q.device) or self._open(q.device)
        if workspace is not None:
            self._check_workspace(workspace, q.device, tokens, seqs)
        if out is None:
            out = q.new_empty((tokens, geometry.query_heads, geometry.v_dim))
        lse = torch.empty((tokens, geometry.query_heads), dtype=torch.float32, device=q.device) if return_lse else None
        if bound and seqs:
            pointers = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr() | out.data_ptr()
            plan = plans.attention(geometry, not (pointers & 15 or bits & geometry.stride_mask), bound)
            stream = plans.current_stream(plans.index)
            pool = plans.workspaces
            if workspace is None:
                workspace = pool.by_stream.get(stream) or pool.missing(stream)
            store_lse = 1 if return_lse else 0
            lse_or_any = lse if return_lse else workspace.partial_ml
            if plan.prefill is not None:
                plan.prefill(
                    plan.prefill_grid, stream, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, lse_or_any,
                    seqs, max_pages, store_lse, *strides,
                )  # fmt: skip
            if plan.decode is not None:
                plan.decode(
                    plan.decode_grid, stream, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, lse_or_any,
                    workspace.partial_acc, workspace.partial_ml, workspace.counters, seqs, max_pages, store_lse, *strides,
                )  # fmt: skip
            if pool.spare_wanted:
                pool.renew_spare()
        return (out, lse) if return_lse else out

    def _bound_attention(
        self, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer, out, checks
    ):
        """Find the geometry and check; (geometry, tokens, bound of rows per sequence, then what check_attention returns)."""
        try:
            tokens, query_heads, _ = q.shape
            pages, _, kv_heads, _ = k_cache.shape
            geometry = self._by_heads.get((layer, query_heads, kv_heads))
            if geometry is None:
                raise self.geometries.no_heads(layer, query_heads, kv_heads)
            bound = tokens
            if max_seqlen_q is not None:
                if type(max_seqlen_q) is not int or max_seqlen_q < 0:
                    _checks.host_bound("max_seqlen_q", max_seqlen_q)
                if max_seqlen_q < tokens:
                    bound = max_seqlen_q
            if max_seqlen_k is not None and (type(max_seqlen_k) is not int or max_seqlen_k < 0):
                _checks.host_bound("max_seqlen_k", max_seqlen_k)
            if checks == "none":
                read = _checks.read_attention(geometry, q, k_cache, v_cache, block_table, out)
            else:
                read = _checks.check_attention(
                    geometry, self.limits, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out
                )
                if checks == "full":
                    check_values(
                        geometry, self.limits, tokens, pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k
                    )
                elif checks != "shapes":
                    _checks.bad("attention", "checks", f"is {checks!r}", f"one of {', '.join(_checks.CHECKS)}")
        except ArgumentError:
            raise
        except _NOT_READABLE:
            tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
            tensors |= {"seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q} | ({} if out is None else {"out": out})
            self._diagnose("attention", tensors, layer)
            raise
        return geometry, tokens, bound, *read

    def _traced_attention(
        self, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer, out, return_lse,
        workspace, checks,
    ):  # fmt: skip
        """The call as custom operators: under torch.compile, export, fake tensors, tensor subclasses and dispatch modes."""
        if not isinstance(q, Tensor):
            _checks.bad("attention", "q", f"is {type(q).__name__}", "a torch.Tensor [tokens, query_heads, qk_dim]")
        if workspace is not None:
            _checks.bad("attention", "workspace", "is given to a traced call", "None: a compiled graph uses its stream's own")
        if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
            _checks.bad("attention", "q, k_cache or v_cache", "requires grad", "inference: torch.no_grad() or .detach()")
        return self._operators.attention(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer, checks, out, return_lse
        )

    def append_kv(self, k, v, k_cache, v_cache, *, slot_mapping, layer=None, k_scale=None, v_scale=None):
        """Write new keys and values into the caches, in place.

        k `[tokens, kv_heads, qk_dim]`, v `[tokens, kv_heads, v_dim]`; caches as in `attention`; slot_mapping int64 `[tokens]`,
        slot = page * page_size + offset; a negative slot is skipped, as is one past the pool. Raises ArgumentError before
        anything is written, NoBinaryError or CaptureError at the first call on a device.
        """
        if k_scale is not None or v_scale is not None:
            _checks.refuse_features("append_kv", {"k_scale": k_scale, "v_scale": v_scale})
        call = self._traced_append if _is_compiling() or _active_modes() or type(k) not in _PLAIN else self._append_kv
        return call(k, v, k_cache, v_cache, slot_mapping, layer)

    def _append_kv(self, k, v, k_cache, v_cache, slot_mapping, layer) -> None:
        try:
            kv_heads = k_cache.shape[2]
            geometry = self.geometries.by_kv_heads.get((layer, kv_heads))
            if geometry is None:
                raise self.geometries.no_kv_heads(layer, kv_heads)
            tokens, num_slots, bits, strides = _checks.check_append(geometry, k, v, k_cache, v_cache, slot_mapping)
        except ArgumentError:
            raise
        except (IndexError, *_NOT_READABLE):
            tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
            self._diagnose("append_kv", tensors, layer)
            raise
        plans = self._devices.get(k.device) or self._open(k.device)
        if tokens and num_slots:
            pointers = k.data_ptr() | v.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
            kernel, grid = plans.append(geometry, not (pointers & 15 or bits & geometry.stride_mask))
            stream = plans.current_stream(plans.index)
            kernel(grid, stream, k, v, k_cache, v_cache, slot_mapping, tokens, num_slots, *strides)

    def _traced_append(self, k, v, k_cache, v_cache, slot_mapping, layer) -> None:
        if not isinstance(k, Tensor):
            _checks.bad("append_kv", "k", f"is {type(k).__name__}", "a torch.Tensor [tokens, kv_heads, qk_dim]")
        self._operators.append_kv(k, v, k_cache, v_cache, slot_mapping, layer)

    def merge_states(self, out_a, lse_a, out_b, lse_b):
        """Merge two attention results over disjoint keys of the same queries; returns new (out, lse).

        out_a, out_b `[tokens, query_heads, v_dim]` in the spec's dtype, lse_a, lse_b float32 `[tokens, query_heads]` in natural
        log; all contiguous. A state that saw no key is (0, -inf). Raises ArgumentError, NoBinaryError or CaptureError.
        """
        traced = _is_compiling() or _active_modes() or type(out_a) not in _PLAIN
        return (self._traced_merge if traced else self._merge_states)(out_a, lse_a, out_b, lse_b)

    def _merge_states(self, out_a, lse_a, out_b, lse_b) -> tuple[Tensor, Tensor]:
        try:
            tokens, query_heads, v_dim = out_a.shape
            geometry = self.geometries.by_out.get((query_heads, v_dim))
            if geometry is None:
                raise self.geometries.no_out(query_heads, v_dim)
            _checks.check_merge(geometry, out_a, lse_a, out_b, lse_b)
        except ArgumentError:
            raise
        except _NOT_READABLE:
            self._diagnose("merge_states", {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}, None)
            raise
        plans = self._devices.get(out_a.device) or self._open(out_a.device)
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        if tokens:
            kernel, grid, aligned = plans.merge(geometry)
            if aligned and (out_a.data_ptr() | out_b.data_ptr()) & 15:
                out_a, out_b = out_a.clone(), out_b.clone()
            stream = plans.current_stream(plans.index)
            kernel(grid, stream, out_a, lse_a, out_b, lse_b, out, lse, tokens * query_heads)
        return out, lse

    def _traced_merge(self, out_a, lse_a, out_b, lse_b):
        if not isinstance(out_a, Tensor):
            _checks.bad("merge_states", "out_a", f"is {type(out_a).__name__}", "a torch.Tensor [tokens, query_heads, v_dim]")
        return self._operators.merge_states(out_a, lse_a, out_b, lse_b)

    def workspace(self, device=None, **limits) -> Workspace:
        """Scratch for `attention` on one device (default: the current one), owned by the caller.

        Its size is a constant of package and device, `.nbytes`. `limits` (max_seqs, max_seq_len, max_tokens, max_spec_tokens)
        narrow what a call that uses it may hold; each at most the spec's. Raises ArgumentError, NoBinaryError, CaptureError.
        """
        narrow = narrowed(self.limits, limits)
        plans = self._plans(device, "workspace")
        if is_capturing(plans.torch_device):
            raise CaptureError("workspace: a graph is being captured; needed: make the workspace before the capture")
        return Workspace(plans.torch_device, plans.size, narrow, self)

    def warmup(self, device=None) -> None:
        """Load every binary on one device (default: the current one) and allocate its workspaces; waits for the device.

        After it a first call inside graph capture works. Raises NoBinaryError without a GPU or a fitting binary,
        DamagedBinaryError for an altered file, CaptureError while a graph is being captured.
        """
        plans = self._plans(device, "warmup")
        if is_capturing(plans.torch_device):
            raise CaptureError("warmup: a graph is being captured; needed: call warmup() before the capture")
        plans.warm()

    def explain(
        self, q, k_cache, v_cache, *, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None, max_seqlen_k=None, layer=None,
        out=None, return_lse=False, sinks=None, alibi_slopes=None, prefix_ranges=None, q_scale=None, k_scale=None, v_scale=None,
        workspace=None, checks="shapes",
    ) -> _explain.Explanation:  # fmt: skip
        """What `attention` would do with the same arguments: specialization, row and why, grid, splits, bytes, floor.

        Launches nothing. Lengths are the bounds of shapes and host integers; with checks="full" it synchronises and counts
        the real ones. Raises what the checks of `attention` raise; where no binary runs here it says so and goes on.
        """
        given = {"sinks": sinks, "alibi_slopes": alibi_slopes, "prefix_ranges": prefix_ranges}
        _checks.refuse_features("explain", given | {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale})
        bound = self._bound_attention(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer, out, checks
        )
        if workspace is not None:
            self._check_workspace(workspace, q.device, bound[1], bound[3])
        problem = None
        try:
            plans = self._devices.get(q.device) or self._open(q.device)
        except NoBinaryError as error:
            plans, problem = None, str(error)
        data = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | ({} if out is None else {"out": out})
        lengths = _explain.read_lengths(cu_seqlens_q, seq_lens) if checks == "full" else None
        return _explain.explain(self, plans, problem, bound, data, return_lse, max_seqlen_k, lengths)

    def describe(self) -> str:
        """The package as text: layer groups, limits, targets, variants with sizes and registers, versions. Needs no GPU."""
        return _describe.describe(self.manifest, self.table)

    def _check_workspace(self, workspace: object, device: torch.device, tokens: int, seqs: int) -> None:
        if not isinstance(workspace, Workspace):
            _checks.bad("attention", "workspace", f"is {type(workspace).__name__}", "what workspace() returns, or None")
        if not workspace.belongs_to(self):
            _checks.bad("attention", "workspace", "is of another package", f"one that {self.name}.workspace() returned")
        if workspace.device != device:
            _checks.bad("attention", "workspace", f"is on {workspace.device}", f"q's device {device}")
        if tokens > workspace.limits.max_tokens:
            _checks.bad("attention", "workspace", f"was made for max_tokens {workspace.limits.max_tokens}", tokens)
        if seqs > workspace.limits.max_seqs:
            _checks.bad("attention", "workspace", f"was made for max_seqs {workspace.limits.max_seqs}", seqs)

    def _diagnose(self, function: str, tensors: dict, layer: object) -> None:
        _checks.diagnose(function, tensors)
        if not isinstance(layer, str | None):
            _checks.bad(function, "layer", f"is {type(layer).__name__}", "a str, the name of an attention entry")

    def _plans(self, device: object, function: str) -> DevicePlans:
        if device is None:
            if torch.cuda.is_available():
                device = torch.device("cuda", torch.cuda.current_device())
            elif environ.get("TRITON_INTERPRET") == "1":
                device = torch.device("cpu")
            else:
                archs = ", ".join(self.table.archs)
                raise NoBinaryError(
                    f"{function}: no CUDA or HIP device is available; needed: a GPU of {archs} with its driver, "
                    "or TRITON_INTERPRET=1 for CPU tensors"
                )
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self._devices.get(device) or self._open(device)

    def _open(self, device: torch.device) -> DevicePlans:
        opened = self._open_device(self.directory, self.manifest, device)
        plans = DevicePlans(opened, device, self.table, self.manifest["variants"], self._own_workspace)
        return self._devices.setdefault(device, plans)

    def _own_workspace(self, plans: DevicePlans) -> Workspace:
        return Workspace(plans.torch_device, plans.size, self.limits, self)
