"""Tensor maps through the launcher, on the stand-in driver: what is encoded, what is kept, errors, time; and their types."""

import ctypes
import sys
import timeit
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from standin_support import Bench, built, make_package  # noqa: E402, F401

from specgen.runtime.arguments import arguments, call_arguments  # noqa: E402
from specgen.runtime.tensor_maps import FIRST_MAP, ZERO, parameters, resolve, variant_maps  # noqa: E402

CACHE = {"dtype": "bfloat16", "box": [1, 16, 1, 64], "swizzle": 128}
MAPS = (
    {
        "name": "q_map",
        "tensor": "q_ptr",
        "dtype": "float16",
        "extents": ["num_tokens", 8, 80],
        "strides": ["q_stride_token", "q_stride_head"],
        "box": [16, 4, 64],
        "swizzle": 128,
    },
    *(
        {
            "name": f"{operand}_map",
            "tensor": f"{operand}_cache_ptr",
            "extents": ["num_pages", 16, 2, 80],
            "strides": [f"{operand}_cache_stride_{dim}" for dim in ("page", "slot", "head")],
            **CACHE,
        }
        for operand in "kv"
    ),
)
CALL = call_arguments("prefill_ws")


@pytest.fixture(params=["C", "ctypes"])
def bench(request, built, tmp_path, monkeypatch):  # noqa: F811
    built.cuda.reset()
    monkeypatch.setenv("SPECGEN_CUDA_LIBRARY", str(built.cuda.path))
    monkeypatch.syspath_prepend(tmp_path)
    package, _ = make_package(tmp_path, {}, built.extension if request.param == "C" else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield Bench(built.cuda, "nvidia", request.param, package)


def values(**given) -> list:
    """Arguments of a call in order: those that are given, and 16 for the others."""
    assert given.keys() <= {argument.name for argument in CALL}
    return [given.get(argument.name, 16) for argument in CALL]


def fields(line: str) -> dict[str, str]:
    return dict(field.split("=", 1) for field in line.split()[1:])


def test_maps_are_made_of_the_arguments_of_the_call(bench):
    """Address, sizes and strides in bytes from the fastest dimension on, box, element type; the copy reaches the kernel whole."""
    _, kernel = bench.bind("prefill_ws", maps=MAPS)
    q, k = torch.empty(5, 8, 80, dtype=torch.float16), torch.empty(3, 16, 2, 80, dtype=torch.bfloat16)
    strides = {"k_cache_stride_page": 2560, "k_cache_stride_slot": 160, "k_cache_stride_head": 80}
    interleaved = {"v_cache_stride_page": 5120, "v_cache_stride_slot": 80, "v_cache_stride_head": 1280}
    call = values(
        q_ptr=q, k_cache_ptr=k, v_cache_ptr=0x70, num_tokens=5, num_pages=3, q_stride_token=640, q_stride_head=80,
        seq_lens_ptr=0x999, num_seqs=7, out_stride_head=-2, **strides, **interleaved,
    )  # fmt: skip
    kernel(132, 0, *call)
    first, second, third = (fields(line) for line in bench.standin.logged("encode"))
    assert first == {
        "map": first["map"], "type": "6", "address": str(q.data_ptr()), "extents": "80,8,5", "strides": "160,1280",
        "box": "64,4,16", "swizzle": "3", "promotion": "2",
    }  # fmt: skip
    assert (second["type"], second["address"], second["extents"]) == ("9", str(k.data_ptr()), "80,2,16,3")
    assert (second["strides"], second["box"]) == ("160,320,5120", "64,1,16,1")
    assert (third["address"], third["strides"]) == ("112", "2560,160,10240")

    sent = bench.standin.launches[0]["args"].split(",")
    maps = [first["map"], *["0"] * 6, second["map"], *["0"] * 8, third["map"], *["0"] * 8]
    taken = [argument.name for argument in arguments("prefill_ws")[3:]]
    given = dict(zip((argument.name for argument in CALL), map(str, call))) | {"late_programs": "0"}
    assert given["seq_lens_ptr"] == "2457"
    assert sent == maps + [given[name] for name in taken] + ["0", "0"]


def test_a_launch_that_may_overlap_the_one_before(bench):
    """The driver is asked for it, and the kernel told how many programs begin late; a driver that cannot launches in order."""
    for launch_with, called in ((None, "cuLaunchKernelEx"), (0, "cuLaunchKernel")):
        if launch_with is not None:
            bench.driver.launch_addresses = bench.driver.launch_addresses._replace(launch_with=launch_with)
        handle, kernel = bench.bind("prefill_ws", index=1, threads=384, shared_bytes=777, maps=MAPS, late=66)
        kernel(132, 0xBEEF, *values(seq_lens_ptr=0x999))
        launch = bench.standin.launches[-1]
        assert (launch["call"], launch["grid"], launch["block"], launch["shared"]) == (called, "132,1,1", "384,1,1", "777")
        assert (launch["stream"], launch["extra"], launch["on"]) == ("0xbeef", "0", "1")
        assert int(launch["function"], 16) == handle
        names = [argument.name for argument in arguments("prefill_ws")[3:]]
        assert launch["args"].split(",")[-len(names) - 2 :][names.index("late_programs")] == "66"
        assert launch["args"].split(",")[-len(names) - 2 :][names.index("seq_lens_ptr")] == "2457"


@pytest.mark.parametrize(("version", "overlaps"), [(12020, False), (12030, True)])
def test_launches_overlap_from_the_driver_on_that_captures_them(bench, version, overlaps):
    bench.standin.set(version=version)
    driver = bench.modules["driver"].CudaDriver(ctypes.CDLL(str(bench.standin.path)))
    assert bool(driver.launch_addresses.launch_with) == overlaps


def given_maps(launch: dict) -> list[str]:
    """Which encoded maps a launch was given, by the numbers that the stand-in wrote into them."""
    sent = launch["args"].split(",")
    return [sent[0], sent[7], sent[16]]


def test_a_steady_state_encodes_nothing(bench):
    """The maps of 80 layers stay; another size, stride or address makes another; a returning one is not made again."""
    _, kernel = bench.bind("prefill_ws", maps=MAPS)
    layers = [values(k_cache_ptr=1 << 20 | i << 12, v_cache_ptr=1 << 40 | i << 12, q_ptr=1 << 30) for i in range(80)]
    for call in layers:
        kernel(1, 0, *call)
    assert len(bench.standin.logged("encode")) == 161
    for call in layers:
        kernel(1, 0, *call)
    assert len(bench.standin.logged("encode")) == 161
    first, second = bench.standin.launches[:80], bench.standin.launches[80:]
    assert [given_maps(launch) for launch in first] == [given_maps(launch) for launch in second]
    for name, count in (("num_tokens", 1), ("num_pages", 2), ("q_stride_head", 1), ("v_cache_stride_slot", 1), ("num_seqs", 0)):
        before = len(bench.standin.logged("encode"))
        for _ in range(2):
            kernel(1, 0, *values(k_cache_ptr=1 << 20, v_cache_ptr=1 << 40, q_ptr=1 << 30, **{name: 32}))
        assert len(bench.standin.logged("encode")) == before + count, name


def test_kernels_do_not_share_maps(bench):
    (_, first), (_, second) = bench.bind("prefill_ws", maps=MAPS), bench.bind("prefill_ws", maps=MAPS)
    for kernel in (first, second, first):
        kernel(1, 0, *values())
    assert len(bench.standin.logged("encode")) == 6


def test_many_more_maps_than_are_kept(bench):
    """Whatever is forgotten on the way, every launch gets the maps of its own tensors."""
    _, kernel = bench.bind("prefill_ws", maps=MAPS)
    bench.standin.set(record=0)
    for i in range(1, 3000):
        kernel(1, 0, *values(q_ptr=i << 8, k_cache_ptr=i << 16, v_cache_ptr=i << 20))
    bench.standin.set(record=1)
    owners = {}
    for i in (*range(1, 100), *range(2950, 3000), *range(1, 100)):
        tensors = (i << 8, i << 16, i << 20)
        kernel(1, 0, *values(q_ptr=tensors[0], k_cache_ptr=tensors[1], v_cache_ptr=tensors[2]))
        for address, number in zip(tensors, given_maps(bench.standin.launches[-1])):
            assert owners.setdefault(number, address) == address


@pytest.mark.parametrize(("rank", "name"), [(3, "q_map"), (4, "k_map")])
def test_a_map_that_the_driver_refuses_is_named(bench, rank, name):
    _, kernel = bench.bind("prefill_ws", index=1, maps=MAPS)
    bench.standin.set(fail_encode=rank)
    with pytest.raises(bench.error("DriverError")) as caught:
        kernel(1, 0, *values())
    for part in (f"encoding {name} before launching the_symbol failed: CUDA_ERROR_INVALID_VALUE (1)", "multiples of 16 bytes"):
        assert part in str(caught.value)
    assert not bench.standin.launches
    assert len(bench.standin.logged("push")) == len(bench.standin.logged("pop"))
    bench.standin.set(fail_encode=0)
    kernel(1, 0, *values())  # what failed was not kept
    assert len(bench.standin.launches) == 1


def test_a_bad_argument_of_a_map_is_named(bench):
    _, kernel = bench.bind("prefill_ws", maps=MAPS)
    for name, value in (("q_ptr", None), ("num_pages", 1 << 31), ("v_cache_stride_slot", 1.0)):
        with pytest.raises(bench.error("ArgumentError"), match=f"the_symbol: {name}: "):
            kernel(1, 0, *values(**{name: value}))
    kernel(1, 0, *values(partial_acc_ptr=None, counters_ptr="no parameter needs it"))


def test_an_old_driver_is_refused(bench, monkeypatch):
    addresses = bench.driver.launch_addresses._replace(encode=0)
    monkeypatch.setattr(bench.driver, "launch_addresses", addresses)
    with pytest.raises(bench.error("DriverError"), match="it has no cuTensorMapEncodeTiled; needed: a later driver"):
        bench.bind("prefill_ws", maps=MAPS)
    bench.bind("prefill")


def test_host_time_of_a_launch_with_maps(bench):
    """Three maps from the cache: well below a microsecond more than their tensors; the bound leaves room for a busy host."""
    _, kernel = bench.bind("prefill_ws", maps=MAPS)
    bench.standin.set(record=0)
    tensor = torch.empty(16)
    call = [tensor if argument.kind == "pointer" else 4096 for argument in CALL]
    best = min(timeit.repeat(lambda: kernel(132, 0, *call), number=200, repeat=100)) / 200 * 1e6
    print(f"{bench.path}: {best:.2f} us a launch")
    assert best < (15 if bench.path == "C" else 150)


def test_parameters_of_a_compiled_kernel():
    """As Triton 3.7.1 lays them out: a map is 128 bytes, its sizes and its strides; two pointers come last."""
    maps = variant_maps({"tensor_maps": MAPS})
    found = parameters(arguments("prefill_ws"), maps)
    assert found[:8] == (("q_map", 128), *[(None, 4)] * 3, *[(None, 8)] * 3, ("k_map", 128))
    assert found[-4:] == (("out_stride_head", 8), ("late_programs", 4), (None, 8), (None, 8))
    positions, resolved = resolve(CALL, arguments("prefill_ws"), maps)
    assert positions[:8] == (FIRST_MAP, *[ZERO] * 6, FIRST_MAP - 1) and len(resolved) == 3
    assert maps[1].triton_type.startswith("tensordesc<bf16[1, 16, 1, 64],NVMMASharedLayout(")
