"""The even split of decode_ws and decode in numbers: the model that tests hold their kernels to, over many batches.

Decode runs in Triton's interpreter, in a process of its own; tests/test_decode_ws.py runs decode_ws.
"""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from even_split import Split, decode_split, split_of  # noqa: E402

from specgen.decode_ws import MOST_PROGRAMS, Shape
from specgen.runtime.sizes import MERGE_GROUP
from specgen.variant import Config, Geometry, Variant

CONFIG = Config(16, 64, 4, 6, 2, (("maxnreg", 168),))
SHAPE = Shape(Variant("decode_ws", Geometry(32, 8, 128, 128, "bfloat16", 16, 128**-0.5, "causal"), CONFIG, True, 256, 1))
PROGRAMS = 264
DECODE = replace(SHAPE.variant, family="decode", config=Config(16, 64, 4, 3, 2))


def drawn(rng: random.Random) -> Split:
    """Batches of all kinds: alike or not, short, long or both, fewer programs than items or more than units."""
    kinds = (lambda: 1, lambda: rng.randint(1, 4), lambda: rng.randint(1, 40), lambda: rng.choice((1, 2, 3000)))
    kind = rng.choice(kinds)
    items = (kind(),) * rng.randint(0, 60) if rng.random() < 0.3 else tuple(kind() for _ in range(rng.randint(0, 60)))
    return Split(items, rng.choice((1, 2, 7, 80, 264)), rng.choice((1, 3, 6)), rng.choice((1, 4)), rng.choice((None, 2, 8)))


@pytest.mark.parametrize("seed", range(40))
def test_what_kernels_and_workspace_count_on(seed):
    """Each unit is one program's; no piece is empty; the states of an item keep to slots and counters of its own, within
    the workspace; none takes longer than its share and an item.
    """
    rng = random.Random(seed)
    for _ in range(50):
        split = drawn(rng)
        pieces, programs, merges = split.pieces(), split.programs, split.merges()
        assert all(0 <= piece.program < programs and piece.units > 0 for piece in pieces)
        assert [(piece.program, piece.item) for piece in pieces] == sorted({(each.program, each.item) for each in pieces})
        for item, units in enumerate(split.items):
            assert sum(piece.units for piece in pieces if piece.item == item) == units
        # The loop of a program: wherever its share begins, its first item has a unit for it, gap or not.
        end = split.starts[-1] - split.gap
        assert {piece.program for piece in pieces} == set(range(-(-end // split.share)))
        slots = [slot for each, _ in merges for slot in each]
        counters = [counter for _, each in merges for counter in each]
        groups = -(-programs // MERGE_GROUP)
        assert len(slots) == len(set(slots)) and all(0 <= slot < 2 * (programs + groups) for slot in slots)
        assert len(counters) == len(set(counters)) and all(0 <= each < programs + 2 * groups for each in counters)
        if split.plan[2] > 1:  # items apart
            assert max((sum(piece.program == each for piece in pieces) for each in range(programs)), default=0) <= 1
        if split.gap:
            assert split.longest_program(split.cost) <= split.share + split.cost


@pytest.mark.parametrize("seed", range(40))
def test_the_last_share_ends_where_int32_still_counts(seed):
    """Of any batch: rules.py refuses limits of which Shape.axis_end is beyond int32."""
    rng = random.Random(seed)
    for _ in range(50):
        programs = rng.choice((1, 7, 132, 264, MOST_PROGRAMS))
        config = replace(CONFIG, ctas_per_multiprocessor=rng.choice((1, 2)))
        shape = Shape(replace(SHAPE.variant, config=config))
        longest = rng.choice((16, 600, 70_000))
        alike = (1, rng.randint(1, longest)) if rng.random() < 0.3 else None
        batch = tuple(alike or (1, rng.randint(1, longest)) for _ in range(rng.randint(1, 60)))
        split = split_of(shape, batch, programs)
        end = -(-(split.starts[-1] - split.gap) // split.share) * split.share
        assert end <= shape.axis_end(sum(split.items) + shape.item_units * len(split.items))


def by_keys_alone(split: Split) -> int:
    """longest_program of shares that count units alone, so many at least."""
    share, begin, spent = max(-(-sum(split.items) // split.programs), split.least), 0, [0] * split.programs
    for units in split.items:
        for program in range(begin // share, (begin + units - 1) // share + 1):
            spent[program] += min(begin + units, (program + 1) * share) - max(begin, program * share) + split.cost
        begin += units
    return max(spent)


@pytest.mark.parametrize(
    ("lengths", "before", "after"),
    [
        ((126_247,) + (16,) * 16, 781, 248),
        ((16, 16), 24, 6),
        ((17, 17), 14, 7),
        ((16, 17), 24, 7),
        ((942,) * 3, 16, 11),
        ((70, 40, 16), 24, 10),
    ],
)
def test_short_items_do_not_crowd_one_program(lengths, before, after):
    """Units of the program that takes longest, an item at its cost: by keys alone, and with what items cost."""
    split = split_of(SHAPE, tuple((1, keys) for keys in lengths), PROGRAMS)
    assert (by_keys_alone(split), split.longest_program(split.cost)) == (before, after)


@pytest.mark.parametrize(
    ("lengths", "before", "after"),
    [
        ((126_247,) + (16,) * 16, 122, 62),
        ((16,) * 16 + (126_247,), 122, 62),
        ((4096,) * 32, 65, 65),
        ((17, 16), 2, 2),
    ],
)
def test_short_items_do_not_crowd_one_program_of_decode(lengths, before, after):
    """The same in key tiles; items that are alike are split as they were."""
    split = decode_split(DECODE, tuple((1, keys) for keys in lengths), PROGRAMS)
    assert (by_keys_alone(split), split.longest_program(split.cost)) == (before, after)


def test_decode_keeps_to_the_model():
    script = Path(__file__).parent / "standin" / "decode_in_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize(("heads", "unit", "programs", "units"), [(1, 16, 2, 5), (1, 16, 1, 10), (1, 64, 2, 2), (4, 16, 2, 2)])
def test_the_cost_of_an_item_in_units(heads, unit, programs, units):
    options = (("heads", heads), ("unit", unit))
    config = replace(CONFIG, ctas_per_multiprocessor=programs, options=options)
    geometry = replace(SHAPE.variant.geometry, page_size=64)
    assert Shape(replace(SHAPE.variant, config=config, geometry=geometry)).item_units == units


@pytest.mark.parametrize(("size", "rows", "units"), [(64, 16, 10), (128, 16, 5), (256, 16, 3), (64, 32, 14), (128, 32, 7)])
def test_an_item_costs_the_same_time_for_all_head_sizes(size, rows, units):
    geometry = replace(SHAPE.variant.geometry, qk_dim=size, v_dim=size)
    config = replace(CONFIG, block_m=rows, num_warps=rows // 4)
    assert Shape(replace(SHAPE.variant, geometry=geometry, config=config)).item_units == units
