"""The public functions as torch custom operators, with fake implementations, in a namespace named as the
package.

Under torch.compile, export and fake tensors the public functions call these; the eager call never does.
Registration is one small library per package, made at import, and survives a reload of the package: the
operators stay and serve the new one.
"""

from functools import partial

import torch
from torch import Tensor

from .errors import ArgumentError
from .refusals import bad
from .rotary import Rotary

_OPTIONS = (
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, str? layer=None, str checks='shapes', "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? prefix_ranges=None"
)
# The tensors of a batch that an attention function takes, in its order.
_BATCHES = {
    "attention": ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q"),
    "attention_varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
}
# The operators of an attention function: (suffix of the name, takes out, gives lse, result).
_FORMS = (
    ("", False, False, "Tensor"),
    ("_lse", False, True, "(Tensor, Tensor)"),
    ("_out", True, False, "()"),
    ("_out_lse", True, True, "Tensor"),
)
_ATTENTION_SCHEMAS = {
    f"{function}{suffix}": f"({', '.join(f'Tensor {name}' for name in names)}, "
    f"{'Tensor(a!) out, ' if takes_out else ''}{_OPTIONS}) -> {result}"
    for function, names in _BATCHES.items()
    for suffix, takes_out, _, result in _FORMS
}
_SCHEMAS = _ATTENTION_SCHEMAS | {
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
        self._forms = {
            (function, takes_out, gives_lse): getattr(space, function + suffix).default
            for function in _BATCHES
            for suffix, takes_out, gives_lse, _ in _FORMS
        }
        self._append_kv = space.append_kv.default
        self._append_kv_rotary = space.append_kv_rotary.default
        self._merge_states = space.merge_states.default

    def attention(self, function, batch, max_seqlen_q, max_seqlen_k, layer, checks, out, return_lse, extras):
        """`attention` or `attention_varlen` as one operator, with the tensors of the batch in its order; the
        result is that of the public function.
        """
        options = (max_seqlen_q, max_seqlen_k, layer, checks, *(extras or ()))
        run = self._forms[function, out is not None, bool(return_lse)]
        if out is None:
            return run(*batch, *options)
        lse = run(*batch, out, *options)
        return (out, lse) if return_lse else out

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
        runs = {
            "append_kv": (self.append_kv, _fake_append_kv),
            "append_kv_rotary": (self.append_kv_rotary, _fake_append_kv_rotary),
            "merge_states": (self.merge_states, _fake_merge_states),
        }
        for function in _BATCHES:
            for suffix, *form, _ in _FORMS:
                run = partial(self.attention, function, *form)
                runs[function + suffix] = run, partial(_fake_attention, function, *form)
        for name, schema in _SCHEMAS.items():
            run, fake = runs[name]
            self.library.define(name + schema, tags=tags)
            for backend in _BACKENDS:
                self.library.impl(name, run, backend)
            torch.library.register_fake(f"{namespace}::{name}", fake, lib=self.library)

    # The dispatcher passes arguments by place, in schema order, and may leave out trailing defaults.

    def attention(self, function, takes_out, gives_lse, *arguments):
        count = len(_BATCHES[function])
        batch, rest = arguments[:count], arguments[count:]
        out, options = (rest[0], rest[1:]) if takes_out else (None, rest)
        result = self._run(function, batch, out, gives_lse, *options)
        if takes_out:
            return result[1] if gives_lse else None
        return result

    def append_kv(self, k, v, k_cache, v_cache, slot_mapping, layer=None):
        self.package.run_append_kv(k, v, k_cache, v_cache, slot_mapping, layer)

    def append_kv_rotary(self, k, v, k_cache, v_cache, slot_mapping, q, positions, cos, sin, layer=None):
        rotary = Rotary(q, positions, cos, sin, None)
        return self.package.run_append_kv(k, v, k_cache, v_cache, slot_mapping, layer, rotary)

    def merge_states(self, out_a, lse_a, out_b, lse_b):
        return self.package.run_merge_states(out_a, lse_a, out_b, lse_b)

    def _run(
        self, function, batch, out, return_lse, max_seqlen_q=None, max_seqlen_k=None, layer=None,
        checks="shapes", sinks=None, alibi_slopes=None, prefix_ranges=None,
    ):  # fmt: skip
        absent = sinks is None and alibi_slopes is None and prefix_ranges is None
        extras = None if absent else (sinks, alibi_slopes, prefix_ranges)
        given = (*batch, max_seqlen_q, max_seqlen_k, layer, out, return_lse)
        if function == "attention":
            return self.package.run_attention(*given, None, checks, extras)
        return self.package.run_varlen(*given, checks, extras)


def _fake_attention(function, takes_out, gives_lse, *arguments, **named):
    names = _BATCHES[function]
    given = dict(zip(names, arguments)) | named
    q, v = given["q"], given[names[2]]
    _ranks(function, q, v)
    out = None if takes_out else q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32) if gives_lse else None
    return lse if out is None else out if lse is None else (out, lse)


def _fake_append_kv(k, v, k_cache, v_cache, slot_mapping, layer=None):
    pass


def _fake_append_kv_rotary(k, v, k_cache, v_cache, slot_mapping, q, positions, cos, sin, layer=None):
    return q.new_empty(q.shape)


def _fake_merge_states(out_a, lse_a, out_b, lse_b):
    return torch.empty_like(out_a), torch.empty_like(lse_a)


def _ranks(function, q, v) -> None:
    if q.ndim != 3:
        raise ArgumentError(f"{function}: q has shape {list(q.shape)}; needed: [tokens, query_heads, qk_dim]")
    if function == "attention" and v.ndim != 4:
        raise ArgumentError(
            f"attention: v_cache has shape {list(v.shape)}; needed: [pages, page_size, kv_heads, v_dim] "
            "(layout HND: [pages, kv_heads, page_size, v_dim])"
        )
    if function == "attention_varlen" and v.ndim != 3:
        raise ArgumentError(
            f"attention_varlen: v has shape {list(v.shape)}; needed: [key_tokens, kv_heads, v_dim]"
        )
