"""What needs a GPU besides numbers: streams, threads, devices, two packages side by side, operators, compile and export.

    python tests/gpu/integration.py llama_3_1_8b_kernels smollm2_135m_kernels

Needs two installed packages; uses a second GPU if there is one. Prints a line per check; exit status 1 if one fails.
"""

import importlib
import sys
import threading
import traceback
import warnings

import torch


class Subject:
    """A package, its first layer as a Case, and calls over pools of it."""

    def __init__(self, name: str):
        self.package = importlib.import_module(name)
        self.testing = importlib.import_module(f"{name}.runtime.testing")
        row = importlib.import_module(f"{name}.dispatch").ATTENTION_ROWS[0]
        manifest = self.package._package.manifest
        self.case = self.testing.Case.of_layer(manifest, row.layer, row.query_heads, row.kv_heads)

    def pool(self, device, sequences=((1, 700), (17, 90), (3, 20), (1, 0))):
        batch = self.testing.Batch("integration", sequences)
        pool = self.testing.Pool(self.case, torch.device(device), [batch])
        pool.load(batch, fill=float("nan"))
        return pool

    def run(self, pool, **options):
        return self.package.attention(**pool.arguments(), **options)

    def right(self, pool, label: str) -> None:
        self.testing.assert_matches(pool, None, label)


def check_streams(a: Subject, b: Subject) -> None:
    """Two streams of one device at a time, many calls each: no scratch is shared."""
    pools = [a.pool("cuda", ((1, 3000), (1, 5), (2, 900))) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in pools]
    torch.cuda.synchronize()
    for _ in range(50):
        for pool, stream in zip(pools, streams):
            with torch.cuda.stream(stream):
                a.run(pool)
    torch.cuda.synchronize()
    for pool in pools:
        a.right(pool, "two streams")


def check_threads(a: Subject, b: Subject) -> None:
    """Four new threads, each with its own stream: first launches of a thread have no current context."""
    failures = []

    def work(subject, pool):
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
                for _ in range(50):
                    subject.run(pool)
                torch.cuda.current_stream().synchronize()
            subject.right(pool, "threads")
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    work_items = [(subject, subject.pool("cuda")) for subject in (a, b, a, b)]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=item) for item in work_items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def check_side_by_side(a: Subject, b: Subject) -> None:
    """Two packages in one process, calls in turn."""
    pools = a.pool("cuda"), b.pool("cuda")
    for _ in range(3):
        a.run(pools[0])
        b.run(pools[1])
    a.right(pools[0], "first package")
    b.right(pools[1], "second package")


def check_devices(a: Subject, b: Subject) -> None:
    """A tensor's device decides where a kernel runs, whatever is current; graphs on the other device too."""
    if torch.cuda.device_count() < 2:
        print("  one GPU only: not run")
        return
    torch.cuda.set_device(0)
    pools = [a.pool(f"cuda:{i}") for i in (0, 1)]
    for pool in pools[::-1]:
        a.run(pool)
    assert torch.cuda.current_device() == 0
    for pool in pools:
        a.right(pool, str(pool.device))
    a.package.warmup(torch.device("cuda:1"))
    pool = a.pool("cuda:1")
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a.run(pool)
        pool.poison_out()
        graph.replay()
        torch.cuda.synchronize()
    a.right(pool, "graph on the second device")
    k, v = (
        torch.randn(2, a.case.kv_heads, d, device="cuda:1").to(a.case.torch_dtype)
        for d in (a.case.qk_dim, a.case.v_dim)
    )
    slots = torch.tensor([0, 3], device="cuda:1")
    a.package.append_kv(k, v, pool.k_cache, pool.v_cache, slot_mapping=slots, layer=a.case.layer)
    assert torch.equal(pool.k_cache[0, 0], k[0]) and torch.equal(pool.v_cache[0, 3], v[1])


def check_opcheck(a: Subject, b: Subject) -> None:
    """torch.library.opcheck of the operators on the device."""
    pool = a.pool("cuda")
    given = pool.arguments()
    operators = getattr(torch.ops, a.package.__name__)
    values = [given[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")]
    torch.library.opcheck(operators.attention.default, (*values, None, None, a.case.layer, "shapes"))
    torch.library.opcheck(operators.attention_lse.default, (*values, 20, None, a.case.layer, "shapes"))


def check_compile(a: Subject, b: Subject) -> None:
    """torch.compile(fullgraph=True) and torch.export give the eager bits; `out` is mutated in a compiled graph."""
    pool = a.pool("cuda")
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    values = [pool.arguments()[name] for name in names]
    layer = a.case.layer

    def step(*tensors):
        return a.package.attention(**dict(zip(names, tensors)), layer=layer, max_seqlen_q=32) * 2

    def into(out, *tensors):
        a.package.attention(**dict(zip(names, tensors)), layer=layer, out=out)
        return out + 1

    eager = step(*values)[: pool.total]
    for backend in ("aot_eager", "inductor"):
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        assert torch.equal(compiled(*values)[: pool.total], eager), f"{backend} differs from eager"
    pool.poison_out()
    added = torch.compile(into, fullgraph=True, backend="aot_eager")(pool.out, *values)
    a.right(pool, "compiled with out")
    assert torch.equal(added[: pool.total], (pool.out + 1)[: pool.total])

    class Step(torch.nn.Module):
        def forward(self, *tensors):
            return step(*tensors)

    exported = torch.export.export(Step(), tuple(values))
    assert torch.equal(
        exported.module()(*values)[: pool.total], eager
    ), "the exported program differs from eager"


CHECKS = (check_streams, check_threads, check_side_by_side, check_devices, check_opcheck, check_compile)


def main() -> int:
    """Run every check on the packages named; the exit status."""
    subjects = [Subject(name) for name in sys.argv[1:]]
    if len(subjects) != 2:
        sys.exit(__doc__)
    with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
        warnings.simplefilter("always")
        failed = 0
        for check in CHECKS:
            try:
                check(*subjects)
                print(f"{check.__name__[6:]:16} ok", flush=True)
            except Exception:  # noqa: BLE001 - reported
                failed += 1
                print(f"{check.__name__[6:]:16} FAILED\n{traceback.format_exc()[-1500:]}", flush=True)
    for text in dict.fromkeys(
        str(w.message) for w in caught if "SPECGEN" in str(w.message) or "ctypes" in str(w.message)
    ):
        print(f"warned: {text[:300]}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
