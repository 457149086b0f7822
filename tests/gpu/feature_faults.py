"""Fault rows 2, 3, 6, 11, 12 and 23 on a GPU: windows, chunks, sinks and softcap, by closed forms; used by
faults.py.

Keys of 0 make every score 0: then exp(lse) counts the visible keys, whatever their number, and with values
0, 1, 2, ... an output is the mean of the visible positions.
"""

import importlib
import math

import torch

NAN, INF = float("nan"), float("inf")
FAR = 2**31 - 1  # a page id whose address is mapped nowhere
SINK = 2.0
SMALL = 120  # keys whose positions, and whose means, bfloat16 holds


def feature_rows(table, subject) -> None:
    """Run every feature row on every layer that it can touch."""
    for case in subject.cases():
        for row, label, check in _checks(case):
            table.run(row, subject.name, f"{case.layer}, {label}", lambda: check(subject, case))


def _checks(case):
    if case.reach:
        yield "2 left of the window", "pages", check_left_pages
        edge = "23 chunk" if case.chunk else "11 window edge"
        yield edge, "counts", check_counts
        if not case.chunk:
            yield "3 hidden tile", "rows", check_hidden_tile
    if case.sinks:
        yield "6 sink", "closed form", check_sinks
    if case.softcap:
        yield "12 softcap", "weights", check_softcap
    if case.prefix_ranges:
        yield "0 features", "no ranges", check_no_ranges
    if case.alibi:
        yield "0 features", "model slopes", check_model_slopes


def _pool(subject, case, *sequences, values="random", fill=NAN):
    batch = subject.testing.Batch("feature", sequences)
    batch = subject.testing.fit(batch, case, case.max_tokens)
    pool = subject.testing.Pool(case, subject.device, [batch])
    pool.load(batch, fill=fill, values=values)
    return pool, batch


def _bounds(batch):
    """The call with its bound, which may choose decode alone, and without, which does not."""
    return (dict(max_seqlen_q=max(q for q, _ in batch.sequences)), {})


def check_left_pages(subject, case) -> float:
    """Row 2: table entries left of every row's window or chunk lead to a poisoned page, to -1, and nowhere."""
    far = 4 * case.reach + 3 * case.page_size
    for sequences in (((1, far), (3, far - 40)), ((70, far), (1, far + 9))):
        pool, batch = _pool(subject, case, *sequences, fill=0.0)
        spare = pool.pages - 1
        hidden = pool.block_table == spare
        assert hidden.any(), "the batch has no page left of the window"
        for options in _bounds(batch):
            seen = []
            for entry in (spare, spare, -1, FAR):
                pool.block_table[hidden] = entry
                pool.poison_out()
                subject.call(pool, **options)
                torch.cuda.synchronize()
                seen.append(subject.testing.bits(pool.result()))
                for cache in (pool.k_cache, pool.v_cache):
                    cache[spare] = NAN
            pool.block_table[hidden] = -1
            subject.testing.assert_matches(pool, None, f"{sequences} {options}")
            assert all(torch.equal(seen[0], other) for other in seen), f"{sequences} {options}: other bits"
            for cache in (pool.k_cache, pool.v_cache):
                cache[spare] = 0
    return 0.0


def _count(subject, case, sequences) -> list[int]:
    """Visible keys of each row as head 0 counts them, by lse; asserts that they are the reference's, and small
    means too.
    """
    pool, batch = _pool(subject, case, *sequences, values="positions")
    if case.sinks:
        pool.sinks.fill_(-INF)
    if case.alibi:
        pool.alibi_slopes.zero_()
    for options in _bounds(batch):
        _, lse = subject.call(pool, return_lse=True, **options)
        out, expected = pool.expected()
        counts = lse[: pool.total].double().exp()
        off = (counts - expected.exp()).abs().max().item()
        assert off < 0.3, f"{batch.sequences} {options}: visible keys are off by {off}"
        if batch.longest <= SMALL:
            mean = (pool.result().double() - out).abs().max().item()
            assert mean < 0.25, f"{batch.sequences} {options}: a mean of visible positions is off by {mean}"
    return counts[:, 0].round().long().tolist()


def check_counts(subject, case) -> float:
    """Rows 11 and 23: at the edge, in a prefill and in decode, a row sees exactly so many keys."""
    r = case.reach
    prefill = _count(subject, case, ((2 * r + 8, 0),))
    decode = _count(subject, case, tuple((1, c) for c in (r - 1, r, r + 1, 2 * r + 7)))
    chunked = _count(subject, case, ((19, r - 9), (19, r + 3)))
    if not case.prefix_ranges:
        right = [(c % r if case.chunk else min(c, r - 1)) + 1 for c in range(2 * r + 8)]
        assert prefill == right[: len(prefill)], f"prefill: {prefill}"
        assert decode == [right[c] for c in (r - 1, r, r + 1, 2 * r + 7)], f"decode: {decode}"
        first = max(r - 9, 0)
        assert chunked[:19] == right[first : first + 19] or r < 9, f"chunked prefill: {chunked}"
    return 0.0


def check_hidden_tile(subject, case) -> float:
    """Row 3: rows of one tile of which some see nothing in a key tile that others need."""
    for sequences in (((17, 100),), ((17, 2 * case.reach + 84), (5, 3 * case.reach))):
        _count(subject, case, sequences)
        pool, batch = _pool(subject, case, *sequences, values="ones")
        if not case.sinks:
            for options in _bounds(batch):
                subject.call(pool, **options)
                off = (pool.result().double() - 1).abs().max().item()
                assert off < 1e-6, f"{sequences} {options}: a mean of ones is off by {off}"
    return 0.0


def check_sinks(subject, case) -> float:
    """Row 6: n / (n + e^s) and log(n + e^s), for one split and many; a sink of -inf is no sink."""
    bounds = subject.reference.tolerance(case.torch_dtype)
    worst = 0.0
    batches = [((1, n - 1),) for n in (1, 5, 129, 5000)]
    batches += [tuple((1, n - 1) for n in (1, 5, 129, 5000)), ((40, 0), (9, 120), (1, -1)), ((1, 31000),)]
    for sequences in batches:
        for dtype in (torch.bfloat16, torch.float32):
            pool, batch = _pool(subject, case, *sequences, values="ones")
            if case.alibi:
                pool.alibi_slopes.zero_()
            for sink in (SINK, -SINK, -INF):
                pool.sinks = torch.full((case.query_heads,), sink, dtype=dtype, device=subject.device)
                for options in _bounds(batch):
                    _, lse = subject.call(pool, return_lse=True, **options)
                    label = f"{batch.sequences} sink {sink} {dtype} {options}"
                    found = subject.testing.assert_matches(pool, lse, label)
                    worst = max(worst, subject.error(found, case))
                    if batch.sequences == ((1, 4),) and not case.reach and not case.prefix_ranges:
                        share = 5 / (5 + math.exp(sink))
                        off = (pool.result().double() - share).abs().max().item()
                        assert off <= bounds.row * share, f"{label}: {share} became {share + off}"
    return worst


def check_softcap(subject, case) -> float:
    """Row 12: scaled scores 4 and 0 and future keys of 9: the weight of the first key."""
    bounds = subject.reference.tolerance(case.torch_dtype)
    for rows in (1, 2, 20):
        pool, batch = _pool(subject, case, (rows, 1), values="ones", fill=0.0)
        keys, values = pool.by_slot(pool.k_cache), pool.by_slot(pool.v_cache)
        scale = case.scale or case.qk_dim**-0.5
        pool.q[..., :] = 0
        pool.q[..., 0] = 1
        for position in range(rows + 1):
            page = int(pool.block_table[0, position // case.page_size])
            slot = position % case.page_size
            keys[page, slot] = 0
            keys[page, slot, :, 0] = {0: 4, 1: 0}.get(position, 9) / scale
            values[page, slot] = float(position == 0)
        for options in _bounds(batch):
            subject.call(pool, **options)
            subject.testing.assert_matches(pool, None, f"{rows} rows {options}")
            if case.softcap == 1 and not (case.sinks or case.alibi or case.prefix_ranges):
                first = pool.result()[0].double()
                assert (first - 0.7309).abs().max() < 2 * bounds.row, f"{rows} rows {options}: {first[0, 0]}"
    return 0.0


def check_no_ranges(subject, case) -> float:
    """Without the tensor, with none and with empty ranges alone: the bits of a layer that has no ranges."""
    pool, batch = _pool(subject, case, (1, 100), (9, 40), (33, 0), fill=0.0)
    pool.prefix_ranges.copy_(torch.tensor([[0, 0], [9, 3], [5, 5]]))
    for options in _bounds(batch):
        seen = []
        for ranges in (pool.prefix_ranges, pool.prefix_ranges[:, :0].contiguous(), None):
            pool.poison_out()
            subject.package.attention(**pool.arguments() | {"prefix_ranges": ranges}, **options)
            seen.append(subject.testing.bits(pool.result()))
        subject.testing.assert_matches(pool, None, f"{options}")
        assert torch.equal(seen[0], seen[1]) and torch.equal(
            seen[0], seen[2]
        ), "empty ranges change the result"
    return 0.0


def check_model_slopes(subject, case) -> float:
    """Without slopes the model's own are used, as they are if passed in."""
    layer = next(entry for entry in subject.manifest["layers"] if entry["name"] == case.layer)
    pool, batch = _pool(subject, case, (1, 100), (9, 40), (33, 0))
    if layer["query_heads"] != case.query_heads:
        return 0.0
    slopes = importlib.import_module(f"{subject.name}.runtime.extras").model_slopes(case.query_heads)
    pool.alibi_slopes.copy_(torch.tensor(slopes))
    given = {name: value for name, value in pool.arguments().items() if name != "alibi_slopes"}
    worst = 0.0
    for options in _bounds(batch):
        pool.poison_out()
        _, lse = subject.package.attention(**given, return_lse=True, **options)
        worst = max(worst, subject.error(subject.testing.assert_matches(pool, lse, f"{options}"), case))
    return worst
