"""The public functions of a generated package: refuse what it has not, then run eagerly or as custom
operators.

The eager bodies are in eager.py; explain, describe and the custom operators have modules of their own.
Importing it needs no GPU and opens no device.
"""

import importlib
from dataclasses import replace
from os import environ
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from . import describe as _describe
from . import explain as _explain
from . import interpret as _interpret
from . import refusals as _refusals
from .eager import Eager
from .errors import CaptureError, NoBinaryError
from .installed import TABLES, check_rows, read_dispatch
from .operators import Operators
from .plans import DevicePlans
from .rotary import Rotary
from .table import EVERY, AttentionRow, Bounds, Table
from .workspace import Workspace, check_workspace, is_capturing, narrowed

_is_compiling = torch.compiler.is_compiling
_active_modes = torch._C._len_torch_dispatch_stack
_PLAIN = (Tensor, Parameter)


def _open_device(directory: Path, manifest: dict, torch_device: torch.device):
    from .device import Device

    return Device.open(directory, manifest, torch_device)


def _public(method):
    """A method whose errors about arguments name it as its callers do: "attention() missing ...", without the class."""
    method.__qualname__ = method.__name__
    return method


class Package(Eager):
    """One generated package: its manifest, its dispatch table and, per device, what is loaded.

    `name` is the import name, `directory` the package's folder with manifest.json; the rows are those of
    dispatch.py, and `selectors` its functions (table.Table). `open_device(directory, manifest, torch_device)`
    gives a device's launcher; tests replace it.
    """

    def __init__(
        self, name, directory, attention_rows, append_rows, merge_rows, varlen_rows, *, selectors=None,
        open_device=_open_device,
    ):  # fmt: skip
        super().__init__(
            name, directory, attention_rows, append_rows, merge_rows, varlen_rows, open_device, selectors
        )
        self._operators = Operators(self)

    @classmethod
    def installed(cls, name: str, directory: Path) -> "Package":
        """The package `name` as it lies in its folder. Raises DamagedBinaryError for a damaged manifest.json or dispatch.py."""
        dispatch = read_dispatch(name, directory)
        *rows, selectors = (getattr(dispatch, table) for table in TABLES)
        return cls(name, directory, *rows, selectors=selectors)

    def __reduce__(self):
        """Copies and pickles, of its functions too, are the package of the process that reads them."""
        return _package_of, (self.name,)

    def pinned(self, row: AttentionRow) -> "Package":
        """This package with `row` for every call of its geometry and guard that the row's kernels can serve,
        whatever the table would choose: what tests and measurements call. Opened devices are shared.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        takes = self.limits.max_tokens if row.prefill else self.manifest["variants"][row.decode]["max_query_len"]
        every = dict.fromkeys(Bounds._fields[1:], EVERY)
        whole = dict(index=0, min_query_len=1, max_query_len=takes, **every)
        other.table = Table([replace(row, **whole)], self.table.append_rows, self.table.merge_rows, self.table.varlen_rows)
        other._devices, other._readers = {}, {}
        other._open_device = lambda directory, manifest, torch_device: self.open(torch_device).device
        return other

    @_public
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
        cu_seqlens_q[-1] are untouched (not initialised in an allocated one). It may be q itself, element for
        element, and shares no other memory with q and the caches. With `return_lse` the result is (out, lse):
        natural log, float32 `[tokens, query_heads]`. `checks`: "shapes" reads no device value,
        "full" synchronises and checks values, "none". Unless "full", device values are the caller's duty:
        lengths are clamped to block_table's row, but cu_seqlens_q (rising from 0 to at most tokens) and the
        page ids of visible keys (0 to pages - 1) are used as addresses.

        Contiguous tensors of features, refused where the layer has them not: `sinks` bfloat16 or float32
        `[query_heads]`, needed by a layer with sinks; `alibi_slopes` float32 `[query_heads]`, None is the
        model's own (where a rank holds part of the heads, its slopes are needed); `prefix_ranges` int32
        `[seqs, ranges, 2]`, [start, end) of positions that see each other, empty if start >= end, or None. In
        layout HND the caches are `[pages, kv_heads, page_size, dim]`. Raises ArgumentError before anything is
        written, NoBinaryError or CaptureError at the first call on a device.
        """
        if q_scale is not None or k_scale is not None or v_scale is not None:
            scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
            _refusals.refuse_features("attention", scales)
        extras = None
        if sinks is not None or alibi_slopes is not None or prefix_ranges is not None:
            extras = sinks, alibi_slopes, prefix_ranges
        if _is_compiling() or _active_modes() or type(q) not in _PLAIN:
            if workspace is not None:
                need = "None: it uses its stream's own"
                _refusals.bad("attention", "workspace", "is given to a traced call", need)
            batch = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
            batch |= {"seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
            return self._traced_attention(
                "attention", batch, max_seqlen_q, max_seqlen_k, layer, out, return_lse, checks, extras
            )
        return self.run_attention(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
            out, return_lse, workspace, checks, extras,
        )  # fmt: skip

    @_public
    def attention_varlen(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, layer=None,
        out=None, return_lse=False, sinks=None, alibi_slopes=None, prefix_ranges=None, checks="shapes",
    ):  # fmt: skip
        """Attention of queries over contiguous keys and values, without a cache: encoders, vision, a first
        prefill.

        q `[tokens, query_heads, qk_dim]`, k `[key_tokens, kv_heads, qk_dim]`, v `[key_tokens, kv_heads,
        v_dim]`: the spec's dtype, any strides with a unit last stride, such as slices of a fused QKV.
        cu_seqlens_q, cu_seqlens_k int32 `[seqs + 1]`: rows cu_seqlens_k[s] to cu_seqlens_k[s + 1] of k and v
        are the keys of sequence s, likewise its queries. Row i of m queries over n keys sits at position
        n - m + i. `layer`, `out`, `return_lse`, `checks`, the bounds `max_seqlen_q` and `max_seqlen_k` and
        the tensors of features are those of `attention`; no workspace is needed. Unless `checks` is "full",
        device values are the caller's duty: cu_seqlens_q and cu_seqlens_k, rising from 0 to at most tokens
        and key_tokens, are used as addresses. Raises what `attention` raises.
        """
        extras = None
        if sinks is not None or alibi_slopes is not None or prefix_ranges is not None:
            extras = sinks, alibi_slopes, prefix_ranges
        if _is_compiling() or _active_modes() or type(q) not in _PLAIN:
            batch = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
            return self._traced_attention(
                "attention_varlen", batch, max_seqlen_q, max_seqlen_k, layer, out, return_lse, checks, extras
            )
        return self.run_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layer, out, return_lse, checks,
            extras,
        )  # fmt: skip

    @_public
    def append_kv(
        self, k, v, k_cache, v_cache, *, slot_mapping, layer=None, k_scale=None, v_scale=None,
        q=None, positions=None, cos=None, sin=None, q_out=None,
    ) -> Tensor | None:  # fmt: skip
        """Write new keys and values into the caches, in place.

        k `[tokens, kv_heads, qk_dim]`, v `[tokens, kv_heads, v_dim]`; caches as in `attention`; slot_mapping
        int64 `[tokens]`, slot = page * page_size + offset; a negative slot is skipped, as is one past the
        pool. The caches may interleave in one buffer, but share no element with each other, k or v. Raises
        ArgumentError before anything is written, NoBinaryError or CaptureError at the first call on a device.
        Compiled by inductor with dynamic shapes, caches that are views of one buffer must be made outside of
        the compiled function, or shapes be static (dynamic=False): torch 2.13 miscomputes two mutated views.

        A layer with rotary embedding rotates the keys on their way, and the queries in the same launch: q
        `[tokens, query_heads, qk_dim]`, positions int64 `[tokens]`, cos and sin float32 `[positions, rotary
        dim / 2]`. Returns the rotated queries, `q_out` or a new tensor; q_out shares memory with no other tensor.
        A position outside the tables is clamped to them.
        """
        rotary = None
        if not (q is positions is cos is sin is q_out is None):
            rotary = Rotary(q, positions, cos, sin, q_out)
        if k_scale is not None or v_scale is not None:
            _refusals.refuse_features("append_kv", {"k_scale": k_scale, "v_scale": v_scale})
        if _is_compiling() or _active_modes() or type(k) not in _PLAIN:
            _tensor("append_kv", "k", k)
            return self._operators.append_kv(k, v, k_cache, v_cache, slot_mapping, layer, rotary)
        return self.run_append_kv(k, v, k_cache, v_cache, slot_mapping, layer, rotary)

    @_public
    def merge_states(self, out_a, lse_a, out_b, lse_b) -> tuple[Tensor, Tensor]:
        """Merge two attention results over disjoint keys of the same queries; returns new (out, lse).

        out_a, out_b `[tokens, query_heads, v_dim]` in the spec's dtype, lse_a, lse_b float32 `[tokens,
        query_heads]` in natural log; all contiguous. A state that saw no key is (0, -inf). lse must be
        finite or -inf, which is not checked: NaN and +inf give NaN. Raises ArgumentError, NoBinaryError,
        CaptureError or DriverError.
        """
        if _is_compiling() or _active_modes() or type(out_a) not in _PLAIN:
            _tensor("merge_states", "out_a", out_a)
            return self._operators.merge_states(out_a, lse_a, out_b, lse_b)
        return self.run_merge_states(out_a, lse_a, out_b, lse_b)

    @_public
    def workspace(self, device=None, **limits) -> Workspace:
        """Scratch for `attention` on one device (default: the current one), owned by the caller.

        Its size is a constant of package and device, `.nbytes`. `limits` (max_seqs, max_seq_len, max_tokens,
        max_spec_tokens) narrow what a call that uses it may hold; each at most the spec's. Raises
        ArgumentError, NoBinaryError without a GPU or a fitting binary, DriverError, CaptureError.
        """
        narrow = narrowed(self.limits, limits)
        plans = self._plans(device, "workspace")
        if is_capturing(plans.torch_device):
            raise CaptureError(
                "workspace: a graph is being captured; needed: make the workspace before the capture"
            )
        return Workspace(plans.torch_device, plans.size, narrow, self)

    @_public
    def warmup(self, device=None) -> None:
        """Load every binary on one device (default: the current one) and allocate its workspaces; waits for
        the device.

        After it a first call inside graph capture works. Raises ArgumentError for what is no device,
        NoBinaryError without a GPU or a fitting binary, DriverError where its driver cannot be used,
        DamagedBinaryError for an altered file, CaptureError while a graph is being captured.
        """
        plans = self._plans(device, "warmup")
        if is_capturing(plans.torch_device):
            raise CaptureError("warmup: a graph is being captured; needed: call warmup() before the capture")
        plans.warm()

    @_public
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
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        _refusals.refuse_features("attention", scales)
        extras = sinks, alibi_slopes, prefix_ranges
        call = self.bind_attention(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
            out, checks, extras,
        )  # fmt: skip
        plans, problem = self._plans_or_problem(q.device)
        if workspace is not None:
            check_workspace(workspace, self, q.device, call[1], call[3])
        data = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | ({} if out is None else {"out": out})
        lengths = None
        if checks == "full":
            lengths = _explain.read_lengths(cu_seqlens_q, seq_lens, prefix_ranges)
        ranged = prefix_ranges is not None
        return _explain.explain(self, plans, problem, call, data, return_lse, max_seqlen_k, lengths, ranged)

    @_public
    def explain_varlen(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, layer=None,
        out=None, return_lse=False, sinks=None, alibi_slopes=None, prefix_ranges=None, checks="shapes",
    ) -> _explain.Explanation:  # fmt: skip
        """What `attention_varlen` would do with the same arguments; otherwise as `explain`."""
        extras = sinks, alibi_slopes, prefix_ranges
        call = self.bind_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layer, out, checks, extras
        )
        plans, problem = self._plans_or_problem(q.device)
        data = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        lengths = None
        if checks == "full":
            lengths = _explain.read_lengths(cu_seqlens_q, cu_seqlens_k.diff(), prefix_ranges)
        ranged = prefix_ranges is not None
        return _explain.explain_varlen(
            self, plans, problem, call, data, return_lse, max_seqlen_k, lengths, ranged
        )

    @_public
    def describe(self) -> str:
        """The package as text: layer groups, limits, targets, variants with sizes and registers, versions.
        Needs no GPU.
        """
        check_rows(self.directory, self.manifest, self.table)
        return _describe.describe(self.manifest, self.table)

    def _traced_attention(
        self, function, batch, max_seqlen_q, max_seqlen_k, layer, out, return_lse, checks, extras
    ):
        """The call as custom operators: under torch.compile, export, fake tensors, tensor subclasses and
        dispatch modes.
        """
        (q_name, q), (k_name, k), (v_name, v), *_ = batch.items()
        _tensor(function, q_name, q)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            names = f"{q_name}, {k_name} or {v_name}"
            _refusals.bad(function, names, "requires grad", "torch.no_grad() or .detach()")
        return self._operators.attention(
            function,
            tuple(batch.values()),
            max_seqlen_q,
            max_seqlen_k,
            layer,
            checks,
            out,
            return_lse,
            extras,
        )

    def _plans_or_problem(self, device: torch.device) -> tuple[DevicePlans | None, str | None]:
        """The plans of a device, or why nothing of the package runs there."""
        try:
            return self.open(device), None
        except NoBinaryError as error:
            return None, str(error)

    def _plans(self, device: object, function: str) -> DevicePlans:
        if device is None:
            if torch.cuda.is_available():
                device = torch.device("cuda", torch.cuda.current_device())
            elif environ.get("TRITON_INTERPRET") == "1":
                device = torch.device("cpu")
            else:
                raise self._no_gpu(function)
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):  # no name of a device; or an index, and no device has one
            need = 'a torch.device or its name, such as "cuda:0", of a device that is there, or None'
            _refusals.bad(function, "device", f"is {device!r}", need)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise self._no_gpu(function)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self.open(device)

    def _no_gpu(self, function: str) -> NoBinaryError:
        return NoBinaryError(
            f"{function}: no CUDA or HIP device is available; "
            f"needed: a GPU of {', '.join(self.table.archs)} with its driver" + _interpret.hint(self.manifest)
        )


def _package_of(name: str) -> Package:
    return importlib.import_module(name)._package


def _tensor(function: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        _refusals.bad(function, name, f"is {type(value).__name__}", f"a torch.Tensor {_refusals.RANKS[name]}")
    if value.is_nested:
        _refusals.bad(function, name, "is a nested tensor", f"a dense strided tensor {_refusals.RANKS[name]}")
