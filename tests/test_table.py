"""The dispatch table and the sizes: lookup, the proof that rows are total and disjoint, and the formulas."""

from dataclasses import replace

import pytest

from specgen.runtime import sizes
from specgen.runtime.table import EVERY, AppendRow, AttentionRow, Bounds, MergeRow, NoRowError, Table

MAX_TOKENS = 64
MOST = Bounds(MAX_TOKENS, 8, MAX_TOKENS, 128, MAX_TOKENS)


def bounds(query_len, seqs=1, tokens=1, keys=1):
    return Bounds(query_len, seqs, tokens, keys)


def attention_rows(arch="sm_90", layer="all", heads=((8, 2), (4, 1)), spec_tokens=4, start=0):
    rows = []
    for query_heads, kv_heads in heads:
        for aligned in (True, False):
            name = f"{layer}_{query_heads}_{kv_heads}_{'a' if aligned else 'u'}"
            for low, high, prefill in (
                (1, spec_tokens, None),
                (spec_tokens + 1, MAX_TOKENS, f"prefill_{name}"),
            ):
                index = start + len(rows)
                row = AttentionRow(
                    index,
                    arch,
                    layer,
                    query_heads,
                    kv_heads,
                    aligned,
                    low,
                    high,
                    f"decode_{name}",
                    prefill,
                    "because",
                )
                rows.append(row)
    return rows


def append_rows(arch="sm_90", layer="all"):
    cases = [(kv_heads, aligned) for kv_heads in (2, 1) for aligned in (True, False)]
    return [
        AppendRow(i, arch, layer, kv, aligned, f"append_{kv}_{aligned}", "")
        for i, (kv, aligned) in enumerate(cases)
    ]


def merge_rows(arch="sm_90"):
    return [MergeRow(i, arch, heads, 16, f"merge_{heads}", "") for i, heads in enumerate((8, 4))]


def whole() -> Table:
    return Table(attention_rows(), append_rows(), merge_rows())


def test_total_and_disjoint_and_looked_up_at_every_length():
    table = whole()
    assert table.faults(MOST) == []
    for row in table.attention_rows:
        for length in range(row.min_query_len, row.max_query_len + 1):
            found = table.attention("sm_90", "all", row.query_heads, row.kv_heads, row.aligned, bounds(length))
            assert found is row
    assert table.layers == ("all",) and table.archs == ("sm_90",) and table.heads("all") == ((8, 2), (4, 1))
    assert table.append("sm_90", "all", 1, False).symbol == "append_1_False"
    assert table.merge("sm_90", 4, 16).symbol == "merge_4"


def test_list_order_never_decides():
    rows = attention_rows()
    forward, backward = Table(rows), Table(rows[::-1])
    for length in (1, 4, 5, MAX_TOKENS):
        key = ("sm_90", "all", 8, 2, True, bounds(length))
        assert forward.attention(*key) is backward.attention(*key)


def test_launch_order_is_decode_then_prefill():
    row = whole().attention("sm_90", "all", 8, 2, True, bounds(5))
    assert row.symbols == (row.decode, row.prefill)


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda rows: rows[:1] + rows[2:], "query_len 5..64 have no row"),
        (lambda rows: rows[1:], "query_len 1..4 have no row"),
        (lambda rows: [replace(rows[0], max_query_len=2), *rows[1:]], "query_len 3..4 have no row"),
        (
            lambda rows: [rows[0], replace(rows[1], max_query_len=63), *rows[2:]],
            "query_len 64..64 have no row",
        ),
        (lambda rows: [replace(rows[0], decode=None), *rows[1:]], "row 0 launches nothing"),
        (lambda rows: rows[:2] + rows[4:], "8/2 unaligned: query_len 1..64 have no row"),
        (lambda rows: [replace(rows[0], index=7), *rows[1:]], "row 7 stands at place 0"),
        (lambda rows: [replace(rows[0], min_query_len=1, max_query_len=0), *rows[1:]], "row 0 is empty"),
    ],
)
def test_faults_are_found(change, fault):
    found = Table(change(attention_rows()), append_rows(), merge_rows()).faults(MOST)
    assert any(fault in text for text in found), found


def boxed_rows():
    """One geometry: few sequences, many, and those with long or short keys; longer queries in one row."""
    first, second = attention_rows(heads=((8, 2),))[:2]
    few = replace(first, seqs=(1, 4))
    long = replace(first, index=1, seqs=(5, EVERY[1]), keys=(65, EVERY[1]))
    short = replace(first, index=2, seqs=(5, EVERY[1]), keys=(1, 64))
    return [few, long, short, replace(second, index=3)]


@pytest.mark.parametrize(
    "case, index", [((1, 4, 9, 128), 0), ((4, 5, 9, 65), 1), ((4, 8, 9, 64), 2), ((4, 5, 9, 1), 2), ((5, 1, 9, 1), 3)]
)
def test_rows_are_boxes_of_bounds(case, index):
    table = Table(boxed_rows())
    key = ("sm_90", "all", 8, 2, True)
    assert table.attention(*key, Bounds(*case)).index == index == table.selector(*key)(*case)


def test_boxes_are_proven_total_and_disjoint():
    rows = boxed_rows()
    unaligned = [replace(row, index=4 + row.index, aligned=False) for row in rows]
    assert Table([*rows, *unaligned]).faults(MOST) == []
    gap = Table([rows[0], replace(rows[1], keys=(70, 100)), *rows[2:], *unaligned]).faults(MOST)
    name = "sm_90 all 8/2 aligned: query_len 1..4, seqs 5..8, tokens 1..64,"
    assert gap == [f"{name} keys 65..69 have no row", f"{name} keys 101..128 have no row"]
    with pytest.raises(ValueError, match="rows 2 and 1 overlap"):
        Table([rows[0], replace(rows[1], keys=(64, 128)), *rows[2:]])


def test_a_selector_that_disagrees_with_the_rows_is_a_fault():
    rows, key = boxed_rows(), ("sm_90", "all", 8, 2, True)
    unaligned = [replace(row, index=4 + row.index, aligned=False) for row in rows]

    def selects(query_len, seqs, tokens, keys, least_query_len, edge=4):
        if query_len > 4:
            return 3
        return 0 if seqs <= edge else 1 if keys > 64 else 2

    right = Table([*rows, *unaligned], selectors={key: selects})
    assert right.faults(MOST) == [] and right.selector(*key) is selects
    wrong = Table([*rows, *unaligned], selectors={key: lambda *call: selects(*call, edge=3)})
    assert any("seqs 4" in text and "the selector gives row" in text for text in wrong.faults(MOST))


def test_missing_append_and_merge_rows_are_faults():
    found = Table(attention_rows(), append_rows()[:-1], merge_rows()[:-1]).faults(MOST)
    assert found == ["sm_90 all 4/1 unaligned: no append_kv row", "sm_90 4 query heads: no merge_states row"]


def test_overlaps_are_refused():
    rows = attention_rows()
    with pytest.raises(ValueError, match="rows 0 and 1 overlap"):
        Table([rows[0], replace(rows[1], min_query_len=4), *rows[2:]])
    with pytest.raises(ValueError, match="append_kv rows 0 and 1 overlap"):
        Table(rows, [append_rows()[0], replace(append_rows()[0], index=1)])
    with pytest.raises(ValueError, match="merge_states rows 0 and 1 overlap"):
        Table(rows, (), [merge_rows()[0], replace(merge_rows()[0], index=1)])


@pytest.mark.parametrize(
    "call, parts",
    [
        (lambda t: t.attention("sm_80", "all", 8, 2, True, bounds(1)), ["arch sm_80", "sm_90"]),
        (lambda t: t.attention("sm_90", "local", 8, 2, True, bounds(1)), ["layer 'local'", "'all'"]),
        (lambda t: t.attention("sm_90", "all", 9, 2, True, bounds(1)), ["9/2 heads", "8/2, 4/1"]),
        (lambda t: t.attention("sm_90", "all", 8, 2, True, bounds(65, 2, 70, 9)), ["query_len 65, seqs 2, tokens 70, keys 9", "1..4, 5..64"]),
        (lambda t: t.append("sm_90", "all", 3, True), ["3 kv heads", "all with 2 kv heads on sm_90"]),
        (lambda t: t.merge("sm_90", 8, 32), ["v_dim 32", "8 heads of 16 on sm_90"]),
    ],
)
def test_no_row(call, parts):
    with pytest.raises(NoRowError) as error:
        call(whole())
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("dim", range(1, 513))
def test_head_tiles_hold_the_head_in_the_least_room_of_one_or_two(dim):
    tiles = sizes.head_tiles(dim)
    powers = [16, 32, 64, 128, 256, 512]
    pairs = [(a, b) for a in powers for b in powers if a >= b and a + b >= dim]
    assert set(tiles) <= set(powers) and sum(tiles) >= dim
    assert sum(tiles) == min([a for a in powers if a >= dim] + [a + b for a, b in pairs])
    assert len(tiles) == 1 or sum(tiles) < min(a for a in powers if a >= dim)


@pytest.mark.parametrize(
    "v_dim, columns", [(1, 16), (16, 16), (17, 32), (72, 128), (112, 128), (128, 128), (192, 256), (256, 256)]
)
def test_head_tile(v_dim, columns):
    assert sizes.head_tile(v_dim) == columns >= sum(sizes.head_tiles(v_dim))


def test_workspace_size_is_the_maximum_over_variants_that_split_keys():
    wide = {"family": "decode", "ctas_per_multiprocessor": 1, "block_m": 64, "v_dim": 100}
    many = {"family": "decode", "ctas_per_multiprocessor": 4, "block_m": 16, "v_dim": 16}
    other = {"family": "prefill", "ctas_per_multiprocessor": 8, "block_m": 128, "v_dim": 256}
    size = sizes.workspace_size(10, [wide, many, other])
    assert size == (2 * 10 * 64 * 128, 4 * 10 * 64, 40, sizes.TICKETS, 1)
    assert size.nbytes == 4 * sum(size)
    assert sizes.workspace_size(10, [other]) == (1, 1, 1, sizes.TICKETS, 1)
    whole = {"family": "prefill_ws", "ctas_per_multiprocessor": 2, "block_m": 64, "v_dim": 128, "options": {"maxnreg": 128}}
    cut = whole | {"options": {"maxnreg": 128, "split": 1}}
    assert sizes.workspace_size(10, [whole]) == (1, 1, 1, sizes.TICKETS, 1)
    assert sizes.workspace_size(10, [cut, other]) == (1, 1, 1, sizes.TICKETS + 20, 20 * 64 * (128 + 8))


@pytest.mark.parametrize("kv_heads, splits", [(1, 32), (8, 32), (12, 21), (16, 16), (232, 16)])
def test_workspace_of_batch_invariant_decode_holds_every_split(kv_heads, splits):
    variant = {"family": "decode", "ctas_per_multiprocessor": 2, "block_m": 16, "v_dim": 64, "kv_heads": kv_heads}
    size = sizes.workspace_size(10, [variant | {"batch_invariant": True}])
    assert sizes.max_splits(kv_heads) == splits
    assert size == (splits * 20 * 16 * 64, splits * 20 * 2 * 16, 20, sizes.TICKETS, 1)


@pytest.mark.parametrize("tile_n, tiles", [(16, 32), (64, 8), (96, 6), (1024, 1)])
def test_a_split_has_keys_enough(tile_n, tiles):
    assert sizes.split_tiles(tile_n) == tiles


@pytest.mark.parametrize(
    "qk, v, item, promised", [(128, 128, 2, 16), (100, 100, 2, 8), (100, 100, 4, 16), (192, 20, 2, 8)]
)
def test_alignment(qk, v, item, promised):
    assert sizes.alignment(qk, v, item) == promised
