"""A trial of `specgen tune` and what becomes of it: what passes between the sweep and the processes that run it. Frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specgen.bench.workloads import Workload
from specgen.tuning.records import Gpu


class Kernels(NamedTuple):
    """The symbols that one call launches: `decode`, `prefill` or both, or `varlen` alone."""

    decode: str | None = None
    prefill: str | None = None
    varlen: str | None = None


@dataclass(frozen=True)
class Trial:
    """Kernels to check and to time on one batch, in the same interleaved rounds; none, to ask where they would run.

    `folder`, `stamp`, `package` and `arch` are the bundle's, `layer` as in its groups; the batch is drawn from `seed`.
    """

    folder: str
    stamp: str
    package: str
    arch: str
    layer: Mapping
    workload: Workload
    kernels: tuple[Kernels, ...]
    rounds: int
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of one of a trial's kernels; the fields of a Measurement that a trial finds."""

    status: str
    samples_us: tuple[float, ...] = ()
    empty_us: float = 0.0
    error: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Answer:
    """Where a trial ran, and its outcomes: one for each of its kernels, or none with the reason why the batch was `skipped`.

    mode, arch: as runtime/device.py has them: "binary" with the bundle's arch where its kernels run as they are. run: names
    this process. healthy: False where the device is of no use to this process any more.
    """

    gpu: Gpu
    mode: str
    arch: str
    driver: str
    torch: str
    run: str
    outcomes: tuple[Outcome, ...] = ()
    skipped: str = ""
    healthy: bool = True
