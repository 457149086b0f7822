"""The eager bodies of the public functions: find the geometry, check, choose the table row, launch.

Holds what a package has read and opened: manifest, table, geometries and, per device, its plans. The path of
a call does no formatting, no allocation but the output, and reads no device value (checks="full" apart).
"""

from functools import reduce
from operator import or_
from pathlib import Path

import torch
from torch import Tensor

from . import checks as _checks
from . import memory as _memory
from . import refusals as _refusals
from . import rotary as _rotary
from .errors import ArgumentError
from .extras import ABSENT, NAMES, check_extras, check_presence, launch_arguments
from .geometry import Geometries, Limits
from .installed import check_rows, read_manifest
from .plans import DevicePlans
from .reading import Reader, readers
from .table import Table, least_query_len
from .values import check_values, check_varlen_values
from .varlen import check_varlen, read_varlen
from .workspace import Workspace, check_workspace

_NOT_READABLE = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class Eager:
    """The state of one package and the bodies that launch; `Package` adds the public functions.

    `open_device(directory, manifest, torch_device)` gives a device's launcher.
    """

    def __init__(
        self, name, directory, attention_rows, append_rows, merge_rows, varlen_rows, open_device, selectors=None
    ):  # fmt: skip
        self.name = name
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory, Limits._fields)
        self.version = self.manifest["version"]
        self.limits = Limits(*(self.manifest["limits"][field] for field in Limits._fields))
        self.table = Table(attention_rows, append_rows, merge_rows, varlen_rows, selectors)
        self.geometries = Geometries(self.manifest, self.table)
        self._by_heads = self.geometries.by_heads
        self._hnd = self.geometries.hnd
        self._devices: dict[torch.device | int, DevicePlans] = {}  # GPUs by index too
        self._readers: dict[str | None, tuple[Reader, ...]] = {}
        self._open_device = open_device

    def run_attention(
        self, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
        out, return_lse, workspace, checks, extras,
    ):  # fmt: skip
        """`attention`, every argument by place. `extras`: (sinks, alibi_slopes, prefix_ranges), or None if
        none is given.
        """
        read = None
        if self._readers and (checks == "shapes" or checks == "none") and (layer is None or type(layer) is str):
            sinks, slopes, ranges = extras or ABSENT
            plain = slopes is None and ranges is None and workspace is None and return_lse is False
            for reader in self._readers.get(layer, ()):
                read = reader.call(
                    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, sinks,
                    max_seqlen_q, max_seqlen_k, plain,
                )  # fmt: skip
                if read is not None:
                    break
        if read is None:
            geometry, tokens, bound, seqs, max_pages, bits, strides = self.bind_attention(
                q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
                out, checks, extras,
            )  # fmt: skip
            device = q.device
            plans = self._devices.get(device) or self.open(device)
            addresses, plain = None, False
        elif type(read) is not tuple:
            return read  # the output: launched
        else:
            geometry = reader.geometry
            (index, aligned, max_pages, pages), bounds, addresses, strides = read
            bound, seqs, tokens, *_ = bounds
            if extras is not None or geometry.extras is not None:
                if checks == "none":
                    check_presence("attention", geometry, extras)
                else:
                    check_extras("attention", geometry, extras, q, seqs)
            plans = self._devices.get(index) or self.open(q.device)
        if workspace is not None:
            check_workspace(workspace, self, q.device, tokens, seqs)
        if return_lse is not False and return_lse is not True:  # a tensor's truth would synchronise
            _refusals.bad("attention", "return_lse", f"is {type(return_lse).__name__}", "True or False")
        if out is None:
            out = q.new_empty((tokens, geometry.query_heads, geometry.v_dim))
        lse = None
        if return_lse:
            lse = torch.empty((tokens, geometry.query_heads), dtype=torch.float32, device=q.device)
        if bound and seqs:
            if addresses is None:
                data = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out}
                pointers = reduce(or_, _refusals.addresses("attention", data))
                tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
                _refusals.addresses("attention", tables)
                aligned = not (pointers & 15 or bits & geometry.stride_mask)
                pages = k_cache.size(0)
                keys = max_pages * geometry.page_size
                if max_seqlen_k is not None and max_seqlen_k < keys:
                    keys = max_seqlen_k
                bounds = bound, seqs, tokens, keys or 1, least_query_len(bound, seqs, tokens)
            plan = plans.attention(geometry, aligned, *bounds)
            stream = plans.current_stream(plans.index)
            pool = plans.workspaces
            if workspace is None:
                workspace = pool.by_stream.get(stream) or pool.missing(stream)
            if geometry.extras is not None:
                strides += launch_arguments(geometry, extras, plans, workspace.partial_ml)
            if addresses is None:  # tensors, which an interpreted kernel needs
                data, scratch = (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out), workspace.scratch
            else:
                data, scratch = addresses if addresses[6] else (*addresses[:6], out.data_ptr()), workspace.addresses
            lse_or_any, store_lse = (scratch[1], 0) if lse is None else (lse, 1)
            passed = (*data, lse_or_any, *scratch, seqs, max_pages, store_lse, tokens, pages, *strides)
            if plan.decode is not None:
                plan.decode(plan.decode_grid, stream, *passed)
            if plan.prefill is not None:
                plan.prefill(plan.prefill_grid, stream, *passed)
            if pool.spare_wanted:  # every call comes by here until one outside a capture has made a spare
                pool.renew_spare()
                self._forget_routes()
            elif plain and reader.routed:
                reader.keep(
                    index, stream, aligned, plan.row.box, workspace.addresses,
                    plan.decode, plan.decode_grid, plan.prefill, plan.prefill_grid,
                )  # fmt: skip
        return out if lse is None else (out, lse)

    def bind_attention(
        self, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
        out, checks, extras,
    ):  # fmt: skip
        """Find the geometry and check, launching and writing nothing.

        Returns (geometry, tokens, bound of query rows per sequence, then what `check_attention` returns).
        """
        try:
            q_shape, k_shape = q.shape, k_cache.shape
            tokens, query_heads, _ = q_shape
            pages, kv_heads, near, _ = k_shape
            if not self._hnd:
                kv_heads = near
            geometry = self._by_heads.get((layer, query_heads, kv_heads))
            if geometry is None:
                raise self.geometries.no_heads("attention", layer, query_heads, "k_cache", kv_heads, k_shape)
            bound = _bound("attention", tokens, max_seqlen_q, max_seqlen_k)
            if checks == "none":
                read = _checks.read_attention(geometry, q, k_cache, v_cache, block_table, out)
                if extras is not None or geometry.extras is not None:
                    check_presence("attention", geometry, extras)
            else:
                read = _checks.check_attention(
                    geometry, self.limits, q_shape, k_shape,
                    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out,
                )  # fmt: skip
                if extras is not None or geometry.extras is not None:
                    check_extras("attention", geometry, extras, q, read[0])
                if out is not None:
                    others = {"k_cache": k_cache, "v_cache": v_cache}
                    if checks == "full":
                        others |= {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
                        others |= zip(NAMES, extras or ABSENT)
                    _memory.refuse_out("attention", out, q, others)
                if checks == "full":
                    check_values(
                        geometry, self.limits, tokens, pages,
                        block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, extras,
                    )  # fmt: skip
                elif checks != "shapes":
                    _refusals.bad(
                        "attention", "checks", f"is {checks!r}", f"one of {', '.join(_checks.CHECKS)}"
                    )
        except ArgumentError:
            raise
        except _NOT_READABLE:
            tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
            tensors |= {"seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q} | (
                {} if out is None else {"out": out}
            )
            self._diagnose("attention", tensors, layer)
            raise
        return geometry, tokens, bound, *read

    def run_varlen(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layer, out, return_lse, checks,
        extras,
    ):  # fmt: skip
        """`attention_varlen`, every argument by place; `extras` as in `run_attention`."""
        geometry, tokens, bound, seqs, bits, strides = self.bind_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layer, out, checks, extras
        )
        device = q.device
        plans = self._devices.get(device) or self.open(device)
        if return_lse is not False and return_lse is not True:  # a tensor's truth would synchronise
            _refusals.bad(
                "attention_varlen", "return_lse", f"is {type(return_lse).__name__}", "True or False"
            )
        if out is None:
            out = q.new_empty((tokens, geometry.query_heads, geometry.v_dim))
        lse = None
        if return_lse:
            lse = torch.empty((tokens, geometry.query_heads), dtype=torch.float32, device=device)
        if bound and seqs:
            pointers = reduce(or_, _refusals.addresses("attention_varlen", {"q": q, "k": k, "v": v, "out": out}))
            _refusals.addresses("attention_varlen", {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
            kernel, grid = plans.varlen(geometry, not (pointers & 15 or bits & geometry.stride_mask))
            if geometry.extras is not None:
                strides += launch_arguments(geometry, extras, plans, q)
            lse_or_any, store_lse = (q, 0) if lse is None else (lse, 1)
            kernel(
                grid, plans.current_stream(plans.index), q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse_or_any,
                seqs, store_lse, *strides,
            )  # fmt: skip
        return out if lse is None else (out, lse)

    def bind_varlen(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layer, out, checks, extras
    ):
        """Find the geometry and check, launching and writing nothing.

        Returns (geometry, tokens, bound of query rows per sequence, then what `check_varlen` returns).
        """
        function = "attention_varlen"
        try:
            q_shape, k_shape = q.shape, k.shape
            tokens, query_heads, _ = q_shape
            key_tokens, kv_heads, _ = k_shape
            geometry = self._by_heads.get((layer, query_heads, kv_heads))
            if geometry is None:
                raise self.geometries.no_heads(function, layer, query_heads, "k", kv_heads)
            bound = _bound(function, tokens, max_seqlen_q, max_seqlen_k)
            if checks == "none":
                read = read_varlen(geometry, q, k, v, cu_seqlens_q, out)
                if extras is not None or geometry.extras is not None:
                    check_presence(function, geometry, extras)
            else:
                read = check_varlen(
                    geometry, self.limits, q_shape, k_shape, q, k, v, cu_seqlens_q, cu_seqlens_k, out
                )
                if extras is not None or geometry.extras is not None:
                    check_extras(function, geometry, extras, q, read[0])
                if out is not None:
                    others = {"k": k, "v": v}
                    if checks == "full":
                        others |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
                        others |= zip(NAMES, extras or ABSENT)
                    _memory.refuse_out(function, out, q, others)
                if checks == "full":
                    check_varlen_values(
                        self.limits, tokens, key_tokens,
                        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, extras,
                    )  # fmt: skip
                elif checks != "shapes":
                    _refusals.bad(function, "checks", f"is {checks!r}", f"one of {', '.join(_checks.CHECKS)}")
        except ArgumentError:
            raise
        except _NOT_READABLE:
            tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
            self._diagnose(function, tensors | ({} if out is None else {"out": out}), layer)
            raise
        return geometry, tokens, bound, *read

    def run_append_kv(self, k, v, k_cache, v_cache, slot_mapping, layer, rotary=None) -> Tensor | None:
        """`append_kv`, every argument by place, features already refused; `rotary` a Rotary or None."""
        try:
            kv_heads = k_cache.shape[1 if self._hnd else 2]
            geometry = self.geometries.by_kv_heads.get((layer, kv_heads))
            if geometry is None:
                raise self.geometries.no_kv_heads(layer, kv_heads, k_cache.shape)
            tokens, num_slots, bits, strides, sizes = _checks.check_append(
                geometry, k, v, k_cache, v_cache, slot_mapping
            )
            data = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
            tables = {"slot_mapping": slot_mapping}
            if rotary is not None or geometry.rotary_dim is not None:
                _rotary.check_presence(geometry, rotary)
                more_bits, more_strides = _rotary.check_rotary(geometry, rotary, k, tokens)
                if rotary.q_out is None:
                    rotary = rotary._replace(q_out=rotary.q.new_empty(rotary.q.shape))
                data |= {"q": rotary.q, "q_out": rotary.q_out}
                tables |= {"positions": rotary.positions, "cos": rotary.cos, "sin": rotary.sin}
                bits |= more_bits
                strides += _rotary.launch_arguments(rotary, more_strides)
            if tokens and num_slots:
                found = _refusals.addresses("append_kv", data)
                starts = [*found, *_refusals.addresses("append_kv", tables)]
                if rotary is not None or not _memory.clear(starts, sizes, k_cache, v_cache):
                    _memory.refuse_shared("append_kv", data | tables, ("q_out", "k_cache", "v_cache"))
        except ArgumentError:
            raise
        except _NOT_READABLE:
            tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
            self._diagnose("append_kv", tensors, layer)
            raise
        device = k.device
        plans = self._devices.get(device) or self.open(device)
        if tokens and rotary is not None and not num_slots:
            _refusals.bad("append_kv", "k_cache", "has no pages", "at least one, layer has rotary embedding")
        if tokens and num_slots:
            kernel, grid = plans.append(geometry, not (reduce(or_, found) & 15 or bits & geometry.stride_mask))
            stream = plans.current_stream(plans.index)
            kernel(grid, stream, k, v, k_cache, v_cache, slot_mapping, tokens, num_slots, *strides)
        return None if rotary is None else rotary.q_out

    def run_merge_states(self, out_a, lse_a, out_b, lse_b) -> tuple[Tensor, Tensor]:
        """`merge_states`."""
        try:
            tokens, query_heads, v_dim = out_a.shape
            geometry = self.geometries.by_out.get((query_heads, v_dim))
            if geometry is None:
                raise self.geometries.no_out(query_heads, v_dim)
            _checks.check_merge(geometry, out_a, lse_a, out_b, lse_b)
        except ArgumentError:
            raise
        except _NOT_READABLE:
            states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
            self._diagnose("merge_states", states, None)
            raise
        plans = self._devices.get(out_a.device) or self.open(out_a.device)
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        if tokens:
            kernel, grid, aligned = plans.merge(geometry)
            pointers = reduce(or_, _refusals.addresses("merge_states", {"out_a": out_a, "out_b": out_b}))
            _refusals.addresses("merge_states", {"lse_a": lse_a, "lse_b": lse_b})
            if aligned and pointers & 15:
                out_a, out_b = out_a.clone(), out_b.clone()
            stream = plans.current_stream(plans.index)
            kernel(grid, stream, out_a, lse_a, out_b, lse_b, out, lse, tokens * query_heads)
        return out, lse

    def open(self, device: torch.device) -> DevicePlans:
        """The plans of a device, opened at its first use. Raises what Device.open raises."""
        found = self._devices.get(device)
        if found is None:
            check_rows(self.directory, self.manifest, self.table)
            opened = self._open_device(self.directory, self.manifest, device)
            plans = DevicePlans(opened, device, self.table, self.manifest["variants"], self._own_workspace)
            found = self._devices.setdefault(device, plans)
            if found.is_cuda:
                self._devices[found.index] = found
                self._readers = self._readers or readers(self.geometries, self.limits, found.current_stream)
        return found

    def _forget_routes(self) -> None:
        for readers_of_layer in self._readers.values():
            for reader in readers_of_layer:
                reader.forget()

    def _own_workspace(self, plans: DevicePlans) -> Workspace:
        return Workspace(plans.torch_device, plans.size, self.limits, self)

    def _diagnose(self, function: str, tensors: dict, layer: object) -> None:
        _refusals.diagnose(function, tensors, self._hnd)
        if not isinstance(layer, str | None):
            need = "a str, the name of an attention entry"
            _refusals.bad(function, "layer", f"is {type(layer).__name__}", need)


def _bound(function: str, tokens: int, max_seqlen_q: object, max_seqlen_k: object) -> int:
    """The bound on query rows per sequence; raises for a bound that is no host integer of at least 0."""
    if max_seqlen_k is not None and (type(max_seqlen_k) is not int or max_seqlen_k < 0):
        _refusals.host_bound(function, "max_seqlen_k", max_seqlen_k)
    if max_seqlen_q is None:
        return tokens
    if type(max_seqlen_q) is not int or max_seqlen_q < 0:
        _refusals.host_bound(function, "max_seqlen_q", max_seqlen_q)
    return min(max_seqlen_q, tokens)
