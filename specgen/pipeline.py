"""The one composition: load -> expand -> plan -> render -> format -> compile -> write -> wheel. Prints nothing."""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from specgen import __version__, json_text
from specgen.aot import Progress, compile_all
from specgen.artifact import Artifact
from specgen.binary import Binary, CompileJob
from specgen.cache import Cache, cache_key
from specgen.data_files import license_text
from specgen.errors import BudgetError, Diagnostic, LimitsError, SpecError, SpecgenError
from specgen.expand import Expansion, expand, with_max_seq_len
from specgen.format import FORMATTER, format_source
from specgen.load import Loaded, load
from specgen.manifest import binary_path, field_differences, manifest, to_json
from specgen.measured import measured
from specgen.plan import RUNTIME, package_name, plan
from specgen.render import render
from specgen.rules import refusals
from specgen.spec import Spec
from specgen.target import load_targets
from specgen.toolchain import ptxas_versions, triton_version
from specgen.tuning.records import Measurement
from specgen.verify import Difference, verify_wheel
from specgen.wheel import LAUNCHER_FILE, PURE_TAG, Launcher, build_launcher, wheel_tag, write_wheel
from specgen.write import diff_tree, refuse_folder, refuse_place, replacing, sweep_staged, write_tree

_PACKAGE = ("manifest.json", "package")  # what tells a package's folder from a user's own
_WHEELS = "dist"  # beside the package
OverBudget = dict[tuple[str, str], str]
# Oldest torch whose library, compile and export interfaces the runtime uses (specgen/runtime/operators.py).
REQUIRES = ("torch>=2.6",)
EXTRAS = {"jit": ("triton>=3.6",), "test": ("pytest>=7", "numpy")}
# What building adds to the generated text: `check` reads it by the manifest's digests.
_BUILT = ("binaries/", "manifest.json", f"runtime/{LAUNCHER_FILE}")


@dataclass(frozen=True)
class Generated:
    """A spec and everything that it generates as text: files by path inside the package."""

    loaded: Loaded
    expansion: Expansion
    artifacts: tuple[Artifact, ...]
    stale: int  # measurements of its geometries that are of other kernels or another Triton: not used

    @property
    def warnings(self) -> list[str]:
        """A line for each target that is not routed by measurements of its own, and one if some were passed over."""
        own = [warning for each in self.expansion.dispatch if each.aligned for warning in each.choice.warnings]
        if self.stale:
            what = f"{self.stale} measurements are of other kernels or another Triton and were not used"
            own.append(f"{self.loaded.spec.name}: {what}; `specgen tune {shlex.quote(self.loaded.path)} --stale` lists them")
        return list(dict.fromkeys(own))

    @property
    def package(self) -> str:
        """Import name of the generated package."""
        return package_name(self.loaded.spec.name)

    @property
    def files(self) -> dict[str, bytes]:
        """POSIX path inside the package -> content."""
        return {artifact.path: artifact.content for artifact in self.artifacts}


def generate(path: Path | str, cache: Cache | None = None, over_budget: OverBudget | None = None) -> Generated:
    """Load a spec and generate its sources. SpecError for mistakes and unimplemented fields, BuildError if nothing fits.

    `over_budget`: (symbol, arch) -> reason for kernels that a compile refused; the next configurations take their place.
    """
    return _generated(load_legal(path), cache, over_budget)


def _generated(loaded: Loaded, cache: Cache | None, over_budget: OverBudget | None) -> Generated:
    measurements, stale = measured(loaded)
    expansion = expanded(loaded, over_budget, measurements)
    artifacts = tuple(formatted(render(artifact, loaded), cache) for artifact in plan(loaded, expansion))
    return Generated(loaded, expansion, artifacts, len(stale))


def load_legal(path: Path | str) -> Loaded:
    """Load a spec. SpecError naming every field that is not legal or that no kernel template implements, each with its place."""
    loaded = load(path)
    mistakes = [_mistake(loaded, field, reason) for field, reason in refusals(loaded.spec)]
    if mistakes:
        raise SpecError(mistakes)
    return loaded


def expanded(
    loaded: Loaded, over_budget: OverBudget | None = None, measurements: Iterable[Measurement] = ()
) -> Expansion:
    """`expand` of a loaded spec; SpecError with the place in `limits` and what would fit there if these ask too much."""
    try:
        return expand(loaded.spec, load_targets(), over_budget, measurements)
    except LimitsError as error:
        reason = f"needs at most {_most_keys(loaded.spec)} beside the other limits; {error}"
        raise SpecError([_mistake(loaded, "limits.max_seq_len", reason)]) from None


def _most_keys(spec: Spec) -> int:
    """The largest limits.max_seq_len that raises no LimitsError, by bisection."""
    low, high = 1, spec.limits.max_seq_len
    while high - low > 1:
        middle = (low + high) // 2
        try:
            expand(with_max_seq_len(spec, middle), load_targets())
            low = middle
        except LimitsError:
            high = middle
    return low


def _mistake(loaded: Loaded, field: str, reason: str) -> Diagnostic:
    return Diagnostic(loaded.path, *loaded.positions.get(field, (None, None)), field, reason)


def formatted(artifact: Artifact, cache: Cache | None) -> Artifact:
    """A rendered artifact with its content formatted; copied files pass unchanged."""
    if artifact.template is None:
        return artifact
    source = artifact.content.decode()
    key = cache_key({"kind": "format", "formatter": FORMATTER, "path": artifact.path, "source": source})
    if cache is not None and (entry := cache.get(key)):
        return replace(artifact, content=entry[1])
    content = format_source(artifact.path, source).encode()
    if cache is not None:
        cache.put(key, {}, content)
    return replace(artifact, content=content)


def jobs(generated: Generated) -> list[CompileJob]:
    """Every (specialization, architecture) to compile. Banner and docstring are left out: they change no code."""
    targets = load_targets()
    files = generated.files
    found = []
    for symbol, variant in generated.expansion.variants.items():
        source = files[f"kernels/{symbol}.py"].decode().split('"""', 2)[2]
        for arch in generated.expansion.archs(symbol):
            of_arch = [targets[name] for name in generated.loaded.spec.targets if targets[name].arch == arch]
            found.append(
                CompileJob(
                    symbol=symbol,
                    arch=arch,
                    source=source,
                    signature=variant.signature,
                    divisibility=variant.divisibility,
                    parameters=variant.parameter_bytes,
                    num_warps=variant.config.num_warps,
                    num_stages=variant.config.num_stages,
                    options=variant.compiler_options,
                    shared_limit=min(target.shared_memory_per_block for target in of_arch),
                    targets=tuple(target.id for target in of_arch),
                )
            )
    return found


def build(
    path: Path | str,
    build_dir: Path,
    *,
    cache: Cache | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
    pure: bool = False,
) -> Path:
    """Build a spec's package and wheel below `build_dir`/<name>; returns the wheel's path.

    `pure` leaves the launch extension out: a py3-none-any wheel that launches through ctypes on any host.
    """
    loaded = load_legal(path)
    root = package_folder(loaded.spec, build_dir)
    refuse_place(root, *_PACKAGE)  # an error now, not after all was compiled
    refuse_folder(root.parent / _WHEELS)
    over_budget: OverBudget = {}
    while True:
        generated = _generated(loaded, cache, over_budget)
        try:
            binaries = compile_all(jobs(generated), workers=workers, progress=progress, cache=cache)
            break
        except BudgetError as error:  # each round rules out at least one more; expand fails when none is left
            over_budget |= error.over
    for warning in generated.warnings if warn else ():
        warn(warning)
    launcher = None if pure else build_launcher(RUNTIME, cache=cache, warn=warn)
    return _write_package(generated, package_files(generated, binaries, launcher, over_budget), root, wheel_tag(launcher))


def _write_package(generated: Generated, files: dict[str, bytes], root: Path, tag: str) -> Path:
    """Replace the package in `root` and the wheel beside it, both or none; the wheel's path."""
    content = json.loads(files["manifest.json"])
    with replacing(root, *_PACKAGE):
        sweep_staged(root.parent / _WHEELS)
        wheel = write_wheel(
            files,
            distribution=content["distribution"],
            version=content["version"],
            package=generated.package,
            summary=f"Paged attention kernels for {generated.loaded.spec.name}, generated by specgen",
            generator=f"specgen {__version__}",
            tag=tag,
            dest=root.parent / _WHEELS,
            requires=REQUIRES,
            extras=EXTRAS,
            license_files={"LICENSE": license_text()},
            together=lambda: write_tree(files, root),
        )
        for other in wheel.parent.glob(f"{wheel.name.split('-')[0]}-*.whl"):  # an older build's, with another tag
            if other != wheel:
                other.unlink(missing_ok=True)
    return wheel


def build_sources(path: Path | str, build_dir: Path, cache: Cache | None = None) -> Path:
    """Write a package of sources alone (no binaries, no wheel): what the interpreter and the JIT run. Returns its folder."""
    generated = generate(path, cache)
    root = package_folder(generated.loaded.spec, build_dir)
    with replacing(root, *_PACKAGE):
        write_tree(package_files(generated, {}, None), root)
    return root


def package_files(
    generated: Generated,
    binaries: dict[tuple[str, str], Binary],
    launcher: Launcher | None,
    over_budget: OverBudget | None = None,
) -> dict[str, bytes]:
    """Everything in the package, by POSIX path, sorted."""
    content = manifest(
        generated.loaded.spec,
        generated.expansion,
        load_targets(),
        binaries,
        triton=triton_version(),
        ptxas=ptxas_versions(arch for _, arch in binaries),
        launcher_compiler=launcher.compiler if launcher else None,
        over_budget=over_budget or {},
    )
    files = dict(generated.files)
    files |= {binary_path(symbol, arch, binary): binary.data for (symbol, arch), binary in binaries.items()}
    if launcher:
        files[f"runtime/{LAUNCHER_FILE}"] = launcher.data
    files["LICENSE"] = license_text()
    files["manifest.json"] = to_json(content)
    return dict(sorted(files.items()))


def check(path: Path | str, build_dir: Path, cache: Cache | None = None) -> list[str]:
    """Differences between the built tree and what the spec generates now, both directions; empty if it is up to date."""
    generated, root = generate_as_built(path, build_dir, cache)
    if not root.is_dir():
        raise SpecgenError(f"{root}: no such folder; run `specgen build {path}` first")
    files = generated.files | {"LICENSE": license_text()}
    return diff_tree(files, root, ignored=_BUILT) + _built_differences(generated, root)


def generate_as_built(path: Path | str, build_dir: Path, cache: Cache | None = None) -> tuple[Generated, Path]:
    """What the spec generates, without the configurations that its last build refused; and the built package's folder."""
    loaded = load_legal(path)
    root = package_folder(loaded.spec, build_dir)
    return _generated(loaded, cache, built_over_budget(root)), root


def package_folder(spec: Spec, build_dir: Path) -> Path:
    """Where the package of a spec is built."""
    return build_dir / spec.name / package_name(spec.name)


def built_over_budget(root: Path) -> OverBudget:
    """What the compile of the package in `root` refused, from its manifest; empty where that cannot be read."""
    try:
        refused = json_text.read(root / "manifest.json")["over_budget"]
        return {(each["symbol"], each["arch"]): each["reason"] for each in refused}
    except (SpecgenError, KeyError, TypeError):
        return {}


def built_sizes(root: Path, digest: str) -> dict[tuple[str, str], str]:
    """(symbol, arch) -> sizes in words, from the manifest in `root`; empty where that is missing, damaged or another spec's."""
    try:
        content = json_text.read(root / "manifest.json")
        variants = content["variants"] if content["spec"]["sha256"] == digest else {}
        return {
            (symbol, arch): f"{b['registers']:4d} registers {b['shared_bytes']:7d} B shared {b['spill_bytes']:4d} B spilled"
            + (" outside the main loop" if b["spill_bytes"] else "")
            for symbol, variant in variants.items()
            for arch, b in variant["binaries"].items()
        }
    except (SpecgenError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _built_differences(generated: Generated, root: Path) -> list[str]:
    try:
        content = json_text.read(root / "manifest.json")
        binaries = [b for v in content["variants"].values() for b in v["binaries"].values()]
        known = {PurePosixPath(b["file"]).as_posix(): b["sha256"] for b in binaries}
    except SpecError as error:
        return [f"manifest.json: {error.diagnostics[0].message}"]
    except (KeyError, TypeError, AttributeError) as error:
        return [f"manifest.json: damaged ({error!r})"]
    tools = {"triton": "", "ptxas": "", "launcher_compiler": None}
    refused = built_over_budget(root)
    expected = manifest(generated.loaded.spec, generated.expansion, load_targets(), {}, over_budget=refused, **tools)
    fields = field_differences(content, json.loads(to_json(expected)))
    lines = [f"manifest.json: {field}: differs from what the spec generates" for field in fields]
    for file in sorted(known):
        path = root / file
        if not path.is_file():
            lines.append(f"{file}: missing from the tree")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != known[file]:
            lines.append(f"{file}: differs from the manifest's digest")
    stray = {p.relative_to(root).as_posix() for p in (root / "binaries").rglob("*") if p.is_file()} - known.keys()
    return lines + [f"{file}: not in the manifest" for file in sorted(stray)]


def verify(wheel: Path, *, progress: Progress | None = None) -> list[Difference]:
    """Rebuild a wheel from its embedded spec, with no cache, and compare every file."""

    def rebuild(spec: Path) -> Path:
        pure = wheel.name.endswith(f"-{PURE_TAG}.whl")
        return build(spec, spec.parent / "build", progress=progress, pure=pure)

    if not wheel.is_file():
        what = "is a folder" if wheel.is_dir() else "is no ordinary file"
        raise SpecgenError(f"{wheel}: {f'{what}; needs a wheel' if wheel.exists() else 'no such file'}")
    return verify_wheel(wheel, rebuild)
