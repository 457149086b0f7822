"""Spec -> the one list of specializations and where each is used. Pure; everything generated derives from this list."""

from collections.abc import Mapping
from dataclasses import dataclass

from specgen.errors import BuildError
from specgen.rules import why_not
from specgen.spec import AttentionSpec, Spec
from specgen.target import Target
from specgen.tuning import candidates
from specgen.variant import Geometry, Variant


# Alignment guards of each family: the runtime copies misaligned states instead of merging them slowly.
_GUARDS = {
    "decode": (True, False),
    "prefill": (True, False),
    "varlen": (True, False),
    "append_kv": (True, False),
    "merge_states": (True,),
}


@dataclass(frozen=True)
class Use:
    """One dispatch situation and the specialization that serves it."""

    arch: str
    layer: str
    degree: int  # tensor-parallel degree that gives these head counts
    variant: Variant


@dataclass(frozen=True)
class Rejection:
    """A preferred configuration that a target cannot hold: what `specgen list --why-not` shows."""

    symbol: str
    target: str
    reason: str


@dataclass(frozen=True)
class Expansion:
    """uses in spec order; variants unique, by symbol; rejections of configurations that were preferred to the chosen."""

    uses: tuple[Use, ...]
    rejections: tuple[Rejection, ...]

    @property
    def variants(self) -> dict[str, Variant]:
        """symbol -> Variant of its first use, sorted by symbol."""
        first = {use.variant.symbol: use.variant for use in reversed(self.uses)}
        return dict(sorted(first.items()))

    def archs(self, symbol: str) -> tuple[str, ...]:
        """Architectures that `symbol` is compiled for, in the spec's order."""
        return tuple(dict.fromkeys(use.arch for use in self.uses if use.variant.symbol == symbol))


def geometry(spec: Spec, entry: AttentionSpec, degree: int) -> Geometry:
    """Per-rank geometry of an attention entry at a tensor-parallel degree; ValueError if the degree is illegal."""
    query_heads, kv_heads = entry.per_rank(degree)
    return Geometry(
        query_heads=query_heads,
        kv_heads=kv_heads,
        qk_dim=entry.head_dim.qk,
        v_dim=entry.head_dim.v,
        dtype=spec.dtype,
        page_size=spec.kv_cache.page_size,
        scale=entry.resolved_scale,
        mask=entry.mask,
        sliding_window=entry.sliding_window,
        chunk=entry.chunk,
        softcap=entry.softcap,
        sinks=entry.sinks,
        alibi=entry.alibi,
        prefix_ranges=entry.prefix_ranges,
        rotary_dim=entry.rotary.dim if entry.rotary else None,
        rotary_style=entry.rotary.style if entry.rotary else None,
    )


def decode_query_lens(spec: Spec) -> tuple[int, ...]:
    """Bounds on query rows per sequence that get a decode specialization of their own: single rows, and speculative ones."""
    return tuple(sorted({1, spec.limits.max_spec_tokens}))


def _families(spec: Spec) -> list[tuple[str, int | None]]:
    """(family, max_query_len) of every specialization that one geometry needs."""
    families = [("decode", n) for n in decode_query_lens(spec)]
    if spec.limits.max_spec_tokens < spec.limits.max_tokens:  # else decode takes every sequence there can be
        families.append(("prefill", spec.limits.max_spec_tokens))
    return families + [("varlen", None), ("append_kv", None), ("merge_states", None)]


def expand(
    spec: Spec, targets: dict[str, Target], over_budget: Mapping[tuple[str, str], str] | None = None
) -> Expansion:
    """Enumerate the specializations of `spec`. Raises BuildError naming bytes when no configuration fits a target.

    `over_budget` maps (symbol, arch) to the reason for kernels that an earlier compile refused: others are chosen.
    """
    by_arch: dict[str, list[Target]] = {}
    for name in spec.targets:
        by_arch.setdefault(targets[name].arch, []).append(targets[name])
    uses: list[Use] = []
    rejections: dict[Rejection, None] = {}
    for arch, arch_targets in by_arch.items():
        for entry in spec.attention:
            for degree in spec.tensor_parallel:
                shape = geometry(spec, entry, degree)
                owner = f"attention {entry.name!r}, tensor_parallel {degree}"
                for family, max_query_len in _families(spec):
                    for aligned in _GUARDS[family]:
                        variant = _choose(
                            family, shape, arch_targets, aligned, max_query_len, spec.limits, over_budget or {},
                            rejections, owner,
                        )
                        uses.append(Use(arch, entry.name, degree, variant))
    return Expansion(tuple(uses), tuple(rejections))


def _choose(family, shape, targets, aligned, max_query_len, limits, over_budget, rejections, owner) -> Variant:
    """The first configuration that every one of `targets`, GPUs of one arch, can hold; notes those before it."""
    refused = []
    for config in candidates(family, shape, targets[0], aligned, max_query_len):
        variant = Variant(family, shape, config, aligned, limits.max_seqs, max_query_len)
        reasons = [
            Rejection(variant.symbol, target.id, reason)
            for target in targets
            if (reason := why_not(variant, target, limits) or over_budget.get((variant.symbol, target.arch)))
        ]
        rejections.update(dict.fromkeys(reasons))
        if not reasons:
            return variant
        refused += reasons
    lines = [f"  {r.symbol}: {r.reason}" for r in refused]
    raise BuildError("\n".join([f"{owner}: no {family} configuration fits {targets[0].arch}:", *lines]))
