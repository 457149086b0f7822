"""Times of calls on a GPU: captured as CUDA graphs, replayed in interleaved rounds with a cold, clean L2.

L2 is flushed by reading: writing would leave dirty lines, whose write-back is then charged to the call that
is timed. Touches the current CUDA device; nothing is imported from it before a timer is made.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Protocol

import torch

FLUSH_BYTES = 384 << 20  # read before each replay: several times the largest L2
READ_BYTES = 4 << 30  # of the read and the copy bandwidth
MATRIX = 8192  # side of the product that measures the matrix rate
LEAST_ROUNDS = 5  # that are timed, however short the time
WARM_UPS = 3  # calls before a capture: they compile, allocate and load
EMPTY, READ, COPY, MATMUL = "empty", "read", "copy", "matmul"  # what `ceilings` measures

Call = Callable[[], object]


@dataclass(frozen=True)
class Samples:
    """Times of one call in microseconds, in the order of rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile."""
        ordered = sorted(self.values)
        return tuple(ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))


class Timer(Protocol):
    """What `measure` needs of a device."""

    def enqueue(self, call: Call) -> None:
        """Have `call` timed, after what was enqueued before it; need not wait for it."""

    def collect(self) -> list[float]:
        """Wait; microseconds of each call since the last `collect`, in order."""


class GraphTimer:
    """Times of replays by CUDA events, with L2 flushed before each."""

    def __init__(self):
        self._flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self._sum = torch.empty((), device="cuda")
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def enqueue(self, call: Call) -> None:
        """Flush, then launch `call` between two events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._flush, dim=0, out=self._sum)
        start.record()
        call()
        end.record()
        self._events.append((start, end))

    def collect(self) -> list[float]:
        """Synchronise and read the events."""
        torch.cuda.synchronize()
        times = [1e3 * start.elapsed_time(end) for start, end in self._events]
        self._events.clear()
        return times


def capture(call: Call, warm_ups: int = WARM_UPS) -> Call:
    """A replay of `call` as a CUDA graph, after so many plain calls of it on the stream of the capture.

    Tensors that the call reads must live as long as the replay: it keeps `call`, and so what that holds.
    """
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        with torch.cuda.graph(graph, stream=stream):
            result = call()

    def replay() -> object:
        graph.replay()
        return result

    replay.call = call
    return replay


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures: what is kept per stream (workspaces) is then made once, in the warm-ups."""
    return torch.cuda.Stream()


def measure(
    calls: Mapping[str, Call], rounds: int = 20, timer: Timer | None = None, until: float | None = None
) -> dict[str, Samples]:
    """Time the calls (replays, as a rule) in `rounds` interleaved rounds; samples by name.

    Each round runs all of them once, in an order of its own (the same in every run), so that none always
    follows the same other; one round ahead is not counted. `timer` is a GraphTimer by default. After `until`,
    a time of time.monotonic, no round begins once LEAST_ROUNDS are counted.
    """
    timer = GraphTimer() if timer is None else timer
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        if until is not None and number > LEAST_ROUNDS and time.monotonic() > until:
            break
        order = list(calls)
        Random(number).shuffle(order)
        for name in order:
            timer.enqueue(calls[name])
        for name, value in zip(order, timer.collect(), strict=True):
            if number:
                times[name].append(value)
    return {name: Samples(tuple(values)) for name, values in times.items()}


def ceilings() -> dict[str, Call]:
    """Replays that measure the device beside the calls: EMPTY, an empty graph; READ, a sum over 4 GiB; COPY,
    4 GiB read and written by a kernel; MATMUL, a bfloat16 product of two 8192 x 8192 matrices. `rates` turns their times into
    rates. Holds 8.5 GiB.
    """
    source, target = (torch.ones(READ_BYTES // 4, device="cuda") for _ in range(2))
    total = torch.empty((), device="cuda")
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    calls = {
        EMPTY: lambda: None,
        READ: lambda: torch.sum(source, dim=0, out=total),
        COPY: lambda: torch.neg(source, out=target),  # copy_ is the driver's own node in a graph, and slower: 2780 GB/s on an H200
        MATMUL: lambda: torch.matmul(a, b, out=product),
    }
    return {name: capture(call) for name, call in calls.items()}


def rates(times: Mapping[str, Samples]) -> dict[str, float]:
    """read_GBs and copy_GBs (bytes read and written), matmul_TFLOPs and empty_us, from the ceilings' times.

    The empty graph is their zero.
    """
    empty = times[EMPTY].median
    read, copy, matmul = (times[name].median - empty for name in (READ, COPY, MATMUL))
    return {
        "read_GBs": READ_BYTES / read / 1e3,
        "copy_GBs": 2 * READ_BYTES / copy / 1e3,
        "matmul_TFLOPs": 2 * MATRIX**3 / matmul / 1e6,
        "empty_us": empty,
    }


def host_us(
    call: Call, calls: int = 50, loops: int = 5, clock=time.perf_counter, wait: Call | None = None
) -> float:
    """Microseconds of the host for one call: the median over loops that do not wait inside."""
    wait = torch.cuda.synchronize if wait is None else wait
    found = []
    for _ in range(loops):
        wait()
        start = clock()
        for _ in range(calls):
            call()
        found.append(1e6 * (clock() - start) / calls)
    wait()
    return statistics.median(found)
