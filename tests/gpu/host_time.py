"""Host time of one decode call of an installed package, on a GPU.

    python tests/gpu/host_time.py [PACKAGE] [LAYER]    # default: llama_3_1_8b_kernels, its first layer

One sequence of few keys, so that the GPU is ahead and no launch waits for room in its queue. Medians of 40 batches of 50
calls, taken in turns, the GPU idle before each; in microseconds, under torch.no_grad() and, as "grad mode", without it.
"""

import importlib
import statistics
import sys
import time

import torch

BATCHES, CALLS = 40, 50


def decode(layer: dict, device: str = "cuda") -> tuple[tuple, dict]:
    """Tensors by place and by name of a decode call of one sequence with two pages."""
    dtype, size = getattr(torch, layer["dtype"]), (layer["page_size"], layer["kv_heads"])
    near = size[::-1] if layer.get("layout") == "HND" else size
    zeros = lambda *shape, kind=dtype: torch.zeros(shape, dtype=kind, device=device)  # noqa: E731
    q, caches = zeros(1, layer["query_heads"], layer["qk_dim"]), (zeros(2, *near, layer[dim]) for dim in ("qk_dim", "v_dim"))
    named = {
        "block_table": torch.tensor([[0, 1]], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([layer["page_size"] + 1], dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "max_seqlen_q": 1,
        "layer": layer["name"],
    }
    if layer.get("sinks"):
        named["sinks"] = zeros(layer["query_heads"], kind=torch.float32)
    return (q, *caches), named


def batch_us(call, tensors: tuple, named: dict) -> float:
    """Host time of one of CALLS calls; the GPU is idle before the first."""
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call(*tensors, **named)
    return (time.perf_counter_ns() - start) / CALLS / 1e3


def main(name: str = "llama_3_1_8b_kernels", layer: str | None = None) -> None:
    package = importlib.import_module(name)
    package.warmup()
    layers = package._package.manifest["layers"]
    tensors, named = decode(next(each for each in layers if layer in (None, each["name"])))
    out = package.attention(*tensors, **named)
    given = named | {"out": out}
    ways = {"with out": given, "without out": named, 'with out, checks="none"': given | {"checks": "none"}, "grad mode, with out": given}
    times = {way: [] for way in ways}
    for _ in range(BATCHES):
        for way, arguments in ways.items():
            with torch.set_grad_enabled(way.startswith("grad")):
                times[way].append(batch_us(package.attention, tensors, arguments))
    print(f"{name} on {torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}: us a call")
    for way, found in times.items():
        print(f"  {way:24} {statistics.median(found):6.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
