"""The decode_ws family without a GPU: its compiled PTX runs in tests/standin/ptx_machine.py against the float64 reference, and its
binaries are held to their budgets. Most runs take minutes together, and run when SPECGEN_PTX_MACHINE is set.
"""

import os
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from even_split import split_of  # noqa: E402
from ptx_machine import Heap, Machine, TensorMap, compiled_ptx  # noqa: E402

from specgen.aot import compile_all
from specgen.binary import CompileJob
from specgen.decode_ws import Shape
from specgen.errors import BuildError
from specgen.render import kernel_source
from specgen.rules import why_not
from specgen.runtime import sizes
from specgen.runtime.testing.cases import BATCHES, Batch, Case, edge_batches, fit
from specgen.runtime.testing.pools import Pool
from specgen.spec import Limits
from specgen.target import load_targets
from specgen.tuning import candidates
from specgen.variant import Config, Geometry, Variant

torch.set_num_threads(1)  # tensors are small
NAN = float("nan")
GEOMETRY = Geometry(8, 2, 128, 128, "bfloat16", 16, 128**-0.5, "causal")
NARROW = Config(16, 64, 4, 2, 2, (("maxnreg", 128),))
BESIDE = replace(NARROW, ctas_per_multiprocessor=1, options=(("maxnreg", 128), ("share", 50)))
WIDE = Config(32, 64, 8, 3, 1, (("maxnreg", 128),))


def boxes_of(keys: int, config: Config = NARROW) -> Config:
    """A configuration whose boxes hold so many keys."""
    return replace(config, options=(*config.options, ("unit", keys)))


def heads_at_once(heads: int) -> Config:
    """A configuration whose programs attend to so many key/value heads, one a warp."""
    return replace(NARROW, tile_n=16, num_warps=heads, options=(("heads", heads), *NARROW.options))


@dataclass(frozen=True)
class Run:
    """A variant over batches: its geometry's changes, configuration, query rows that it takes, programs of a launch,
    sequences of a call.
    """

    changes: dict
    config: Config = NARROW
    max_query_len: int = 1
    programs: int = 5
    layout: str = "NHD"
    max_seqs: int = 32

    @property
    def variant(self) -> Variant:
        return Variant("decode_ws", replace(GEOMETRY, **self.changes), self.config, True, self.max_seqs, self.max_query_len)

    @property
    def case(self) -> Case:
        g = self.variant.geometry
        return Case(
            "", "decode", g.dtype, g.v_dim, "layer", g.query_heads, g.kv_heads, g.qk_dim, g.page_size, g.mask, g.scale,
            g.sliding_window, g.chunk, g.softcap, g.sinks, layout=self.layout, max_seqs=self.max_seqs, max_seq_len=1 << 20,
            max_tokens=400,
        )  # fmt: skip


RUNS = {
    "gqa": Run({}, programs=12),
    "one_program": Run({}, programs=1),
    "float16": Run({"dtype": "float16"}),
    "mha": Run({"query_heads": 3, "kv_heads": 3}),
    "mqa_32_rows": Run({"query_heads": 32, "kv_heads": 1}, WIDE),
    "group_256": Run({"query_heads": 256, "kv_heads": 1}, WIDE),
    "group_7_dim_64": Run({"query_heads": 14, "qk_dim": 64, "v_dim": 64}, replace(NARROW, tile_n=128)),
    "dim_256": Run({"query_heads": 4, "qk_dim": 256, "v_dim": 256}),
    "dim_80": Run({"qk_dim": 80, "v_dim": 80}),
    "dims_192_128": Run({"qk_dim": 192, "v_dim": 128}),
    "dim_24": Run({"qk_dim": 24, "v_dim": 24}),
    "four_heads": Run({"query_heads": 16, "kv_heads": 4}, heads_at_once(4), programs=9),
    "four_heads_speculative": Run({"query_heads": 8, "kv_heads": 8}, heads_at_once(4), max_query_len=4),
    "eight_heads_window": Run({"query_heads": 8, "kv_heads": 8, "sliding_window": 50}, heads_at_once(8)),
    "speculative": Run({}, max_query_len=4),
    "speculative_row_blocks": Run({"query_heads": 20, "kv_heads": 1}, max_query_len=3, programs=9),
    "speculative_32_rows": Run({}, WIDE, max_query_len=8),
    "beside_prefill": Run({}, BESIDE, max_query_len=4),
    "page_64": Run({"page_size": 64}, boxes_of(64)),
    "page_256_hnd": Run({"page_size": 256}, boxes_of(32), layout="HND"),
    "page_2048": Run({"page_size": 2048}),
    "bidirectional": Run({"mask": "bidirectional"}, max_query_len=4),
    "window": Run({"sliding_window": 37}),
    "window_speculative_sinks": Run({"sliding_window": 100, "sinks": True}, max_query_len=4),
    "chunk": Run({"chunk": 64}, max_query_len=4),
    "softcap_sinks": Run({"softcap": 5.0, "sinks": True}, max_query_len=2),
}
# Seconds each; the other runs are those of many programs, rows or elements.
QUICK = ("one_program", "page_64", "softcap_sinks")
slow = pytest.mark.skipif(
    not os.environ.get("SPECGEN_PTX_MACHINE"), reason="minutes on the PTX machine: set SPECGEN_PTX_MACHINE=1"
)
# (query rows, keys before them): stale tails, no keys, rows without keys, and rows that are not decode's.
EDGES = Batch("edges", ((1, 16), (1, -1), (9, 40), (0, 5), (2, -1), (1, 63), (40, 3), (3, 126)))
PAGES = Batch("pages", ((1, 3), (1, 529), (1, 255)))
BEYOND = next(batch for batch in BATCHES if batch.beyond)
LONG = Batch("long", ((1, 70), (1, 2700), (1, 2400)))
# Items that cost more than their keys: in the gaps before their units programs begin and end.
SHORT = {
    "one_long": Batch("one_long", ((1, 1300), *((1, 0),) * 16)),
    "long_last": Batch("long_last", (*((1, 0),) * 9, (9, 40), *((1, 0),) * 6, (1, 700))),
    "one_unit": Batch("one_unit", ((1, 15),) * 5),
    "units_1_2": Batch("units_1_2", ((1, 15), (1, 16), (0, 5), (1, -1), (1, 20))),
}


@dataclass(frozen=True)
class Launched:
    """One launch over a batch: out and lse [tokens, ...], rows that were not written NaN, and partial states likewise."""

    out: torch.Tensor
    lse: torch.Tensor
    partial_acc: np.ndarray
    pool: Pool


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """All of the storage that a tensor is a view of, flat."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


@cache
def ptx_of(variant: Variant) -> str:
    return compiled_ptx(kernel_source(variant), variant)


def launch(run: Run, batch: Batch, layout: str, fill: float, seed: int) -> Launched:
    """One launch, its programs and warps in an order that `seed` chooses; caches around the batch's keys hold `fill`."""
    variant, case = run.variant, run.case
    pool = Pool(case, torch.device("cpu"), [batch], layout, min_tokens=1)
    pool.load(batch, fill=fill)
    pool.out.fill_(NAN)
    lse = torch.full((pool.tokens, case.query_heads), NAN)
    size = sizes.decode_ws_workspace(run.programs, Shape(variant).state_rows, case.v_dim)
    partial_acc, partial_ml = (np.full(count, np.nan, np.float32) for count in (size.partial_acc, size.partial_ml))
    counters = np.zeros(size.counters, np.int32)
    k_cache, v_cache = pool.by_slot(pool.k_cache), pool.by_slot(pool.v_cache)
    float_sinks = pool.sinks is not None and pool.sinks.dtype == torch.float32
    heap, memory = Heap(), {}

    def put(tensor: torch.Tensor) -> int:
        """The address of a tensor, in a copy of all its storage."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = heap.put(bytes_of(tensor))
        return memory[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()

    values = {
        "q_ptr": put(pool.q), "out_ptr": put(pool.out), "lse_ptr": put(lse), "block_table_ptr": put(pool.block_table),
        "seq_lens_ptr": put(pool.seq_lens), "cu_seqlens_q_ptr": put(pool.cu_seqlens_q), "partial_acc_ptr": heap.put(partial_acc),
        "partial_ml_ptr": heap.put(partial_ml), "counters_ptr": heap.put(counters), "k_cache_ptr": put(k_cache),
        "v_cache_ptr": put(v_cache), "num_seqs": pool.seqs, "max_pages": pool.columns, "store_lse": 1, "num_pages": pool.pages,
        "block_table_stride": pool.block_table.stride(0), "sinks_are_f32": int(float_sinks),
        "sinks_f32_ptr": put(pool.sinks) if float_sinks else 0,
        "sinks_bf16_ptr": put(pool.sinks) if pool.sinks is not None and not float_sinks else 0,
    }  # fmt: skip
    named = {"q": pool.q, "out": pool.out, "k_cache": k_cache, "v_cache": v_cache}
    for name, tensor in named.items():
        dims = ("token", "head") if name in ("q", "out") else ("page", "slot", "head")
        values |= {f"{name}_stride_{dim}": stride for dim, stride in zip(dims, tensor.stride())}
    maps = {each.name: TensorMap.of(each, values) for each in variant.tensor_maps}
    parameters = []
    for argument in variant.arguments:
        parameters.append(maps[argument.name] if argument.name in maps else values[argument.name])
        parameters += [0] * (2 * len(maps[argument.name].box) if argument.name in maps else 0)
    warps = [run.config.num_warps, 1, 1, 1, 1]  # attending, loading, and those that fill up a group
    Machine(ptx_of(variant), heap, [*parameters, 0, 0], warps, run.programs, seed).run()

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        found = heap.get(memory[tensor.untyped_storage().data_ptr()], bytes_of(tensor))
        whole = torch.from_numpy(found.copy()).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    assert not heap.get(values["counters_ptr"], counters).any(), "counters are zero again"
    return Launched(taken(pool.out), taken(lse), heap.get(values["partial_acc_ptr"], partial_acc), pool)


def check(run: Run, batch: Batch, layout: str = "plain") -> Launched:
    """Right against the reference, the same bits whatever the cache holds around the keys and in whatever order programs
    and warps run; sequences that are not decode's are left alone; partial states in the slots that the model says.
    """
    launched = launch(run, batch, layout, NAN, seed=1)
    out, lse, pool = launched.out, launched.lse, launched.pool
    again = launch(run, batch, layout, float("inf"), seed=2)
    assert torch.equal(again.out.nan_to_num(7e4), out.nan_to_num(7e4))
    assert torch.equal(again.lse.nan_to_num(7e4), lse.nan_to_num(7e4))
    rows = [q for q, _ in batch.sequences for _ in range(q)]
    takes = torch.tensor([1 <= q <= run.max_query_len for q in rows] + [False] * (pool.tokens - len(rows)), dtype=torch.bool)
    assert out[~takes].isnan().all() and lse[~takes].isnan().all()
    expected, expected_lse = (each[takes[: len(rows)]] for each in pool.expected())
    error = (out[takes].double() - expected).norm()
    assert error <= 3e-3 * expected.norm()
    assert torch.allclose(lse[takes].double(), expected_lse, rtol=0, atol=1e-5)
    lengths = ((q, max(min(q + c + batch.beyond, pool.columns * run.case.page_size), 0)) for q, c in batch.sequences)
    split = split_of(Shape(run.variant), tuple(lengths), run.programs)
    states = launched.partial_acc.reshape(2 * (run.programs + -(-run.programs // sizes.MERGE_GROUP)), -1)
    written = np.flatnonzero(~np.isnan(states).all(axis=1)).tolist()
    assert written == sorted(slot for slots, _ in split.merges() for slot in slots)
    return launched


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in RUNS])
def test_matches_the_reference(name):
    run = RUNS[name]
    check(run, EDGES)
    for batch in (*edge_batches(run.case)[:2], PAGES):
        check(run, fit(batch, run.case, run.max_query_len), "views")


def test_lengths_are_clamped_to_the_block_table():
    run = Run({}, max_query_len=4)
    check(run, fit(BEYOND, run.case, 4))


def test_a_launch_over_nothing():
    check(Run({}), Batch("nothing", ((0, 3), (0, 0))))


@pytest.mark.parametrize("max_seqs", [32, 300])
def test_a_launch_beside_a_prefill_alone(max_seqs):
    run = Run({}, BESIDE, max_query_len=4, max_seqs=max_seqs)
    check(run, Batch("prefill", ((9, 40), (0, 3), (5, 0))))
    check(run, Batch("last", ((9, 40), *((0, 3),) * 20, (1, 30))))


@pytest.mark.parametrize("programs", [3, pytest.param(12, marks=slow), pytest.param(90, marks=slow)])
@pytest.mark.parametrize("batch", [*SHORT])
def test_short_items(batch, programs):
    """Shares that begin and end in gaps, between items and within the long one; more programs than units."""
    check(Run({}, programs=programs), SHORT[batch])


@slow
@pytest.mark.parametrize("name", ["four_heads", "speculative_row_blocks", "window_speculative_sinks", "chunk", "page_64"])
def test_short_items_of_other_shapes(name):
    for batch in SHORT.values():
        check(RUNS[name], fit(batch, RUNS[name].case, RUNS[name].max_query_len))


def sparse(seqs: int, decodes: range) -> Batch:
    """Sequences of which these are decode's, of up to 130 keys; the others have no query row or too many."""
    others = ((0, 20), (0, 0), (2, 5), (0, -1))
    return Batch(f"sparse_{seqs}", tuple((1, 40 * i % 130 - 1) if i in decodes else others[i % 4] for i in range(seqs)))


# A call may have more sequences than one warp reads at once: groups that are full, begun, without work, the last.
MANY = {
    "3": Batch("3", ((2, 40), (1, 100), (0, 3))),
    "256": sparse(256, range(0, 256, 15)),
    "257": sparse(257, range(0, 257, 16)),
    "600": sparse(600, range(37, 600, 13)),
    "600_last": sparse(600, range(580, 600, 9)),
    **{
        f"600_of_{keys}": Batch(f"600_of_{keys}", tuple((1, keys[i // 256]) if i % 100 > 95 else (0, 3) for i in range(600)))
        for keys in ((20, 20, 20), (99, 20, 99), (99, 20, 20))
    },
}
MANY_SEQS = Run({"query_heads": 1, "kv_heads": 1, "qk_dim": 16, "v_dim": 16}, programs=9, max_seqs=600)


@pytest.mark.parametrize("batch", [*MANY])
def test_more_sequences_than_one_warp_reads_at_once(batch):
    check(MANY_SEQS, MANY[batch])


@slow
def test_long_items_merge_in_two_levels():
    check(Run({"query_heads": 4, "kv_heads": 1}, programs=80), LONG)


@slow
@pytest.mark.parametrize(("programs", "keys", "split"), [(8, 256, False), (9, 4096, True), (8, 240, True)])
def test_shares_are_aligned_with_items_that_are_alike(programs, keys, split):
    """31 items of 16 units among 8 programs: 4 whole items each instead of 62 units. 2 of 256 among 9: 64 units each instead of
    57 would be too many more. Lengths that differ are split evenly.
    """
    seqs = ((1, keys - 1),) * (31 if keys == 256 else 2 if keys == 4096 else 30) + (((1, 255),) if keys == 240 else ())
    launched = check(Run({"query_heads": 4, "kv_heads": 1}, programs=programs), Batch("alike", seqs))
    assert np.isnan(launched.partial_acc).all() != split


def job(variant: Variant) -> CompileJob:
    """How a build compiles the variant, for an H200."""
    c = variant.config
    return CompileJob(
        variant.symbol,
        "sm_90",
        kernel_source(variant),
        variant.signature,
        variant.divisibility,
        variant.parameter_bytes,
        c.num_warps,
        c.num_stages,
        variant.compiler_options,
        shared_limit=H200.shared_memory_per_block,
        targets=("h200",),
    )


H200 = load_targets()["h200"]
LIMITS = Limits(max_seqs=256, max_seq_len=131072, max_tokens=16384, max_spec_tokens=8)
LLAMA = replace(GEOMETRY, query_heads=32, kv_heads=8)
BUDGETS = {
    "llama": (LLAMA, 1, 256),
    "llama_float16_thousand_sequences": (replace(LLAMA, dtype="float16"), 1, 1024),
    "llama_speculative": (LLAMA, 8, 256),
    "mqa": (replace(LLAMA, kv_heads=1), 1, 256),
    "dim_64": (replace(LLAMA, query_heads=14, kv_heads=2, qk_dim=64, v_dim=64), 1, 256),
    "dim_256": (replace(LLAMA, query_heads=8, kv_heads=4, qk_dim=256, v_dim=256), 1, 256),
    "window_softcap_sinks": (replace(LLAMA, sliding_window=128, softcap=30.0, sinks=True), 4, 256),
}


def preferred(geometry: Geometry, max_query_len: int, max_seqs: int) -> list[Variant]:
    """Legal specializations of decode_ws, the preferred first."""
    found = [
        Variant("decode_ws", geometry, config, True, max_seqs, max_query_len)
        for config in candidates("decode_ws", geometry, H200, True, max_query_len)
    ]
    return [variant for variant in found if why_not(variant, H200, LIMITS) is None]


@pytest.mark.parametrize("name", BUDGETS)
def test_binaries_keep_to_their_budgets(name):
    """No spill in a loop, as much shared memory as is stated, as many programs on a multiprocessor as the grid counts on."""
    variants = preferred(*BUDGETS[name])
    assert variants
    chosen = {variant.symbol: variant for variant in (variants[0], variants[-1])}
    for (symbol, _), binary in compile_all([job(variant) for variant in chosen.values()]).items():
        assert binary.main_loop_spills == 0 and binary.spill_bytes <= 64
        assert binary.shared_bytes <= Shape(chosen[symbol]).shared_bytes <= binary.shared_bytes + 4096
        assert binary.occupancy >= chosen[symbol].config.ctas_per_multiprocessor


def test_copies_that_leave_l2_first():
    """The hint is another binary of the same resources; a kernel without copies by tensor map refuses it."""
    plain = preferred(LLAMA, 1, 256)[0]
    hinted = job(replace(plain, config=replace(plain.config, options=(("evict_first", 1), *plain.config.options))))
    binaries = [compile_all([each])[each.symbol, "sm_90"] for each in (job(plain), hinted)]
    assert binaries[0].data != binaries[1].data
    assert binaries[0].registers == binaries[1].registers and binaries[1].main_loop_spills == 0
    with pytest.raises(BuildError, match="no copy by tensor map"):
        compile_all([replace(hinted, source="import triton\n\n\n@triton.jit\ndef f(x_ptr):\n    pass\n", symbol="f", signature=(("x_ptr", "*fp32"),), parameters=(), divisibility=())])  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "config", "max_query_len", "reason"),
    [
        ({"page_size": 8}, NARROW, 1, "pages of a power of two of at least 16 keys, not 8"),
        ({"page_size": 48}, NARROW, 1, "pages of a power of two"),
        ({"dtype": "float32"}, NARROW, 1, "elements of 2 bytes, float32 has 4"),
        ({"qk_dim": 100, "v_dim": 100}, NARROW, 1, "heads of a multiple of 16 bytes, not 100 and 100"),
        ({"qk_dim": 512, "v_dim": 512}, NARROW, 1, "heads of up to 256"),
        ({"alibi": True}, NARROW, 1, "neither ALiBi nor prefix ranges"),
        ({"batch_invariant": True}, NARROW, 1, "splits keys evenly over the whole batch, which batch_invariant excludes"),
        ({"kv_heads": 2}, replace(NARROW, tile_n=16, options=(("heads", 4), ("maxnreg", 128))), 1, "which do not divide 2"),
        ({}, boxes_of(64), 1, "takes boxes from one page, of 16 keys, not 64"),
        ({}, replace(NARROW, num_warps=8), 1, "needs 4 warps here, not 8"),
        ({}, replace(NARROW, tile_n=32), 1, "needs 16 keys a warp, tiles of 32 give 8"),
        ({}, replace(NARROW, num_stages=8), 1, "bytes of shared memory per block, h200 has"),
    ],
)
def test_what_is_not_legal_says_why(changes, config, max_query_len, reason):
    variant = Variant("decode_ws", replace(GEOMETRY, **changes), config, True, 256, max_query_len)
    assert reason in why_not(variant, H200, LIMITS)


def test_other_gpus_and_unaligned_views_are_refused():
    variant = Variant("decode_ws", GEOMETRY, NARROW, True, 256, 1)
    assert "is written for sm_90, a100_sxm is sm_80" in why_not(variant, load_targets()["a100_sxm"], LIMITS)
    assert "aligned pointers and strides" in why_not(replace(variant, aligned=False), H200, LIMITS)
    assert why_not(variant, H200, LIMITS) is None
