"""Device: which binaries a GPU gets, and each way in which it gets none, on stand-in drivers. No GPU."""

import sys
import warnings
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from standin_support import SEVEN, built, gpu, variant  # noqa: E402, F401 (fixtures)


def test_the_exact_architecture_runs_its_binaries(gpu):
    fake = gpu(
        {
            "small": variant(sm_80={}, sm_90={}),
            "large": variant(sm_90={"shared_bytes": 200_000, "num_threads": 256}),
        }
    )
    device = fake.open()
    assert (device.arch, device.mode, device.multiprocessors, device.index) == ("sm_90", "binary", 132, 0)
    assert not fake.standin.logged("cuModuleLoadData")
    kernel = device.kernel("large")
    assert device.kernel("large") is kernel
    kernel(264, 5, *SEVEN)
    (launch,) = fake.standin.launches
    assert (launch["grid"], launch["block"], launch["shared"], launch["on"]) == (
        "264,1,1",
        "256,1,1",
        "200000",
        "0",
    )
    assert fake.standin.logged("cuModule") == [
        "cuModuleLoadData large@sm_90 on=0",
        "cuModuleGetFunction large_entry",
    ]
    assert fake.standin.logged("dynamic") == ["dynamic shared memory 200000"]
    device.load_all()
    device.load_all()
    assert len(fake.standin.logged("cuModuleLoadData")) == 2


def test_a_gpu_that_is_no_target_is_told_which_table_serves_it(gpu):
    fake = gpu({"small": variant(sm_90={})}, multiprocessors=114)
    fake.manifest["targets"] = [dict(id="h200", arch="sm_90", multiprocessors=132, shared_memory_per_block=232448)]
    with pytest.warns(RuntimeWarning) as caught:
        assert fake.open().multiprocessors == 114
    (message,) = (str(warning.message) for warning in caught)
    assert "has 114 multiprocessors" in message and "chosen for h200 with 132 multiprocessors" in message
    fake.manifest["targets"][0]["multiprocessors"] = 114
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fake.open()


def test_the_current_device_and_a_second_one(gpu):
    fake = gpu({"small": variant(sm_90={})})
    device = fake.open("cuda")
    assert device.index == 1
    device.kernel("small")(1, 0, *SEVEN)
    assert fake.standin.launches[0]["on"] == "1"
    with pytest.raises(fake.errors.DriverError, match="CUDA_ERROR_INVALID_DEVICE"):
        fake.open("cuda:2")


@pytest.mark.parametrize(
    ("major", "minor", "arch"), [(9, 0x42, "gfx942"), (9, 0x0A, "gfx90a"), (9, 0x50, "gfx950")]
)
def test_hip(gpu, major, minor, arch):
    fake = gpu(
        {"small": variant(sm_90={}, **{arch: {"num_threads": 256}})},
        hip=True,
        major=major,
        minor=minor,
        multiprocessors=304,
    )
    device = fake.open("cuda:1")
    assert (device.arch, device.mode, device.multiprocessors) == (arch, "binary", 304)
    device.kernel("small")(304, 0, *SEVEN)
    assert fake.standin.logged("hipModuleLoadData") == [f"hipModuleLoadData small@{arch} on=1"]
    assert (fake.standin.launches[0]["block"], fake.standin.launches[0]["on"]) == ("256,1,1", "1")


@pytest.mark.parametrize(("minor", "arch"), [(6, "sm_80"), (9, "sm_89"), (0, "sm_80")])
def test_a_lower_minor_runs_where_its_shared_memory_fits(gpu, minor, arch):
    fake = gpu({"small": variant(sm_80={"shared_bytes": 90_000}, sm_89={}, sm_90={})}, major=8, minor=minor)
    assert (fake.open().arch, fake.open().mode) == (arch, "binary")


def test_a_lower_minor_that_needs_too_much_shared_memory_is_not_used(gpu, monkeypatch):
    monkeypatch.setenv("SPECGEN_NO_JIT", "1")
    fake = gpu(
        {"small": variant(sm_80={}), "large": variant(sm_80={"shared_bytes": 150_000})}, major=8, minor=6
    )
    with pytest.raises(
        fake.errors.NoBinaryError, match="large needs 150000 bytes of shared memory per block of 101376"
    ):
        fake.open()


def test_an_exact_binary_beyond_the_device_s_shared_memory(gpu):
    fake = gpu({"large": variant(sm_90={"shared_bytes": 200_000})}, shared=100_000)
    with pytest.raises(fake.errors.NoBinaryError, match="large for sm_90 needs 200000 bytes .* has 100000"):
        fake.open().load_all()
    assert not fake.standin.logged("cuModuleLoadData")


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize(("major", "minor"), [(8, 6), (10, 3), (12, 1)])
def test_fault_20_a_wheel_without_this_gpu(gpu, monkeypatch, major, minor, absent):
    """An sm_90 wheel where just-in-time compilation is off, or Triton absent: a named error, listing both
    sides.
    """
    if absent:
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.setenv("SPECGEN_NO_JIT", "1")
    fake = gpu({"small": variant(sm_90={}, gfx942={})}, major=major, minor=minor)
    with pytest.raises(fake.errors.NoBinaryError) as caught:
        fake.open()
    shared = 227 << 10 if major == 10 else 99 << 10
    for part in (
        fake.path.name,
        f"Stand-in GPU 0 (sm_{major}{minor}, {shared} bytes",
        "the wheel holds sm_90, gfx942",
    ):
        assert part in str(caught.value)
    assert ("Triton >= 3.6" if absent else "SPECGEN_NO_JIT=1 forbids") in str(caught.value)
    assert f"a wheel built with a target of sm_{major}{minor}" in str(caught.value)


def test_an_old_triton_is_as_good_as_none(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.5.1"))
    fake = gpu({"small": variant(sm_90={})}, major=8, minor=6)
    with pytest.raises(fake.errors.NoBinaryError, match="Triton is 3.5.1, and >= 3.6 is needed"):
        fake.open()


@pytest.mark.parametrize("damage", ["deleted", "empty", "altered", "cut", "a folder"])
def test_a_damaged_binary_is_named_and_the_others_run(gpu, damage):
    fake = gpu({"good": variant(sm_90={}), "bad": variant(sm_90={})})
    facts = fake.manifest["variants"]["bad"]["binaries"]["sm_90"]
    file = fake.path / facts["file"]
    whole = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "deleted":
        file.write_bytes({"empty": b"", "altered": whole[:-1] + b"?", "cut": whole[:5]}[damage])
    device = fake.open()
    with pytest.raises(fake.errors.DamagedBinaryError) as caught:
        device.load_all()
    assert str(file) in str(caught.value) and facts["sha256"] in str(caught.value)
    assert "reinstall" in str(caught.value)
    if damage == "empty":
        assert "its 0 bytes have sha256 e3b0c442" in str(caught.value)
    device.kernel("good")(1, 0, *SEVEN)
    assert fake.standin.logged("cuModuleLoadData") == ["cuModuleLoadData good@sm_90 on=0"]
    if damage != "a folder":  # repaired: the next use loads it
        file.write_bytes(whole)
        device.kernel("bad")(1, 0, *SEVEN)


def test_a_binary_that_the_driver_refuses(gpu):
    fake = gpu({"small": variant(sm_90={})}, fail_load=209)
    with pytest.raises(fake.errors.DriverError) as caught:
        fake.open().kernel("small")
    for part in (
        "small.cubin does not load on Stand-in GPU 0",
        "CUDA_ERROR_NO_BINARY_FOR_GPU (209)",
        "driver 525.60.13 or later",
    ):
        assert part in str(caught.value)
    assert caught.value.code == 209


def test_unknown_symbols_and_devices(gpu):
    fake = gpu({"small": variant(sm_90={}), "amd_only": variant(gfx942={})})
    with pytest.raises(fake.errors.NoBinaryError, match="has no kernel nothing"):
        fake.open().kernel("nothing")
    with pytest.raises(
        fake.errors.NoBinaryError, match="amd_only: the wheel has binaries for gfx942; .* needs sm_90"
    ):
        fake.open().kernel("amd_only")
    with pytest.raises(
        fake.errors.NoBinaryError, match=r"runs on CUDA and HIP devices \(sm_90, gfx942\); came meta"
    ):
        fake.open("meta")


@pytest.mark.parametrize("how", [{"capturing": 1}, {"fail_capturing": 906}])
@pytest.mark.parametrize("hip", [False, True])
def test_loading_inside_a_capture_is_refused(gpu, how, hip):
    """By name, before anything is captured; what was loaded before runs."""
    fake = gpu({"one": variant(sm_90={}, gfx942={}), "two": variant(sm_90={}, gfx942={})}, hip=hip)
    fake.standin.set(**({"minor": 0x42} if hip else {}))
    device = fake.open()
    kernel = device.kernel("one")
    fake.standin.set(**how)
    kernel(1, 0, *SEVEN)
    with pytest.raises(
        fake.errors.CaptureError, match=rf"two is not loaded.*call {fake.path.name}.warmup\(\) before"
    ):
        device.kernel("two")
    with pytest.raises(fake.errors.CaptureError):
        device.load_all()
    assert len([line for line in fake.standin.log if "LoadData" in line]) == 1
    asked = [line for line in fake.standin.log if "IsCapturing" in line]
    assert len(asked) == 3 and all(line.endswith("StreamIsCapturing 0x77 on=0") for line in asked)
    fake.standin.set(capturing=0, fail_capturing=0)
    device.load_all()
    device.kernel("two")(1, 0, *SEVEN)


def test_threads_load_a_kernel_once(gpu):
    fake = gpu({f"k{i}": variant(sm_90={}) for i in range(5)})
    device = fake.open()
    barrier, found = threading.Barrier(8), []

    def work():
        barrier.wait()
        found.append([device.kernel(f"k{i}") for i in range(5)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(kernels == found[0] for kernels in found)
    assert len(fake.standin.logged("cuModuleLoadData")) == 5


@pytest.mark.parametrize("ctas", [1, 2])
def test_a_kernel_is_told_how_many_programs_begin_late(gpu, monkeypatch, ctas):
    """Those of the multiprocessors that it finds taken."""
    operands = {"q": ("token", "head"), "k_cache": ("page", "slot", "head"), "v_cache": ("page", "slot", "head")}
    maps = [
        {
            "name": f"{operand[0]}_map", "tensor": f"{operand}_ptr", "dtype": "bfloat16", "extents": [64] * (len(dims) + 1),
            "strides": [f"{operand}_stride_{dim}" for dim in dims], "box": [1] * len(dims) + [64], "swizzle": 128,
        }
        for operand, dims in operands.items()
    ]  # fmt: skip
    facts = {"ctas_per_multiprocessor": ctas, "tensor_maps": maps}
    device = gpu({"pre": variant("prefill_ws", sm_90={}) | facts, "small": variant(sm_90={})}).open()
    launcher, late = sys.modules[f"{type(device).__module__.rpartition('.')[0]}.launcher"], []
    bind = launcher.bind
    monkeypatch.setattr(launcher, "bind", lambda driver, index, launch: late.append(launch.late) or bind(driver, index, launch))
    assert device.beside("pre", 66) is device.beside("pre", 66) is not device.kernel("pre")
    assert device.beside("small", 66) is device.kernel("small"), "one that does not ask waits"
    assert late == [None, 66 * ctas, None]


@pytest.mark.parametrize(
    ("binary", "device", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_80", "sm_89", True),
        ("sm_86", "sm_80", False),
        ("sm_89", "sm_86", False),
        ("sm_80", "sm_90", False),
        ("sm_90", "sm_90", True),
        ("sm_90", "sm_91", False),
        ("sm_100", "sm_103", False),
        ("sm_120", "sm_121", False),
        ("sm_120", "sm_120", True),
        ("gfx942", "gfx942", True),
        ("gfx942", "gfx950", False),
        ("gfx90a", "sm_90", False),
        ("sm_90", "gfx90a", False),
    ],
)
def test_which_binaries_run_where(binary, device, runs):
    from specgen.runtime.choice import runs_on

    assert runs_on(binary, device) is runs
