"""The measure stage of `specgen tune`: trials of a bundle's candidates on GPUs, every result into the store at once.

Needs torch and the bundle, not what made it: imports no Triton, Jinja or black, and Optuna only where a sampler is asked for.
Prints nothing.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from specgen.bench.workloads import Workload, parse
from specgen.errors import SpecgenError
from specgen.tuning.bundle import Bundle, Group, find_bundles, store_in, tuning_folder
from specgen.tuning.executors import open_executor, run_trial
from specgen.tuning.grid import ordered, read_trace
from specgen.tuning.problems import Problem, joint_problem, single_problems
from specgen.tuning.store import Store
from specgen.tuning.sweep import Plan, Report, Summary, Sweep
from specgen.tuning.trial import Answer, Trial

CACHE_SHARE = 0.4  # of a GPU's memory, for the keys and values of one batch
MOST_US = 4000.0  # a batch of the grid that no GPU could serve faster tells no more than a smaller one


@dataclass(frozen=True)
class Where:
    """`executor` as in open_executor; `gpus`, for a local one: values of CUDA_VISIBLE_DEVICES, none is all that are visible."""

    executor: str = "local"
    gpus: tuple[str, ...] = ()


def measure(
    bundles: Sequence[Bundle],
    store: Path,
    *,
    where: Where = Where(),
    plan: Plan = Plan(),
    seconds: float | None = None,
    trace: Path | None = None,
    imported: Sequence[Path] = (),
    report: Report = lambda problem, done, total: None,
    conclude: Callable[[Summary], None] = lambda summary: None,
) -> list[Summary]:
    """Try the candidates of the bundle that runs here, until all is tried or about `seconds` have passed; then call it again.

    store: the file that keeps the measurements, and that says what is known. trace: a file of batches (grid.read_trace), in
    place of the bundle's grid. imported: JSON Lines that are added to the store first. `report` hears of every trial, `conclude` of every problem. SpecgenError where none can run.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    summaries: list[Summary] = []
    with Store(store) as kept, open_executor(where.executor, local_gpus(where)) as (executor, workers):
        for file in imported:
            kept.import_jsonl(file)
        bundle, hello = _fitting(bundles, executor)
        sweep = Sweep(bundle, kept, executor, workers, hello, plan, report)
        batches = [_batches(bundle, group, hello, trace) for group in bundle.groups]
        singles = [single_problems(bundle, group, each) for group, each in zip(bundle.groups, batches)]
        left = sum(len(problems) + 1 for problems in singles)

        def run(problems: Sequence[Problem]) -> None:
            nonlocal left
            for problem in problems:
                summaries.append(sweep.run(problem, _share(deadline, left)))
                conclude(summaries[-1])
                left -= 1

        for group, each, problems in zip(bundle.groups, batches, singles):
            sweep.refuse(group)
            run(problems)
            run(joint_problem(bundle, group, each, sweep.times))
    return summaries


def find(spec: Path | None, build_dir: Path, folder: Path | None) -> list[Bundle]:
    """The bundles in `folder`, or those of a spec. SpecgenError if there is none, or it is not of the spec as it is now."""
    if spec is None:
        return find_bundles(folder)
    from specgen.load import load

    loaded = load(spec)
    bundles = find_bundles(folder or tuning_folder(build_dir, loaded.spec.name))
    if any(bundle.spec_sha256 != loaded.spec.digest for bundle in bundles):
        raise SpecgenError(f"{spec}: the bundle in {bundles[0].folder} is of another state of it; make it anew")
    return bundles


def store_beside(bundles: Sequence[Bundle]) -> Path:
    """Where the measurements of bundles are kept, if no other place is named."""
    return store_in(bundles[0].folder.parent)


def local_gpus(where: Where) -> tuple[str | None, ...]:
    """The workers of a local executor; none for another. SpecgenError without a GPU, but for Triton's interpreter."""
    if where.executor != "local":
        return ()
    if where.gpus:
        return where.gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            import torch
        except ImportError:
            raise SpecgenError("measuring needs torch, which is not installed here: pip install 'specgen[tune]'") from None
        found = tuple(str(index) for index in range(torch.cuda.device_count()))
    else:
        found = tuple(name.strip() for name in visible.split(",") if name.strip())
    if not found and os.environ.get("TRITON_INTERPRET") == "1":
        return (None,)
    if not found:
        advice = "`specgen tune SPEC --compile-only` makes the bundle here, --measure-only runs it on a machine with one"
        raise SpecgenError(f"no GPU is visible here; {advice}")
    return found


def _fitting(bundles: Sequence[Bundle], executor: Executor) -> tuple[Bundle, Answer]:
    """The bundle whose binaries run where the executor's workers are, and a worker's word on it."""
    hello = _ask(bundles[0], executor)
    for bundle in sorted(bundles, key=lambda bundle: bundle.arch != hello.gpu.arch):
        hello = _ask(bundle, executor)
        if hello.mode in ("binary", "interpret") and hello.arch == bundle.arch:
            return bundle, hello
    archs = ", ".join(bundle.arch for bundle in bundles)
    reason = f"; {hello.skipped}" if hello.skipped else ""
    raise SpecgenError(f"{hello.gpu.name} ({hello.gpu.arch}) runs no bundle of {bundles[0].spec}: they are for {archs}{reason}")


def _ask(bundle: Bundle, executor: Executor) -> Answer:
    return executor.submit(run_trial, _nothing(bundle), 0.0).result()


def _nothing(bundle: Bundle) -> Trial:
    """The trial of no kernels, which asks where a bundle would run."""
    folder = str(bundle.folder.resolve())
    return Trial(folder, bundle.stamp, bundle.package, bundle.arch, {}, Workload("", ()), (), rounds=0)


def check_trace(trace: Path, spec: Path | str) -> None:
    """SpecError with the place of every line of a trace that is wrong, or beyond the limits of the spec."""
    from specgen.load import load  # needs more than a machine that only measures has

    read_trace(trace, load(spec).spec.limits.model_dump())


def _batches(bundle: Bundle, group: Group, hello: Answer, trace: Path | None) -> list[Workload]:
    """What is measured of one geometry, in the order of measuring."""
    room = hello.gpu.memory_bytes * CACHE_SHARE or float("inf")
    if trace is None:
        return ordered(map(parse, bundle.workloads), group.layer, bundle.target, room, MOST_US)
    return ordered(read_trace(trace, bundle.limits), group.layer, bundle.target, room, float("inf"))


def _share(deadline: float | None, problems: int) -> float | None:
    """When the next of so many problems must end, for each to have its part of the time."""
    if deadline is None:
        return None
    now = time.monotonic()
    return now + max(0.0, deadline - now) / problems
