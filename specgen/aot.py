"""Ahead-of-time compiling: jobs in, binaries with facts out, in parallel, without a GPU.

Each worker is a process of its own (`child`, running `aot_worker`) with a private folder; a thread here feeds it one
job at a time, so a worker that dies takes one job with it and is replaced. Triton is never imported in this process,
and a build that the cache answers starts no worker. Touches temporary folders and the cache it is given.
"""

import contextlib
import os
import queue
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from specgen import ptx
from specgen.binary import Binary, CompileJob, Failed, Refused
from specgen.cache import Cache, cache_key
from specgen.child import Child, Died, TimedOut
from specgen.errors import BudgetError, BuildError
from specgen.resources import ARCH_LIMITS, budget_problems
from specgen.toolchain import toolchain_digest

Progress = Callable[[int, int, str, str], None]
Key = tuple[str, str]
Outcome = Binary | Refused | Failed

_FACTS = 3  # of the facts in a Binary: raise it when how they are read changes, or what is refused
_TIME_LIMIT = 900.0  # seconds for one kernel
_PAUSE = 0.05  # seconds before looking again whether another process has finished a kernel
# What changes Triton's output or its speed; a build must not depend on the user's environment.
_SCRUBBED = (
    "TRITON_",
    "AMDGCN_",
    "LLVM_",
    "MLIR_",
    "NVPTX_",
    "PTXAS_",
    "DISABLE_",
    "USE_IR_LOC",
    "PYTHONPATH",
)


def compile_all(
    jobs: Sequence[CompileJob],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    cache: Cache | None = None,
    time_limit: float = _TIME_LIMIT,
) -> dict[Key, Binary]:
    """Compiles every job; returns {(symbol, arch): binary} in the order of `jobs`.

    `workers` processes (default: the CPUs this process may use) share the work, the largest sources first.
    With a `cache`, known binaries are taken from it, and processes that build the same kernels at the same
    time divide them. `progress(done, total, symbol, arch)` is called in the caller's thread after each job. A
    kernel that takes longer than `time_limit` seconds fails.

    Raises, after all jobs ran, BuildError with one line for each failure (a compile error, a worker that died), or
    BudgetError for kernels that compiled and may not ship; ValueError for two different jobs of one (symbol, arch).
    """
    found = compile_each(jobs, workers=workers, progress=progress, cache=cache, time_limit=time_limit)
    if failures := [outcome.reason for outcome in found.values() if isinstance(outcome, Failed)]:
        raise BuildError("\n".join(failures))
    if over := {pair: outcome.reason for pair, outcome in found.items() if isinstance(outcome, Refused)}:
        raise BudgetError(over)
    return found


def compile_each(
    jobs: Sequence[CompileJob],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    cache: Cache | None = None,
    time_limit: float = _TIME_LIMIT,
) -> dict[Key, Outcome]:
    """`compile_all` for jobs that may fail one by one: what became of each, in the order of `jobs`.

    A Binary may ship; Refused is over a budget, with the reason in bytes; Failed did not compile.
    """
    order: dict[Key, CompileJob] = {}
    for job in jobs:
        if order.setdefault((job.symbol, job.arch), job) != job:
            raise ValueError(f"two different jobs for {job.symbol} on {job.arch}")
        if job.arch not in ARCH_LIMITS:
            raise BuildError(
                f"{job.symbol}: unknown architecture {job.arch!r}; known: {', '.join(ARCH_LIMITS)}"
            )
    keys = {pair: job_key(job) for pair, job in order.items()}
    found: dict[Key, Outcome] = {}

    def record(pair: Key, outcome: Outcome) -> None:
        found[pair] = _held_to_budget(order[pair], outcome)
        if progress is not None:
            progress(len(found), len(order), *pair)

    for pair in order:
        if cache is not None and (binary := _cached(cache, keys[pair])) is not None:
            record(pair, binary)
    missing = sorted((pair for pair in order if pair not in found), key=lambda pair: -_weight(order[pair]))
    if missing:
        pool = _Pool([(order[pair], keys[pair]) for pair in missing], cache, time_limit)
        pool.run(workers or usable_cpus(), record)
    return {pair: found[pair] for pair in order}


def job_key(job: CompileJob) -> str:
    """The cache key of a job: all that decides its binary, nothing else (targets and limits do not)."""
    return cache_key(
        {
            "kind": "binary",
            "facts": [_FACTS, *(field.name for field in fields(Binary))],
            "symbol": job.symbol,
            "arch": job.arch,
            "source": job.source,
            "signature": job.signature,
            "divisibility": job.divisibility,
            "parameters": job.parameters,
            "num_warps": job.num_warps,
            "num_stages": job.num_stages,
            "options": sorted(job.options),
            "rewritings": ptx.digest() if ptx.REWRITINGS.keys() & dict(job.options) else "",
            "toolchain": toolchain_digest(),
        }
    )


def _held_to_budget(job: CompileJob, outcome: Outcome) -> Outcome:
    problems = budget_problems(job, outcome) if isinstance(outcome, Binary) else []
    return Refused("; ".join(problems)) if problems else outcome


def usable_cpus() -> int:
    """How many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _weight(job: CompileJob) -> int:
    """A guess of the compile time, for the order only: AMD's assembler works in LLVM and is slower."""
    return len(job.source) * (1 if job.arch.startswith("sm_") else 2)


def _cached(cache: Cache, key: str) -> Binary | None:
    entry = cache.get(key)
    if entry is None:
        return None
    facts, data = entry
    return Binary(data=data, **facts)


class _Pool:
    """Threads that each feed one worker process from a common list of jobs."""

    def __init__(self, jobs: list[tuple[CompileJob, str]], cache: Cache | None, time_limit: float):
        self._jobs = deque(jobs)
        self._count = len(jobs)
        self._cache = cache
        self._time_limit = time_limit
        self._outcomes: queue.SimpleQueue[tuple[Key, Outcome] | BaseException] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._workers: set[Child] = set()
        self._lock = threading.Lock()

    def run(self, workers: int, record: Callable[[Key, Outcome], None]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="specgen-aot-"))
        threads = [
            threading.Thread(target=self._feed, args=(folder / str(number),), daemon=True)
            for number in range(min(workers, self._count))
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in range(self._count):
                outcome = self._outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                record(*outcome)
        finally:
            with self._lock:
                self._stopped.set()
                for worker in self._workers:
                    worker.kill()
            for thread in threads:
                thread.join()
            shutil.rmtree(folder, ignore_errors=True)

    def _feed(self, folder: Path) -> None:
        worker: Child | None = None
        try:
            while not self._stopped.is_set():
                try:
                    job, key = self._jobs.popleft()
                except IndexError:
                    return
                with self._cache.claim(key) if self._cache else contextlib.nullcontext(True) as mine:
                    if not mine:
                        self._jobs.append((job, key))
                        self._stopped.wait(_PAUSE)
                        continue
                    outcome = _cached(self._cache, key) if self._cache else None
                    if outcome is None:
                        worker = worker if worker and worker.alive else self._start(folder)
                        if worker is None:
                            return
                        outcome = self._compile(worker, job)
                        if self._cache and isinstance(outcome, Binary):
                            self._cache.put(key, outcome.facts(), outcome.data)
                self._outcomes.put(((job.symbol, job.arch), outcome))
        except BaseException as error:  # handed to the caller's thread, which raises it
            if not self._stopped.is_set():
                self._outcomes.put(error)
        finally:
            if worker is not None:
                worker.close()

    def _compile(self, worker: Child, job: CompileJob) -> Outcome:
        try:
            return worker.ask(job, self._time_limit)
        except TimedOut as limit:
            return Failed(f"{job.title}: compiling took longer than {limit}")
        except Died as ending:
            return Failed(f"{job.title}: the compiler process {ending}")

    def _start(self, folder: Path) -> Child | None:
        """A new compiler process, or None if no more work is wanted."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_SCRUBBED)}
        environment |= {
            "TRITON_DISABLE_LINE_INFO": "1",  # binaries would name source files
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TRITON_HOME": str(folder),
            "TMPDIR": str(folder),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with self._lock:
            if self._stopped.is_set():
                return None
            worker = Child("specgen.aot_worker:main", folder, environment)
            self._workers.add(worker)
            return worker
