"""Routes (runtime/_routes.h): a plain call launches in C what Python launched for such a call before. On CPU tensors, which the
reader takes for a GPU's, over the stand-in driver.
"""

import gc
import importlib.util
import sys
import timeit
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_package import SPEC, FakeDevice, build, misaligned
from test_checks import WRONG, put
from test_extras import WRONG as WRONG_EXTRAS
from test_reading import CPU, call, given_of

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from standin_support import built  # noqa: E402, F401

from specgen.runtime import launcher, reading, workspace
from specgen.runtime.arguments import arguments, variant_arguments, variant_call_arguments
from specgen.runtime.driver import open_driver
from specgen.runtime.errors import ArgumentError, DriverError
from specgen.runtime.package import Package
from specgen.runtime.tensor_maps import variant_maps


class StandinDevice(FakeDevice):
    """Binds every kernel to the stand-in driver; the number of its function is that of its symbol."""

    def kernel(self, symbol):
        variant, driver = self.variants[symbol], open_driver("nvidia")
        number = 1 + list(self.variants).index(symbol)
        call, taken = variant_call_arguments(variant), variant_arguments(variant)
        launch = launcher.Launch(symbol, number, 128, 1024, call, taken, "the GPU", variant_maps(variant))
        return launcher.bind(driver, 0, launch)


@pytest.fixture
def make(built, tmp_path, monkeypatch):  # noqa: F811
    """make(**options of fake_package.build) -> routed and plain packages, `launched` of a call, and the stream."""
    built.cuda.reset()
    monkeypatch.setenv("SPECGEN_CUDA_LIBRARY", str(built.cuda.path))
    spec = importlib.util.spec_from_file_location("_launch", built.extension)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    for module in (launcher, reading):
        monkeypatch.setattr(module, "load_extension", lambda: (extension, ""))

    def made(**options):
        world = SimpleNamespace(stream=0x77, standin=built.cuda, packages=[], selected=0)

        def read_by_c(package, plans):
            package._readers = reading.readers(package.geometries, package.limits, plans.current_stream, CPU)
            package._devices[0] = plans

        def counted(attention):
            def select(*bounds):
                world.selected += 1
                return attention(*bounds)

            return select

        def launched(package, given):
            world.standin.reset()
            # As much as prefill takes, so that a call may launch both; with sinks, at the end, all of decode's.
            taken = arguments("decode", sinks=True) if "sinks" in given else arguments("prefill")
            world.standin.kinds("l" * len(taken))
            call(package, given)
            return world.standin.launches

        for name in ("routed", "plain"):
            (tmp_path / name).mkdir(exist_ok=True)
            directory, *rows = build(tmp_path / name, **options)
            open_device = lambda directory, manifest, device: StandinDevice(manifest)  # noqa: E731
            package = Package("fake_kernels", directory, *rows, open_device=open_device)
            plans = package.open(torch.device("cpu"))
            plans.current_stream = lambda index: world.stream
            world.packages.append(package)
        world.routed, world.plain = world.packages
        ours, theirs = (package._devices[torch.device("cpu")] for package in world.packages)
        theirs.workspaces.by_stream = ours.workspaces.by_stream
        ours.attention = counted(ours.attention)
        world.read_by_c, world.launched, world.plans = read_by_c, launched, ours
        read_by_c(world.routed, ours)
        return world

    return made


CALLS = {
    "decode": put(max_seqlen_q=1),
    "speculative rows": put(max_seqlen_q=SPEC, max_seqlen_k=30),
    "prefill and decode": put(max_seqlen_q=SPEC + 1),
    "no bounds": put(),
    "no checks": put(checks="none"),
    "named layer": put(layer="global"),
    "misaligned q": lambda given: given.update(q=misaligned(given["q"])),
    "table of one column": put(block_table=torch.zeros(4, 1, dtype=torch.int32)),
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("case", CALLS)
def test_a_call_like_one_before_launches_the_same_by_its_route(make, case, layout):
    world = make(features={"layout": layout})
    given = given_of(lens=((1, 9), (7, 12), (1, 1), (1, 2)), layout=layout)
    CALLS[case](given)
    first, second, plain = (world.launched(*pair) for pair in ((world.routed, given), (world.routed, given), (world.plain, given)))
    assert len(first) == 1 + (given.get("max_seqlen_q") in (None, SPEC + 1))
    assert first == second == plain
    assert world.selected == 1


def test_no_out_is_allocated_after_the_checks(make):
    world = make()
    given = given_of() | {"out": None}
    call(world.routed, given)
    out = call(world.routed, given)
    assert world.selected == 1
    assert out.shape == given_of()["out"].shape and out.is_contiguous() and out.dtype is torch.float32
    world.standin.kinds("p" * 7)
    assert str(call(world.routed, given).data_ptr()) in world.standin.launches[-1]["args"].split(",")


def test_a_route_is_for_the_bounds_of_its_row(make):
    """Other lengths of the row go by it; a call of another row is chosen in Python, and has a route from then on."""
    world = make()
    few, more, many = given_of(lens=((1, 5),) * 4), given_of(lens=((2, 7), (1, 3))), given_of(lens=((SPEC + 1, 9), (1, 4)))
    for given in (few, more, few | {"max_seqlen_k": 3}, more | {"max_seqlen_q": 1}):
        assert world.launched(world.routed, given) == world.launched(world.plain, given)
    assert world.selected == 1
    for _ in range(3):
        assert world.launched(world.routed, many) == world.launched(world.plain, many)
    assert world.selected == 2
    assert len(world.launched(world.routed, many)) == 2
    assert not world.launched(world.routed, many | {"max_seqlen_q": 0})


def test_every_stream_has_its_own_workspace(make):
    world = make()
    given, seen = given_of(), {}
    for stream in (1, 2, 1, 2, 1):
        world.stream = stream
        (launch,) = world.launched(world.routed, given)
        assert launch["stream"] == hex(stream)
        assert seen.setdefault(stream, launch) == launch
    assert seen[1]["args"] != seen[2]["args"]
    assert world.selected == 2


def test_other_calls_are_not_launched_by_a_route(make):
    world = make()
    given = given_of()
    own = world.routed.workspace(device="cpu")
    call(world.routed, given)
    for number, more in enumerate(({"return_lse": True}, {"workspace": own}, {"checks": "full"}), 2):
        (launch,) = world.launched(world.routed, given | more)
        assert world.selected == number
        assert (str(own.addresses[0]) in launch["args"]) == ("workspace" in more)
    with pytest.raises(ArgumentError, match="requires grad"):
        call(world.routed, given | {"k_cache": given["k_cache"].clone().requires_grad_()})
    with pytest.raises(ArgumentError, match="sinks is given"):
        call(world.routed, given | {"sinks": torch.zeros(8)})
    with pytest.raises(ArgumentError, match="return_lse"):
        call(world.routed, given | {"return_lse": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_go_by_the_route(make, dtype):
    world = make(features={"sinks": True})
    given = given_of() | {"sinks": torch.zeros(8, dtype=dtype), "max_seqlen_q": 2}
    for _ in range(3):
        assert world.launched(world.routed, given) == world.launched(world.plain, given)
    assert str(given["sinks"].data_ptr()) in world.launched(world.routed, given)[0]["args"].split(",")
    assert world.selected == 1


@pytest.mark.parametrize("case", [case for case in WRONG_EXTRAS if "sinks" in case])
def test_a_route_excuses_no_mistake_in_sinks(make, case):
    world = make(features={"sinks": True})
    given = given_of() | {"sinks": torch.zeros(8)}
    call(world.routed, given)
    change, parts = WRONG_EXTRAS[case]
    with pytest.raises(ArgumentError) as error:
        call(world.routed, given | change)
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize("features", [{"alibi": True}, {"prefix_ranges": True}, {"sinks": True, "alibi": True}])
def test_other_features_have_no_route(make, features):
    world = make(features=features)
    given = given_of() | ({"sinks": torch.zeros(8)} if "sinks" in features else {}) | {"max_seqlen_q": 2}
    theirs = given | ({"alibi_slopes": torch.zeros(8)} if "alibi" in features else {})
    for _ in range(3):
        assert world.launched(world.routed, theirs) == world.launched(world.plain, theirs)
    assert world.selected == 3


@pytest.mark.parametrize("case", WRONG)
def test_a_route_excuses_no_mistake(make, case):
    world = make()
    call(world.routed, given_of())
    world.standin.reset()
    given = given_of()
    WRONG[case][0](given)
    with pytest.raises(ArgumentError) as error:
        call(world.routed, given)
    assert all(part in str(error.value) for part in WRONG[case][1])
    assert not world.standin.launches


@pytest.mark.parametrize("given", [{"max_seqlen_q": -1}, {"max_seqlen_k": 1.0}, {"max_seqlen_q": True}, {"max_seqlen_k": torch.tensor(3)}])
def test_bounds_are_host_integers(make, given):
    world = make()
    call(world.routed, given_of())
    with pytest.raises(ArgumentError, match="max_seqlen_."):
        call(world.routed, given_of() | given)


def test_a_bound_of_any_size(make):
    world = make()
    for _ in range(2):
        for size in (1 << 40, 1 << 80):
            given = given_of() | {"max_seqlen_k": size}
            assert world.launched(world.routed, given) == world.launched(world.plain, given)


def test_a_failed_launch_is_told_as_ever(make):
    world = make()
    given, texts = given_of(), []
    call(world.routed, given)
    for package in (world.routed, world.plain):
        world.standin.set(fail_launch=1)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE") as error:
            call(package, given)
        texts.append(str(error.value))
        world.standin.set(fail_launch=0)
    assert texts[0] == texts[1]
    assert world.selected == 1


def test_routes_wait_until_the_spare_is_renewed(make, monkeypatch):
    """A capture takes the spare workspace; the next call outside a capture makes another, whatever routes there were."""
    world = make()
    pool, given, capturing = world.plans.workspaces, given_of(), False
    monkeypatch.setattr(workspace, "is_capturing", lambda device: capturing)
    pool.renew_spare()
    call(world.routed, given)
    for stream in (5, 6):
        capturing, world.stream = True, stream
        call(world.routed, given)
        call(world.routed, given)
        assert pool.spare_wanted
        capturing, world.stream = False, 0x77
        call(world.routed, given)
        assert not pool.spare_wanted
    before = world.selected
    for stream in (5, 6, 0x77) * 2:
        world.stream = stream
        call(world.routed, given)
    assert world.selected == before + 3


def test_a_pinned_package_has_its_own_routes(make):
    world = make()
    given = given_of()
    usual = world.launched(world.routed, given)
    row = next(row for row in world.routed.table.attention_rows if row.prefill and row.query_heads == 8)
    pinned = world.routed.pinned(row)
    assert not pinned._readers
    plans = pinned.open(torch.device("cpu"))
    plans.current_stream = lambda index: world.stream
    world.read_by_c(pinned, plans)
    for _ in range(2):
        assert len(world.launched(pinned, given)) == 2
        assert world.launched(world.routed, given) == usual


def test_beyond_the_routes_that_are_kept_python_launches(make):
    world = make()
    given = given_of()
    for stream in range(1, 270):
        world.stream = stream
        for _ in range(2):
            (launch,) = world.launched(world.routed, given)
            assert launch["stream"] == hex(stream)
    assert world.selected == 269 + 269 - 256


def test_no_reference_is_kept(make):
    world = make()
    given = given_of()
    call(world.routed, given)
    world.standin.set(record=0)
    gc.collect()
    watched = [value for value in given.values() if isinstance(value, torch.Tensor)] + [None, True]
    before = [sys.getrefcount(value) for value in watched]
    for _ in range(300):
        call(world.routed, given)
        call(world.routed, given | {"out": None})
        call(world.routed, given | {"return_lse": True})
    gc.collect()
    after = [sys.getrefcount(value) for value in watched]
    assert max(now - then for now, then in zip(after, before)) < 100


def test_it_is_quicker(make):
    world = make()
    given = given_of() | {"max_seqlen_q": 1}
    world.standin.set(record=0)
    with torch.no_grad():
        routed, plain = (min(timeit.repeat(lambda: call(package, given), number=300, repeat=7)) for package in world.packages)
    assert routed < plain / 2
