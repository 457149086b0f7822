"""Which tensors share memory (runtime/memory.py): found to the byte, and told apart where views interleave."""

import random

import fake_package
import pytest
import torch
from fake_package import PAGE, QK, append, batch, fake, kv

from specgen.runtime.errors import ArgumentError
from specgen.runtime.memory import refuse_out, share_memory

HEADS, PAGES = 2, 16


def addresses(tensor):
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, stride in enumerate(tensor.stride()):
        places = places.movedim(dim, -1).add(torch.arange(tensor.shape[dim]) * stride).movedim(-1, dim)
    starts = tensor.data_ptr() + tensor.itemsize * places.flatten()
    return {start + byte for start in starts.tolist() for byte in range(tensor.itemsize)}


def test_shared_bytes_are_found_and_no_others():
    """Against every address, over random views of one buffer: any strides, dtypes and sizes, expanded ones too."""
    make = random.Random(1)
    found = {True: 0, False: 0}

    def view(memory):
        memory = memory.view(make.choice([torch.float16, torch.float32, torch.int64]))
        shape = [make.choice([1, 2, 3, 4, 5]) for _ in range(make.choice([1, 2, 3, 4]))]
        strides = [make.choice([0, 1, 2, 4, 8, 12, 16, 20, 32, 40, 64]) for _ in shape]
        return memory.as_strided(shape, strides, make.randrange(60))

    for _ in range(1500):
        memory = torch.zeros(4096)
        a, b = view(memory), view(memory)
        shared = bool(addresses(a) & addresses(b))
        assert share_memory(a, b) == share_memory(b, a) == shared, (a.shape, a.stride(), b.shape, b.stride())
        found[shared] += 1
    assert min(found.values()) > 200


def test_what_is_too_entangled_is_taken_to_share():
    memory = torch.zeros(1 << 22)
    a = memory.as_strided((1000, 1000), (2003, 2))
    b = memory.as_strided((900, 900), (2402, 2), 1)
    assert share_memory(a, b)


INTERLEAVED = {
    "pages": lambda: torch.zeros(PAGES, 2, PAGE, HEADS, QK).unbind(1),
    "slots": lambda: torch.zeros(PAGES, PAGE, 2, HEADS, QK).unbind(2),
    "heads": lambda: torch.zeros(PAGES, PAGE, HEADS, 2, QK).unbind(3),
    "elements": lambda: torch.zeros(PAGES, PAGE, HEADS, 2 * QK).split(QK, -1),
    "halves": lambda: torch.zeros(2, PAGES, PAGE, HEADS, QK).unbind(0),
    "heads before slots": lambda: [x.transpose(1, 2) for x in torch.zeros(PAGES, HEADS, 2, PAGE, QK).unbind(2)],
}


@pytest.mark.parametrize("how", INTERLEAVED)
def test_caches_that_interleave_in_one_buffer_are_legal(tmp_path, monkeypatch, how):
    """And so is an output between them."""
    monkeypatch.setattr(fake_package, "V", QK)
    package = fake(tmp_path)
    caches, given = INTERLEAVED[how](), kv()
    apart = [torch.zeros(PAGES, PAGE, HEADS, QK) for _ in caches]
    append(package, given | dict(zip(("k_cache", "v_cache"), caches)))
    append(package, given | dict(zip(("k_cache", "v_cache"), apart)))
    assert all(map(torch.equal, caches, apart))
    (q, *_), keywords = batch()
    want = package.attention(q, *apart, **keywords)
    assert torch.equal(package.attention(q, *caches, **keywords, out=torch.zeros_like(q), checks="full"), want)
    with pytest.raises(ArgumentError, match="k_cache overlaps v_cache"):
        append(package, given | {"k_cache": caches[0], "v_cache": caches[0]})


def test_the_output_may_be_q_itself_or_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_package, "V", QK)
    package = fake(tmp_path)
    (q, *caches), keywords = batch()
    want = package.attention(q, *caches, **keywords)
    for checks in ("shapes", "full"):
        fused = torch.zeros(4, 3 * 8 * QK)
        ours, beside = (fused[:, part].unflatten(1, (8, QK)) for part in (slice(8 * QK), slice(8 * QK, 16 * QK)))
        ours.copy_(q)
        assert torch.equal(package.attention(ours, *caches, **keywords, out=beside, checks=checks), want)
        assert torch.equal(ours, q)
        assert torch.equal(package.attention(ours, *caches, **keywords, out=ours, checks=checks), want)
    with pytest.raises(ArgumentError, match="out overlaps q"):
        package.attention(fused[:, : 8 * QK].unflatten(1, (8, QK)), *caches, **keywords, out=fused[:, 16 : 8 * QK + 16].unflatten(1, (8, QK)))


def test_one_row_is_in_place_whatever_its_stride():
    memory = torch.zeros(8 * QK)
    refuse_out("attention", memory.as_strided((1, 8, QK), (1, QK, 1)), memory.view(1, 8, QK), {})
