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
from specgen.runtime.sizes import WorkspaceSize
from specgen.runtime.table import AppendRow, AttentionRow, MergeRow
from specgen.runtime.testing import Batch, Case, Pool, checks
from specgen.runtime.workspace import Workspace

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


def run_reference(fields, sequences, values="random", **extras):
    """(out, lse, pool) of the reference over one batch, invisible keys NaN."""
    case = Case(**{**CASE.__dict__, **fields})
    batch = Batch("given", tuple(sequences))
    pool = Pool(case, CPU, [batch])
    pool.load(batch, fill=float("nan"), values=values)
    for name, value in extras.items():
        setattr(pool, name, value)
    return *pool.expected(), pool


def test_window_rows_and_edges():
    """Fault rows 3 and 11: means of the visible positions, in a prefill and in decode."""
    out, _, _ = run_reference(dict(sliding_window=8), [(17, 100)], "positions")
    torch.testing.assert_close(out[:, 0, 0], 96.5 + torch.arange(17, dtype=torch.float64))
    out, _, _ = run_reference(dict(sliding_window=8), [(17, 100)], "ones")
    torch.testing.assert_close(out[:, 0, 0], torch.ones(17).double())
    out, _, _ = run_reference(dict(sliding_window=16), [(40, 0), (1, 39)], "positions")
    torch.testing.assert_close(out[39:, 0, 0], torch.tensor([31.5, 31.5], dtype=torch.float64))


def test_chunk_is_no_window():
    """Fault row 23: keys {0..7}, {8}, {8, 9}."""
    out, lse, _ = run_reference(dict(chunk=8), [(1, 7), (1, 8), (1, 9)], "positions")
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([3.5, 8, 8.5], dtype=torch.float64))
    torch.testing.assert_close(lse[:, 0].exp(), torch.tensor([8, 1, 2], dtype=torch.float64))


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_sink_is_counted_once(window, softcap):
    """Fault row 6: n / (n + e^s); a sink of -inf is none; a row without a key gives 0 and -inf."""
    fields = dict(query_heads=8, kv_heads=8, sinks=True, sliding_window=window, softcap=softcap)
    sequences = [(1, 0), (1, 4), (1, 128), (1, 4999), (1, -1)]
    sinks = torch.tensor([2.0] * 7 + [-torch.inf])
    fields |= dict(max_seq_len=8192)
    out, lse, _ = run_reference(fields, sequences, "ones", sinks=sinks)
    for row, n in enumerate((1, 5, 129, 5000)):
        n = min(n, window or n)
        e = torch.tensor(2.0, dtype=torch.float64).exp()
        torch.testing.assert_close(out[row, :7], (n / (n + e)).expand(7, 20))
        torch.testing.assert_close(lse[row, :7], (n + e).log().expand(7))
        torch.testing.assert_close(out[row, 7], torch.ones(20).double())
        torch.testing.assert_close(lse[row, 7].exp(), torch.tensor(float(n)).double())
    assert (out[4] == 0).all() and (lse[4] == -torch.inf).all()
    assert round(out[1, 0, 0].item(), 4) == 0.4036


def test_softcap_comes_before_the_mask():
    """Fault row 12: cap 1, scaled scores 4 and 0, one future key: the first weight is 0.7309."""
    q = torch.ones(1, 1, 1)
    keys = torch.tensor([4.0, 0.0, 9.0]).view(1, 3, 1, 1)
    values = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    table, cu = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)

    def first_weight(n, **options):
        lens = torch.tensor([n], dtype=torch.int32)
        tables = dict(block_table=table, seq_lens=lens, cu_seqlens_q=cu)
        return reference.attention(q, keys, values, **tables, scale=1.0, **options)[0].item()

    assert round(first_weight(2, softcap=1.0), 4) == 0.7309
    assert round(first_weight(2), 3) == 0.982
    two = torch.ones(2, 1, 1)  # rows at 1 and 2: the first has a future key
    tables = dict(block_table=table, seq_lens=torch.tensor([3], dtype=torch.int32))
    out, _ = reference.attention(two, keys, values, **tables, cu_seqlens_q=2 * cu, scale=1.0, softcap=1.0)
    assert round(out[0].item(), 4) == 0.7309


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_alibi_is_a_bias_on_the_distance(mask):
    out, _, pool = run_reference(dict(alibi=True, mask=mask), [(5, 27)])
    k, v = (cache[pool.block_table[0].long()].flatten(0, 1)[:32] for cache in (pool.k_cache, pool.v_cache))
    q, k, v = (x.double().transpose(0, 1) for x in (pool.q[:5], k, v))
    k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
    i, j = torch.arange(27, 32)[:, None], torch.arange(32)[None]
    bias = -pool.alibi_slopes.double()[:, None, None] * (i - j).abs()
    if mask == "causal":
        bias = bias.masked_fill(j > i, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=20**-0.5)
    torch.testing.assert_close(out.transpose(0, 1), expected, rtol=1e-12, atol=1e-12)


def test_prefix_ranges_see_each_other():
    """Positions 2 to 5 and 6 to 7 are spans; window 2 for the rest."""
    ranges = torch.tensor([[[2, 6], [6, 8], [9, 3]]], dtype=torch.int32)
    fields = dict(prefix_ranges=True, sliding_window=2)
    seen = reference.visible(torch.arange(10), 10, sliding_window=2, ranges=ranges[0])
    keys = [row.nonzero().flatten().tolist() for row in seen]
    span = [2, 3, 4, 5]
    assert keys == [[0], [0, 1], [1, *span], span, span, span, [5, 6, 7], [6, 7], [7, 8], [8, 9]]
    means = torch.tensor([sum(row) / len(row) for row in keys], dtype=torch.float64)
    case = Case(**{**CASE.__dict__, **fields})
    pool = Pool(case, CPU, [Batch("one", ((10, 0),))])
    pool.load(Batch("one", ((10, 0),)), values="positions")
    pool.prefix_ranges[0] = ranges[0]
    torch.testing.assert_close(pool.expected()[0][:, 0, 0], means)
    with pytest.raises(ValueError, match="bidirectional"):
        reference.visible(torch.arange(2), 2, "bidirectional", sliding_window=2)


def test_pool_hides_what_no_row_sees():
    """Fault row 2: pages left of the window are -1, or poisoned, and keys left of it are poisoned."""
    case = Case(**{**CASE.__dict__, "sliding_window": 20})
    batch = Batch("old", ((1, 100), (3, 60)))
    pool = Pool(case, CPU, [batch])
    pool.load(batch, fill=float("nan"))
    assert pool.block_table[0].tolist()[:5] == [-1] * 5 and pool.block_table[1].tolist()[:2] == [-1] * 2
    assert (pool.block_table[0, 5:7] >= 0).all() and pool.block_table[0, 5] != pool.pages - 1
    page = pool.k_cache[pool.block_table[0, 5].long(), :, 0, 0]
    assert page[:1].isnan().all() and not page[1:].isnan().any()
    pool.load(batch, fill=0.0)
    assert pool.block_table[0].tolist()[:5] == [pool.pages - 1] * 5


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


def kernel(
    q, k_cache, v_cache, *, block_table, seq_lens, cu_seqlens_q, out, case, scale=None, fault=None,
    sinks=None, alibi_slopes=None, prefix_ranges=None,
):  # fmt: skip
    """Write out and return lse. `fault` breaks one thing the way real kernels broke."""
    if case.layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    page_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    scale = scale or case.scale or case.qk_dim**-0.5
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
        edge = n - m + torch.arange(m)
        edge = {"sees the next key": edge + 1, "misses its own key": (edge - 1).clamp(min=0)}.get(fault, edge)
        ranges = [] if prefix_ranges is None else prefix_ranges[seq].tolist()
        visible = sight(case, edge, n, ranges, fault)
        if fault == "missing key" and n > 2:
            visible[:, n // 2] = False
        positions = torch.arange(n)[visible.any(0)]
        visible = visible[:, positions]
        pages = block_table[seq].long()[positions // page_size]
        k, v = (
            cache[pages, positions % page_size].repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        if fault == "wrong kv head":
            k = k.roll(1, 1)
        scores = torch.einsum("rhd,nhd->rhn", q[first : first + m].float(), k.float())
        scores = scores * {"lost scale": 1.0, "default scale": q.shape[-1] ** -0.5}.get(fault, scale)
        distance = (edge[:, None, None] - positions).abs()
        if fault == "softcap after mask":
            scores = scores.masked_fill(~visible[:, None], -torch.inf)
        if case.softcap and fault not in ("softcap dropped", "softcap after alibi"):
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if case.alibi:
            slopes = alibi_slopes[:, None]
            slopes = {"slope sign flipped": -slopes, "slopes of the next head": slopes.roll(1, 0)}.get(
                fault, slopes
            )
            scores = scores - slopes * distance
        if fault == "softcap after alibi":
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if fault != "softcap after mask":
            scores = scores.masked_fill(~visible[:, None], -torch.inf)
        top = (
            scores.amax(-1, keepdim=True)
            if len(positions)
            else torch.full((*scores.shape[:2], 1), -torch.inf)
        )
        weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
        total = weights.sum(-1)
        if case.sinks and fault != "sink dropped":
            sink = sinks.float() * {"sink scaled": scale}.get(fault, 1.0)
            count = {"sink counted twice": 2}.get(fault, 1)
            with_sink = total + count * torch.exp(sink - top[..., 0])
            total = torch.where(top[..., 0] == -torch.inf, total, with_sink)
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


def sight(case, edge, n, ranges, fault):
    """Which keys rows at positions `edge` see, row by row."""
    seen = torch.ones(len(edge), n, dtype=torch.bool)
    if case.mask == "bidirectional":
        return seen
    keys = torch.arange(n)
    window = case.sliding_window
    if window is not None:
        window += {"window of one more": 1, "window of one less": -1}.get(fault, 0)
    for row, i in enumerate(edge.tolist()):
        low = 0
        if window is not None:
            low = i - window + 1
        if case.chunk is not None:
            low = i - i % case.chunk
            if fault == "chunk as window":
                low = i - case.chunk + 1
            elif fault == "chunk counted from the batch":
                low = i - (i - int(edge[0])) % case.chunk
        seen[row] = (low <= keys) & (keys <= i)
        for start, end in [] if fault == "ranges ignored" else ranges:
            if start < end and start <= i < end + (fault == "range end included"):
                stop = min(n, end + (fault == "range end included"))
                if fault == "window cuts ranges":
                    start = max(start, low)
                seen[row, start:stop] = True
    return seen


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
        lse = kernel(q, k_cache, v_cache, **arguments, case=self.case, fault=self.fault)
        return (arguments["out"], lse) if return_lse else arguments["out"]

    def append_kv(self, k, v, k_cache, v_cache, *, slot_mapping, layer):
        if self.fault == "writes slot -1":
            slot_mapping = slot_mapping.clamp(min=0)
        layout = self.case.layout
        reference.append_kv(k, v, k_cache, v_cache, slot_mapping=slot_mapping, layout=layout)

    def merge_states(self, *states):
        out, lse = reference.merge_states(*states)
        if self.fault == "forgets the maximum":
            out, lse = out.nan_to_num() * 0.99, lse
        return out.to(states[0].dtype), lse.float()

    def explain(self, **arguments):
        return types.SimpleNamespace(row=self.row)

    def workspace(self, device):
        return Workspace(device, WorkspaceSize(partial_acc=4, partial_ml=4, counters=4, tickets=2, prefill_partial=4), None, self)


def opened(arch, **stand_ins):
    """A device whose kernels named in `stand_ins` are served by others."""
    variants = {symbol: {"stand_in": other} for symbol, other in stand_ins.items()}
    return types.SimpleNamespace(arch=arch, manifest={"variants": variants}, serving=lambda symbol: stand_ins.get(symbol, symbol))


@pytest.fixture
def interpreter(monkeypatch):
    """As if on a machine without a GPU, the interpreter on; the stand-in's rows are the device's."""
    monkeypatch.setattr(checks, "open_device", lambda package, device: opened("sm_90"))
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
    dict(layout="HND"),
    dict(layout="HND", aligned=False, sliding_window=16, qk_dim=24, v_dim=16),
    dict(sliding_window=20, sinks=True, softcap=30.0),
    dict(sliding_window=1, query_heads=1, kv_heads=1, sinks=True),
    dict(chunk=8, dtype="float32"),
    dict(alibi=True, query_heads=12, kv_heads=4),
    dict(alibi=True, mask="bidirectional", softcap=1.0, dtype="float32"),
    dict(prefix_ranges=True),
    dict(prefix_ranges=True, sliding_window=16, page_size=3),
    dict(prefix_ranges=True, chunk=24, sinks=True, alibi=True, softcap=50.0),
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


FEATURE_FAULTS = [
    ("window of one more", dict(sliding_window=16)),
    ("window of one less", dict(sliding_window=16)),
    ("window of one more", dict(sliding_window=16, prefix_ranges=True)),
    ("chunk as window", dict(chunk=8)),
    ("chunk counted from the batch", dict(chunk=8)),
    ("sink dropped", dict(sinks=True)),
    ("sink counted twice", dict(sinks=True)),
    ("sink scaled", dict(sinks=True)),
    ("sink scaled", dict(sinks=True, sliding_window=16, softcap=30.0)),
    ("softcap dropped", dict(softcap=1.0)),
    ("softcap dropped", dict(softcap=30.0)),
    ("softcap after mask", dict(softcap=1.0)),
    ("softcap after alibi", dict(softcap=1.0, alibi=True)),
    ("slope sign flipped", dict(alibi=True)),
    ("slopes of the next head", dict(alibi=True)),
    ("slope sign flipped", dict(alibi=True, mask="bidirectional")),
    ("ranges ignored", dict(prefix_ranges=True)),
    ("range end included", dict(prefix_ranges=True)),
    ("window cuts ranges", dict(prefix_ranges=True, sliding_window=16)),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("fault, fields", FEATURE_FAULTS, ids=str)
def test_helpers_fail_a_kernel_that_is_wrong_in_a_feature(interpreter, fault, fields, dtype):
    case = Case(**{**CASE.__dict__, "dtype": dtype, "scale": 0.21, **fields})
    run_some(StandIn(case, None, case.symbol), case)
    with pytest.raises(AssertionError):
        run_some(StandIn(case, fault, case.symbol), case)


def run_some(package, case):
    """The small batches: what a decode specialization of a feature is run with, in the interpreter too."""
    for batch in ("stale_tail", "groups", "first_prefill", *(b.name for b in testing.edge_batches(case))):
        testing.check_attention(package, case, batch)


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

    lse = kernel(**arguments, case=case, scale=0.083)
    right = reference.errors(pool.out, expected, lse, expected_lse)
    assert right.tensor < bounds.tensor / 1.5 and right.row < bounds.row / 1.2 and right.lse < 0.5
    for fault in ("lost scale", "default scale", "misses its own key", "missing key"):
        lse = kernel(**arguments, case=case, scale=0.083, fault=fault)
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
    package.explain = lambda **arguments: types.SimpleNamespace(row=replace(package.row, decode="other"))
    with pytest.raises(AssertionError, match="chose"):
        testing.check_attention(package, other, "groups")


def test_helpers_skip_rows_of_other_architectures(interpreter, monkeypatch):
    monkeypatch.setattr(checks, "open_device", lambda package, device: opened("gfx942"))
    with pytest.raises(SkipTest, match="sm_90 only, not on gfx942"):
        testing.check_attention(StandIn(CASE, symbol=CASE.symbol), CASE, "groups")


def test_helpers_take_what_serves_a_row_and_skip_what_does_not(interpreter, monkeypatch):
    """A kernel that ships as a binary alone and its stand-in: whichever does not run here has nothing to test."""
    monkeypatch.setattr(checks, "open_device", lambda package, device: opened("sm_90", binary=CASE.symbol))
    package = StandIn(CASE, symbol="binary")
    testing.check_attention(package, CASE, "groups")
    with pytest.raises(SkipTest, match=f"as a binary alone, and {CASE.symbol} serves here"):
        testing.check_attention(package, replace(CASE, symbol="binary"), "groups")
    manifest = {"variants": {"binary": {"stand_in": CASE.symbol}}}
    device = types.SimpleNamespace(arch="sm_90", manifest=manifest, serving=lambda symbol: symbol)
    monkeypatch.setattr(checks, "open_device", lambda package, _: device)
    testing.check_attention(package, replace(CASE, symbol="binary"), "groups")
    with pytest.raises(SkipTest, match="only where a binary cannot"):
        testing.check_attention(package, CASE, "groups")


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


def test_a_case_of_a_manifest_layer():
    layer = dict(name="local", layers="all", query_heads=8, kv_heads=2, qk_dim=20, v_dim=12, dtype="float16")
    layer |= dict(scale=0.2, mask="causal", page_size=3, sliding_window=7, sinks=True, layout="HND")
    limits = dict(max_seqs=4, max_seq_len=99, max_tokens=50, max_spec_tokens=2)
    case = Case.of_layer({"layers": [layer], "limits": limits}, "local", 4, 1)
    assert (case.query_heads, case.kv_heads, case.layer, case.max_tokens) == (4, 1, "local", 50)
    assert (case.reach, case.sinks, case.layout, case.alibi, case.softcap) == (7, True, "HND", False, None)
