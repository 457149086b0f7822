"""One workload on the GPU: contenders prepared, checked, captured, and timed in the same rounds."""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from specgen.bench.batch import Batch
from specgen.bench.peers import Peer, Run, Unavailable, one_line
from specgen.bench.results import Outcome
from specgen.bench.timing import Call, Timer, capture, host_us, measure, rates
from specgen.errors import SpecgenError
from specgen.runtime.reference import tolerance

LOOSE = 4  # times the tolerance of a generated kernel: peers may round more often
HOSTED_US = 1000  # a call that takes the GPU longer hides the host's time, which is not measured then


class DeviceLost(SpecgenError):
    """The GPU answers no more: nothing after this can be measured in this process."""


class Subject(Protocol):
    """What contenders are measured on. `bytes` and `operations` are what it takes at least; `allowed` is the
    error from which on an answer is wrong, and its time nothing worth.
    """

    bytes: int
    operations: int
    allowed: float

    def enter(self, peer: Peer, way: str) -> Run:
        """The contender's call; Unavailable where it cannot."""

    def poison(self) -> None:
        """Make sure that an output which is not written is seen as an error."""

    def error(self, out: Tensor) -> float:
        """Relative L2 distance of an output from float64."""


class Attention:
    """A Subject: one attention call over a batch."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.bytes = batch.workload.bytes(batch.layer)
        self.operations = batch.workload.operations(batch.layer)
        self.allowed = LOOSE * tolerance(batch.dtype).tensor
        self.poison, self.error = batch.poison, batch.error

    def enter(self, peer: Peer, way: str = "") -> Run:
        """The peer's call over the batch."""
        return peer.make(self.batch, way)


def contest(
    subject: Subject,
    contenders: Iterable[Peer],
    *,
    rounds: int,
    hosted: bool = False,
    ceilings: Mapping[str, Call] | None = None,
    timer: Timer | None = None,
    until: float | None = None,
) -> Outcome:
    """Measure the contenders on a subject, and the `ceilings` of timing.py in the same rounds, of which there
    may be fewer after `until`, as `measure` says.

    A contender that cannot, or that raises, is noted and the others go on; DeviceLost once the GPU itself
    fails. `hosted`: also the host's time for a call that takes the GPU less than HOSTED_US.
    """
    outcome, runs, replays = Outcome(), {}, {}
    for peer in contenders:
        for way in peer.ways:
            try:
                run = subject.enter(peer, way)
                subject.poison()
                out = run.post(run.call())
                if peer.checked:
                    error = outcome.errors[peer.name, way] = subject.error(out)
                    if not error <= subject.allowed:
                        raise Unavailable(f"wrong: relative error {error:.2g}, allowed {subject.allowed:.2g}")
                replays[peer.name, way] = capture(run.call)
                runs[peer.name, way] = run
            except Unavailable as reason:
                outcome.note(peer.name, way, str(reason))
            except Exception as error:  # a contender's own, of any kind
                outcome.note(peer.name, way, one_line(error))
                _check_alive(f"{peer.name} raised {one_line(error)}")
    try:
        outcome.times = measure(replays | (ceilings or {}), rounds, timer, until)
        if ceilings:
            outcome.rates = rates({name: outcome.times.pop(name) for name in ceilings})
        if hosted:
            short = {entry: run for entry, run in runs.items() if outcome.times[entry].median < HOSTED_US}
            outcome.host = {entry: host_us(run.call) for entry, run in short.items()}
    except Exception as error:
        _check_alive(f"timing raised {one_line(error)}")
        raise
    return outcome


def _check_alive(what: str) -> None:
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise DeviceLost(f"{what}, and the GPU is lost") from error
