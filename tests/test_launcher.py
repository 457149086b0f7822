"""The launch itself, through the C extension and through ctypes, on both vendors' stand-in drivers: packing,
contexts, errors, time.
"""

import ctypes
import gc
import re
import subprocess
import sys
import threading
import timeit
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from standin_support import (
    Bench,
    build_extension,
    build_standins,
    make_package,
    variant,
)  # noqa: E402

I32, I64 = (1 << 31) - 1, (1 << 63) - 1


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standin")
    cuda, hip = build_standins(folder)
    return {"nvidia": cuda, "amd": hip, "extension": build_extension(folder)}


@pytest.fixture(params=["nvidia-C", "nvidia-ctypes", "amd-C", "amd-ctypes"])
def bench(request, built, tmp_path, monkeypatch):
    vendor, path = request.param.split("-")
    standin = built[vendor]
    standin.reset(**({"major": 9, "minor": 0x42} if vendor == "amd" else {}))
    monkeypatch.setenv("SPECGEN_CUDA_LIBRARY", str(built["nvidia"].path))
    monkeypatch.setenv("SPECGEN_HIP_LIBRARY", str(built["amd"].path))
    monkeypatch.syspath_prepend(tmp_path)
    package, _ = make_package(tmp_path, {}, built["extension"] if path == "C" else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield Bench(standin, vendor, path, package)


def test_packing(bench):
    """Grid, block, shared memory, stream, every argument in order and width, two null pointers, no extra."""
    handle, kernel = bench.bind(threads=256, shared_bytes=50000)
    a = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    view, empty = a[1:, 1:], torch.empty(0)
    assert kernel(132, 0xBEEF, a, view, empty, 0, (1 << 64) - 1, a.data_ptr() + 2, -(1 << 63)) is None
    (launch,) = bench.standin.launches
    address = a.data_ptr()
    assert launch["args"] == f"{address},{address + 20},0,0,-1,{address + 2},{-(1 << 63)},0,0"
    assert (launch["grid"], launch["block"], launch["shared"]) == ("132,1,1", "256,1,1", "50000")
    assert (launch["stream"], launch["extra"], launch["on"]) == ("0xbeef", "0", "0")
    assert int(launch["function"], 16) == handle


@pytest.mark.parametrize("family", ["decode", "prefill", "varlen", "append_kv", "merge_states"])
def test_every_family_packs_as_declared(bench, family):
    """The kernel gets what it takes of the call, in its own order; what it does not take is not looked at."""
    _, kernel = bench.bind(family)
    call = bench.modules["arguments"].call_arguments(family)
    taken = bench.modules["arguments"].ARGUMENTS[family]
    extremes = {"i32": (-I32 - 1, I32, -1, 0), "i64": (-I64 - 1, I64, -1, 1 << 40)}
    values = {
        a.name: None if a not in taken else torch.empty(4) if a.kind == "pointer" else extremes[a.kind][i % 4]
        for i, a in enumerate(call)
    }
    kernel(1, 0, *values.values())
    given = [values[a.name] for a in taken]
    expected = [str(v.data_ptr() if isinstance(v, torch.Tensor) else v) for v in given]
    assert bench.standin.launches[0]["args"].split(",") == [*expected, "0", "0"]


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("max_pages", I32 + 1, "2147483648 came, an int of 32 bits"),
        ("max_pages", -I32 - 2, "an int of 32 bits"),
        ("max_pages", 1.0, "1.0 came"),
        ("max_pages", None, "NoneType came"),
        ("max_pages", torch.tensor(3), "Tensor came"),
        ("max_pages", 1 << 200, "an int of 32 bits"),
        ("store_lse", "1", "str came"),
        ("q_stride_token", I64 + 1, "an int of 64 bits"),
        ("q_stride_token", -I64 - 2, "an int of 64 bits"),
        ("q_stride_token", torch.tensor(3), "Tensor came"),
        ("q_ptr", None, "NoneType came, a tensor"),
        ("q_ptr", -1, "-1 came"),
        ("q_ptr", 1 << 64, "a tensor, or an address"),
        ("out_ptr", 1.5, "1.5 came"),
    ],
)
def test_bad_arguments_are_named(bench, name, value, needed):
    _, kernel = bench.bind("decode")
    names = [argument.name for argument in bench.modules["arguments"].call_arguments("decode")]
    values = [0] * len(names)
    values[names.index(name)] = value
    with pytest.raises(bench.error("ArgumentError"), match=needed) as caught:
        kernel(1, 0, *values)
    assert f"the_symbol: {name}: " in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert not bench.standin.launches


def test_bad_grid_stream_and_count(bench):
    _, kernel = bench.bind()
    error = bench.error("ArgumentError")
    for grid in (0, -1, 1 << 31, 1 << 70, None, 1.0):
        with pytest.raises(error, match="the_symbol: grid: .* came, an int from 1 to 2147483647 needed"):
            kernel(grid, 0, *[0] * 7)
    for stream in (-1, None, "0", 1 << 64):
        with pytest.raises(error, match="the_symbol: stream: .* came"):
            kernel(1, stream, *[0] * 7)
    for count in (0, 6, 8):
        with pytest.raises(
            error, match=rf"the_symbol: {count + 2} arguments came, 9 needed: grid, stream, out_a_ptr, "
        ):
            kernel(1, 0, *[0] * count)
    assert not bench.standin.launches


def test_an_error_of_data_ptr_comes_through(bench):
    class Odd:
        def data_ptr(self):
            raise OverflowError("no storage")

    _, kernel = bench.bind()
    with pytest.raises(OverflowError, match="no storage"):
        kernel(1, 0, Odd(), *[0] * 6)


def test_launches_on_its_own_device_from_any_thread(bench):
    """Device 1's kernel, from a thread with nothing current, with device 0 current, and with device 1
    current.
    """
    _, kernel = bench.bind(index=1)
    seen = {}

    def launch(name, scope):
        if scope is None:
            kernel(1, 0, *[0] * 7)
        else:
            with bench.driver.entered(bench.driver.scope(scope)):
                bench.standin.library.standin_reset()
                kernel(1, 0, *[0] * 7)
                seen[name] = bench.standin.log
                return
        seen[name] = bench.standin.log

    bench.standin.reset()
    for name, scope in (("none", None), ("other", 0), ("own", 1)):
        thread = threading.Thread(target=launch, args=(name, scope))
        thread.start()
        thread.join()
    switches = {"nvidia": ["push 1", "pop 1"], "amd": ["set 1", "set 0"]}[bench.vendor]
    for name, expected in (("none", switches), ("other", switches), ("own", [])):
        assert [line for line in seen[name] if "Launch" not in line] == expected, name
        assert "on=1 " in next(line for line in seen[name] if "Launch" in line)
    if bench.vendor == "nvidia":
        assert seen["other"][0].startswith("push") and seen["other"][-1].startswith("pop")


def test_a_failed_launch_names_error_symbol_and_facts(bench):
    _, kernel = bench.bind(threads=64, shared_bytes=777)
    name = {"nvidia": "CUDA_ERROR_INVALID_VALUE", "amd": "hipErrorInvalidValue"}[bench.vendor]
    bench.standin.set(fail_launch=1)
    with pytest.raises(bench.error("DriverError")) as caught:
        kernel(5, 0xABC, *[0] * 7)
    for part in (
        "launching the_symbol failed",
        name,
        "grid 5",
        "64 threads",
        "777 bytes",
        "stream 0xabc",
        "on the GPU",
    ):
        assert part in str(caught.value)
    assert (caught.value.code, caught.value.name) == (1, name)
    bench.standin.set(fail_launch=0)
    kernel(5, 0xABC, *[0] * 7)
    if bench.vendor == "nvidia":  # the failed launch left the context stack as it was
        assert len(bench.standin.logged("push")) == len(bench.standin.logged("pop"))


def test_a_failed_switch_of_device_is_an_error(bench):
    _, kernel = bench.bind(index=1)
    bench.standin.set(fail_enter=1)
    with pytest.raises(
        bench.error("DriverError"), match="making the device current before launching the_symbol failed"
    ):
        kernel(1, 0, *[0] * 7)
    assert not bench.standin.launches
    bench.standin.set(fail_enter=0)
    if bench.vendor == "nvidia":
        bench.standin.set(fail_leave=1)
        with pytest.raises(
            bench.error("DriverError"),
            match="restoring the caller's device after launching the_symbol failed",
        ):
            kernel(1, 0, *[0] * 7)
        bench.standin.set(fail_leave=0)
        bench.standin.library.cuCtxPopCurrent_v2(
            ctypes.byref(ctypes.c_void_p())
        )  # what the refused pop left behind


def test_many_threads_share_a_kernel(bench):
    _, kernel = bench.bind()
    failures = []

    def work(number):
        try:
            for i in range(100):
                kernel(number + 1, number, *[number] * 6, number)
        except Exception as error:  # reported by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    launches = bench.standin.launches
    assert len(launches) == 600
    for launch in launches:
        number = int(launch["stream"], 16)
        assert launch["grid"] == f"{number + 1},1,1"
        assert launch["args"] == ",".join([str(number)] * 7 + ["0", "0"])


def test_no_reference_is_kept(bench):
    _, kernel = bench.bind()
    bench.standin.set(record=0)
    tensor, big = torch.empty(3), 1 << 40
    gc.collect()  # other tests' garbage holds None too
    before = sys.getrefcount(tensor), sys.getrefcount(big), sys.getrefcount(None)
    for _ in range(300):
        kernel(1, 0, *[tensor] * 6, big)
        with pytest.raises(bench.error("ArgumentError")):
            kernel(1, 0, *[tensor] * 5, None, big)
    gc.collect()
    after = sys.getrefcount(tensor), sys.getrefcount(big), sys.getrefcount(None)
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 100


def test_one_warning_for_the_ctypes_path(bench):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bench.bind()
        bench.bind()
    assert len(caught) == (bench.path == "ctypes")
    if caught:
        assert issubclass(caught[0].category, RuntimeWarning)
        assert "ctypes" in str(caught[0].message)


def test_more_shared_memory_than_the_default_is_reserved(bench):
    bench.bind(shared_bytes=48 * 1024)
    assert not bench.standin.logged("dynamic")
    bench.bind(shared_bytes=48 * 1024 + 1)
    expected = ["dynamic shared memory 49153"] if bench.vendor == "nvidia" else []
    assert bench.standin.logged("dynamic") == expected


def test_a_block_beyond_the_device_is_refused(bench):
    bench.standin.set(max_threads=256)
    with pytest.raises(
        bench.error("DriverError"), match="entry: a block of 512 threads needed, 256 possible"
    ):
        bench.bind(threads=512)


def test_driver_failures_carry_the_driver_s_name(bench):
    name = {"nvidia": "CUDA_ERROR_NOT_FOUND", "amd": "hipErrorNotFound"}[bench.vendor]
    bench.standin.set(fail_function=1)
    with pytest.raises(bench.error("DriverError"), match=f"ModuleGetFunction failed: {name}"):
        bench.bind()
    bench.standin.set(fail_function=0)
    assert len(bench.standin.logged("push")) == len(bench.standin.logged("pop"))
    with pytest.raises(bench.error("DriverError"), match=r"Invalid_?Device \(101\)|INVALID_DEVICE \(101\)"):
        bench.driver.properties(7)


def test_a_missing_library_is_a_named_error(bench, monkeypatch, tmp_path):
    variable = {"nvidia": "SPECGEN_CUDA_LIBRARY", "amd": "SPECGEN_HIP_LIBRARY"}[bench.vendor]
    monkeypatch.setenv(variable, str(tmp_path / "nowhere.so"))
    with pytest.raises(bench.error("DriverError"), match=f"no driver library could be opened.*{variable}"):
        bench.modules["driver"].open_driver(bench.vendor)


def test_host_time_of_a_launch(bench):
    """28 arguments, of which the kernel takes 11 tensors and 14 ints: below 5 us on an idle host through C; the bound leaves room for a
    busy one.
    """
    _, kernel = bench.bind("decode")
    bench.standin.set(record=0)
    tensor = torch.empty(16)
    values = [tensor if a.kind == "pointer" else 4096 for a in bench.modules["arguments"].call_arguments("decode")]
    number = 200  # short bursts: the best of many escapes a busy host
    best = min(timeit.repeat(lambda: kernel(132, 0, *values), number=number, repeat=100)) / number * 1e6
    print(f"{bench.vendor} {bench.path}: {best:.2f} us a launch")
    assert best < (15 if bench.path == "C" else 100)


def test_the_extension_needs_no_library_and_the_stable_abi_only(built):
    """No symbol of a glibc later than 2.17 (manylinux2014), no library but the C library's, and nothing
    private of CPython's.
    """
    text = subprocess.run(
        ["objdump", "-T", "-p", str(built["extension"])], check=True, capture_output=True, text=True
    ).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", text)}
    assert all(version <= (2, 17) for version in versions)
    assert set(re.findall(r"NEEDED +(\S+)", text)) == {"libc.so.6"}  # auditwheel needs one
    private = set(re.findall(r"\b(_Py\w+)", text))
    assert private <= {
        "_Py_NoneStruct",
        "_Py_Dealloc",
        "_PyArg_ParseTuple_SizeT",
        "_PyObject_CallFunction_SizeT",
    }


def test_two_packages_side_by_side(bench, built, tmp_path):
    extension = built["extension"] if bench.path == "C" else None
    other, _ = make_package(tmp_path, {"other": variant()}, extension)
    second = Bench(bench.standin, bench.vendor, bench.path, other)
    (_, kernel), (_, other_kernel) = bench.bind(), second.bind()
    kernel(1, 0, *[1] * 7)
    other_kernel(2, 0, *[2] * 7)
    assert [launch["grid"] for launch in bench.standin.launches] == ["1,1,1", "2,1,1"]
    with pytest.raises(second.error("ArgumentError")):
        other_kernel(0, 0, *[2] * 7)
