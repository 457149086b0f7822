"""The composition of `specgen bench`: packages and peers over workloads on the current GPU.

Prints nothing: progress goes to a callback, a line for each row.
"""

import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import torch

from specgen.bench import timing
from specgen.bench.batch import Batch
from specgen.bench.contest import Attention, DeviceLost, contest
from specgen.bench.machine import gpu, software
from specgen.bench.peers import PEERS, Package, Peer, one_line, open_peers
from specgen.bench.results import SUBJECT, line, medians, row
from specgen.bench.step import NoAttention, Stack
from specgen.bench.workloads import Workload, geometry, select, spell_geometry
from specgen.errors import SpecgenError

TRACKS = {"kernels": "standard", "end-to-end": "steps"}  # and the rows that each measures by default
DEVICE = "cuda"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What one run measures. `packages` as `open_package` takes them, `rows` as `workloads.select` (none: the
    track's), `peers` by name (None: all); `seconds` that are shared among the rows, after which none begins;
    `layers` of a step's model; `command`, for the record.
    """

    packages: tuple[str, ...]
    track: str = "kernels"
    rows: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    rounds: int = 20
    seconds: float | None = None
    seed: int = 0
    layers: int = 32
    build_dir: Path = Path("build")
    command: str = "specgen bench"

    @classmethod
    def of(cls, options) -> "Plan":
        """From the command line's options, which have the same names."""
        given = {each.name: getattr(options, each.name) for each in fields(cls)}
        return cls(**given | {"packages": (*options.packages, *options.package), "rows": tuple(options.rows)})


def bench(plan: Plan, progress: Progress) -> dict:
    """Measure; the result. SpecgenError without a GPU, and for packages, peers or rows that there are not."""
    if not plan.packages:
        raise SpecgenError("bench: names no package; needs the import name, folder or spec of a built one")
    if unknown := [name for name in plan.peers or () if name not in PEERS]:
        raise SpecgenError(f"--peers: unknown {', '.join(unknown)}; known: {', '.join(PEERS)}")
    groups = group(plan, [open_package(text, plan.build_dir) for text in plan.packages])
    if not torch.cuda.is_available():
        raise SpecgenError("bench: torch sees no GPU here; `specgen bench --report FILE` renders a past run")
    with torch.inference_mode():
        return _measure(plan, groups, progress)


def open_package(name: str, build_dir: Path) -> ModuleType:
    """The package of an import name, a built package's folder, or a spec built below `build_dir`."""
    folder = Path(name)
    if name.endswith((".yaml", ".yml")):
        from specgen.load import load  # these need more than a GPU machine has
        from specgen.plan import package_name

        spec = load(name).spec
        folder = build_dir / spec.name / package_name(spec.name)
        if not folder.is_dir():
            raise SpecgenError(f"{folder}: no such folder; run `specgen build {name}` first")
    if folder.is_dir() and (folder / "manifest.json").is_file():
        sys.path.insert(0, str(folder.resolve().parent))
        name = folder.resolve().name
    if not all(part.isidentifier() for part in name.split(".")):
        what = "a folder without manifest.json" if folder.is_dir() else "neither a folder nor a name that can be imported"
        raise SpecgenError(f"bench: {name} is {what}; needs the import name, folder or spec of a built package")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise SpecgenError(
            f"{name}: does not import ({error}); needs an installed package that specgen built"
        ) from error
    if not module.__file__ or not Path(module.__file__).with_name("manifest.json").is_file():
        raise SpecgenError(f"{name}: is no package that specgen built; its folder holds no manifest.json")
    return module


@dataclass(frozen=True)
class Group:
    """One geometry: a layer that has it, the packages that serve it, and the workloads to run."""

    layer: Mapping
    packages: list[Package]
    workloads: tuple[Workload, ...]


def group(plan: Plan, modules: Iterable[ModuleType]) -> list[Group]:
    """The packages' geometries. The first package of one is SUBJECT, others go by import names."""
    found: list[tuple[Mapping, list[Package]]] = []
    for module in dict.fromkeys(modules):
        for layer in Package(module, module.__name__).layers:
            same = [packages for other, packages in found if geometry(other) == geometry(layer)]
            if not same:
                found.append((layer, [Package(module, SUBJECT)]))
            elif all(package.module is not module for package in same[0]):
                same[0].append(Package(module, module.__name__))
    chosen = plan.rows or (TRACKS[plan.track],)
    groups = []
    for layer, packages in found:
        limits = packages[0].manifest["limits"]
        workloads = dict.fromkeys(workload for text in chosen for workload in select(text, layer, limits))
        groups.append(Group(layer, packages, tuple(workloads)))
    return groups


def _measure(plan: Plan, groups: list[Group], progress: Progress) -> dict:
    peers, reasons = open_peers(PEERS if plan.peers is None else plan.peers)
    for name, reason in reasons.items():
        progress(f"without {name}: {reason}")
    head, rows, skipped = _head(plan, groups, peers, reasons), [], {}
    ceilings, timer, begun = timing.ceilings(), timing.GraphTimer(), time.monotonic()
    pairs = [(each, workload) for each in groups for workload in each.workloads]
    for place, (each, workload) in enumerate(pairs):
        name, until = f"{workload.name}, {spell_geometry(each.layer)}", None
        if plan.seconds is not None:
            now, end = time.monotonic(), begun + plan.seconds
            if now > end:
                skipped[name] = f"the time budget of {plan.seconds:g} s was over"
                continue
            until = now + (end - now) / (len(pairs) - place)
        try:
            rows.append(_row(plan, each, workload, peers, ceilings, timer, until))
            progress(line(rows[-1]))
        except DeviceLost as error:
            skipped[name] = str(error)
            progress(f"{name}: {error}; the run ends here")
            break
        except Exception as error:  # one row's, such as a batch that does not fit; the others count
            skipped[name] = one_line(error)
            progress(f"{name}: skipped: {skipped[name]}")
        gc.collect()
        torch.cuda.empty_cache()
    return head | medians(rows) | {"rows": rows, "skipped": skipped}


def _row(plan: Plan, each: Group, workload: Workload, peers: list[Peer], ceilings, timer, until) -> dict:
    options = {"rounds": plan.rounds, "ceilings": ceilings, "timer": timer, "until": until}
    contenders = [*each.packages, *peers]
    if plan.track == "kernels":
        subject = Attention(Batch(workload, each.layer, DEVICE, plan.seed))
        outcome = contest(subject, contenders, hosted=workload.query_len == 1, **options)
    else:
        subject = Stack(workload, each.layer, DEVICE, plan.layers, each.packages[0], plan.seed)
        outcome = contest(subject, [*contenders, NoAttention()], **options)
    return row(workload, each.layer, subject.bytes, subject.operations, outcome)


def _head(plan: Plan, groups: list[Group], peers: list[Peer], reasons: Mapping[str, str]) -> dict:
    """The result but for what is measured."""
    known: dict[str, dict[str, str]] = {}
    for peer in [*(package for each in groups for package in each.packages), *peers]:
        facts = known.setdefault(peer.name, {"title": peer.title, "version": peer.version})
        if peer.title not in facts["title"].split(", "):  # several packages, each the first of its geometry
            facts["title"] += f", {peer.title}"
            facts["version"] += f", {peer.version}"
    known |= {name: {"title": PEERS[name].title, "reason": reason} for name, reason in reasons.items()}
    packages = {package.title: package for each in groups for package in each.packages}
    layers = {}
    if plan.track == "end-to-end":
        layers["layers"] = plan.layers
        known[NoAttention.name] = {"title": NoAttention.title}
    return {
        "device": gpu(),
        "software": software(),
        "peers": known,
        "regret": {name: trees for name, package in packages.items() if (trees := package.regret)},
        "command": plan.command,
        "track": plan.track,
        **layers,
        "rounds": plan.rounds,
        "seed": plan.seed,
    }
