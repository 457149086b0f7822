"""A script: plain decode in Triton's interpreter, over batches of items that differ and that are alike, among few programs and many.
Results against the float64 reference, partial states in the slots that even_split.py says. Needs TRITON_INTERPRET=1.
"""

import importlib.util
import random
import tempfile
from pathlib import Path

import torch
from even_split import decode_split

from specgen.render import kernel_source
from specgen.runtime import sizes
from specgen.runtime.testing.cases import Batch, Case
from specgen.runtime.testing.pools import Pool
from specgen.variant import Config, Geometry, Variant

GEOMETRY = Geometry(4, 2, 16, 16, "float16", 16, 0.25, "causal")
WINDOW = Geometry(6, 1, 16, 16, "float16", 16, 0.25, "causal", sliding_window=37)
VARIANTS = [Variant("decode", g, Config(16, 16, 4, 1, 1), False, 16, rows) for g, rows in ((GEOMETRY, 1), (WINDOW, 4))]
BATCHES = [
    ((1, 700), *((1, 0),) * 12),
    (*((1, 0),) * 5, (9, 40), (1, -1), *((1, 0),) * 5, (1, 300)),
    ((1, 15), (1, 16), (0, 5), (1, -1), (1, 20)),
    ((1, 100),) * 5,
    ((0, 3), (0, 0)),
]


def batches(rng: random.Random) -> list[Batch]:
    drawn = [tuple((rng.choice((0, 1, 1, 1, 3, 6)), rng.choice((-1, 0, 15, 16, 90, 200))) for _ in range(6)) for _ in range(2)]
    return [Batch("split", sequences) for sequences in (*BATCHES, *drawn)]


def function_of(variant: Variant, folder: str):
    path = Path(folder) / f"{variant.symbol}.py"
    path.write_text(kernel_source(variant))
    spec = importlib.util.spec_from_file_location(variant.symbol, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, variant.symbol)


def check(variant: Variant, function, batch: Batch, programs: int) -> None:
    g, c = variant.geometry, variant.config
    case = Case(
        "", "decode", g.dtype, g.v_dim, "layer", g.query_heads, g.kv_heads, g.qk_dim, g.page_size, g.mask, g.scale,
        g.sliding_window, max_seqs=16, max_seq_len=1024, max_tokens=128,
    )  # fmt: skip
    pool = Pool(case, torch.device("cpu"), [batch], min_tokens=1)
    pool.load(batch, fill=float("nan"))
    pool.out.fill_(float("nan"))
    size = sizes.decode_workspace(programs, c.block_m, g.v_dim)
    nan = float("nan")
    tensors = {
        "q": pool.q, "k_cache": pool.by_slot(pool.k_cache), "v_cache": pool.by_slot(pool.v_cache), "out": pool.out,
        "block_table": pool.block_table, "seq_lens": pool.seq_lens, "cu_seqlens_q": pool.cu_seqlens_q,
        "lse": torch.full((pool.tokens, g.query_heads), nan), "partial_acc": torch.full((size.partial_acc,), nan),
        "partial_ml": torch.full((size.partial_ml,), nan), "counters": torch.zeros(size.counters, dtype=torch.int32),
    }  # fmt: skip
    values = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    values |= {"num_seqs": pool.seqs, "max_pages": pool.columns, "store_lse": 1, "block_table_stride": pool.columns}
    for name, dims in {"q": "token head", "out": "token head", "k_cache": "page slot head", "v_cache": "page slot head"}.items():
        values |= {f"{name}_stride_{dim}": stride for dim, stride in zip(dims.split(), tensors[name].stride())}
    function[(programs,)](*(values[argument.name] for argument in variant.arguments))

    where = f"{variant.symbol}, {programs} programs, {batch.sequences}"
    takes = torch.tensor([1 <= q <= variant.max_query_len for q, _ in batch.sequences for _ in range(q)], dtype=torch.bool)
    out, lse = (each[: len(takes)] for each in (pool.out, tensors["lse"]))
    expected, expected_lse = pool.expected()
    assert out[~takes].isnan().all() and lse[~takes].isnan().all(), where
    assert torch.allclose(out[takes].double(), expected[takes], rtol=0, atol=4e-3), where
    assert torch.allclose(lse[takes].double(), expected_lse[takes], rtol=0, atol=1e-4), where
    assert not tensors["counters"].any(), where
    written = (~tensors["partial_acc"].view(2 * programs, -1).isnan().all(1)).nonzero().flatten().tolist()
    split = decode_split(variant, tuple((q, max(q + before, 0)) for q, before in batch.sequences), programs)
    assert written == sorted(slot for slots, _ in split.merges() for slot in slots), where


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            function = function_of(variant, folder)
            for batch in batches(random.Random(0)):
                for programs in (3, 20):
                    check(variant, function, batch, programs)
