"""Reading a call's tensors in C (runtime/_read.h): what is launched is what the checks in Python would launch, and every
error is theirs. On CPU tensors: the reader is told to take DLPack's kDLCPU for a GPU.
"""

import importlib.util
import sys
import timeit
from pathlib import Path

import pytest
import torch
from fake_package import QK, V, batch, fake, misaligned, padded
from test_checks import WRONG, put, strided

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from standin_support import build_extension  # noqa: E402

from specgen.runtime import reading
from specgen.runtime.errors import ArgumentError

CPU = 1  # kDLCPU


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("_launch", build_extension(tmp_path_factory.mktemp("extension")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def packages(tmp_path, extension, monkeypatch):
    """(one that reads in C, one that does not), of the same features."""

    def make(**options):
        made = []
        for name in ("quick", "plain"):
            (tmp_path / name).mkdir(exist_ok=True)
            made.append(fake(tmp_path / name, compute=False, **options))
            made[-1].open(torch.device("cpu"))
        quick = made[0]
        monkeypatch.setattr(reading, "load_extension", lambda: (extension, ""))
        quick._readers = reading.readers(quick.geometries, quick.limits, lambda index: 0, CPU)
        quick._devices[0] = quick._devices[torch.device("cpu")]
        return made

    return make


def addressed(package, launch):
    """A launch with addresses in place of tensors, and of a workspace's by name."""
    symbol, grid, stream, given = launch
    (workspace,) = package._devices[torch.device("cpu")].workspaces.by_stream.values()
    own = dict(zip(workspace.addresses, ("acc", "ml", "counters", "tickets", "prefill")))
    flat = {name: value.data_ptr() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    return symbol, grid, stream, {name: own.get(value, value) for name, value in flat.items()}


def call(package, given):
    given = dict(given)
    return package.attention(given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), **given)


def given_of(**options):
    (q, k_cache, v_cache), keywords = batch(**options)
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": torch.zeros(len(q), q.shape[1], V)} | keywords


def fused(given):
    both = torch.zeros(16, 2, 4, 2, QK)
    given["k_cache"], given["v_cache"] = both[:, 0], both[:, 1, :, :, :V]


def tailed(cache, elements):
    """The cache with so many elements behind each page: all strides multiples of 16 bytes, pages no multiple of a slot apart."""
    pages, page = cache.shape[0], cache[0].numel() + elements
    return torch.zeros(pages * page).as_strided(cache.shape, (page, *cache.stride()[1:]))


RIGHT = {
    "plain": put(),
    "bounds": put(max_seqlen_q=1, max_seqlen_k=9),
    "loose bounds": put(max_seqlen_q=99, max_seqlen_k=1 << 40),
    "nothing in it": put(max_seqlen_q=0),
    "named layer": put(layer="global"),
    "no checks": put(checks="none"),
    "lse": put(return_lse=True),
    "views of one cache": fused,
    "misaligned q": lambda given: given.update(q=misaligned(given["q"])),
    "odd strides of k": lambda given: given.update(k_cache=padded(given["k_cache"])),
    "pages with a tail": lambda given: given.update(k_cache=tailed(given["k_cache"], 8)),
    "pages of v with a tail": lambda given: given.update(v_cache=tailed(given["v_cache"], 16)),
    "pages over one slot": lambda given: given.update(k_cache=given["k_cache"][:, :1].expand_as(given["k_cache"])),
    "padded out": put(out=torch.zeros(4, 9, V + 4)[:, :8, :V]),
    "padded table": lambda given: given.update(block_table=torch.zeros(4, 11, dtype=torch.int32)[:, 2:9]),
}


@pytest.mark.parametrize("heads", [(8, 2), (4, 1)])
@pytest.mark.parametrize("case", RIGHT)
def test_what_is_launched_is_the_same(packages, case, heads, monkeypatch):
    if heads == (4, 1) and case in ("views of one cache", "padded out"):
        pytest.skip("made for other heads")
    given = given_of(heads=heads)
    RIGHT[case](given)
    quick, plain = packages()
    returned = [call(package, given) for package in (quick, plain)]
    ours, theirs = ([addressed(package, launch) for launch in package.opened[0].launches] for package in (quick, plain))
    if given.get("return_lse"):
        assert returned[0][1].shape == returned[1][1].shape
        for launch in (*ours, *theirs):
            assert launch[3].pop("lse_ptr")
    assert ours == theirs
    assert all(type(value) is int for *_, arguments in quick.opened[0].launches for name, value in arguments.items() if name != "lse_ptr")


@pytest.mark.parametrize(
    ("rows", "bound", "least"), [((9, 9, 9), 9, 9), ((9, 2, 9), 9, 2), ((9, 0, 9), 9, 1), ((4, 9, 9), 20, 1), ((7,), 9, 7), ((9, 9), None, 1)]
)
def test_both_find_the_fewest_rows_of_a_sequence(packages, rows, bound, least):
    given = given_of(lens=tuple((count, 12) for count in rows)) | {"max_seqlen_q": bound}
    seen = []
    for package in packages():
        plans = package._devices[torch.device("cpu")]
        package._devices[0] = plans
        chosen = plans.attention
        plans.attention = lambda *call, chosen=chosen: seen.append(call[2:]) or chosen(*call)
        call(package, given)
    ours, theirs = seen
    assert ours == theirs and ours[0] == min(bound or sum(rows), sum(rows)) and ours[-1] == least


def test_no_out_is_allocated(packages):
    given = given_of()
    del given["out"]
    quick, _ = packages()
    out = call(quick, given)
    assert out.shape == (4, 8, V) and out.is_contiguous()
    (launch,) = quick.opened[0].launches[:1]
    assert launch[3]["out_ptr"] == out.data_ptr()
    assert (launch[3]["out_stride_token"], launch[3]["out_stride_head"]) == (8 * V, V)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts_and_features(packages, layout):
    features = {"layout": layout, "sinks": True}
    quick, plain = packages(features=features)
    given = given_of(layout=layout) | {"sinks": torch.zeros(8)}
    for package in (quick, plain):
        call(package, given)
    ours, theirs = (addressed(package, package.opened[0].launches[0]) for package in (quick, plain))
    assert ours == theirs
    with pytest.raises(ArgumentError, match="sinks is None"):
        call(quick, given | {"sinks": None})


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_those_of_the_checks(packages, case):
    change, _ = WRONG[case]
    texts = []
    for package in packages():
        given = given_of()
        change(given)
        with pytest.raises(ArgumentError) as error:
            call(package, given)
        texts.append(str(error.value))
        assert not package.opened[0].launches
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, :, ::2],
        lambda x: x.half(),
        lambda x: x[:0],
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: None,
        lambda x: [1],
        strided,
    ],
)
def test_what_is_irregular_is_not_read(extension, packages, change):
    quick, _ = packages()
    reader, *_ = quick._readers[None]
    given = given_of()
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "out")
    rest = None, None, None, True
    assert reader.call(*(given[name] for name in names), *rest) is not None
    assert reader.call(*(change(given[name]) if name == "q" else given[name] for name in names), *rest) is None


def test_devices_of_another_kind_are_not_read(packages):
    quick, _ = packages()
    quick._readers = reading.readers(quick.geometries, quick.limits, lambda index: 0)
    call(quick, given_of())
    assert isinstance(quick.opened[0].launches[0][3]["q_ptr"], torch.Tensor)


def test_without_the_exchange_api_nothing_is_read(packages, monkeypatch):
    quick, _ = packages()
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert reading.readers(quick.geometries, quick.limits, lambda index: 0) == {}


def test_it_is_quicker(packages):
    given = given_of() | {"max_seqlen_q": 1}
    with torch.no_grad():
        quick, plain = (min(timeit.repeat(lambda: call(package, given), number=300, repeat=7)) for package in packages())
    assert quick < plain
