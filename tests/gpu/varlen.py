"""attention_varlen on a GPU, bfloat16: small batches that have broken kernels, then shapes of an encoder, of vision
towers and of a first prefill, against float64.

    python tests/gpu/varlen.py --spec varlen_check.yaml
    specgen build varlen_check.yaml && pip install its wheel
    python tests/gpu/varlen.py [RESULT.txt]

Prints one line per layer and check: runs, and the worst errors: of the whole output, of one row, of the lse; each
beside its bound. Exit status 1 if anything failed. The keys around those of a sequence, between two sequences and
behind the last, hold NaN or Inf, which must not change a bit.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path

import torch

NAME = "varlen_check_kernels"
NAN, INF = float("nan"), float("inf")
LAYERS = {
    "minilm": "query_heads: 12, kv_heads: 12, head_dim: 32, mask: bidirectional",
    "vision_80": "query_heads: 16, kv_heads: 16, head_dim: 80, mask: bidirectional",
    "vision_72": "query_heads: 16, kv_heads: 16, head_dim: 72, mask: bidirectional",
    "gqa": "query_heads: 32, kv_heads: 8, head_dim: 128",
    "two_dims": "query_heads: 16, kv_heads: 16, head_dim: {qk: 192, v: 128}",
    "window": "query_heads: 8, kv_heads: 2, head_dim: 64, sliding_window: 128",
    "chunk_sinks": "query_heads: 8, kv_heads: 1, head_dim: 64, chunk: 96, sinks: true",
    "softcap_alibi": "query_heads: 12, kv_heads: 4, head_dim: 64, softcap: 50.0, alibi: true",
    "ranges": "query_heads: 8, kv_heads: 2, head_dim: 64, prefix_ranges: true, sliding_window: 16",
}
# Lengths of a layer's workload, as (query rows, keys before them).
SENTENCES = tuple((7 + 37 * i % 250, 0) for i in range(64))
IMAGES = ((4096, 0), (1024, 0), (256, 0), (1025, 0), (577, 0))
PROMPTS = ((2048, 0), (4096, 0), (1, 0), (333, 0), (600, 2400), (17, 9000))
WORKLOADS = {"minilm": SENTENCES, "vision_80": IMAGES, "vision_72": IMAGES}


def spec() -> str:
    """The spec of the package that this script runs."""
    entries = (
        f"  - {{name: {name}, layers: [{i}], {fields}}}" for i, (name, fields) in enumerate(LAYERS.items())
    )
    return (
        "version: 1\nname: varlen_check\ndtype: bfloat16\nattention:\n" + "\n".join(entries) + "\n"
        "kv_cache: {dtype: bfloat16, page_size: 16}\ntargets: [h200]\n"
        "limits: {max_seqs: 256, max_seq_len: 32768, max_tokens: 16384, max_spec_tokens: 8}\n"
    )


class Subject:
    """The package, its helpers, and the worst errors of one check at a time."""

    def __init__(self):
        self.package = importlib.import_module(NAME)
        self.testing = importlib.import_module(f"{NAME}.runtime.testing")
        self.reference = importlib.import_module(f"{NAME}.runtime.reference")
        manifest = Path(self.package.__file__).parent / "manifest.json"
        self.manifest = json.loads(manifest.read_text(encoding="utf-8"))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.begin()

    def begin(self) -> None:
        """Forget the errors."""
        self.runs, self.tensor, self.row, self.lse = 0, 0.0, 0.0, 0.0

    def case(self, layer: str):
        """The layer, of no one specialization."""
        heads = next((x["query_heads"], x["kv_heads"]) for x in self.manifest["layers"] if x["name"] == layer)
        return self.testing.Case.of_layer(self.manifest, layer, *heads)

    def check(self, pool, label: str, **options) -> torch.Tensor:
        """Call over a loaded pool, compare and note the errors; the bits of the output."""
        pool.poison_out()
        _, lse = pool.call(self.package, return_lse=True, **options)
        self.note(self.testing.assert_matches(pool, lse, label))
        return self.testing.bits(pool.result())

    def note(self, errors) -> None:
        """Count a run."""
        self.runs += 1
        self.tensor, self.row = max(self.tensor, errors.tensor), max(self.row, errors.row)
        self.lse = max(self.lse, errors.lse)


def edges(subject: Subject, layer: str) -> None:
    """Every batch in every layout: lengths 0, rows without keys, partial tiles, edges of a window."""
    case, testing = subject.case(layer), subject.testing
    for batch in (*testing.BATCHES, *testing.edge_batches(case)):
        if batch.large and subject.device.type == "cpu":
            continue
        fitted = testing.fit(batch, case, case.max_tokens)
        for layout in ("plain",) if batch.large else testing.LAYOUTS:
            tokens = min(case.max_tokens, fitted.tokens + 3)
            pool = testing.PackedPool(case, subject.device, [fitted], layout, min_tokens=tokens)
            seen = []
            for fill in (0.0, NAN, INF):
                pool.load(fitted, fill=fill)
                seen.append(subject.check(pool, f"{batch.name}, {layout}, {fill}"))
            same = all(torch.equal(seen[0], other) for other in seen)
            assert same, f"{batch.name}, {layout}: what lies around the keys changes bits"


def workload(subject: Subject, layer: str) -> None:
    """Lengths of a model's own."""
    case, testing = subject.case(layer), subject.testing
    batch = testing.fit(testing.Batch("workload", WORKLOADS.get(layer, PROMPTS)), case, case.max_tokens)
    for layout in ("plain", "odd"):
        pool = testing.PackedPool(case, subject.device, [batch], layout)
        pool.load(batch, fill=NAN)
        first = subject.check(pool, f"workload, {layout}")
        assert torch.equal(
            first, subject.check(pool, f"workload, {layout}")
        ), f"{layout}: another run, other bits"


def fused(subject: Subject, layer: str) -> None:
    """q, k and v are slices of one matrix of rows, as a projection gives them; nothing is copied."""
    case = subject.case(layer)
    lengths = [5, 0, 300, 1, 64]
    generator = torch.Generator(subject.device).manual_seed(0)
    counts = (case.query_heads, case.qk_dim), (case.kv_heads, case.qk_dim), (case.kv_heads, case.v_dim)
    widths = [heads * dim for heads, dim in counts]
    rows = torch.randn(sum(lengths), sum(widths), generator=generator, device=subject.device)
    q, k, v = (
        part.unflatten(1, shape) for part, shape in zip(rows.to(case.torch_dtype).split(widths, 1), counts)
    )
    cu_seqlens = torch.tensor([0, *lengths], device=subject.device).cumsum(0, dtype=torch.int32)
    given = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    extras = {}
    if case.sinks:
        extras["sinks"] = torch.linspace(-1, 3, case.query_heads, device=subject.device)
    if case.alibi:
        extras["alibi_slopes"] = torch.linspace(0.01, 1, case.query_heads, device=subject.device)
    if case.prefix_ranges:
        ranges = [[[0, min(4, n)], [n // 2, n]] for n in lengths]
        extras["prefix_ranges"] = torch.tensor(ranges, dtype=torch.int32, device=subject.device)
    out, lse = subject.package.attention_varlen(
        q, k, v, **given, layer=layer, return_lse=True, checks="full", **extras
    )
    expected, expected_lse = subject.reference.attention_varlen(q, k, v, **given, **extras, **case.formula)
    errors = subject.reference.errors(out, expected, lse, expected_lse)
    subject.note(errors)
    assert errors.within(subject.reference.tolerance(case.torch_dtype)), f"fused QKV: {errors}"


def graph(subject: Subject, layer: str) -> None:
    """One captured call replayed over other lengths."""
    if subject.device.type == "cpu":
        return
    case, testing = subject.case(layer), subject.testing
    batches = [
        testing.Batch("captured", ((24, 10),) * 8),
        testing.Batch("one", ((192, 0),) + ((0, 0),) * 7),
        testing.Batch("ragged", ((3, 40), (0, 5), (1, 0), (70, 3000), (1, 9), (100, -20), (0, 0), (9, 1))),
        testing.Batch("nothing", ((0, 0),) * 8),
    ]
    pool = testing.PackedPool(case, subject.device, batches, min_tokens=200)
    pool.load(batches[0])
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        _, lse = pool.call(subject.package, return_lse=True)
    for seed, batch in enumerate(batches):
        pool.load(batch, fill=NAN, seed=seed)
        captured.replay()
        subject.note(testing.assert_matches(pool, lse, f"replay of {batch.name}"))
        replayed = testing.bits(pool.result())
        assert torch.equal(
            replayed, subject.check(pool, batch.name)
        ), f"{batch.name}: other bits than an eager call"


def far_keys(subject: Subject, layer: str) -> None:
    """Keys on both sides of 2^31 elements: the bits of those at the beginning."""
    case, testing = subject.case(layer), subject.testing
    if layer != "minilm" or subject.device.type == "cpu":
        return
    batch = testing.Batch("near", ((40, 9), (5, 70)))
    pool = testing.PackedPool(case, subject.device, [batch])
    pool.load(batch, fill=NAN)
    near = subject.check(pool, "near keys")
    count = int(pool.cu_seqlens_k[-1])
    before = 2**31 // (case.kv_heads * case.qk_dim) - count // 2
    given = pool.arguments()
    for name in ("k", "v"):
        shape = before + count, case.kv_heads, case.qk_dim
        given[name] = torch.full(shape, NAN, dtype=case.torch_dtype, device=subject.device)
        given[name][before:] = getattr(pool, name)[:count]
    for name in ("q", "k"):  # a sequence of no queries and of all keys before
        lengths = pool.arguments()[f"cu_seqlens_{name}"] + (before if name == "k" else 0)
        given[f"cu_seqlens_{name}"] = torch.cat([lengths.new_zeros(1), lengths])
    pool.poison_out()
    subject.package.attention_varlen(**given)
    assert torch.equal(testing.bits(pool.result()), near), "keys beyond 2^31 elements give other bits"
    subject.runs += 1


def main() -> int:
    """Run every check on every layer, print, write; the exit status."""
    if sys.argv[1:2] == ["--spec"]:
        Path(sys.argv[2]).write_text(spec(), encoding="utf-8")
        return 0
    subject, failures = Subject(), []
    subject.package.warmup()
    bounds = subject.reference.tolerance(subject.case("minilm").torch_dtype)
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"{on}, torch {torch.__version__}, built with triton {subject.manifest['triton']}",
        f"{'layer':15}{'check':10}{'runs':>5}{'output':>10}{'row':>10}{'lse/bound':>11}  verdict",
        f"{'bound':30}{bounds.tensor:10.1e}{bounds.row:10.1e}{1:11.2f}",
    ]
    for layer in LAYERS:
        for check in (edges, workload, fused, graph, far_keys):
            subject.begin()
            verdict = "ok"
            try:
                check(subject, layer)
            except Exception as error:  # noqa: BLE001 - the table reports whatever came
                failures.append(
                    f"{layer}, {check.__name__}: {traceback.format_exception_only(error)[-1].strip()}"
                )
                verdict = "FAILED"
            if subject.runs or verdict != "ok":
                errors = f"{subject.tensor:10.1e}{subject.row:10.1e}{subject.lse:11.2f}"
                lines.append(f"{layer:15}{check.__name__:10}{subject.runs:5}{errors}  {verdict}")
    text = "\n".join([*lines, *failures])
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    return int(bool(failures))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
