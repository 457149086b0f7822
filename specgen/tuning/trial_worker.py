"""The process that runs trials: kernels of a bundle on one batch, checked against float64, then timed.

Started by `executors`; see `main`. Touches the GPU that CUDA_VISIBLE_DEVICES leaves it (without one and under
TRITON_INTERPRET=1, the CPU), and reads the bundle. Needs torch; Triton only for the interpreter.
"""

import gc
import importlib
import json
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType

import torch

from specgen.bench import machine, timing
from specgen.bench.batch import Batch
from specgen.child import serve
from specgen.runtime import reference
from specgen.tuning.records import Gpu
from specgen.tuning.trial import Answer, Kernels, Outcome, Trial

KEPT_SHARE = 0.4  # of the device's memory, for the batches that are kept
_KEPT = 16  # batches
_TOO_LARGE = ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "hipErrorLaunchOutOfResources")
_REASON = "a trial of specgen tune"


class _Wrong(Exception):
    """The kernels give a wrong answer; the text says how, `error` how far off it is."""

    def __init__(self, text: str, error: float | None = None):
        super().__init__(text)
        self.error = error


def main(folder: str) -> None:
    """Answers trials until standard input ends."""
    serve(Path(folder), Bench().answer)


class Bench:
    """The device of this process, the kernels that it has loaded and the batches that it keeps; of one bundle."""

    def __init__(self):
        self.torch_device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.is_cuda = self.torch_device.type == "cuda"
        self._run = uuid.uuid4().hex[:12]
        self._batches: OrderedDict[tuple, _Drawn] = OrderedDict()
        self._packages: dict[tuple, object] = {}
        self._opened = None  # the runtime's Device, which keeps the kernels that were loaded

    def answer(self, trial: Trial) -> Answer:
        """What became of a trial."""
        if not trial.kernels:
            try:
                self._opened = self._open(trial)
            except Exception as error:  # any of the runtime's: what this process is asked is whether it can
                return Answer(self._gpu, "", "", "", "", self._run, skipped=_line(error))
            return self._answer()
        try:
            drawn = self._drawn(trial)
        except torch.OutOfMemoryError as error:
            return self._answer(skipped=f"{trial.workload.name}: {_line(error)}")
        found: dict[Kernels, Outcome] = {}
        calls = {}
        for kernels in trial.kernels:
            try:
                calls[kernels] = self._checked(trial, kernels, drawn)
            except Exception as error:
                found[kernels] = _failure(error)
        healthy = self._healthy()
        if calls and healthy:
            found |= self._timed(calls, trial.rounds)
            healthy = self._healthy()
        lost = Outcome("crash", detail="the device failed")  # under other kernels of the trial
        outcomes = tuple(found.get(kernels, lost) for kernels in trial.kernels)
        return self._answer(outcomes=outcomes, healthy=healthy)

    def _answer(self, **more) -> Answer:
        opened = self._opened
        return Answer(self._gpu, opened.mode, opened.arch, self._driver, torch.__version__, self._run, **more)

    def _open(self, trial: Trial):
        """The runtime's Device for the bundle's package. Raises what it raises."""
        sys.path.insert(0, trial.folder)
        directory = Path(trial.folder) / trial.package
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        device = importlib.import_module(f"{trial.package}.runtime.device")
        return device.Device.open(directory, manifest, self.torch_device)

    @cached_property
    def _gpu(self) -> Gpu:
        if not self.is_cuda:
            return Gpu("CPU", "interpreter", 1, 0)
        facts = torch.cuda.get_device_properties(self.torch_device)
        gcn = getattr(facts, "gcnArchName", "") if torch.version.hip else ""
        arch = gcn.split(":")[0] or f"sm_{facts.major}{facts.minor}"
        return Gpu(facts.name, arch, facts.multi_processor_count, facts.total_memory)

    @cached_property
    def _driver(self) -> str:
        return machine.driver() if self.is_cuda else ""

    @cached_property
    def _timer(self) -> timing.Timer:
        return timing.GraphTimer() if self.is_cuda else WallTimer()

    @cached_property
    def _empty(self) -> Callable:
        return timing.capture(_nothing) if self.is_cuda else _nothing

    def _drawn(self, trial: Trial) -> "_Drawn":
        layer = trial.layer
        key = (trial.workload, layer["name"], layer["query_heads"], layer["kv_heads"], trial.seed)
        if key in self._batches:
            self._batches.move_to_end(key)
            return self._batches[key]
        try:
            drawn = _Drawn(Batch(trial.workload, layer, self.torch_device, trial.seed))
        except torch.OutOfMemoryError:
            self._batches.clear()
            gc.collect()
            torch.cuda.empty_cache()
            drawn = _Drawn(Batch(trial.workload, layer, self.torch_device, trial.seed))
        room = self._gpu.memory_bytes * KEPT_SHARE if self.is_cuda else float("inf")
        while self._batches and (
            len(self._batches) >= _KEPT or drawn.nbytes + sum(each.nbytes for each in self._batches.values()) > room
        ):
            self._batches.popitem(last=False)
        self._batches[key] = drawn
        return drawn

    def _checked(self, trial: Trial, kernels: Kernels, drawn: "_Drawn") -> "_Checked":
        """The call of some kernels, after its answer was compared with float64. Raises _Wrong, or what the call raises."""
        package, batch = self._package(trial, kernels), drawn.batch
        if kernels.varlen:
            call = drawn.varlen_call(package)
        else:  # a workspace of its own: a capture may not make one
            call = partial(package.attention, **batch.arguments, workspace=package.workspace(self.torch_device))
        batch.poison()
        call()
        errors = batch.errors()  # waits for the device
        bounds = reference.tolerance(batch.dtype)
        if not errors.within(bounds):
            token, head = errors.worst
            text = f"relative error {errors.tensor:.2e} (at most {bounds.tensor:.2e}), {errors.row:.2e} in a row"
            raise _Wrong(f"{text} (at most {bounds.row:.2e}): checked row {token}, head {head}", errors.tensor)
        bits = batch.out.clone()
        replay = timing.capture(call) if self.is_cuda else call
        return _Checked(replay, batch, bits, errors.tensor)

    def _timed(self, calls: Mapping[Kernels, "_Checked"], rounds: int) -> dict[Kernels, Outcome]:
        """Times of all that were found right. Their answers are looked at again: a launch must leave its scratch clean."""
        named = {"empty": self._empty} | {str(number): call.replay for number, call in enumerate(calls.values())}
        try:
            samples = timing.measure(named, rounds, self._timer)
        except Exception as error:
            return dict.fromkeys(calls, _failure(error))
        found = {}
        for number, (kernels, checked) in enumerate(calls.items()):
            times, empty_us = samples[str(number)], samples["empty"].median
            try:
                checked.look_again()
                if times.median <= empty_us:
                    raise _Wrong(f"takes {times.median:.2f} us, an empty graph {empty_us:.2f} us: nothing ran", checked.error)
                found[kernels] = Outcome("ok", times.values, empty_us, checked.error)
            except Exception as error:
                found[kernels] = _failure(error)
        return found

    def _package(self, trial: Trial, kernels: Kernels):
        """The bundle's package under a dispatch table of `kernels` alone: what is timed is what the product runs."""
        key = (kernels, trial.layer["name"], trial.layer["query_heads"], trial.layer["kv_heads"])
        if key not in self._packages:
            names = ("runtime.table", "runtime.package")
            table, package = (importlib.import_module(f"{trial.package}.{name}") for name in names)
            directory, own = Path(trial.folder) / trial.package, rows(table, trial, kernels)
            opened = package.Package(trial.package, directory, **own, open_device=lambda *_: self._opened)
            self._packages[key] = opened
        return self._packages[key]

    def _healthy(self) -> bool:
        """Whether the device still answers: after a fault on it, every later call fails."""
        if not self.is_cuda:
            return True
        try:
            torch.cuda.synchronize(self.torch_device)
            return True
        except Exception:  # torch has several classes for a device's faults, and they change
            return False


class _Drawn:
    """A batch, and the same keys and values contiguous where a varlen kernel asks for them."""

    def __init__(self, batch: Batch):
        self.batch = batch
        expected = 8 * batch.out.numel()  # in float64
        self.nbytes = expected + sum(each.nbytes for each in (batch.q, *batch.caches, batch.out))

    def varlen_call(self, package) -> Callable:
        """A call without arguments of `package.attention_varlen`; it writes the batch's `out`."""
        batch = self.batch
        k, v, cu_seqlens_k = self._contiguous
        own = ("q", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "layer", "out", *batch.features)
        arguments = {name: value for name, value in batch.arguments.items() if name in own}
        return partial(package.attention_varlen, k=k, v=v, cu_seqlens_k=cu_seqlens_k, **arguments)

    @cached_property
    def _contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(k, v, cu_seqlens_k): the keys and values of the paged caches, sequence behind sequence."""
        batch = self.batch
        lengths = [keys for _, keys in batch.workload.seqs]
        packed = []
        for cache in batch.caches:
            rows = zip(batch.block_table, batch.pages, lengths)
            packed.append(torch.cat([cache[table[:pages]].flatten(0, 1)[:keys] for table, pages, keys in rows]))
        ends = torch.tensor([0, *lengths], device=batch.device).cumsum(0).int()
        return packed[0], packed[1], ends


@dataclass
class _Checked:
    """A call that gave a right answer, as a replay; `bits` is that answer."""

    replay: Callable
    batch: Batch
    bits: torch.Tensor
    error: float

    def look_again(self) -> None:
        """Raises _Wrong unless another replay gives the same bits."""
        self.batch.poison()
        self.replay()
        if not torch.equal(self.bits, self.batch.out):
            raise _Wrong("a later replay gives other bits than the first call", self.error)


class WallTimer:
    """Times by the wall clock: for the interpreter, where only the order of magnitude counts."""

    def __init__(self):
        self._times: list[float] = []

    def enqueue(self, call: Callable) -> None:
        """Call, and keep the time."""
        start = time.perf_counter()
        call()
        self._times.append(1e6 * (time.perf_counter() - start))

    def collect(self) -> list[float]:
        """Microseconds of each call since the last `collect`."""
        times, self._times = self._times, []
        return times


def rows(table: ModuleType, trial: Trial, kernels: Kernels) -> dict[str, tuple]:
    """The rows under which a package launches exactly `kernels`, by the names of Package's arguments.

    `table` is the bundle package's own module. The one place that knows how a row looks.
    """
    layer = trial.layer
    heads = {"query_heads": layer["query_heads"], "kv_heads": layer["kv_heads"]}
    group = {"index": 0, "arch": trial.arch, "layer": layer["name"], **heads, "aligned": True, "reason": _REASON}
    least, most = table.EVERY
    calls = {"min_query_len": least, "max_query_len": most, "decode": kernels.decode, "prefill": kernels.prefill}
    varlen = (table.VarlenRow(**group, symbol=kernels.varlen),) if kernels.varlen else ()
    own = {"attention_rows": (table.AttentionRow(**group, **calls),), "varlen_rows": varlen}
    return {**own, "append_rows": (), "merge_rows": ()}


def _failure(error: Exception) -> Outcome:
    """The outcome of kernels that raised. A runtime's classes are those of the bundle's own copy: known by name."""
    if isinstance(error, _Wrong):
        finite = error.error if error.error is not None and error.error < float("inf") else None
        return Outcome("wrong", error=finite, detail=str(error))
    too_large = type(error).__name__ == "NoBinaryError" or getattr(error, "name", None) in _TOO_LARGE
    return Outcome("budget" if too_large else "crash", detail=f"{type(error).__name__}: {_line(error)}")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _nothing() -> None:
    """What an empty graph holds."""
