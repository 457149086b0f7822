"""Decode time under a sliding window: proportional to the window, not to the cache.

    specgen build SPEC && pip install its wheel    # layers `local` (sliding_window: W) and `global`, as written below
    python tests/gpu/window.py window_1024_kernels [RESULT.json]

The spec: version 1, bfloat16, pages of 16; local: query_heads 32, kv_heads 8, head_dim 128, sliding_window 1024; global:
the same without a window. Medians of CUDA-graph replays with L2 flushed by reading; an empty graph is the zero. Exit status
1 if a window over a long cache takes 15 % more than a cache of the window's length.
"""

import importlib
import json
import sys
from pathlib import Path

import torch

SEQS, WINDOW, LONG = 32, 1024, 32768
ROUNDS = 60


def median_us(call, flush) -> float:
    """Median time of a captured call in microseconds; L2 is flushed by reading before each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in events:
        flush.sum()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(1e3 * start.elapsed_time(end) for start, end in events)[ROUNDS // 2]


def decode(package, layer: str, keys: int):
    """A decode step of SEQS sequences with `keys` keys each, over fresh random data."""
    device = torch.device("cuda")
    pages = -(-keys // 16)
    k, v = (torch.randn(SEQS * pages, 16, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(SEQS, 32, 128, device=device, dtype=torch.bfloat16)
    table = torch.randperm(SEQS * pages, device=device).int().view(SEQS, pages)
    lens = torch.full((SEQS,), keys, dtype=torch.int32, device=device)
    cu = torch.arange(SEQS + 1, dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    tables = dict(block_table=table, seq_lens=lens, cu_seqlens_q=cu)
    return lambda: package.attention(q, k, v, **tables, max_seqlen_q=1, layer=layer, out=out)


def main() -> int:
    """Measure, print, write; the exit status."""
    package = importlib.import_module(sys.argv[1])
    package.warmup()
    flush = torch.ones(96 << 20, device="cuda")
    one = torch.zeros(1, device="cuda")
    rows = {
        "empty graph": median_us(lambda: one.add_(1), flush),
        f"{SEQS} x {WINDOW} keys, no window": median_us(decode(package, "global", WINDOW), flush),
        f"{SEQS} x {WINDOW} keys, window {WINDOW}": median_us(decode(package, "local", WINDOW), flush),
        f"{SEQS} x {LONG} keys, window {WINDOW}": median_us(decode(package, "local", LONG), flush),
        f"{SEQS} x {LONG} keys, no window": median_us(decode(package, "global", LONG), flush),
    }
    for name, us in rows.items():
        print(f"{name:32} {us:8.1f} us")
    ratio = rows[f"{SEQS} x {LONG} keys, window {WINDOW}"] / rows[f"{SEQS} x {WINDOW} keys, no window"]
    print(f"window over a long cache / cache of its length: {ratio:.3f}")
    if len(sys.argv) > 2:
        result = {
            "device": torch.cuda.get_device_name(),
            "software": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton of the build": package._package.manifest["triton"]},
            "command": "python tests/gpu/window.py window_1024_kernels RESULT.json",
            "times_us": rows,
            "ratio": ratio,
        }
        Path(sys.argv[2]).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return int(ratio > 1.15)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
