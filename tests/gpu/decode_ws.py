"""The decode_ws family on a GPU: right against float64, the same bits under graph replay, then timed beside the plain family,
FlashAttention-3 (where it is installed) and cuDNN over a dense cache.

    python tests/gpu/decode_ws_wheels.py FOLDER && pip install FOLDER/*/dist/*.whl
    python tests/gpu/decode_ws.py check [PACKAGE ...]                # all ws_*_kernels found, or those named
    python tests/gpu/decode_ws.py time [RESULT.json [PART ...]]      # ws_bf16_p16_kernels; rows whose name holds a PART

Every decode_ws kernel of a package takes the place of the plain one in its dispatch rows and runs through the package's own
call. Caches hold NaN, then Inf around the keys, block tables -1 behind them. Exit status 1 if anything is wrong.
"""

import importlib
import json
import pkgutil
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch

DEVICE = "cuda"
NAN = float("nan")
SEQS = (1, 2, 5, 17, 64, 100, 150)
ROUNDS = 40


class Ours:
    """A package whose decode rows of one geometry launch `symbol`, or unchanged (None)."""

    def __init__(self, module, symbol: str | None):
        name = module.__name__
        dispatch = importlib.import_module(f"{name}.dispatch")
        eager = importlib.import_module(f"{name}.runtime.eager")
        package = module._package
        self.symbol, self.manifest = symbol, package.manifest
        rows = dispatch.ATTENTION_ROWS
        if symbol:
            self.variant = package.manifest["variants"][symbol]
            rows = tuple(map(self._changed, rows))
        others = dispatch.APPEND_ROWS, dispatch.MERGE_ROWS, dispatch.VARLEN_ROWS
        self.eager = eager.Eager(name, package.directory, rows, *others, package._open_device)
        self.workspace = self.eager._own_workspace(self.eager.open(torch.device(DEVICE, 0)))
        for scratch in (self.workspace.partial_acc, self.workspace.partial_ml):
            scratch.fill_(NAN)

    def _changed(self, row):
        plain = self.manifest["variants"].get(row.decode)
        mine = self.variant
        same = ("query_heads", "kv_heads", "qk_dim", "v_dim", "mask", "sliding_window", "chunk", "softcap", "sinks", "scale")
        alike = plain and row.aligned and all(plain[name] == mine[name] for name in (*same, "max_query_len"))
        return replace(row, decode=self.symbol) if alike else row

    def __call__(self, layer: str, rows: int, extras: dict, lse: bool = False, **tensors):
        """One call; `rows`: bound on query rows a sequence."""
        names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
        given = (extras.get("sinks"), None, None) if extras else None
        return self.eager.run_attention(
            *(tensors[name] for name in names), rows, None, layer, tensors["out"], lse, self.workspace, "shapes", given
        )


def symbols(module) -> list[str]:
    """The package's decode_ws kernels."""
    return [name for name, variant in module._package.manifest["variants"].items() if variant["family"] == "decode_ws"]


def layer_of(module, variant: dict) -> str:
    """The layer that a kernel serves."""
    names = ("query_heads", "kv_heads", "qk_dim", "v_dim", "mask", "sliding_window", "chunk", "softcap", "sinks", "scale")
    return next(
        layer["name"] for layer in module._package.manifest["layers"] if all(layer[name] == variant[name] for name in names)
    )


def batch_of(testing, rng: random.Random, seqs: int, most_rows: int):
    """A ragged batch: 0 to 5000 keys, 0 to most_rows query rows and now and then more, which are not decode's."""
    sequences = []
    for _ in range(seqs):
        keys = rng.choice((0, 1, 15, 16, 17, 63, 64, 65, 1024, rng.randrange(5000), int(5000 ** rng.random())))
        rows = rng.choice((most_rows, most_rows, most_rows, 1, 0, most_rows + 3 if seqs > 2 else 1))
        sequences.append((rows, keys - rows))
    return testing.Batch(f"{seqs} sequences", tuple(sequences))


class Wrong(dict):
    """symbol -> what is wrong, the first of it."""

    def note(self, symbol: str, is_right: bool, what: str) -> None:
        if not is_right:
            self.setdefault(symbol, what)


def check(module, layer: str, most_rows: int, kernels: list[Ours], wrong: Wrong) -> dict[str, float]:
    """Largest relative error of each kernel over batches of 1 to 150 sequences."""
    testing = importlib.import_module(f"{module.__name__}.runtime.testing.cases")
    pools = importlib.import_module(f"{module.__name__}.runtime.testing.pools")
    variant = kernels[0].variant
    case = testing.Case.of_layer(kernels[0].manifest, layer, variant["query_heads"], variant["kv_heads"])
    rng = random.Random(most_rows)
    worst = dict.fromkeys((ours.symbol for ours in kernels), 0.0)
    for number, seqs in enumerate(SEQS):
        batch = batch_of(testing, rng, seqs, most_rows)
        pool = pools.Pool(case, torch.device(DEVICE), [batch], ("plain", "views")[number % 2], min_tokens=1)
        tensors = {name: tensor for name, tensor in pool.arguments().items() if name not in ("layer", "sinks")}
        found: dict[str, tuple] = {}
        for fill in (NAN, float("inf")):
            pool.load(batch, fill=fill, seed=number)
            for ours in kernels:
                pool.out.fill_(NAN)
                out, lse = ours(layer, most_rows, pool.extras(), lse=True, **tensors)
                before = found.setdefault(ours.symbol, (out.clone(), lse))
                same = torch.equal(before[0].nan_to_num(nan=7e4), out.nan_to_num(nan=7e4))
                wrong.note(ours.symbol, same, f"{batch.name}: other bits with {fill} around the keys")
        rows = torch.tensor([q for q, _ in batch.sequences for _ in range(q)], device=DEVICE)
        takes = torch.zeros(pool.tokens, dtype=torch.bool, device=DEVICE)
        takes[: len(rows)] = (rows >= 1) & (rows <= most_rows)
        expected, expected_lse = (each[takes[: len(rows)]] for each in pool.expected())
        for symbol, (out, lse) in found.items():
            wrong.note(symbol, bool(out[~takes].isnan().all()), f"{batch.name}: wrote rows of other sequences")
            error = (out[takes].double() - expected).norm().item() / (expected.norm().item() or 1.0)
            wrong.note(symbol, error < 4e-3, f"{batch.name}: error {error:.1e}")
            close = torch.allclose(lse[takes].double(), expected_lse, rtol=1e-5, atol=1e-4)
            wrong.note(symbol, close, f"{batch.name}: lse")
            worst[symbol] = max(worst[symbol], error)
    for ours in kernels:
        replayed(ours, case, pools, testing, layer, most_rows, wrong)
    return worst


def replayed(ours: Ours, case, pools, testing, layer: str, most_rows: int, wrong: Wrong) -> None:
    """One graph over batches of other lengths gives the bits of eager calls; counters are zero afterwards."""
    rng = random.Random(7)
    batches = [
        testing.Batch("", tuple((most_rows, rng.randrange(most) - most_rows) for _ in range(8))) for most in (4000, 70, 5000, 900)
    ]
    pool = pools.Pool(case, torch.device(DEVICE), batches)
    pool.load(batches[0])
    tensors = {name: tensor for name, tensor in pool.arguments().items() if name not in ("layer", "sinks")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours(layer, most_rows, pool.extras(), **tensors)
    for seed, batch in enumerate(batches):
        pool.load(batch, fill=NAN, seed=seed)
        graph.replay()
        by_graph = pool.result()
        pool.poison_out()
        ours(layer, most_rows, pool.extras(), **tensors)
        wrong.note(ours.symbol, torch.equal(pool.result(), by_graph), "replay and eager call differ")
    wrong.note(ours.symbol, not ours.workspace.counters.any(), "counters are not zero")


def check_all(names: list[str]) -> int:
    """Check every kernel of the packages; the number that failed."""
    found = names or sorted(m.name for m in pkgutil.iter_modules() if m.name.startswith("ws_") and m.name.endswith("_kernels"))
    wrong = Wrong()
    for name in found:
        module = importlib.import_module(name)
        groups: dict[tuple, list[Ours]] = {}
        for symbol in symbols(module):
            ours = Ours(module, symbol)
            groups.setdefault((layer_of(module, ours.variant), ours.variant["max_query_len"]), []).append(ours)
        for (layer, most_rows), kernels in groups.items():
            for symbol, error in check(module, layer, most_rows, kernels, wrong).items():
                print(f"{name:26} {layer:18} {symbol:84} {error:.1e} {wrong.get(symbol, '')}", flush=True)
    print(f"{len(wrong)} kernels wrong", *(f"{symbol}: {what}" for symbol, what in wrong.items()), sep="\n")
    return len(wrong)


RAGGED = [int(2048 * 2.718281828 ** (0.8 * random.Random(i).gauss(0, 1))) + 1 for i in range(64)]
# (name, layer, keys of each sequence, query rows of each)
ROWS = (
    ("dec b1 k512", "llama", [512], 1),
    ("dec b1 k4k", "llama", [4096], 1),
    ("dec b1 k32k", "llama", [32768], 1),
    ("dec b1 k128k", "llama", [131072], 1),
    ("dec b8 k4k", "llama", [4096] * 8, 1),
    ("dec b32 k1k", "llama", [1024] * 32, 1),
    ("dec b32 k4k", "llama", [4096] * 32, 1),
    ("dec b128 k2k", "llama", [2048] * 128, 1),
    ("dec b64 ragged", "llama", RAGGED, 1),
    ("dec b16 one 32k", "llama", [32768] + [512] * 15, 1),
    ("dec 32/32 b16 k2k", "mha", [2048] * 16, 1),
    ("dec 32/1 b16 k8k", "mqa", [8192] * 16, 1),
    ("dec 14/2/64 b32 k2k", "qwen", [2048] * 32, 1),
    ("dec 8/4/256 b16 k4k", "wide", [4096] * 16, 1),
    ("spec b16 q4 k4k", "llama", [4096] * 16, 4),
)


class Work:
    """Tensors of one row: random data, shuffled pages of 16 keys."""

    def __init__(self, layer: dict, keys: list[int], rows: int):
        generator = torch.Generator(DEVICE).manual_seed(0)
        heads, kv_heads, dim, page = layer["query_heads"], layer["kv_heads"], layer["qk_dim"], layer["page_size"]
        pages = [-(-n // page) for n in keys]
        normal = lambda *shape: torch.randn(shape, generator=generator, device=DEVICE).bfloat16()  # noqa: E731
        self.keys, self.rows, self.scale = keys, rows, layer["scale"]
        self.q = normal(len(keys) * rows, heads, dim)
        self.k_cache, self.v_cache = normal(sum(pages), page, kv_heads, dim), normal(sum(pages), page, kv_heads, dim)
        ids = torch.randperm(sum(pages), device=DEVICE, generator=generator).int()
        self.block_table = torch.full((len(keys), max(pages)), -1, dtype=torch.int32, device=DEVICE)
        for row, part in zip(self.block_table, ids.split(pages)):
            row[: len(part)] = part
        self.seq_lens = torch.tensor(keys, dtype=torch.int32, device=DEVICE)
        self.cu_seqlens_q = torch.arange(0, len(keys) * rows + 1, rows, dtype=torch.int32, device=DEVICE)
        self.out = torch.empty_like(self.q)
        self.bytes = 2 * 2 * sum(keys) * kv_heads * dim + 4 * self.q.numel()

    def tensors(self) -> dict:
        names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "out")
        return {name: getattr(self, name) for name in names}

    def reference(self, seq: int) -> torch.Tensor:
        """Float64 rows of one sequence."""
        n, m = self.keys[seq], self.rows
        page = self.k_cache.shape[1]
        ids = self.block_table[seq, : -(-n // page)].long()
        k, v = (cache[ids].flatten(0, 1)[:n].double() for cache in (self.k_cache, self.v_cache))
        q = self.q[seq * m : (seq + 1) * m].double()
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("mhgd,nhd->mhgn", q.view(m, k.shape[1], group, -1), k) * self.scale
        hidden = torch.arange(n, device=DEVICE) > torch.arange(n - m, n, device=DEVICE)[:, None]
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        return torch.einsum("mhgn,nhd->mhgd", scores.softmax(-1), v).reshape(m, q.shape[1], -1)

    def flash3(self):
        from flash_attn_interface import flash_attn_with_kvcache

        pages = self.block_table.clamp(min=0)
        return lambda: flash_attn_with_kvcache(
            self.q, self.k_cache, self.v_cache, cache_seqlens=self.seq_lens, page_table=pages,
            cu_seqlens_q=self.cu_seqlens_q, max_seqlen_q=self.rows, softmax_scale=self.scale, causal=True,
        )  # fmt: skip

    def cudnn(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if len(set(self.keys)) > 1 or self.rows > 1:
            raise ImportError("a dense cache of equal lengths alone")
        dense = [
            torch.stack([cache[ids.long()].flatten(0, 1) for ids in self.block_table]).transpose(1, 2).contiguous()
            for cache in (self.k_cache, self.v_cache)
        ]
        q = self.q.view(len(self.keys), 1, *self.q.shape[1:]).transpose(1, 2).contiguous()

        def run():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, *dense, enable_gqa=True, scale=self.scale)

        return run


def graph_of(run):
    """A captured call; it keeps what it reads alive."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.kept = (run, kept)
    return graph


def measure(graphs: dict) -> dict[str, float]:
    """Median microseconds of each graph's replay, interleaved; L2 is flushed by reading before each."""
    flush, total = torch.ones(96 << 20, device=DEVICE), torch.empty((), device=DEVICE)
    events = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            torch.sum(flush, dim=0, out=total)
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            graph.replay()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize()
    return {name: sorted(1e3 * a.elapsed_time(b) for a, b in pairs)[ROUNDS // 2] for name, pairs in events.items()}


def time_all(path: str | None, parts: list[str]) -> int:
    """Time the rows; the number of wrong results."""
    module = importlib.import_module("ws_bf16_p16_kernels")
    layers = {layer["name"]: layer for layer in module._package.manifest["layers"]}
    ours = {symbol: Ours(module, symbol) for symbol in symbols(module)}
    plain, one, wrong, results = Ours(module, None), torch.zeros(1, device=DEVICE), 0, []
    for name, layer, keys, rows in ROWS:
        if parts and not any(part in name for part in parts):
            continue
        work = Work(layers[layer], keys, rows)
        runs = {"plain": lambda: plain(layer, rows, {}, **work.tensors())}
        for symbol, mine in ours.items():
            bound = mine.variant["max_query_len"]
            if layer_of(module, mine.variant) == layer and bound == rows:
                runs[symbol] = lambda mine=mine: mine(layer, rows, {}, **work.tensors())
        errors = {}
        for each, run in runs.items():
            work.out.fill_(NAN)
            run()
            chosen = range(0, len(keys), max(1, len(keys) // 4))
            found, expected = (
                torch.cat(x) for x in zip(*((work.out[s * rows : (s + 1) * rows].double(), work.reference(s)) for s in chosen))
            )
            errors[each] = ((found - expected).norm() / expected.norm()).item()
            wrong += not errors[each] < 4e-3
        for peer in ("flash3", "cudnn"):
            try:
                runs[peer] = getattr(work, peer)()
            except ImportError as error:
                print(f"{name}: no {peer}: {error}")
        graphs = {"empty": graph_of(lambda: one.add_(1))} | {each: graph_of(run) for each, run in runs.items()}
        times = measure(graphs)
        results.append({"workload": name, "bytes": work.bytes, "times_us": times, "error": errors})
        print(f"\n{name}: {work.bytes / 1e6:.0f} MB")
        for each, us in sorted(times.items(), key=lambda item: item[1]):
            rate = f"{work.bytes / (us - times['empty']) / 1e6:5.2f} TB/s" if each != "empty" else ""
            error = f"error {errors[each]:.1e}" if each in errors else ""
            print(f"  {us:8.2f} us  {rate:10} {error:14} {each}", flush=True)
        del graphs, runs, work
        torch.cuda.empty_cache()
    if path:
        software = {"torch": torch.__version__, "triton of the build": module._package.manifest["triton"]}
        result = {"device": torch.cuda.get_device_name(), "software": software, "rows": results}
        Path(path).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return wrong


def main() -> int:
    """What the command line asks for; the exit status."""
    what, *rest = sys.argv[1:] or ["check"]
    if what == "check":
        return int(check_all(rest) > 0)
    return int(time_all(rest[0] if rest else None, rest[1:]) > 0)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
