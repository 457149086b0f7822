"""The prefill_ws family without a GPU: its compiled PTX runs on the machine of tests/standin/ptx_machine.py against the float64
reference, and its binaries are held to their budgets.
"""

import functools
import os
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from ptx_machine import Heap, Machine, TensorMap, compiled_ptx  # noqa: E402

from specgen import loops
from specgen.aot import compile_all
from specgen.binary import CompileJob
from specgen.prefill_ws import GROUP_WARPS, LOADER_WARPS, Shape
from specgen.render import kernel_source
from specgen.resources import machine_code
from specgen.rules import why_not
from specgen.runtime.arguments import call_arguments
from specgen.runtime.sizes import prefill_state_words, prefill_ws_workspace
from specgen.runtime.tensor_maps import FIRST_MAP, LATE, ZERO, resolve
from specgen.runtime.testing.cases import Batch, Case
from specgen.runtime.testing.pools import Pool
from specgen.spec import Limits
from specgen.target import load_targets
from specgen.tuning import candidates
from specgen.variant import Config, Geometry, Variant

torch.set_num_threads(1)  # tensors are small
GEOMETRY = Geometry(4, 1, 64, 64, "bfloat16", 16, 64**-0.5, "causal")
H200 = load_targets()["h200"]
LIMITS = Limits(max_seqs=256, max_seq_len=131072, max_tokens=16384, max_spec_tokens=8)
# What a configuration says of one group of warps, two programs a multiprocessor.
ONE = {"block_m": 64, "tile_n": 64, "num_warps": 4, "num_stages": 2, "ctas_per_multiprocessor": 2, "options": (("maxnreg", 128),)}
SPLIT = ONE | {"options": (("maxnreg", 128), ("split", 1))}
TWO_LOADERS_SPLIT = {"options": (("loaders", 2), ("maxnreg", 128), ("split", 1))}
TWO_LOADERS = ONE | {"options": (("loaders", 2), ("maxnreg", 128))}


@dataclass(frozen=True)
class Run:
    """A variant over batches: its geometry's changes, rows that it leaves to decode, programs of a launch, layout of the caches,
    what is not as in the preferred configuration.
    """

    changes: dict
    max_query_len: int = 8
    programs: int = 3
    layout: str = "NHD"
    config: dict = field(default_factory=dict)

    @property
    def variant(self) -> Variant:
        return preferred(replace(GEOMETRY, **self.changes), self.max_query_len, **self.config)

    @property
    def case(self) -> Case:
        g = self.variant.geometry
        return Case(
            "", "prefill", g.dtype, g.v_dim, "layer", g.query_heads, g.kv_heads, g.qk_dim, g.page_size, g.mask, g.scale,
            g.sliding_window, g.chunk, g.softcap, g.sinks, layout=self.layout, max_seqs=100, max_seq_len=1 << 20, max_tokens=2000,
        )  # fmt: skip


def preferred(geometry: Geometry, max_query_len: int = 8, **config) -> Variant:
    """The first legal specialization for many query rows, but for what `config` says."""
    found = [
        Variant("prefill_ws", geometry, config, True, 256, max_query_len)
        for config in candidates("prefill_ws", geometry, H200, True, max_query_len)
    ]
    first = next(variant for variant in found if not variant.cuts_keys and why_not(variant, H200, LIMITS) is None)
    variant = replace(first, config=replace(first.config, **config))
    assert why_not(variant, H200, LIMITS) is None
    return variant


WIDE = {"query_heads": 2, "qk_dim": 128, "v_dim": 128}
RUNS = {
    "gqa": Run({}),
    "one_program": Run({}, programs=1),
    "group_7_sinks_softcap_window": Run({"query_heads": 7, "sinks": True, "softcap": 30.0, "sliding_window": 128}, 0),
    "group_16_chunk": Run({"query_heads": 16, "chunk": 96}),
    "mha_float16_page_64_hnd": Run({"query_heads": 2, "kv_heads": 2, "dtype": "float16", "page_size": 64}, layout="HND"),
    "bidirectional_page_256": Run({"mask": "bidirectional", "page_size": 256}),
    "dim_128_window": Run(WIDE | {"sliding_window": 300}),
    "dim_128_page_128": Run(WIDE | {"page_size": 128}),
    "dim_80": Run(WIDE | {"qk_dim": 80, "v_dim": 80}),
    "dim_256": Run({"query_heads": 2, "qk_dim": 256, "v_dim": 256}),
    "dims_192_128_page_32": Run({"query_heads": 2, "kv_heads": 2, "qk_dim": 192, "v_dim": 128, "page_size": 32}),
    "one_group": Run({}, config=ONE | {"tile_n": 128}),
    "one_group_dim_128_gqa": Run(WIDE | {"query_heads": 4}, config=ONE),
    "one_group_dim_128_window_sinks": Run(WIDE | {"sliding_window": 300, "sinks": True}, config=ONE),
    "two_loaders_group_16_chunk": Run({"query_heads": 16, "chunk": 96}, config=TWO_LOADERS | {"num_stages": 3}),
    "two_loaders_dim_80_page_64": Run(WIDE | {"qk_dim": 80, "v_dim": 80, "page_size": 64}, config=TWO_LOADERS),
}
SPLITS = {
    "split": Run({}, programs=12, config=SPLIT),
    "split_chunk_float16": Run({"chunk": 950, "dtype": "float16", "query_heads": 7}, programs=90, config=SPLIT | {"tile_n": 128}),
    "split_dim_128_window_sinks": Run(WIDE | {"query_heads": 4, "sliding_window": 1100, "sinks": True}, 0, programs=20, config=SPLIT),
    "split_bidirectional_loaders": Run({"mask": "bidirectional"}, programs=12, config=SPLIT | TWO_LOADERS_SPLIT),
}
# (query rows, keys before them): aligned and unaligned ends, chunks, sequences of decode, without rows, without keys.
BATCH = Batch("mixed", ((128, 0), (9, 31), (8, 42), (0, 5), (70, 200), (10, -10), (12, -7), (33, 350)))
# Of 12 programs the first sequence's row block gets four, each of the third's two.
FEW = Batch("few", ((9, 1500), (3, 40), (20, 900), (33, 0)))
MANY = Batch("many", tuple((random.Random(i).choice((0, 3, 9, 20)), random.Random(i).randrange(40)) for i in range(40)))


@pytest.fixture(scope="module")
def compiled():
    """compiled(variant) -> PTX, once per variant."""
    if not os.environ.get("SPECGEN_PTX_MACHINE"):
        pytest.skip("minutes on the PTX machine: set SPECGEN_PTX_MACHINE=1")
    return functools.cache(lambda variant: compiled_ptx(kernel_source(variant), variant))


def launch(run: Run, ptx: str, batch: Batch, layout: str, fill: float, seed: int, store_lse: int = 1, alone: int | None = None, late=0):
    """(out, lse, pool, machine, places of partial states written) after one launch; rows that it does not write hold NaN; caches
    around the keys hold `fill`.

    `alone`: a sequence, the only one that keeps its rows. `late`: programs that begin late.
    """
    variant, case = run.variant, run.case
    pool = Pool(case, torch.device("cpu"), [batch], layout, min_tokens=1)
    pool.load(batch, fill=fill)
    if alone is not None:
        start, end = pool.cu_seqlens_q[alone : alone + 2].tolist()
        pool.cu_seqlens_q[: alone + 1], pool.cu_seqlens_q[alone + 1 :] = start, end
    pool.out.fill_(float("nan"))
    lse = torch.full((pool.tokens, case.query_heads), float("nan"))
    scratch = prefill_ws_workspace(run.programs, case.v_dim)
    sinks = torch.zeros(1) if pool.sinks is None else pool.sinks
    tensors = {
        "q": pool.q, "k_cache": pool.k_cache, "v_cache": pool.v_cache, "out": pool.out, "lse": lse, "seq_lens": pool.seq_lens,
        "block_table": pool.block_table, "cu_seqlens_q": pool.cu_seqlens_q, "tickets": torch.zeros(scratch.tickets, dtype=torch.int32),
        "prefill_partial": torch.full((scratch.prefill_partial,), float("nan")),
        "sinks_bf16": sinks if sinks.dtype == torch.bfloat16 else torch.zeros(1), "sinks_f32": sinks,
    }  # fmt: skip
    caches = {name: pool.by_slot(tensors[name]) for name in ("k_cache", "v_cache")}
    numbers = {
        "num_seqs": pool.seqs, "max_pages": pool.columns, "store_lse": store_lse, "num_tokens": pool.tokens,
        "num_pages": pool.pages, "block_table_stride": pool.block_table.stride(0), "sinks_are_f32": int(sinks.dtype == torch.float32),
        **{f"{n}_stride_{d}": tensors[n].stride(i) for n in ("q", "out") for i, d in enumerate(("token", "head"))},
        **{f"{n}_stride_{d}": cache.stride(i) for n, cache in caches.items() for i, d in enumerate(("page", "slot", "head"))},
    }  # fmt: skip
    heap = Heap()
    places = {}  # of whole storages, as views may share one
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        places.setdefault(storage.data_ptr(), heap.put(memory(tensor)))
    address = {
        f"{name}_ptr": places[t.untyped_storage().data_ptr()] + t.storage_offset() * t.element_size() for name, t in tensors.items()
    }
    call = call_arguments("prefill_ws", sinks=variant.geometry.sinks)
    given = [address.get(argument.name, numbers.get(argument.name, 0)) for argument in call]
    positions, _ = resolve(call, variant.arguments, variant.tensor_maps)
    made = [TensorMap.of(each, dict(zip((argument.name for argument in call), given))) for each in variant.tensor_maps]
    params = [given[p] if p >= 0 else {ZERO: 0, LATE: late}.get(p) if p > FIRST_MAP else made[FIRST_MAP - p] for p in positions]
    units = [GROUP_WARPS] * Shape(variant).groups + [1] * LOADER_WARPS
    machine = Machine(ptx, heap, params, units, run.programs, seed)
    machine.run()
    for tensor in (pool.out, lse, tensors["tickets"], tensors["prefill_partial"]):
        raw = heap.get(places[tensor.untyped_storage().data_ptr()], memory(tensor))
        memory_tensor(tensor).copy_(torch.from_numpy(raw.copy()))
    assert not tensors["tickets"].any(), "tickets are zero again"
    # Of the four threads that hold a row one writes its maximum and its sum: the words of the others stay as they are.
    written = ~tensors["prefill_partial"].view(-1, prefill_state_words(case.v_dim)).isnan().all(1)
    return pool.out.clone(), lse, pool, machine, written.nonzero().flatten().tolist()


def memory_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def memory(tensor: torch.Tensor) -> np.ndarray:
    return memory_tensor(tensor).numpy()


def check(run: Run, ptx: str, batch: Batch, layout: str) -> None:
    """Right against the reference; the same bits whatever the cache holds around the keys and in whatever order warps run and
    copies arrive, and how many programs begin late; sequences that are decode's are left alone.
    """
    out, lse, pool, *_ = launch(run, ptx, batch, layout, float("nan"), seed=1)
    again, lse_again, *_ = launch(run, ptx, batch, layout, float("inf"), seed=2, late=run.programs // 2)
    assert torch.equal(again.nan_to_num(7e4), out.nan_to_num(7e4))
    assert torch.equal(lse_again.nan_to_num(7e4), lse.nan_to_num(7e4))
    rows = [q for q, _ in batch.sequences for _ in range(q)]
    takes = torch.tensor([q > run.max_query_len for q in rows] + [False] * (pool.tokens - len(rows)), dtype=torch.bool)
    assert out[~takes].isnan().all() and lse[~takes].isnan().all()
    expected, expected_lse = (each[takes[: len(rows)]] for each in pool.expected())
    error = (out[takes].double() - expected).norm()
    assert error <= 3e-3 * expected.norm()
    assert torch.allclose(lse[takes].double(), expected_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_matches_the_reference(compiled, name):
    check(RUNS[name], compiled(RUNS[name].variant), BATCH, "views")


@pytest.mark.parametrize("name", SPLITS)
def test_row_blocks_cut_along_their_keys(compiled, name):
    """Parts merge to what the whole row block is, in any order of arrival, beside whole ones; fewer rows than parts have tiles."""
    run = SPLITS[name]
    ptx = compiled(run.variant)
    check(run, ptx, FEW, "views")
    check(run, ptx, BATCH, "plain")
    if name == "split":
        *_, places = launch(run, ptx, FEW, "plain", 0.0, seed=3)
        assert places == list(range(8))


def test_many_sequences(compiled):
    """More than a warp has lanes: the search goes on from chunk to chunk."""
    check(RUNS["gqa"], compiled(RUNS["gqa"].variant), MANY, "plain")
    split = SPLITS["split"]
    check(split, compiled(split.variant), Batch("many", ((9, 1100), *MANY.sequences, (11, 1300))), "plain")


@pytest.mark.parametrize("name", ["gqa", "dim_128_window", "dim_256", "one_group_dim_128_gqa"])
def test_no_bit_depends_on_the_other_sequences(compiled, name):
    """Which program takes an item, and after which other, the batch decides."""
    run, ptx, start = RUNS[name], compiled(RUNS[name].variant), 0
    out, lse, *_ = launch(run, ptx, BATCH, "plain", 0.0, seed=6)
    for seq, (rows, _) in enumerate(BATCH.sequences):
        own, start = slice(start, start + rows), start + rows
        if rows > run.max_query_len:
            one, one_lse, *_ = launch(run, ptx, BATCH, "plain", 0.0, seed=7 + seq, alone=seq)
            assert torch.equal(one[own], out[own]) and torch.equal(one_lse[own], lse[own])


def test_lse_is_written_only_when_asked(compiled):
    run = RUNS["gqa"]
    out, lse, *_ = launch(run, compiled(run.variant), BATCH, "plain", 0.0, seed=3, store_lse=0)
    assert lse.isnan().all() and not out[:128].isnan().any()


def test_nothing_to_do(compiled):
    run = RUNS["gqa"]
    out, *_ = launch(run, compiled(run.variant), Batch("decode", ((8, 40), (1, 9), (0, 3))), "plain", 0.0, seed=4)
    assert out.isnan().all()


@pytest.mark.parametrize("programs", [1, 3])
def test_order_of_the_items(compiled, programs):
    """Sequences by the octave of their keys, row blocks of a sequence from the last; together the programs take each once."""
    run = replace(RUNS["gqa"], programs=programs)
    batch = Batch("ragged", ((70, 0), (300, 0), (40, 20), (3, 9), (128, 512), (90, 200), (9, 0)))
    _, _, pool, machine, _ = launch(run, compiled(run.variant), batch, "plain", 0.0, seed=5)
    block, start = Shape(run.variant).block_tokens, pool.cu_seqlens_q.tolist()
    mine = [seq for seq, (q, _) in enumerate(batch.sequences) if q > run.max_query_len]
    octaves = {seq: sum(batch.sequences[seq]).bit_length() for seq in mine}
    expected = [
        start[seq] + row for seq in sorted(mine, key=lambda seq: -octaves[seq]) for row in reversed(range(0, batch.sequences[seq][0], block))
    ]
    for number in range(programs):
        copies = [at[1] for program, parameter, at in machine.copied if program == number and parameter == 0]
        tokens = list(dict.fromkeys(copies))
        taken = [expected.index(token) for token in tokens]
        assert taken == sorted(taken) and (programs > 1 or len(taken) == len(expected))
        assert taken[0] == number
    assert sorted({at[1] for _, parameter, at in machine.copied if parameter == 0} & set(expected)) == sorted(expected)


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


LLAMA = replace(GEOMETRY, query_heads=32, kv_heads=8, qk_dim=128, v_dim=128, scale=128**-0.5)
BUDGETS = {
    "llama": LLAMA,
    "llama_float16_page_256": replace(LLAMA, dtype="float16", page_size=256),
    "dim_64": replace(GEOMETRY, query_heads=14, kv_heads=2),
    "dim_256": replace(LLAMA, query_heads=8, kv_heads=4, qk_dim=256, v_dim=256),
    "dim_256_softcap": replace(LLAMA, query_heads=16, kv_heads=8, qk_dim=256, v_dim=256, softcap=50.0),
    "window_sinks": replace(LLAMA, sliding_window=1024, sinks=True),
    "chunk": replace(LLAMA, query_heads=40, chunk=8192),
    "bidirectional_softcap": replace(LLAMA, mask="bidirectional", softcap=50.0),
    "dims_192_128": replace(LLAMA, query_heads=16, kv_heads=16, qk_dim=192),
}


CONFIGS = {
    "one_group": ("llama", ONE),
    "two_loaders": ("llama", TWO_LOADERS),
    "one_group_dim_64": ("dim_64", ONE | {"tile_n": 128}),
    "one_group_window_sinks": ("window_sinks", ONE),
    "split": ("llama", SPLIT),
    "split_dim_64": ("dim_64", SPLIT),
    "split_window_sinks": ("window_sinks", SPLIT | TWO_LOADERS_SPLIT),
}


@pytest.mark.parametrize("name", [*BUDGETS, *CONFIGS])
def test_binaries_keep_to_their_budgets(name):
    """No spill in a loop, asynchronous products and copies by tensor map, as much shared memory as is stated."""
    geometry, config = CONFIGS.get(name, (name, {}))
    variant = preferred(BUDGETS[geometry], **config)
    (binary,) = compile_all([job(variant)]).values()
    assert binary.main_loop_spills == 0 and binary.registers == variant.tunable("maxnreg", 0)
    assert binary.num_threads == 32 * Shape(variant).total_warps
    assert binary.occupancy >= variant.config.ctas_per_multiprocessor
    assert binary.shared_bytes <= Shape(variant).shared_bytes <= binary.shared_bytes + 4096
    code = machine_code(binary.data)
    assert "HGMMA" in code and "UTMALDG.3D" in code
    assert "UTMALDG.2D" in code, "a cache whose heads fill their tiles is a matrix"
    assert ("UTMALDG.4D" in code) == (variant.block_qk > variant.geometry.qk_dim), "another is not"
    assert code.count("WARPGROUP.DEPBAR") <= code.count("HGMMA") // 4, "matrix products are not serialised"
    assert ("BAR.SYNC.DEFER_BLOCKING 0x0" in code) == (Shape(variant).groups == 1), "groups of warps do not wait for each other"
    steps, parsed = loops.sass_lines(code), loops.parse_sass(code)
    turns = [any("BAR.SYNC" in steps[i] for i in loop) and any("BAR.ARV" in steps[i] for i in loop) for loop in loops.main_loops(parsed)]
    assert Shape(variant).groups == 1 or all(turns), "groups of warps take turns"
    moves = max(sum("R2UR" in steps[i] for i in loop) for loop in loops.main_loops(parsed))
    wide = max(variant.block_qk, variant.block_v) > 128
    assert moves <= (12 if wide else 4), "numbers of the main loops are in uniform registers"
    # What a loop over the threads of a warp looks like: a copy, and a jump to a few instructions before it.
    before = {i: {step.label for step in parsed[i - 8 : i]} for i, line in enumerate(steps) if "UTMALDG" in line}
    assert not any(step.target in labels for i, labels in before.items() for step in parsed[i + 1 : i + 4]), "copies stand alone"


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({"page_size": 8}, {}, "pages of a power of two of at least 16 keys, not 8"),
        ({"page_size": 48}, {}, "pages of a power of two"),
        ({"dtype": "float32"}, {}, "elements of 2 bytes, float32 has 4"),
        ({"qk_dim": 100, "v_dim": 100}, {}, "heads of a multiple of 16 bytes, not 100 and 100"),
        ({"qk_dim": 512, "v_dim": 512}, {}, "heads of up to 256"),
        ({"alibi": True}, {}, "neither ALiBi nor prefix ranges"),
        ({}, {"block_m": 256, "num_warps": 16}, "row blocks of 64 or 128, 64 for each group of 4 warps, not 256"),
        ({}, {"tile_n": 256}, "tiles of 64 or 128 keys, not 256"),
        ({}, {"num_warps": 4}, "needs 8 warps for row blocks of 128, not 4"),
        ({}, {"num_stages": 1}, "needs 2 tiles in flight, not 1"),
        ({}, {"options": ()}, "needs option maxnreg"),
        ({}, {"options": (("loaders", 3), ("maxnreg", 168))}, "needs 2 or 4 loaders, not 3"),
        ({}, {"options": (("maxnreg", 176),)}, "leaves 244 registers for a thread that computes, which takes a multiple of 8, at most 240"),
        ({}, {"ctas_per_multiprocessor": 2}, "needs 64512 registers for each of 2 programs, a multiprocessor of h200 has 65536"),
        ({}, {"options": (("maxnreg", 168), ("split", 1))}, "cuts keys of row blocks of 64: two groups leave no registers to merge parts"),
        ({"qk_dim": 256, "v_dim": 256}, SPLIT, "cuts keys of heads of up to 128 elements: 256 leave no registers to merge parts"),
        ({"batch_invariant": True}, SPLIT, "cuts keys by what else is in the batch, which batch_invariant excludes"),
        ({}, ONE | {"tile_n": 128, "num_stages": 3}, "needs 123904 bytes of shared memory per block, h200 has 115712 for each of 2"),
        ({"qk_dim": 256, "v_dim": 256}, ONE, "bytes of shared memory per block, h200 has 115712 for each of 2"),
        ({}, {"num_stages": 8}, "bytes of shared memory per block, h200 has"),
    ],
)
def test_what_is_not_legal_says_why(changes, config, reason):
    known = Config(128, 128, 8, 3, 1, (("maxnreg", 168),))
    variant = Variant("prefill_ws", replace(GEOMETRY, **changes), replace(known, **config), True, 256, 8)
    assert reason in why_not(variant, H200, LIMITS)


def test_other_gpus_and_unaligned_views_are_refused():
    variant = preferred(GEOMETRY)
    assert "is written for sm_90, a100_sxm is sm_80" in why_not(variant, load_targets()["a100_sxm"], LIMITS)
    assert "aligned pointers and strides" in why_not(replace(variant, aligned=False), H200, LIMITS)
    assert why_not(variant, H200, LIMITS) is None
