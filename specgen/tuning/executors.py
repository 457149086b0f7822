"""Where trials run: workers of a `concurrent.futures.Executor`, one per GPU, each with a process that it keeps while healthy.

What may hang, crash or break the device does so in that process (`trial_worker`): it is killed and replaced, and the trial's
outcome says why. The same function runs in local threads and on the workers of a Dask cluster.
"""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from specgen.child import Child, Died, TimedOut
from specgen.errors import SpecgenError
from specgen.tuning.trial import Answer, Outcome, Trial

START_LIMIT = 300.0  # seconds for a process to import torch and open its device
_DASK = "dask://"
_here = threading.local()  # .slot: of the thread that runs trials


class Slot:
    """One worker's place for a process. `gpu` is what CUDA_VISIBLE_DEVICES shall be there, None: as it is here."""

    def __init__(self, gpu: str | None = None):
        self.gpu = gpu
        self._child: Child | None = None
        self._folder: Path | None = None
        self._bundle: tuple[str, str] | None = None  # that the process has loaded
        self._hello: Answer | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, trial: Trial, time_limit: float) -> Answer:
        """What became of a trial that may take `time_limit` seconds; "hang" or "crash" where no answer came.

        A process that dies is given a second try: it may have been killed from outside. SpecgenError if none starts.
        """
        for attempt in (1, 2):
            child = self._ready(trial)
            if not trial.kernels:
                return self._hello
            try:
                answer = child.ask(trial, time_limit)
            except TimedOut as limit:
                return self._failed(trial, Outcome("hang", detail=f"no answer within {limit}"))
            except Died as ending:
                if attempt == 2:
                    return self._failed(trial, Outcome("crash", detail=f"the process {ending}"))
            else:
                if not answer.healthy:
                    self._discard()
                return answer
        raise AssertionError("the second attempt returns")

    def stop(self) -> None:
        """Ends the process in the middle of a trial, from another thread; no other is started."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """Ends the process; call it where no trial runs."""
        self.stop()
        self._discard()

    def _failed(self, trial: Trial, outcome: Outcome) -> Answer:
        return replace(self._hello, outcomes=(outcome,) * len(trial.kernels))

    def _ready(self, trial: Trial) -> Child:
        """A process for the trial's bundle: the one at hand, or a new one that has opened its device."""
        if self._child is not None and self._child.alive and self._bundle == (trial.folder, trial.stamp):
            return self._child
        self._discard()
        environment = dict(os.environ) if self.gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": self.gpu}
        with self._lock:
            if self._stopped:
                raise SpecgenError("the sweep was stopped")
            self._folder = Path(tempfile.mkdtemp(prefix="specgen-tune-")) / "worker"
            self._child = Child("specgen.tuning.trial_worker:main", self._folder, environment)
        try:
            self._hello = self._child.ask(replace(trial, kernels=()), START_LIMIT)
        except (Died, TimedOut) as error:
            where = "here" if self.gpu is None else f"on GPU {self.gpu}"
            raise SpecgenError(f"no trial can run {where}: its process {error}") from None
        self._bundle = trial.folder, trial.stamp
        return self._child

    def _discard(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._child = None
            shutil.rmtree(self._folder.parent, ignore_errors=True)


def run_trial(trial: Trial, time_limit: float) -> Answer:
    """`Slot.run` of the worker that this is called on."""
    if not hasattr(_here, "slot"):
        _here.slot = Slot()  # a Dask worker: one thread, and the GPU that its environment leaves it
    return _here.slot.run(trial, time_limit)


class LocalExecutor(ThreadPoolExecutor):
    """A thread for each of `gpus` (values of CUDA_VISIBLE_DEVICES; None: as it is), which runs trials in a process of its own."""

    def __init__(self, gpus: Sequence[str | None]):
        self._slots = [Slot(gpu) for gpu in gpus]
        free: SimpleQueue[Slot] = SimpleQueue()
        for slot in self._slots:
            free.put(slot)
        super().__init__(len(self._slots), thread_name_prefix="tune", initializer=_take_slot, initargs=(free,))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As Executor's; with `cancel_futures`, trials that run are killed too."""
        if cancel_futures:
            for slot in self._slots:
                slot.stop()
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        if wait:
            for slot in self._slots:
                slot.close()


def _take_slot(free: "SimpleQueue[Slot]") -> None:
    _here.slot = free.get()


@contextlib.contextmanager
def open_executor(where: str, gpus: Sequence[str | None]) -> Iterator[tuple[Executor, int]]:
    """(executor, how many workers it has): "local", one worker for each of `gpus`, or "dask://HOST:PORT".

    What runs when the block is left by an exception is killed. SpecgenError if the cluster cannot be reached.
    """
    if where == "local":
        executor = LocalExecutor(gpus)
        try:
            yield executor, len(gpus)
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
        executor.shutdown()
        return
    if not where.startswith(_DASK):
        raise SpecgenError(f"--executor: needs local or {_DASK}HOST:PORT, got {where!r}")
    try:
        from distributed import Client
    except ImportError:
        raise SpecgenError(f"--executor {where} needs Dask: pip install 'specgen[tune]'") from None
    try:
        client = Client(f"tcp://{where.removeprefix(_DASK)}", timeout=30)
    except (OSError, ValueError) as error:
        raise SpecgenError(f"--executor {where}: no Dask scheduler answers there ({error})") from None
    with client:
        workers = len(client.nthreads())
        if not workers:
            raise SpecgenError(f"--executor {where}: the scheduler has no workers; start one per GPU")
        executor = client.get_executor()
        try:
            yield executor, workers
        finally:
            executor.shutdown(wait=False)
