"""Spec -> the one list of specializations and where each is used. Pure; everything generated derives from this list."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from specgen.errors import BuildError, LimitsError
from specgen.rules import why_not
from specgen.runtime.arguments import ROLES, can_overlap
from specgen.spec import AttentionSpec, Spec
from specgen.target import Target
from specgen.tuning import candidates
from specgen.tuning.choose import Choice, Decision, choose
from specgen.tuning.grid import held_out
from specgen.tuning.records import Launch, Measurement, Schedule, attention_part
from specgen.tuning.tree import leaves, replace_leaves
from specgen.variant import GLUON_FAMILIES, Geometry, Variant


# Alignment guards of the families beside paged attention: the runtime copies misaligned states instead of merging them slowly.
_GUARDS = {"varlen": (True, False), "append_kv": (True, False), "merge_states": (True,)}
# Query rows per sequence up to which a prefill without measurements cuts keys: of more, uncut blocks of 128 rows are the faster ones.
SHORT_ROWS = 512
# The origin of a configuration that measurements chose; which ones, the rows that launch it say.
_MEASURED = "measured; the dispatch rows cite the measurements"


@dataclass(frozen=True)
class Use:
    """One dispatch situation and the specialization that serves it."""

    arch: str
    layer: str
    degree: int  # tensor-parallel degree that gives these head counts
    variant: Variant


@dataclass(frozen=True)
class Route:
    """What one attention call launches, a leaf of a tree, and why."""

    decode: Variant | None
    prefill: Variant | None
    reason: str

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What it launches."""
        return tuple(variant for variant in (self.decode, self.prefill) if variant)


@dataclass(frozen=True)
class Dispatch:
    """How the attention calls of one layer, tensor-parallel degree and alignment are routed on an architecture.

    `tree` is a tuning.tree over Route leaves; `choice` the measured choice that it comes from.
    """

    arch: str
    layer: str
    degree: int
    aligned: bool
    tree: object
    choice: Choice


@dataclass(frozen=True)
class Rejection:
    """A preferred configuration that a target cannot hold: what `specgen list --why-not` shows."""

    symbol: str
    target: str
    reason: str


@dataclass(frozen=True)
class Expansion:
    """uses in spec order; variants unique, by symbol; rejections of configurations that were preferred to the chosen.

    stand_ins: symbol of a kernel that ships as a binary alone -> that of the plain-Triton one that serves in its place where
    kernels are compiled just in time or interpreted.
    """

    uses: tuple[Use, ...]
    dispatch: tuple[Dispatch, ...]
    rejections: tuple[Rejection, ...]
    stand_ins: dict[str, str]

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
        batch_invariant=spec.batch_invariant,
    )


def geometries(spec: Spec) -> dict[Geometry, tuple[str, int]]:
    """(layer, degree) of the first use of each geometry that attention kernels tell apart."""
    found: dict[Geometry, tuple[str, int]] = {}
    for entry in spec.attention:
        for degree in spec.tensor_parallel:
            found.setdefault(attention_part(geometry(spec, entry, degree)), (entry.name, degree))
    return found


def decode_query_lens(spec: Spec) -> tuple[int, ...]:
    """Bounds on query rows per sequence that get a decode specialization of their own: single rows, and speculative ones.

    Batch-invariant: one, as which of two served a single row would depend on the rows of its neighbours.
    """
    most = spec.limits.max_spec_tokens
    return (most,) if spec.batch_invariant else tuple(sorted({1, most}))


def _defaults(spec: Spec) -> list[tuple[int, list[tuple[str, int]]]]:
    """(bound on query rows per sequence, [(role, max_query_len)]): what a call within the bound launches untuned, but for calls
    that choose.py leaves to prefill alone.
    """
    lengths, most = decode_query_lens(spec), spec.limits.max_tokens
    found = [(length, [("decode", length)]) for length in lengths]
    # Where lengths[-1] is `most` decode takes every sequence there can be.
    longer = sorted({bound for bound in (min(SHORT_ROWS, most), most) if bound > lengths[-1]})
    return found + [(bound, [("decode", lengths[-1]), ("prefill", lengths[-1])]) for bound in longer]


def expand(
    spec: Spec,
    targets: dict[str, Target],
    over_budget: Mapping[tuple[str, str], str] | None = None,
    measurements: Iterable[Measurement] = (),
) -> Expansion:
    """Enumerate the specializations of `spec`. Raises BuildError naming bytes when no configuration fits a target, LimitsError
    when one would with a smaller limits.max_seq_len.

    `over_budget` maps (symbol, arch) to the reason for kernels that an earlier compile refused: others are chosen.
    `measurements`, usable ones (tuning.current), decide what attention launches where there are any for its geometry and the
    spec is not batch-invariant: what they choose depends on the batch.
    """
    by_arch: dict[str, list[Target]] = {}
    for name in spec.targets:
        by_arch.setdefault(targets[name].arch, []).append(targets[name])
    measurements = tuple(measurements)
    judges = frozenset(workload.name for workload in held_out(spec.limits.model_dump())) if measurements else frozenset()
    uses: list[Use] = []
    dispatch: list[Dispatch] = []
    rejections: dict[Rejection, None] = {}
    stand_ins: dict[str, str] = {}
    for arch, arch_targets in by_arch.items():
        for entry in spec.attention:
            for degree in spec.tensor_parallel:
                shape = geometry(spec, entry, degree)
                owner = f"attention {entry.name!r}, tensor_parallel {degree}"
                site = _Site(spec, targets, arch_targets, shape, owner, over_budget or {}, rejections, judges)
                for aligned in (True, False):
                    tree, choice = site.attention(aligned, measurements)
                    dispatch.append(Dispatch(arch, entry.name, degree, aligned, tree, choice))
                    routed = [variant for route in leaves(tree) for variant in route.variants]
                    for variant in [v for v in routed if v.family in GLUON_FAMILIES]:
                        plain = site.variant(ROLES[variant.family], aligned, variant.max_query_len)
                        stand_ins[variant.symbol] = plain.symbol
                        routed.append(plain)
                    uses += [Use(arch, entry.name, degree, variant) for variant in dict.fromkeys(routed)]
                others = [site.variant(family, aligned) for family in _GUARDS for aligned in _GUARDS[family]]
                uses += [Use(arch, entry.name, degree, variant) for variant in others]
    return Expansion(tuple(uses), tuple(dispatch), tuple(rejections), stand_ins)


@dataclass(frozen=True)
class _Site:
    """One layer and degree on the GPUs of one architecture: what may run there."""

    spec: Spec
    known: dict[str, Target]
    targets: list[Target]
    shape: Geometry
    owner: str
    over_budget: Mapping[tuple[str, str], str]
    rejections: dict[Rejection, None]
    judges: frozenset[str]  # workloads that no tree is fitted to

    def attention(self, aligned: bool, measurements: tuple[Measurement, ...]) -> tuple[object, Choice]:
        """The tree over Routes, and the choice behind it."""
        defaults = []
        for bound, launches in _defaults(self.spec):
            variants: dict[str, Variant] = {}
            for role, rows in reversed(launches):
                beside = "prefill" in variants and can_overlap(variants["prefill"].arguments)
                variants[role] = self.untuned(role, aligned, rows, beside, bound <= SHORT_ROWS)
            chosen = {role: Launch(variant.family, variant.config) for role, variant in variants.items()}
            schedule = Schedule(chosen.get("decode"), chosen.get("prefill"), launches[0][1])
            if defaults and defaults[-1][1] == schedule:  # short rows are nothing apart here
                defaults.pop()
            defaults.append((bound, schedule))
        choice = choose(
            measurements,
            geometry=self.shape,
            aligned=aligned,
            targets=self.targets,
            limits=self.spec.limits,
            defaults=defaults,
            known=self.known,
            fits=lambda schedule: self.unfit(schedule, aligned),
            held_out=self.judges,
            refused="batch_invariant leaves nothing to choose by the batch" if self.spec.batch_invariant else "",
        )

        def route(decision: Decision) -> Route:
            schedule = decision.schedule
            variants = (self.launched(launch, schedule, aligned) for launch in (schedule.decode, schedule.prefill))
            return Route(*variants, f"{_takes(schedule)}; {decision.evidence}")

        return replace_leaves(choice.tree, route), choice

    def unfit(self, schedule: Schedule, aligned: bool) -> str | None:
        """Why a measured schedule cannot be used here, or None."""
        for launch in schedule.launches:
            if launch.family not in ROLES:
                return f"{launch.family} reads no paged cache"
            for _, reason in self.refusals(self.launched(launch, schedule, aligned)):
                return reason
        return None

    def launched(self, launch: Launch | None, schedule: Schedule, aligned: bool) -> Variant | None:
        """The specialization of one launch of a schedule."""
        if launch is None:
            return None
        config = launch.config if launch.config.origin else replace(launch.config, origin=_MEASURED)
        return Variant(launch.family, self.shape, config, aligned, self.spec.limits.max_seqs, schedule.max_query_len)

    def refusals(self, variant: Variant) -> list[tuple[Target, str]]:
        """(target, reason) for each GPU that cannot hold it."""
        found = []
        for target in self.targets:
            reason = why_not(variant, target, self.spec.limits) or self.over_budget.get((variant.symbol, target.arch))
            if reason:
                found.append((target, reason))
        return found

    def untuned(self, role: str, aligned: bool, max_query_len: int, beside: bool, short: bool) -> Variant:
        """What takes a role without measurements: the family written for this architecture, where it can, else the plain one;
        `beside`: a prefill can run beside it; `short`: sequences have at most SHORT_ROWS query rows.

        The trees of the geometries measured on an H200 (tuning/data) take the latter for a few small batches alone.
        """
        for family in (family for family in GLUON_FAMILIES if ROLES[family] == role):
            variant, _ = self._first(family, aligned, max_query_len, beside, short)
            if variant:
                return variant
        return self.variant(role, aligned, max_query_len)

    def variant(self, family: str, aligned: bool, max_query_len: int | None = None) -> Variant:
        """The first configuration that every GPU here can hold; BuildError with the reasons if there is none."""
        variant, refused = self._first(family, aligned, max_query_len)
        if variant:
            return variant
        short = replace(self, spec=with_max_seq_len(self.spec, 1), rejections={})
        fitting, _ = short._first(family, aligned, max_query_len)
        if fitting:
            _, reason = self.refusals(fitting)[0]
            raise LimitsError(f"{self.owner}, {family} on {self.targets[0].arch}: {reason}")
        lines = [f"  {r.symbol}: {r.reason}" for r in refused]
        raise BuildError("\n".join([f"{self.owner}: no {family} configuration fits {self.targets[0].arch}:", *lines]))

    def _first(
        self, family: str, aligned: bool, max_query_len: int | None, beside: bool = False, short: bool = False
    ) -> tuple[Variant | None, list[Rejection]]:
        """The first configuration that every GPU here can hold, None if there is none, and the refusals of those before it.

        Those that leave multiprocessors to others are for a decode that a prefill runs `beside`, those that cut keys for `short` rows.
        """
        refused = []
        configs = candidates(family, self.shape, self.targets[0], aligned, max_query_len)
        for config in (config for config in configs if (beside or not config.shares) and (short or not config.cuts)):
            variant = Variant(family, self.shape, config, aligned, self.spec.limits.max_seqs, max_query_len)
            reasons = [Rejection(variant.symbol, target.id, reason) for target, reason in self.refusals(variant)]
            self.rejections.update(dict.fromkeys(reasons))
            if not reasons:
                return variant, refused
            refused += reasons
        return None, refused


def with_max_seq_len(spec: Spec, keys: int) -> Spec:
    """`spec` for sequences of at most so many keys."""
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"max_seq_len": keys})})


def _takes(schedule: Schedule) -> str:
    """Which sequences each kernel takes."""
    rows = "one query row" if schedule.max_query_len == 1 else f"at most {schedule.max_query_len} query rows"
    if schedule.prefill is None:
        return f"{rows} a sequence: decode alone"
    if schedule.decode is None:
        return "prefill takes every sequence"
    return f"decode takes sequences of {rows}, prefill the longer ones"
