"""The compile stage of `specgen tune`: a spec -> a bundle of every candidate kernel; and which measurements are out of date.

Needs no GPU. Composes the same stages as pipeline.py; prints nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from jinja2 import TemplateNotFound

from specgen import pipeline
from specgen.aot import Outcome, compile_each
from specgen.binary import Binary, Failed
from specgen.cache import Cache
from specgen.errors import SpecgenError
from specgen.expand import Expansion, Use, decode_query_lens, expand, geometry
from specgen.explanations import near
from specgen.load import Loaded, load
from specgen.manifest import layer_fields
from specgen.plan import RUNTIME, kernel_artifact, package_name, plan
from specgen.render import render
from specgen.spec import Spec
from specgen.target import Target, load_targets
from specgen.toolchain import ptxas_versions, triton_version
from specgen.tuning.bundle import FILE, Bundle, Candidate, Group, folder_of, read_bundle, to_json
from specgen.tuning.current import Stale, latest, usable
from specgen.tuning.grid import STEP, grid
from specgen.tuning.records import Launch, Measurement, Schedule, Setting, attention_part, kernel_digest
from specgen.tuning.space import families, sample, space
from specgen.variant import Geometry, Variant
from specgen.wheel import build_launcher
from specgen.write import write_tree

Report = Callable[[str, int, int], None]  # what is done, how many are done, of how many


@dataclass(frozen=True)
class Choice:
    """What goes into a bundle. targets: ids of the spec's, empty is all. only: globs of kernel names, empty is all.

    most: candidates per family and query bound, None is all; max_registers as in `space`; step of the grid of batches.
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
    """A candidate before its compile, and the digest of its source."""

    role: str
    variant: Variant
    digest: str

    def candidate(self, outcome: Outcome | None) -> Candidate:
        """With what became of its compile; None: it was not compiled, and may be tried."""
        v, reason = self.variant, ""
        status = "ok"
        if isinstance(outcome, Binary) and outcome.occupancy < v.config.ctas_per_multiprocessor:
            status = "budget"
            reason = f"a multiprocessor holds {outcome.occupancy} of its programs, ctas is {v.config.ctas_per_multiprocessor}"
        elif outcome is not None and not isinstance(outcome, Binary):
            status, reason = "compile" if isinstance(outcome, Failed) else "budget", outcome.reason
        return Candidate(self.role, Launch(v.family, v.config), v.max_query_len, v.symbol, self.digest, status, reason)


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

    A candidate that does not compile, is over a budget, or does not fit a multiprocessor as often as it asks for is in the
    bundle with that status. SpecError for mistakes in the spec, SpecgenError where nothing is left to try.
    """
    loaded = load(path)
    pipeline.refuse_illegal(loaded)
    return [
        _make_bundle(loaded, arch, targets, build_dir, choice, cache, workers, report, warn)
        for arch, targets in _archs(loaded.spec, choice.targets).items()
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


def _make_bundle(loaded: Loaded, arch, targets, build_dir, choice: Choice, cache, workers, report: Report, warn) -> Bundle:
    spec = loaded.spec
    groups = {
        shape: (layer, degree, [(role, v) for role, v in _candidates(spec, shape, targets, choice)])
        for shape, (layer, degree) in _geometries(spec).items()
    }
    if not any(kernels for _, _, kernels in groups.values()):
        asked = f" named {' or '.join(choice.only)}" if choice.only else ""
        raise SpecgenError(f"{spec.name}: no kernel{asked} can be tried on {arch}")
    uses = [Use(arch, layer, degree, v) for layer, degree, kernels in groups.values() for _, v in kernels]
    artifacts, digests = {}, {}
    for number, use in enumerate(uses):
        rendered = render(kernel_artifact(use.variant), loaded)
        digests[use.variant.symbol] = kernel_digest(rendered.content.decode())
        artifacts[use.variant.symbol] = pipeline.formatted(rendered, cache)
        report(f"{arch}: generating", number + 1, len(uses))
    everything = pipeline.Generated(loaded, Expansion(tuple(uses), ()), tuple(artifacts.values()))
    outcomes: dict = {}
    if choice.binaries:
        jobs = pipeline.jobs(everything)
        tell = lambda done, total, symbol, arch: report(f"{arch}: compiling", done, total)  # noqa: E731
        outcomes = compile_each(jobs, workers=workers, progress=tell, cache=cache)
    found = []
    for shape, (layer, degree, kernels) in groups.items():
        named = [_Kernel(role, v, digests[v.symbol]) for role, v in kernels]
        own = tuple(kernel.candidate(outcomes.get((kernel.variant.symbol, arch))) for kernel in named)
        found.append(Group(shape, _layer(spec, layer, degree), own))
    good = {candidate.symbol for group in found for candidate in group.candidates if candidate.status == "ok"}
    kept = Expansion(tuple(use for use in uses if use.variant.symbol in good), ())
    skeleton = _skeleton(loaded, cache)
    generated = pipeline.Generated(loaded, kept, (*skeleton, *(artifacts[symbol] for symbol in sorted(good))))
    binaries = {pair: outcome for pair, outcome in outcomes.items() if pair[0] in good}
    launcher = build_launcher(RUNTIME, cache=cache, warn=warn) if choice.binaries else None
    files = pipeline.package_files(generated, binaries, launcher)
    bundle = Bundle(
        folder=folder_of(build_dir, spec.name, arch),
        package=package_name(spec.name),
        spec=spec.name,
        spec_sha256=spec.digest,
        arch=arch,
        triton=triton_version(),
        ptxas=ptxas_versions([arch]),
        aligned=True,
        query_lens=decode_query_lens(spec),
        groups=tuple(found),
        workloads=tuple(workload.name for workload in grid(spec.limits.model_dump(), choice.step)),
    )
    tree = {f"{bundle.package}/{name}": content for name, content in files.items()} | {FILE: to_json(bundle)}
    write_tree(tree, bundle.folder)
    return read_bundle(bundle.folder)


def _skeleton(loaded: Loaded, cache: Cache | None) -> list:
    """The package without kernels and tests: runtime, dispatch table (of the untuned choices), public functions."""
    artifacts = plan(loaded, expand(loaded.spec, load_targets()))
    left_out = [a.path for a in artifacts if a.path.startswith(("kernels/", "tests/")) and not a.path.endswith("__init__.py")]
    return [pipeline.formatted(render(a, loaded), cache) for a in artifacts if a.path not in left_out]


def _geometries(spec: Spec) -> dict[Geometry, tuple[str, int]]:
    """(layer, degree) of the first use of each geometry that attention kernels tell apart."""
    found: dict[Geometry, tuple[str, int]] = {}
    for entry in spec.attention:
        for degree in spec.tensor_parallel:
            found.setdefault(attention_part(geometry(spec, entry, degree)), (entry.name, degree))
    return found


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
                named = [v for v in legal if _named(v.symbol, choice.only)]
                found += [(role, v) for v in sample(named, choice.most, choice.seed)]
    return found


def _named(symbol: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatchcase(symbol, glob) for glob in globs)


def _layer(spec: Spec, name: str, degree: int) -> dict:
    """The manifest's entry of a layer with the head counts of a rank."""
    entry = next(entry for entry in spec.attention if entry.name == name)
    query_heads, kv_heads = entry.per_rank(degree)
    return layer_fields(spec, entry) | {"query_heads": query_heads, "kv_heads": kv_heads}


def stale(path: Path, measurements: Iterable[Measurement]) -> list[Stale]:
    """Of the measurements of a spec's geometries, those of other kernels than it generates now, or of another Triton."""
    loaded = load(path)
    shapes = set(_geometries(loaded.spec))
    own = [m for m in latest(measurements) if m.setting.geometry in shapes]

    def digests_now(setting: Setting, schedule: Schedule) -> tuple[str, ...]:
        return tuple(_digest(loaded, setting, schedule, role) for role in ("decode", "prefill") if getattr(schedule, role))

    return usable(own, triton_version(), digests_now)[1]


def _digest(loaded: Loaded, setting: Setting, schedule: Schedule, role: str) -> str:
    """The digest of a kernel as it would be generated now; "" where no template makes one any more."""
    launch = getattr(schedule, role)
    rows = schedule.max_query_len if launch.family not in families("varlen") else None
    variant = Variant(launch.family, setting.geometry, launch.config, setting.aligned, setting.max_seqs, rows)
    try:
        return kernel_digest(render(kernel_artifact(variant), loaded).content.decode())
    except (TemplateNotFound, KeyError):
        return ""
