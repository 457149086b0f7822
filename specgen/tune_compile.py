"""The compile stage of `specgen tune`: a spec -> bundles of every candidate kernel. Needs no GPU; prints nothing.

Composes the stages of pipeline.py for kernels that no dispatch table names yet.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from specgen import pipeline
from specgen.aot import Outcome, compile_each
from specgen.artifact import Artifact
from specgen.binary import Binary, CompileJob, Failed, Refused
from specgen.cache import Cache
from specgen.errors import SpecgenError
from specgen.expand import Expansion, Use, decode_query_lens, geometries
from specgen.explanations import near
from specgen.load import Loaded
from specgen.manifest import layer_fields
from specgen.plan import RUNTIME, kernel_artifact, plan
from specgen.render import render
from specgen.spec import Spec
from specgen.target import Target, load_targets
from specgen.toolchain import ptxas_versions, triton_version
from specgen.tuning.bundle import FILE, Bundle, Candidate, Group, to_json, tuning_folder
from specgen.tuning.grid import STEP, grid, held_out
from specgen.tuning.records import ORIGIN, Launch, attention_part, kernel_digest
from specgen.tuning.space import families, sample, space
from specgen.variant import Geometry, Variant
from specgen.wheel import build_launcher
from specgen.write import refuse_place, replacing, write_tree

_BUNDLE = (FILE, "bundle")  # what tells a bundle's folder from a user's own
Report = Callable[[str, int, int], None]  # what is done, how many are done, of how many


@dataclass(frozen=True)
class Choice:
    """What goes into a bundle. targets: ids of the spec's, empty is all. only: globs of kernel names, empty is all.

    most: candidates per geometry, family and query bound, None is all; max_registers as in `space`; step of the grid of batches.
    binaries: False for sources alone, which Triton's interpreter runs.
    """

    targets: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    most: int | None = None
    max_registers: tuple[int, ...] = ()
    step: int = STEP
    seed: int = 0
    binaries: bool = True


@dataclass(frozen=True)
class _Kernel:
    """A candidate before its compile: for which layer and degree, its module as rendered, the digest of its source."""

    use: Use
    role: str
    module: Artifact
    digest: str

    @property
    def symbol(self) -> str:
        return self.use.variant.symbol

    @property
    def part(self) -> tuple:
        """What it competes with, before it is compiled."""
        v = self.use.variant
        return v.geometry, v.family, v.max_query_len

    def candidate(self, outcome: Outcome | None) -> Candidate:
        """With what became of its compile; None: it was not compiled, and may be tried."""
        v = self.use.variant
        status = "compile" if isinstance(outcome, Failed) else "budget" if isinstance(outcome, Refused) else "ok"
        detail = "" if status == "ok" else outcome.reason
        return Candidate(self.role, Launch(v.family, v.config), v.max_query_len, v.symbol, self.digest, status, detail)


def make_bundles(
    path: Path,
    build_dir: Path,
    choice: Choice = Choice(),
    *,
    cache: Cache | None = None,
    workers: int | None = None,
    report: Report = lambda what, done, total: None,
    warn: Callable[[str], None] | None = None,
) -> list[Bundle]:
    """Compile the candidates of a spec, one bundle for each architecture, in `build_dir`/<spec>/tuning/<arch>.

    A candidate that does not compile or is over a budget is in the bundle with that status; one that a multiprocessor does not
    hold as often as it asks for is left out. SpecError for mistakes in the spec, SpecgenError where nothing is left
    to try or the spec is batch-invariant.
    """
    loaded = pipeline.load_legal(path)
    pipeline.expanded(loaded)  # an error now, not after all was compiled
    if loaded.spec.batch_invariant:
        what = "measurements choose kernels by the batch, which batch_invariant excludes"
        raise SpecgenError(f"{loaded.spec.name}: cannot be tuned: {what}")
    archs = _archs(loaded.spec, choice.targets)
    for arch in archs:
        refuse_place(tuning_folder(build_dir, loaded.spec.name) / arch, *_BUNDLE)
    return [
        _make_bundle(loaded, arch, targets, build_dir, choice, cache, workers, report, warn)
        for arch, targets in archs.items()
    ]


def _archs(spec: Spec, chosen: Iterable[str]) -> dict[str, list[Target]]:
    """The spec's targets by arch, all of an arch where one is chosen: they share a table."""
    known = load_targets()
    for name in chosen:
        if name not in spec.targets:
            hint = near(name, spec.targets) or f"its targets: {', '.join(spec.targets)}"
            raise SpecgenError(f"--target {name}: no target of {spec.name}; {hint}")
    wanted = {known[name].arch for name in chosen or spec.targets}
    found: dict[str, list[Target]] = {}
    for name in spec.targets:
        if known[name].arch in wanted:
            found.setdefault(known[name].arch, []).append(known[name])
    return found


def _make_bundle(loaded: Loaded, arch: str, targets, build_dir: Path, choice: Choice, cache, workers, report, warn) -> Bundle:
    spec = loaded.spec
    kernels = _kernels(loaded, arch, targets, choice)
    codes = _codes(loaded, kernels)
    kernels = _few_codes(kernels, codes, choice)
    outcomes = _compiled(loaded, kernels, codes, cache, workers, report) if choice.binaries else {}
    untuned = pipeline.expanded(loaded, {(symbol, arch): outcome.reason for symbol, outcome in _bad(outcomes).items()})
    kernels = _sampled(_untuned_first(kernels, untuned), codes, outcomes, choice)
    groups: dict[Geometry, Group] = {}
    good = []
    for number, kernel in enumerate(kernels):
        shape, candidate = kernel.use.variant.geometry, kernel.candidate(outcomes.get(kernel.symbol))
        group = groups.get(shape) or Group(shape, _layer(spec, kernel.use), ())
        groups[shape] = replace(group, candidates=(*group.candidates, candidate))
        if candidate.status == "ok":
            good.append(replace(kernel, module=pipeline.formatted(kernel.module, cache)))
        report(f"generating for {arch}", number + 1, len(kernels))
    package = _package(loaded, good, _skeleton(loaded, untuned, cache))
    binaries = {(kernel.symbol, arch): outcomes[kernel.symbol] for kernel in good if choice.binaries}
    launcher = build_launcher(RUNTIME, cache=cache, warn=warn) if choice.binaries else None
    limits = spec.limits.model_dump()
    bundle = Bundle(
        folder=tuning_folder(build_dir, spec.name) / arch,
        package=package.package,
        spec=spec.name,
        spec_sha256=spec.digest,
        arch=arch,
        triton=triton_version(),
        ptxas=ptxas_versions([arch]),
        aligned=True,
        query_lens=decode_query_lens(spec),
        groups=tuple(groups.values()),
        workloads=tuple(workload.name for workload in (*grid(limits, choice.step), *held_out(limits))),
    )
    files = pipeline.package_files(package, binaries, launcher)
    _write(bundle, {f"{bundle.package}/{name}": content for name, content in files.items()} | {FILE: to_json(bundle)})
    return bundle


def _kernels(loaded: Loaded, arch: str, targets: Sequence[Target], choice: Choice) -> list[_Kernel]:
    """Every candidate for one arch. SpecgenError if there is none."""
    found = []
    for shape, (layer, degree) in geometries(loaded.spec).items():
        for role, variant in _candidates(loaded.spec, shape, targets, choice):
            module = render(kernel_artifact(variant), loaded)
            found.append(_Kernel(Use(arch, layer, degree, variant), role, module, kernel_digest(module.content.decode())))
    if not found:
        asked = f" named {' or '.join(choice.only)}" if choice.only else ""
        raise SpecgenError(f"{loaded.spec.name}: no kernel{asked} can be tried on {arch}")
    return found


def _codes(loaded: Loaded, kernels: Sequence[_Kernel]) -> dict[str, CompileJob]:
    """By symbol, what is compiled but for the name: equal where kernels differ in their launch alone (how many programs)."""
    return {
        job.symbol: replace(job, symbol="", source=job.source.replace(job.symbol, ""))
        for job in pipeline.jobs(_package(loaded, kernels))
    }


def _few_codes(kernels: Sequence[_Kernel], codes: Mapping[str, CompileJob], choice: Choice) -> list[_Kernel]:
    """Those of at most twice `choice.most` codes of a part, by chance, and what the product may take untuned.

    Some will not fit, and compiling is what takes the time.
    """
    if choice.most is None:
        return list(kernels)
    kept = {codes[kernel.symbol] for kernel in kernels if kernel.use.variant.config.origin != ORIGIN}
    for part in _parts(kernels):
        kept |= set(sample(list(dict.fromkeys(codes[kernel.symbol] for kernel in part)), 2 * choice.most, choice.seed))
    return [kernel for kernel in kernels if codes[kernel.symbol] in kept]


def _compiled(loaded: Loaded, kernels: Sequence[_Kernel], codes, cache, workers, report: Report) -> dict[str, Outcome]:
    """What became of the compile of each, by symbol. Kernels of the same code share one binary, under the first's name."""
    first: dict[CompileJob, _Kernel] = {}
    for kernel in kernels:
        first.setdefault(codes[kernel.symbol], kernel)
    compiled = [replace(kernel, module=pipeline.formatted(kernel.module, cache)) for kernel in first.values()]
    jobs = pipeline.jobs(_package(loaded, compiled))
    tell = lambda done, total, symbol, arch: report(f"compiling for {arch}", done, total)  # noqa: E731
    outcomes = {symbol: found for (symbol, _), found in compile_each(jobs, workers=workers, progress=tell, cache=cache).items()}
    return {kernel.symbol: outcomes[first[codes[kernel.symbol]].symbol] for kernel in kernels}


def _bad(outcomes: Mapping[str, Outcome]) -> dict[str, Failed | Refused]:
    return {symbol: outcome for symbol, outcome in outcomes.items() if not isinstance(outcome, Binary)}


def _untuned_first(kernels: Sequence[_Kernel], untuned: Expansion) -> list[_Kernel]:
    """In their order, but the configurations that the product takes without measurements before all others."""
    launches = {(attention_part(v.geometry), v.family, v.config) for v in (use.variant for use in untuned.uses) if v.aligned}

    def is_tuned(kernel: _Kernel) -> bool:
        v = kernel.use.variant
        return (v.geometry, v.family, v.config) not in launches

    return sorted(kernels, key=is_tuned)


def _sampled(kernels: Sequence[_Kernel], codes, outcomes: Mapping[str, Outcome], choice: Choice) -> list[_Kernel]:
    """At most `choice.most` of a part that may be tried, those that a multiprocessor holds as often as their launch supposes;
    and of those that failed each code once.
    """
    bad = _bad(outcomes)
    failed = {codes[kernel.symbol]: kernel for kernel in reversed(kernels) if kernel.symbol in bad}
    fitting = [kernel for kernel in kernels if kernel.symbol not in bad and _fits(kernel, outcomes.get(kernel.symbol))]
    chosen = {kernel.symbol for part in _parts(fitting) for kernel in sample(part, choice.most, choice.seed)}
    return [kernel for kernel in fitting if kernel.symbol in chosen] + list(failed.values())


def _fits(kernel: _Kernel, outcome: Binary | None) -> bool:
    return outcome is None or outcome.occupancy >= kernel.use.variant.config.ctas_per_multiprocessor


def _parts(kernels: Iterable[_Kernel]) -> list[list[_Kernel]]:
    """Kernels by geometry, family and query bound."""
    parts: dict[tuple, list[_Kernel]] = {}
    for kernel in kernels:
        parts.setdefault(kernel.part, []).append(kernel)
    return list(parts.values())


def _package(loaded: Loaded, kernels: Sequence[_Kernel], rest: Sequence[Artifact] = ()) -> pipeline.Generated:
    """A package of these kernels, each once; `rest`: its other files."""
    modules = {kernel.module.path: kernel.module for kernel in kernels}
    expansion = Expansion(tuple(kernel.use for kernel in kernels), (), (), {})
    return pipeline.Generated(loaded, expansion, (*rest, *modules.values()), stale=0)


def _write(bundle: Bundle, files: dict[str, bytes]) -> None:
    """Replace the bundle's folder; SpecgenError if something lies there that specgen did not write."""
    with replacing(bundle.folder, *_BUNDLE):
        write_tree(files, bundle.folder)


def _skeleton(loaded: Loaded, untuned: Expansion, cache: Cache | None) -> list[Artifact]:
    """The package without kernels and tests: runtime, public functions, the untuned dispatch table (trials bring their own)."""
    parts = [artifact for artifact in plan(loaded, untuned) if not artifact.path.startswith(("kernels/", "tests/"))]
    return [pipeline.formatted(render(artifact, loaded), cache) for artifact in parts]


def _candidates(spec: Spec, shape: Geometry, targets: Sequence[Target], choice: Choice) -> list[tuple[str, Variant]]:
    """(role, variant) of what may be tried for one geometry."""
    most = spec.limits.max_spec_tokens
    bounds = {"decode": decode_query_lens(spec), "prefill": (0, most), "varlen": (None,)}
    if most >= spec.limits.max_tokens:
        bounds["prefill"] = ()
    found = []
    for role, query_lens in bounds.items():
        for family in families(role):
            for max_query_len in query_lens:
                legal = space(family, shape, targets, spec.limits, max_query_len, choice.max_registers).variants
                meets_prefill = max_query_len == most  # else there is none to leave multiprocessors to
                legal = [v for v in legal if meets_prefill or not v.config.shares]
                named = [v for v in legal if _named(v.symbol, choice.only)]
                found += [(role, v) for v in named]
    return found


def _named(symbol: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatchcase(symbol, glob) for glob in globs)


def _layer(spec: Spec, use: Use) -> dict:
    """The manifest's entry of a use's layer, with the head counts of a rank."""
    entry = next(entry for entry in spec.attention if entry.name == use.layer)
    g = use.variant.geometry
    return layer_fields(spec, entry) | {"query_heads": g.query_heads, "kv_heads": g.kv_heads}
