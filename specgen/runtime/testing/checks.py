"""The checks that generated tests call: each runs one specialization through the package's public functions.

On a GPU the binaries run, on a CPU with TRITON_INTERPRET=1 the generated source runs in Triton's interpreter,
else the check is skipped with the reason (`unittest.SkipTest`, which pytest understands). Touches only
tensors it allocates.
"""

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import SkipTest

import torch

from .. import interpret, reference
from ..device import Device
from .cases import BATCHES, DECODE_REPLAYS, PREFILL_REPLAYS, TOKEN_COUNTS, Batch, Case, edge_batches, fit
from .packed import PackedPool
from .pools import Pool, bits
from .scratch import assert_scratch_sound, poisoned_workspace

NAN, INF = float("nan"), float("inf")
INTERPRETED_TOKENS = 64  # of append_kv and merge_states: the interpreter takes milliseconds for each


def skip_reason(case: Case) -> str | None:
    """Why this machine cannot run the case's kernels; None if it can."""
    if torch.cuda.is_available():
        return None
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "no GPU, and TRITON_INTERPRET=1 is not set"
    if case.dtype == interpret.WRONG_DTYPE:
        return interpret.WHY
    return None


def device_for(case: Case) -> torch.device:
    """The device that the check runs on. Raises SkipTest with `skip_reason`."""
    if reason := skip_reason(case):
        raise SkipTest(reason)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def batches(case: Case) -> list[str]:
    """Names of the batches that `check_attention`, or `check_varlen`, takes for this case on this machine,
    for pytest.mark.parametrize.
    """
    return [batch.name for batch in _known(case) if torch.cuda.is_available() or not batch.large]


def token_counts(case: Case) -> list[int]:
    """Token counts for `check_append_kv` and `check_merge_states`, within the case's limits."""
    most = case.max_tokens if torch.cuda.is_available() else min(case.max_tokens, INTERPRETED_TOKENS)
    return [tokens for tokens in TOKEN_COUNTS if tokens <= most]


def check_attention(package, case: Case, batch: str) -> None:
    """One batch, through the table rows that launch the specialization, against the float64 reference.

    The pool around the keys holds NaN, then Inf: both must give the same bits. Output and lse are right
    within the dtype's tolerance, with and without lse the output has the same bits, and nothing but the
    batch's rows is written. Aligned specializations see dense tensors and views; unaligned ones see views
    that start one element off and have odd strides. In the interpreter, only the first such row.
    """
    device = device_for(case)
    named = {known.name: known for known in _known(case)}[batch]
    rows = attention_rows(package, case, device)
    for row in rows if device.type == "cuda" else rows[:1]:
        serving = _serving(package, row)
        fitted = fit(named, case, row.max_query_len)
        workspace = poisoned_workspace(serving, device)
        bound = max(row.min_query_len, max((q for q, _ in fitted.sequences), default=0))
        tokens = _min_tokens(fitted, case, row.min_query_len)
        seen = None
        for pool, expected, label in _arranged(Pool, case, device, fitted, tokens):
            if pool.tokens:
                _assert_chosen(serving, case, row, pool, max_seqlen_q=bound)
            seen = _run(serving, pool, expected, label, seen, max_seqlen_q=bound, workspace=workspace)
            assert_scratch_sound(workspace, label)


def check_varlen(package, case: Case, batch: str) -> None:
    """One batch over contiguous keys and values, as `check_attention` has it; keys that no row sees are
    poisoned, those between two sequences too.
    """
    device = device_for(case)
    row = varlen_row(package, case, device)
    fitted = fit({known.name: known for known in _known(case)}[batch], case, case.max_tokens)
    bound = max((q for q, _ in fitted.sequences), default=0)
    seen = None
    for pool, expected, label in _arranged(PackedPool, case, device, fitted, _min_tokens(fitted, case)):
        if bound:
            _assert_chosen(package, case, row, pool, max_seqlen_q=bound)
        seen = _run(package, pool, expected, label, seen, max_seqlen_q=bound)


def check_graph_replay(package, case: Case) -> None:
    """Capture one call after warmup, replay it over other batches: right, the bits of an eager call, dead
    rows untouched.
    """
    device = device_for(case)
    if device.type != "cuda":
        raise SkipTest("graphs are captured on a GPU only")
    if case.family == "varlen":
        row = varlen_row(package, case, device)
        fitted = [fit(batch, case, case.max_tokens) for batch in (*PREFILL_REPLAYS, *DECODE_REPLAYS)]
        _replay(package, case, row, PackedPool, device, fitted)
        return
    for row in attention_rows(package, case, device):
        serving = _serving(package, row)
        known = DECODE_REPLAYS if row.prefill is None else PREFILL_REPLAYS
        fitted = [fit(batch, case, row.max_query_len) for batch in known]
        workspace = poisoned_workspace(serving, device)
        options = dict(max_seqlen_q=row.max_query_len, workspace=workspace)
        _replay(serving, case, row, Pool, device, fitted, row.min_query_len, **options)
        assert_scratch_sound(workspace, case.symbol)


def check_append_kv(package, case: Case, tokens: int) -> None:
    """Rows of k and v land in their slots bit for bit; skipped slots and every other byte of the caches stay
    as they were.
    """
    device = device_for(case)
    _rows(package, case, device, "APPEND_ROWS", kv_heads=case.kv_heads, layer=case.layer, aligned=case.aligned)
    for layout in ("plain", "views") if case.aligned else ("odd",):
        pool = Pool(case, device, [Batch("slots", ((0, max(1, tokens)),))], layout)
        k, v = _new_keys(case, device, tokens, layout)
        slot_count = pool.pages * case.page_size
        slots = torch.randperm(slot_count, generator=torch.Generator().manual_seed(tokens))[:tokens]
        slots[1::5] = -1
        slots[3::7] = slot_count + 1  # past the cache: skipped as well
        slots = slots.to(device)
        expected = Pool(case, device, [Batch("slots", ((0, max(1, tokens)),))], layout)
        label = f"{case.symbol}, {tokens} tokens, layout {layout}"
        if case.rotary_dim is None:
            reference.append_kv(k, v, *expected.poison_caches(), slot_mapping=slots, layout=case.layout)
            package.append_kv(k, v, *pool.poison_caches(), slot_mapping=slots, layer=case.layer)
        else:
            rotary = _new_rotary(case, device, tokens, layout)
            turned = [
                reference.rotate(x, rotary["positions"], rotary["cos"], rotary["sin"], case.rotary_style).to(
                    k.dtype
                )
                for x in (k, rotary["q"])
            ]
            reference.append_kv(turned[0], v, *expected.poison_caches(), slot_mapping=slots, layout=case.layout)
            q_out = package.append_kv(k, v, *pool.poison_caches(), slot_mapping=slots, layer=case.layer, **rotary)
            assert _alike(q_out, turned[1]), f"{label}: rotated queries differ"
        for ours, theirs in zip(pool.cache_memory(), expected.cache_memory()):
            same = torch.equal(bits(ours), bits(theirs)) if case.rotary_dim is None else _alike(ours, theirs)
            assert same, f"{label}: caches differ"


def check_merge_states(package, case: Case, tokens: int) -> None:
    """Merging two states gives what attention over both sets of keys would; two states without a key give 0
    and -inf.
    """
    device = device_for(case)
    _rows(package, case, device, "MERGE_ROWS", query_heads=case.query_heads, v_dim=case.v_dim)
    generator = torch.Generator(device).manual_seed(tokens)
    shape = (tokens, case.query_heads, case.v_dim)
    states = []
    for every in (
        3,
        2,
    ):  # every 3rd row of one and every 2nd row of the other saw no key: every 6th row saw none at all
        out = torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)
        lse = 4 * torch.randn(shape[:2], generator=generator, device=device)
        out[::every], lse[::every] = 0, -INF
        lse[1::4] *= 1000  # one state outweighs the other beyond the range of exp
        states += [out, lse.contiguous()]
    out, lse = package.merge_states(*states)
    expected, expected_lse = reference.merge_states(*states)
    found = reference.errors(out, expected, lse, expected_lse)
    assert found.within(reference.tolerance(case.torch_dtype)), f"{case.symbol}, {tokens} tokens: {found}"
    assert out.dtype == case.torch_dtype and lse.dtype == torch.float32


def assert_matches(
    pool: Pool,
    lse: torch.Tensor | None,
    label: str,
    expected: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> reference.Errors:
    """Assert that the pool's output (and lse) is the reference's and that all canaries live; returns the
    errors. `expected`: what `pool.expected()` gives, if it is known.
    """
    case = pool.case
    expected, expected_lse = expected or pool.expected()
    found = reference.errors(
        pool.result(), expected, None if lse is None else lse[: pool.total], expected_lse
    )
    bounds = reference.tolerance(case.torch_dtype)
    assert found.within(bounds), f"{label}: {found}, allowed {bounds}"
    assert pool.canaries_intact(), f"{label}: wrote outside the output rows of the batch"
    return found


def open_device(package, device: torch.device) -> Device:
    """What the package runs on for a torch device: its `arch`, such as "sm_90", chooses table rows and binaries."""
    directory = Path(package.__file__).parent
    return Device.open(directory, json.loads((directory / "manifest.json").read_text(encoding="utf-8")), device)


def _known(case: Case) -> tuple[Batch, ...]:
    known = (*BATCHES, *edge_batches(case))
    return tuple(batch for batch in known if not batch.beyond) if case.family == "varlen" else known


def _rows(package, case: Case, device: torch.device, table: str, **fields) -> list:
    """The rows of a dispatch table that have these fields and for which the specialization runs on this device.

    SkipTest if it runs for other architectures only, or where a kernel that ships as a binary alone does not (or does);
    AssertionError if it runs for none.
    """
    rows = getattr(importlib.import_module(f"{package.__name__}.dispatch"), table)
    rows = [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]
    opened = open_device(package, device)
    variants = opened.manifest["variants"]
    served_by: dict[str, list] = {}
    elsewhere = set()
    for row in rows:
        for symbol in row.symbols if table == "ATTENTION_ROWS" else (row.symbol,):
            if row.arch == opened.arch:
                served_by.setdefault(opened.serving(symbol), []).append(row)
            if case.symbol in (symbol, variants.get(symbol, {}).get("stand_in")):
                elsewhere.add(row.arch)
    if case.symbol in served_by:
        return served_by[case.symbol]
    assert elsewhere, f"no row of {table} with {fields} launches {case.symbol}; those are {rows}"
    if opened.arch in elsewhere:
        stand_in = variants.get(case.symbol, {}).get("stand_in")
        why = f"ships as a binary alone, and {stand_in} serves here" if stand_in else "serves only where a binary cannot be loaded"
        raise SkipTest(f"{case.symbol} {why}")
    raise SkipTest(f"{case.symbol} is launched on {', '.join(sorted(elsewhere))} only, not on {opened.arch}")


def attention_rows(package, case: Case, device: torch.device) -> list:
    """This device's attention rows that launch the specialization, of those that launch the same the first.

    Raises SkipTest if only other architectures' rows launch it.
    """
    heads = dict(layer=case.layer, query_heads=case.query_heads, kv_heads=case.kv_heads, aligned=case.aligned)
    rows = _rows(package, case, device, "ATTENTION_ROWS", **heads)
    return list({(row.decode, row.prefill, row.min_query_len): row for row in reversed(rows)}.values())[::-1]


def _serving(package, row):
    """What to call so that `row` serves any batch: the package, or, of a row for some batches only, one pinned to it."""
    return package.attention.__self__.pinned(row) if row.narrowed else package


def varlen_row(package, case: Case, device: torch.device):
    """This device's attention_varlen row that launches the specialization; SkipTest as `attention_rows`."""
    heads = dict(layer=case.layer, query_heads=case.query_heads, kv_heads=case.kv_heads, aligned=case.aligned)
    (row,) = _rows(package, case, device, "VARLEN_ROWS", **heads)
    return row


def _arranged(
    pool_type: type[Pool], case: Case, device: torch.device, batch: Batch, tokens: int
) -> Iterator[tuple[Pool, tuple[torch.Tensor, torch.Tensor], str]]:
    """The batch in a pool, what the reference says of it, and a label, for every arrangement.

    All hold the same keys, values and queries: the reference, most of a check's time, is asked once.
    """
    expected = None
    for layout, fill in _arrangements(case, device):
        pool = pool_type(case, device, [batch], layout, min_tokens=tokens)
        pool.load(batch, fill=fill)
        expected = expected or pool.expected()
        yield pool, expected, f"{case.symbol}, {batch.sequences}, layout {layout}, around the keys {fill}"


def _run(package, pool: Pool, expected, label: str, seen: torch.Tensor | None, **options) -> torch.Tensor:
    """Call with and without lse (in the interpreter with it at first, then without): each is right, and all
    have the same bits, those of the runs before if there are any. Returns the bits.
    """
    for return_lse in (True, False) if pool.device.type == "cuda" else (seen is None,):
        pool.poison_out()
        result = pool.call(package, return_lse=return_lse, **options)
        out, lse = result if return_lse else (result, None)
        assert out.data_ptr() == pool.out.data_ptr(), f"{label}: did not return `out`"
        assert_matches(pool, lse, label, expected)
        found = bits(pool.result())
        same = seen is None or torch.equal(found, seen)
        assert same, f"{label}, return_lse {return_lse}: other bits than in the runs before"
        seen = found
    return seen


def _replay(package, case, row, pool_type, device, batches: list[Batch], least: int = 1, **options) -> None:
    """Capture a call for the first of some batches and replay it over each; `least` as in `_min_tokens`."""
    layout = "plain" if case.aligned else "odd"
    tokens = max(_min_tokens(batch, case, least) for batch in batches)
    pool = pool_type(case, device, batches, layout, min_tokens=tokens)
    pool.load(batches[0])
    _assert_chosen(package, case, row, pool, **options)
    package.warmup(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = pool.call(package, return_lse=True, **options)
    for seed, batch in enumerate(batches):
        label = f"{case.symbol}, replay of {batch.name} {batch.sequences}"
        pool.load(batch, fill=NAN, seed=seed)
        graph.replay()
        assert_matches(pool, lse, label)
        replayed = bits(pool.result())
        pool.poison_out()
        pool.call(package, return_lse=True, **options)
        assert torch.equal(bits(pool.result()), replayed), f"{label}: other bits than the eager call"


def _assert_chosen(package, case: Case, row, pool: Pool, **options) -> None:
    chosen = pool.explain(package, **options).row
    assert chosen.symbols == row.symbols, f"{case.symbol}: expected table row {row}, the package chose {chosen}"


def _arrangements(case: Case, device: torch.device) -> list[tuple[str, float]]:
    """(layout, filling of the cache) to run; all must give the same bits. Fewer in the interpreter, which is
    slow.
    """
    if not case.aligned:
        return [("odd", NAN), ("odd", INF)]
    if device.type == "cpu":
        return [("plain", NAN), ("views", INF)]
    return [("plain", 0.0), ("plain", NAN), ("plain", INF), ("views", NAN), ("views", INF)]


def _min_tokens(batch: Batch, case: Case, least: int = 1) -> int:
    """Rows of q to allocate: a few canary rows behind the batch, and the `least` that the row's bound needs
    to be in force.
    """
    if not batch.sequences:
        return 0
    return min(case.max_tokens, max(batch.tokens + 3, least))


def _new_rotary(case: Case, device: torch.device, tokens: int, layout: str) -> dict[str, torch.Tensor]:
    """Queries, positions and tables for a rotary append_kv; "odd" queries start one element off."""
    generator = torch.Generator(device).manual_seed(2)
    odd = int(layout == "odd")
    shape = (tokens, case.query_heads, case.qk_dim)
    flat = torch.randn(torch.Size(shape).numel() + odd, generator=generator, device=device).to(
        case.torch_dtype
    )
    angles = 6.3 * torch.rand(97, case.rotary_dim // 2, generator=generator, device=device)
    positions = torch.randint(0, 97, (tokens,), generator=generator, device=device)
    return dict(q=flat[odd:].view(shape), positions=positions, cos=angles.cos(), sin=angles.sin())


def _alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal bits (canaries, whatever they spell), or one rounding apart: products of float32 against float64."""
    close = torch.isclose(ours.float(), theirs.float(), rtol=2 * torch.finfo(ours.dtype).eps, atol=1e-6)
    return bool((close | (bits(ours) == bits(theirs))).all())


def _new_keys(
    case: Case, device: torch.device, tokens: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """New k and v rows: dense, slices of one fused tensor ("views"), or one element off ("odd")."""
    generator = torch.Generator(device).manual_seed(1)
    heads, dims = case.kv_heads, (case.qk_dim, case.v_dim)
    extra = {"plain": 0, "views": 0, "odd": 1}[layout]
    widths = [heads * (dim + extra) for dim in dims]
    ahead = 16  # stands for q; with it k starts at 16 bytes, and v where k's width allows it
    gap = -widths[0] % 16 if layout == "views" else 0
    whole = torch.randn(
        tokens,
        ahead + widths[0] + gap + widths[1] + (-sum(widths) - gap) % 16,
        generator=generator,
        device=device,
    )
    whole = whole.to(case.torch_dtype)
    if layout == "odd":
        whole = torch.cat([whole.flatten().new_zeros(1), whole.flatten()])[1:].view(whole.shape)
    starts = (ahead, ahead + widths[0] + gap)
    k, v = (
        whole[:, start : start + width].view(tokens, heads, dim + extra)[..., :dim]
        for start, width, dim in zip(starts, widths, dims)
    )
    return (k.contiguous(), v.contiguous()) if layout == "plain" else (k, v)
