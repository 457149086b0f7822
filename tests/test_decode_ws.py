"""The decode_ws family without a GPU: its generated sources run in the stand-in of tests/standin/gluon_standin.py against
the float64 reference, and its binaries are held to their budgets.
"""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from standin.gluon_standin import Launch, Memory, Tensor, TensorMap

from specgen.decode_ws import Shape
from specgen.render import kernel_source
from specgen.runtime import sizes
from specgen.runtime.testing.cases import BATCHES, Batch, Case, edge_batches, fit
from specgen.runtime.testing.pools import Pool
from specgen.variant import Config, Geometry, Variant

NAN = float("nan")
GEOMETRY = Geometry(8, 2, 128, 128, "bfloat16", 16, 128**-0.5, "causal")
NARROW = Config(16, 64, 4, 2, 2, (("maxnreg", 128),))
WIDE = Config(32, 64, 8, 3, 1, (("maxnreg", 128),))


def boxes_of(keys: int, config: Config = NARROW) -> Config:
    """A configuration whose boxes hold so many keys."""
    return replace(config, options=(*config.options, ("unit", keys)))


@dataclass(frozen=True)
class Run:
    """A variant over batches: its geometry's changes, configuration, query rows that it takes, programs of a launch."""

    changes: dict
    config: Config = NARROW
    max_query_len: int = 1
    programs: int = 7
    layout: str = "NHD"

    @property
    def variant(self) -> Variant:
        return Variant("decode_ws", replace(GEOMETRY, **self.changes), self.config, True, 16, self.max_query_len)


RUNS = {
    "gqa": Run({}, programs=20),
    "one_program": Run({}, programs=1),
    "float16": Run({"dtype": "float16"}),
    "mha": Run({"query_heads": 3, "kv_heads": 3}),
    "mqa_32_rows": Run({"query_heads": 32, "kv_heads": 1}, WIDE, programs=12),
    "group_256": Run({"query_heads": 256, "kv_heads": 1}, WIDE),
    "group_7_dim_64": Run({"query_heads": 14, "qk_dim": 64, "v_dim": 64}, replace(NARROW, tile_n=128)),
    "dim_256": Run({"query_heads": 4, "qk_dim": 256, "v_dim": 256}),
    "dim_80": Run({"qk_dim": 80, "v_dim": 80}),
    "dims_192_128": Run({"qk_dim": 192, "v_dim": 128}),
    "dim_24": Run({"qk_dim": 24, "v_dim": 24}),
    "speculative": Run({}, max_query_len=4),
    "speculative_row_blocks": Run({"query_heads": 20, "kv_heads": 1}, max_query_len=3, programs=30),
    "speculative_32_rows": Run({}, WIDE, max_query_len=8),
    "page_64": Run({"page_size": 64}, boxes_of(64)),
    "page_256_hnd": Run({"page_size": 256}, boxes_of(32), layout="HND"),
    "page_2048": Run({"page_size": 2048}),
    "bidirectional": Run({"mask": "bidirectional"}, max_query_len=4),
    "window": Run({"sliding_window": 37}),
    "window_speculative_sinks": Run({"sliding_window": 100, "sinks": True}, max_query_len=4),
    "chunk": Run({"chunk": 64}, max_query_len=4),
    "softcap_sinks": Run({"softcap": 5.0, "sinks": True}, max_query_len=2),
}
LONG = Batch("long", ((1, 70), (1, 4400), (1, 3000)))
MIXED = Batch("mixed", ((1, 63), (9, 40), (0, 5), (1, 64), (40, 3), (2, 130), (1, 15)))


def launch(run: Run, batch: Batch, layout: str, fill: float, order=None) -> tuple[torch.Tensor, torch.Tensor, Pool]:
    """(out, lse) [tokens, ...] after one launch over the batch, unwritten rows NaN; caches around its keys hold `fill`."""
    variant, g = run.variant, run.variant.geometry
    case = Case(
        "", "decode", g.dtype, g.v_dim, "layer", g.query_heads, g.kv_heads, g.qk_dim, g.page_size, g.mask, g.scale,
        g.sliding_window, g.chunk, g.softcap, g.sinks, layout=run.layout,
    )  # fmt: skip
    pool = Pool(case, torch.device("cpu"), [batch], layout, min_tokens=1)
    pool.load(batch, fill=fill)
    pool.out.fill_(NAN)
    lse = torch.full((pool.tokens, g.query_heads), NAN)
    shape = Shape(variant)
    size = sizes.decode_ws_workspace(run.programs, shape.state_rows, g.v_dim)
    scratch = torch.full((size.partial_acc,), NAN), torch.full((size.partial_ml,), NAN)
    counters = torch.zeros(size.counters, dtype=torch.int32)
    tensors = {
        "q": pool.q, "out": pool.out, "lse": lse, "block_table": pool.block_table, "seq_lens": pool.seq_lens,
        "cu_seqlens_q": pool.cu_seqlens_q, "partial_acc": scratch[0], "partial_ml": scratch[1], "counters": counters,
        "sinks_f32": pool.sinks, "sinks_bf16": torch.zeros(1),
    }  # fmt: skip
    if pool.sinks is not None and pool.sinks.dtype == torch.bfloat16:
        tensors |= {"sinks_f32": torch.zeros(1), "sinks_bf16": pool.sinks}
    numbers = {
        "num_seqs": pool.seqs, "max_pages": pool.columns, "store_lse": 1, "block_table_stride": pool.block_table.stride(0),
        "sinks_are_f32": int(pool.sinks is not None and pool.sinks.dtype == torch.float32),
        **{f"{name}_stride_token": tensors[name].stride(0) for name in ("q", "out")},
        **{f"{name}_stride_head": tensors[name].stride(1) for name in ("q", "out")},
    }  # fmt: skip
    caches = {"k_cache_ptr": pool.by_slot(pool.k_cache), "v_cache_ptr": pool.by_slot(pool.v_cache)}
    # Dimensions as the map names them: pages, heads, slots.
    values = {each.name: TensorMap(caches[each.tensor].transpose(1, 2), each.box) for each in variant.tensor_maps}
    for argument in variant.arguments:
        if argument.kind == "pointer":
            tensor = tensors[argument.name.removesuffix("_ptr")]
            values[argument.name] = Tensor(torch.tensor(tensor.storage_offset()), Memory(storage(tensor)))
        elif argument.kind != "tensor_map":
            dtype = {"i32": torch.int32, "i64": torch.int64}[argument.kind]
            values[argument.name] = Tensor(torch.tensor(numbers[argument.name], dtype=dtype))
    kernel = Launch(kernel_source(variant), variant.symbol, run.config.num_warps, run.programs)
    kernel.run([values[argument.name] for argument in variant.arguments], order)
    assert not counters.any(), "counters are zero again"
    return pool.out.clone(), lse, pool


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory, flat."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def check(run: Run, batch: Batch, layout: str = "plain") -> None:
    """Right against the reference, the same bits whatever the cache holds around the keys and in whatever order programs run;
    sequences that are not decode's are left alone.
    """
    out, lse, pool = launch(run, batch, layout, NAN)
    order = random.Random(0).sample(range(run.programs), run.programs)
    for fill, programs in ((float("inf"), None), (0.0, order)):
        again, lse_again, _ = launch(run, batch, layout, fill, programs)
        assert torch.equal(again.nan_to_num(7e7), out.nan_to_num(7e7))
        assert torch.equal(lse_again.nan_to_num(7e7), lse.nan_to_num(7e7))
    rows = [q for q, _ in batch.sequences for _ in range(q)]
    takes = torch.tensor([1 <= q <= run.max_query_len for q in rows] + [False] * (pool.tokens - len(rows)), dtype=torch.bool)
    assert out[~takes].isnan().all() and lse[~takes].isnan().all()
    expected, expected_lse = (each[takes[: len(rows)]] for each in pool.expected())
    error = (out[takes].double() - expected).norm()
    assert error <= 3e-3 * expected.norm()
    assert torch.allclose(lse[takes].double(), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_matches_the_reference(name):
    run = RUNS[name]
    variant = run.variant
    case = replace(Case("", "decode", variant.geometry.dtype, 128), max_seqs=16, max_seq_len=1 << 20, max_tokens=400)
    case = replace(case, sliding_window=variant.geometry.sliding_window, chunk=variant.geometry.chunk)
    known = [fit(batch, case, run.max_query_len) for batch in (*BATCHES, *edge_batches(case)) if not batch.large]
    for number, batch in enumerate([*known, MIXED]):
        check(run, batch, ("plain", "views")[number % 2])


@pytest.mark.parametrize("heads", [(4, 1), (4, 2)], ids=str)
def test_long_items_merge_in_two_levels(heads):
    run = Run({"query_heads": heads[0], "kv_heads": heads[1]}, programs=150)
    check(run, LONG)
