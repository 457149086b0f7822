"""The public functions as torch custom operators, with fake implementations, in a namespace named as the
package.

Under torch.compile, export and fake tensors the public functions call these; the eager call never does.
Registration is one small library per package, made at import, and survives a reload of the package: the
operators stay and serve the new one.
"""

import torch
from torch import Tensor

from .errors import ArgumentError
from .refusals import bad
from .rotary import Rotary

_PAGED = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q"
_OPTIONS = (
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, str? layer=None, str checks='shapes', "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? prefix_ranges=None"
)
_SCHEMAS = {
    "attention": f"({_PAGED}, {_OPTIONS}) -> Tensor",
    "attention_lse": f"({_PAGED}, {_OPTIONS}) -> (Tensor, Tensor)",
    "attention_out": f"({_PAGED}, Tensor(a!) out, {_OPTIONS}) -> ()",
    "attention_out_lse": f"({_PAGED}, Tensor(a!) out, {_OPTIONS}) -> Tensor",
    "append_kv": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "str? layer=None) -> ()",
    "append_kv_rotary": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor q, Tensor positions, Tensor cos, Tensor sin, str? layer=None) -> Tensor",
    "merge_states": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
}
_BACKENDS = ("CPU", "CUDA")
_SERVED = "_specgen_served"


class Operators:
    """The operators of one package; `package` provides the eager bodies that they run."""

    def __init__(self, package):
        namespace = package.name.replace(".", "_")
        space = getattr(torch.ops, namespace)
        served = space.__dict__.get(_SERVED)
        if served is None:
            served = _Served(package, namespace)
            setattr(space, _SERVED, served)
        served.package = package
        self._attention = space.attention.default
        self._attention_lse = space.attention_lse.default
        self._attention_out = space.attention_out.default
        self._attention_out_lse = space.attention_out_lse.default
        self._append_kv = space.append_kv.default
        self._append_kv_rotary = space.append_kv_rotary.default
        self._merge_states = space.merge_states.default

    def attention(
        self, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, layer,
        checks, out, return_lse, extras,
    ):  # fmt: skip
        """`attention` as one operator; the result is that of the public function."""
        paged = (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q)
        options = (max_seqlen_q, max_seqlen_k, layer, checks, *(extras or ()))
        if out is None:
            return (self._attention_lse if return_lse else self._attention)(*paged, *options)
        if return_lse:
            return out, self._attention_out_lse(*paged, out, *options)
        self._attention_out(*paged, out, *options)
        return out

    def append_kv(self, k, v, k_cache, v_cache, slot_mapping, layer, rotary) -> Tensor | None:
        """`append_kv` as one operator that mutates the caches; the rotated queries are its result."""
        if rotary is None:
            self._append_kv(k, v, k_cache, v_cache, slot_mapping, layer)
            return None
        for name in ("q", "positions", "cos", "sin"):
            if getattr(rotary, name) is None:
                bad("append_kv", name, "is None", "q, positions, cos and sin together")
        q, positions, cos, sin, q_out = rotary
        rotated = self._append_kv_rotary(k, v, k_cache, v_cache, slot_mapping, q, positions, cos, sin, layer)
        return rotated if q_out is None else q_out.copy_(rotated)

    def merge_states(self, out_a, lse_a, out_b, lse_b) -> tuple[Tensor, Tensor]:
        """`merge_states` as one operator."""
        return self._merge_states(out_a, lse_a, out_b, lse_b)


class _Served:
    """The registered library of one namespace, and the package that serves it now."""

    def __init__(self, package, namespace: str):
        self.package = package
        self.library = torch.library.Library(namespace, "DEF")
        tags = (
            torch.Tag.pt2_compliant_tag,
            getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
        )
        for name, schema in _SCHEMAS.items():
            self.library.define(name + schema, tags=tags)
            for backend in _BACKENDS:
                self.library.impl(name, getattr(self, name), backend)
            torch.library.register_fake(f"{namespace}::{name}", globals()[f"_fake_{name}"], lib=self.library)

    # The dispatcher passes arguments by place, in schema order, and may leave out trailing defaults.

    def attention(self, *arguments):
        return self._run(arguments[:6], None, False, *arguments[6:])

    def attention_lse(self, *arguments):
        return self._run(arguments[:6], None, True, *arguments[6:])

    def attention_out(self, *arguments):
        self._run(arguments[:6], arguments[6], False, *arguments[7:])

    def attention_out_lse(self, *arguments):
        return self._run(arguments[:6], arguments[6], True, *arguments[7:])[1]

    def append_kv(self, k, v, k_cache, v_cache, slot_mapping, layer=None):
        self.package.run_append_kv(k, v, k_cache, v_cache, slot_mapping, layer)

    def append_kv_rotary(self, k, v, k_cache, v_cache, slot_mapping, q, positions, cos, sin, layer=None):
        rotary = Rotary(q, positions, cos, sin, None)
        return self.package.run_append_kv(k, v, k_cache, v_cache, slot_mapping, layer, rotary)

    def merge_states(self, out_a, lse_a, out_b, lse_b):
        return self.package.run_merge_states(out_a, lse_a, out_b, lse_b)

    def _run(
        self, paged, out, return_lse, max_seqlen_q=None, max_seqlen_k=None, layer=None, checks="shapes",
        sinks=None, alibi_slopes=None, prefix_ranges=None,
    ):  # fmt: skip
        absent = sinks is None and alibi_slopes is None and prefix_ranges is None
        extras = None if absent else (sinks, alibi_slopes, prefix_ranges)
        return self.package.run_attention(
            *paged, max_seqlen_q, max_seqlen_k, layer, out, return_lse, None, checks, extras,
        )  # fmt: skip


def _fake_attention(q, k_cache, v_cache, *_, **__):
    _ranks(q, v_cache)
    return q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))


def _fake_attention_lse(q, k_cache, v_cache, *_, **__):
    return _fake_attention(q, k_cache, v_cache), _fake_lse(q)


def _fake_attention_out(q, k_cache, v_cache, *_, **__):
    _ranks(q, v_cache)


def _fake_attention_out_lse(q, k_cache, v_cache, *_, **__):
    _ranks(q, v_cache)
    return _fake_lse(q)


def _fake_append_kv(k, v, k_cache, v_cache, slot_mapping, layer=None):
    pass


def _fake_append_kv_rotary(k, v, k_cache, v_cache, slot_mapping, q, positions, cos, sin, layer=None):
    return q.new_empty(q.shape)


def _fake_merge_states(out_a, lse_a, out_b, lse_b):
    return torch.empty_like(out_a), torch.empty_like(lse_a)


def _fake_lse(q):
    return q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)


def _ranks(q, v_cache) -> None:
    if q.ndim != 3:
        raise ArgumentError(f"attention: q has shape {list(q.shape)}; needed: [tokens, query_heads, qk_dim]")
    if v_cache.ndim != 4:
        raise ArgumentError(
            f"attention: v_cache has shape {list(v_cache.shape)}; needed: [pages, page_size, kv_heads, v_dim] "
            "(layout HND: [pages, kv_heads, page_size, v_dim])"
        )
