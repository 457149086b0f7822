"""The reference against independent formulas, its tolerances against wrong kernels, and the test helpers
against a stand-in package.
"""

import sys
import types
from dataclasses import replace
from unittest import SkipTest

import pytest
import torch

from specgen.runtime import reference, testing
from specgen.runtime.table import AppendRow, AttentionRow, MergeRow
from specgen.runtime.testing import Batch, Case, Pool, checks

CPU = torch.device("cpu")
CASE = Case(
    symbol="decode_symbol",
    family="decode",
    layer="global",
    dtype="float16",
    query_heads=6,
    kv_heads=2,
    qk_dim=20,
    v_dim=20,
    page_size=16,
    max_seqs=64,
    max_seq_len=4096,
    max_tokens=512,
)


def dense(q, k, v, offset, mask, scale):
    """One sequence by torch's own attention in float64: q [m, hq, d], k [n, hkv, d]; row i sits at position
    offset + i.
    """
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if mask == "causal":
        visible = torch.arange(k.shape[1])[None] <= torch.arange(q.shape[1])[:, None] + offset
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    return out.transpose(0, 1)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_paged_batch_equals_dense_attention(mask, scale):
    case = Case(**{**CASE.__dict__, "v_dim": 12, "page_size": 3})
    batch = Batch("mixed", ((1, 16), (5, 27), (1, 0), (0, 4), (9, 0)))
    pool = Pool(case, CPU, [batch], "odd")
    pool.load(batch, fill=float("nan"))
    tables = dict(block_table=pool.block_table, seq_lens=pool.seq_lens, cu_seqlens_q=pool.cu_seqlens_q)
    out, lse = reference.attention(pool.q, pool.k_cache, pool.v_cache, **tables, mask=mask, scale=scale)
    first = 0
    for seq, (m, c) in enumerate(batch.sequences):
        table = pool.block_table[seq].long().clamp(min=0)
        k, v = (cache[table].flatten(0, 1)[: m + c] for cache in (pool.k_cache, pool.v_cache))
        rows = slice(first, first + m)
        if m:
            expected = dense(pool.q[rows], k, v, c, mask, scale or case.qk_dim**-0.5)
            torch.testing.assert_close(out[rows], expected, rtol=1e-12, atol=1e-12)
        first += m
    assert torch.isfinite(lse[:first]).all()


def test_blocks_of_rows_do_not_change_the_result(monkeypatch):
    batch = Batch("one", ((40, 9),))
    pool = Pool(CASE, CPU, [batch])
    pool.load(batch)
    arguments = {name: value for name, value in pool.arguments().items() if name not in ("layer", "out")}
    whole = reference.attention(**arguments)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 3 * 49 * 7)
    for ours, theirs in zip(reference.attention(**arguments), whole):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_rows_without_keys_and_rows_of_no_sequence():
    batch = Batch("keyless", ((3, -3), (5, -2), (0, 8)))
    pool = Pool(CASE, CPU, [batch], min_tokens=10)
    pool.load(batch, fill=float("nan"))
    arguments = {name: value for name, value in pool.arguments().items() if name not in ("layer", "out")}
    out, lse = reference.attention(**arguments)
    for row in (0, 1, 2, 3, 4, 8, 9):
        assert (out[row] == 0).all() and (lse[row] == -torch.inf).all()
    assert torch.isfinite(lse[5:8]).all()


def test_uniform_scores_average_the_visible_positions():
    batch = Batch("uniform", ((1, 39), (3, 0)))
    pool = Pool(CASE, CPU, [batch])
    pool.load(batch, values="positions")
    arguments = {name: value for name, value in pool.arguments().items() if name not in ("layer", "out")}
    out, lse = reference.attention(**arguments)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([19.5, 0, 0.5, 1], dtype=torch.float64))
    torch.testing.assert_close(lse[:, 0].exp(), torch.tensor([40.0, 1, 2, 3], dtype=torch.float64))


def test_seq_lens_are_clamped_to_the_block_table():
    batch = Batch("beyond", ((2, 14),), beyond=500)
    pool = Pool(CASE, CPU, [batch])
    pool.load(batch)
    arguments = {name: value for name, value in pool.arguments().items() if name not in ("layer", "out")}
    clamped = reference.attention(**arguments)
    pool.seq_lens[0] = 16
    for ours, theirs in zip(clamped, reference.attention(**arguments)):
        assert torch.equal(ours, theirs)


def test_merging_halves_gives_the_whole():
    case = Case(**{**CASE.__dict__, "mask": "bidirectional"})
    batch = Batch("halves", ((4, 60),))
    pool = Pool(case, CPU, [batch])
    pool.load(batch)
    q, k_cache, v_cache = pool.q, pool.k_cache, pool.v_cache
    cu_seqlens_q = pool.cu_seqlens_q

    def over(columns, n):
        lens = torch.tensor([n], dtype=torch.int32)
        table = pool.block_table[:, columns]
        return reference.attention(
            q,
            k_cache,
            v_cache,
            block_table=table,
            seq_lens=lens,
            cu_seqlens_q=cu_seqlens_q,
            mask="bidirectional",
        )

    merged = reference.merge_states(*over(slice(0, 2), 32), *over(slice(2, 4), 32))
    for ours, theirs in zip(merged, over(slice(0, 4), 64)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    nothing = over(slice(0, 4), 0)
    out, lse = reference.merge_states(*nothing, *nothing)
    assert (out == 0).all() and (lse == -torch.inf).all()
    for ours, theirs in zip(reference.merge_states(*nothing, *merged), merged):
        assert torch.equal(ours, theirs)


def test_append_kv_skips_slots_outside_the_cache():
    k_cache, v_cache = torch.zeros(2, 4, 1, 3), torch.zeros(2, 4, 1, 2)
    k, v = torch.arange(12.0).view(4, 1, 3) + 1, torch.arange(8.0).view(4, 1, 2) + 1
    reference.append_kv(k, v, k_cache, v_cache, slot_mapping=torch.tensor([5, -1, 8, 0]))
    assert torch.equal(k_cache[1, 1], k[0]) and torch.equal(v_cache[0, 0], v[3])
    assert (k_cache != 0).sum() == 6 and (v_cache != 0).sum() == 4


# A stand-in package: attention as a kernel would compute it (float32, weights rounded), or wrong on purpose.


def kernel(q, k_cache, v_cache, *, block_table, seq_lens, cu_seqlens_q, out, mask, scale, fault=None):
    """Write out and return lse. `fault` breaks one thing the way real kernels broke."""
    page_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    lse = torch.full(q.shape[:2], -torch.inf)
    starts = cu_seqlens_q.tolist()
    for seq, n in enumerate(seq_lens.tolist()):
        first, m = starts[seq], starts[seq + 1] - starts[seq]
        n = min(n, block_table.shape[1] * page_size)
        if m == 0:
            continue
        if n == 0:
            out[first : first + m] = 0
            continue
        positions = torch.arange(n)
        pages = block_table[seq].long()[positions // page_size]
        k, v = (
            cache[pages, positions % page_size].repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        if fault == "wrong kv head":
            k = k.roll(1, 1)
        scores = torch.einsum("rhd,nhd->rhn", q[first : first + m].float(), k.float())
        scores = scores * {"lost scale": 1.0, "default scale": q.shape[-1] ** -0.5}.get(fault, scale)
        edge = n - m + torch.arange(m)
        edge = {"sees the next key": edge + 1, "misses its own key": (edge - 1).clamp(min=0)}.get(fault, edge)
        visible = positions[None] <= edge[:, None] if mask == "causal" else torch.ones(m, n, dtype=torch.bool)
        if fault == "missing key" and n > 2:
            visible[:, n // 2] = False
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
        total = weights.sum(-1)
        rounded = weights if q.dtype == torch.float32 else weights.to(q.dtype)
        if fault == "reads a stale page":
            spare = v_cache[-1, 0].repeat_interleave(group, 0)  # 0 times what lies there
            rounded = rounded + 0 * spare.amax()
        new = (
            torch.einsum("rhn,nhd->rhd", rounded.float(), v.float())
            / total.masked_fill(total == 0, 1)[..., None]
        )
        if fault == "ignores a scratch row" and m > 1:
            new[-1] = 0
        out[first : first + m] = new.to(out.dtype)
        lse[first : first + m] = total.log() + top[..., 0]
    if fault == "writes behind the batch" and len(out) > starts[-1]:
        out[starts[-1]] = 0
    if fault == "lse in base 2":
        lse = lse * 1.4427
    return lse


class StandIn(types.ModuleType):
    """Has the public functions that the helpers call, and a dispatch module with rows for CASE."""

    def __init__(self, case, fault=None, symbol=None):
        super().__init__("stand_in_kernels")
        self.case, self.fault = case, fault
        self.row = AttentionRow(
            0, "sm_90", "global", case.query_heads, case.kv_heads, case.aligned, 1, 8, symbol, None, ""
        )
        dispatch = types.ModuleType("stand_in_kernels.dispatch")
        dispatch.ATTENTION_ROWS = (self.row,)
        dispatch.APPEND_ROWS = (AppendRow(0, "sm_90", "global", case.kv_heads, case.aligned, symbol, ""),)
        dispatch.MERGE_ROWS = (MergeRow(0, "sm_90", case.query_heads, case.v_dim, symbol, ""),)
        sys.modules[dispatch.__name__] = dispatch

    def attention(
        self, q, k_cache, v_cache, *, layer, max_seqlen_q, workspace, return_lse=False, **arguments
    ):
        scale = self.case.scale or self.case.qk_dim**-0.5
        lse = kernel(q, k_cache, v_cache, **arguments, mask=self.case.mask, scale=scale, fault=self.fault)
        return (arguments["out"], lse) if return_lse else arguments["out"]

    def append_kv(self, k, v, k_cache, v_cache, *, slot_mapping, layer):
        if self.fault == "writes slot -1":
            slot_mapping = slot_mapping.clamp(min=0)
        reference.append_kv(k, v, k_cache, v_cache, slot_mapping=slot_mapping)

    def merge_states(self, *states):
        out, lse = reference.merge_states(*states)
        if self.fault == "forgets the maximum":
            out, lse = out.nan_to_num() * 0.99, lse
        return out.to(states[0].dtype), lse.float()

    def explain(self, **arguments):
        return types.SimpleNamespace(row=self.row)

    def workspace(self, device):
        return types.SimpleNamespace(
            partial_acc=torch.zeros(4), partial_ml=torch.zeros(4), counters=torch.zeros(4, dtype=torch.int32)
        )


@pytest.fixture
def interpreter(monkeypatch):
    """As if on a machine without a GPU, the interpreter on; the stand-in's rows are the device's."""
    monkeypatch.setattr(checks, "device_arch", lambda package, device: "sm_90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def run_all(package, case):
    for batch in testing.batches(case):
        testing.check_attention(package, case, batch)


GEOMETRIES = [
    dict(),
    dict(dtype="float32"),
    dict(aligned=False),
    dict(dtype="float32", mask="bidirectional", page_size=1, scale=0.2),
    dict(qk_dim=24, v_dim=16, query_heads=7, kv_heads=1, page_size=48),
    dict(max_seqs=2, max_seq_len=40, max_tokens=4),
]


@pytest.mark.parametrize("fields", GEOMETRIES, ids=str)
def test_helpers_pass_a_right_kernel(interpreter, fields):
    case = Case(**{**CASE.__dict__, **fields})
    package = StandIn(case, symbol=case.symbol)
    run_all(package, case)
    for tokens in testing.token_counts(case):
        testing.check_append_kv(package, case, tokens)
        testing.check_merge_states(package, case, tokens)


FAULTS = [
    "lost scale",
    "default scale",
    "sees the next key",
    "misses its own key",
    "missing key",
    "wrong kv head",
    "reads a stale page",
    "ignores a scratch row",
    "writes behind the batch",
    "lse in base 2",
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("fault", FAULTS)
def test_helpers_fail_a_wrong_kernel(interpreter, fault, dtype):
    case = Case(**{**CASE.__dict__, "dtype": dtype, "scale": 0.21})  # 1/sqrt(20) is 0.2236
    with pytest.raises(AssertionError):
        run_all(StandIn(case, fault, case.symbol), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tolerances_separate_right_from_wrong_at_1000_keys(dtype):
    """Where a fault weighs little, one key of a thousand or 6 % of the scale, in every dtype, and without a
    look at lse.
    """
    name = str(dtype).removeprefix("torch.")
    case = Case(
        **{**CASE.__dict__, "dtype": name, "query_heads": 3, "kv_heads": 1, "qk_dim": 128, "v_dim": 128}
    )
    batch = Batch("long", ((1, 999), (4, 996)))
    pool = Pool(case, CPU, [batch])
    pool.load(batch, fill=float("nan"))
    arguments = {key: value for key, value in pool.arguments().items() if key != "layer"}
    expected, expected_lse = reference.attention(
        **{k: v for k, v in arguments.items() if k != "out"}, scale=0.083
    )
    bounds = reference.tolerance(dtype)

    lse = kernel(**arguments, mask="causal", scale=0.083)
    right = reference.errors(pool.out, expected, lse, expected_lse)
    assert right.tensor < bounds.tensor / 1.5 and right.row < bounds.row / 1.2 and right.lse < 0.5
    for fault in ("lost scale", "default scale", "misses its own key", "missing key"):
        lse = kernel(**arguments, mask="causal", scale=0.083, fault=fault)
        wrong = reference.errors(pool.out, expected)
        assert wrong.tensor > bounds.tensor and wrong.row > bounds.row, fault
        assert reference.errors(pool.out, expected, lse, expected_lse).lse > 1, fault


def test_helpers_fail_wrong_appends_and_merges(interpreter):
    with pytest.raises(AssertionError):
        testing.check_append_kv(StandIn(CASE, "writes slot -1", CASE.symbol), CASE, 37)
    with pytest.raises(AssertionError):
        testing.check_merge_states(StandIn(CASE, "forgets the maximum", CASE.symbol), CASE, 37)


def test_helpers_fail_when_dispatch_chooses_another(interpreter):
    package = StandIn(CASE, symbol="another")
    for check, detail in (
        (testing.check_attention, "groups"),
        (testing.check_append_kv, 5),
        (testing.check_merge_states, 5),
    ):
        with pytest.raises(AssertionError, match="row"):
            check(package, CASE, detail)
    other = Case(**{**CASE.__dict__, "symbol": "another"})
    package.explain = lambda **arguments: types.SimpleNamespace(row=replace(package.row, index=7))
    with pytest.raises(AssertionError, match="chose"):
        testing.check_attention(package, other, "groups")


def test_helpers_skip_rows_of_other_architectures(interpreter, monkeypatch):
    monkeypatch.setattr(checks, "device_arch", lambda package, device: "gfx942")
    with pytest.raises(SkipTest, match="sm_90 only, not on gfx942"):
        testing.check_attention(StandIn(CASE, symbol=CASE.symbol), CASE, "groups")


def test_skips_say_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SkipTest, match="TRITON_INTERPRET"):
        testing.check_attention(None, CASE, "groups")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SkipTest, match="bfloat16"):
        testing.check_attention(None, Case(**{**CASE.__dict__, "dtype": "bfloat16"}), "groups")
    with pytest.raises(SkipTest, match="GPU"):
        testing.check_graph_replay(None, CASE)


@pytest.mark.parametrize("batch", testing.BATCHES, ids=lambda batch: batch.name)
@pytest.mark.parametrize("page_size", [1, 48, 2048])
def test_fitted_batches_are_within_limits(batch, page_size):
    case = Case(
        **{**CASE.__dict__, "max_seqs": 3, "max_seq_len": 100, "max_tokens": 20, "page_size": page_size}
    )
    fitted = testing.fit(batch, case, 9)
    assert len(fitted.sequences) <= 3 and fitted.tokens <= 20 and fitted.longest <= 100
    assert all(q <= 9 for q, _ in fitted.sequences)
    if fitted.beyond:
        assert sum(fitted.sequences[-1]) % page_size == 0


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("dims", [(20, 20), (24, 16), (64, 64)])
def test_layouts_keep_or_break_the_promised_alignment(layout, dims):
    case = Case(**{**CASE.__dict__, "qk_dim": dims[0], "v_dim": dims[1]})
    batch = Batch("some", ((1, 16), (5, 27)))
    pool = Pool(case, CPU, [batch], layout)
    alignment = torch.gcd(torch.tensor(16), torch.gcd(*(torch.tensor(2 * dim) for dim in dims))).item()
    for tensor in (pool.q, pool.k_cache, pool.v_cache, pool.out):
        assert tensor.stride(-1) == 1
        kept = tensor.data_ptr() % 16 == 0 and all(
            2 * stride % alignment == 0 for stride in tensor.stride()[:-1]
        )
        assert kept == (layout != "odd")
