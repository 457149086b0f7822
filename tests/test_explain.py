"""explain() and describe(): what they say, and that they launch nothing."""

import pytest
from fake_package import QK, V, batch, fake, launched, misaligned, padded

from specgen.runtime.errors import ArgumentError


@pytest.fixture
def package(tmp_path):
    return fake(tmp_path)


def test_explain(package):
    tensors, keywords = batch([(9, 20), (1, 7)])
    found = package.explain(*tensors, **keywords, return_lse=True)
    assert not launched(package) and not package.opened[0].loaded
    assert found.row.index == 1 and [launch.symbol for launch in found.launches] == list(found.row.symbols)
    assert [launch.grid for launch in found.launches] == [6, 6]
    text = str(found)
    for part in (
        "attention[1]: mixed",
        "8/2 heads (tensor_parallel 1)",
        "at most 10 query rows",
        "row takes 5..64",
        "aligned: pointers are multiples of 16",
        "grid 6",
        "key tiles",
        "blocks of 32 rows",
        "at most",
        "us on h200",
    ):
        assert part in text, text
    exact = package.explain(*tensors, **keywords, checks="full")
    assert exact.exact and exact.bytes < found.bytes and exact.operations < found.operations
    pairs = sum(range(12, 21)) + 7
    assert exact.operations == 2 * pairs * 8 * (QK + V)
    assert exact.bytes == 4 * (10 * 8 + 27 * 2) * (QK + V) + 4 * (5 + 7)
    assert exact.floor_us == {"h200": pytest.approx(exact.bytes / 4800e3)}
    assert exact.workspace_bytes == package.workspace("cpu").nbytes
    bounded = package.explain(*tensors, **keywords, max_seqlen_k=20)
    assert exact.bytes < bounded.bytes < found.bytes


def test_a_call_has_no_more_rows_than_its_bounds_allow(package):
    tensors, keywords = batch([(9, 20), (1, 7)])
    all_rows, few = (package.explain(*tensors, **keywords, max_seqlen_q=bound) for bound in (9, 2))
    assert few.operations * 10 == all_rows.operations * 4, "four rows of two sequences, of ten"
    assert "at most 1 query row per" in str(package.explain(*tensors, **keywords, max_seqlen_q=1))


def test_options_of_a_kernel_are_told(package):
    (symbol,) = package.explain(*batch([(9, 20)])[0], **batch([(9, 20)])[1]).row.symbols[-1:]
    variant = package.manifest["variants"][symbol]
    variant["options"] = {"maxnreg": 128, "split": 1}
    assert "maxnreg 128, split 1" in package.describe()
    tensors, keywords = batch([(9, 20)])
    cut = "are cut along them into parts"
    assert cut not in str(package.explain(*tensors, **keywords))
    variant["family"] = "prefill_ws"
    assert cut in str(package.explain(*tensors, **keywords))


def test_explain_says_what_breaks_alignment(package):
    tensors, keywords = batch()
    text = str(package.explain(misaligned(tensors[0]), padded(tensors[1]), tensors[2], **keywords))
    assert (
        "unaligned: q starts at an address" in text
        and "k_cache has strides" in text
        and "multiples of 4 elements" in text
    )
    tensors, keywords = batch([(0, 0)])
    assert "nothing to launch" in str(package.explain(*tensors, **keywords))
    with pytest.raises(ArgumentError, match="sinks"):
        package.explain(*tensors, **keywords, sinks=1)


def test_describe(package):
    text = package.describe()
    for part in (
        "fake_kernels 0.1.0",
        "triton 3.7.1",
        "max_seqs 8",
        "global: layers all, 8/2",
        "head dim 32 (v 16)",
        "per rank 8/2, 4/1",
        "h200: sm_90, 132 multiprocessors",
        "oldest driver 525.60.13",
        "decode_global_8_2_a (decode)",
        "64 registers",
        "0 spill bytes",
        "8 attention, 4 append_kv, 2 merge_states",
    ):
        assert part in text, text
    assert not package.opened
