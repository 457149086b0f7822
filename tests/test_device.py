"""Device: which binaries a GPU gets, and every way in which it may get none, on stand-in drivers and fake
packages. No GPU.
"""

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from standin_support import (
    build_extension,
    build_standins,
    make_package,
    runtime_module,
    variant,
)  # noqa: E402

SEVEN = [0] * 7


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standin")
    cuda, hip = build_standins(folder)
    return SimpleNamespace(cuda=cuda, hip=hip, extension=build_extension(folder))


@pytest.fixture
def gpu(built, tmp_path, monkeypatch):
    """gpu(variants, **settings of the stand-in) -> a fake package whose `open()` gives the Device."""
    monkeypatch.setenv("SPECGEN_CUDA_LIBRARY", str(built.cuda.path))
    monkeypatch.setenv("SPECGEN_HIP_LIBRARY", str(built.hip.path))
    monkeypatch.delenv("SPECGEN_NO_JIT", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.syspath_prepend(tmp_path)
    streams = SimpleNamespace(current=0x77)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=streams.current)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def make(variants, hip=False, **settings):
        standin = built.hip if hip else built.cuda
        standin.reset(**settings)
        standin.kinds("ppppppl" + "pp")
        monkeypatch.setattr(torch.version, "hip", "6.4" if hip else None)
        package, manifest = make_package(tmp_path, variants, built.extension)

        def open_device(name="cuda:0"):
            return runtime_module(package, "device").Device.open(package, manifest, torch.device(name))

        errors = runtime_module(package, "errors")
        return SimpleNamespace(
            standin=standin, path=package, manifest=manifest, open=open_device, errors=errors, streams=streams
        )

    return make


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


def test_just_in_time_compiles_the_shipped_source_with_one_warning(gpu):
    """An sm_90 wheel on capability 8.6: compiled for sm_86, launched with the compiled kernel's own facts."""
    fake = gpu({"one": variant(sm_90={"shared_bytes": 2000}), "two": variant(sm_90={})}, major=8, minor=6)
    device = fake.open()
    assert (device.arch, device.mode, device.multiprocessors) == ("sm_90", "jit", 132)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device.load_all()
        device.kernel("one")(7, 9, *SEVEN)
    assert [issubclass(w.category, RuntimeWarning) for w in caught] == [True]
    for part in ("Stand-in GPU 0 (sm_86", "the wheel holds sm_90", "SPECGEN_NO_JIT=1"):
        assert part in str(caught[0].message)
    loads = fake.standin.logged("cuModuleLoadData")
    assert len(loads) == 2 and all("\x7fELF" in line for line in loads)
    assert fake.standin.logged("cuModuleGetFunction") == [
        "cuModuleGetFunction one",
        "cuModuleGetFunction two",
    ]
    (launch,) = fake.standin.launches
    assert (launch["grid"], launch["block"], launch["shared"]) == ("7,1,1", "128,1,1", "0")


def test_just_in_time_on_amd_uses_its_warps(gpu):
    fake = gpu({"one": variant(gfx942={}, sm_90={})}, hip=True, minor=0x0A)
    device = fake.open()
    assert (device.arch, device.mode) == ("gfx942", "jit")
    with pytest.warns(RuntimeWarning, match="gfx90a"):
        device.kernel("one")(7, 9, *SEVEN)
    assert fake.standin.launches[0]["block"] == "256,1,1"


def test_just_in_time_takes_the_rows_that_ask_for_least_shared_memory(gpu):
    """Of the same vendor; and a variant beyond the device is refused with both numbers, without a compile."""
    rows = {
        "sm_80": {"shared_bytes": 120_000},
        "sm_90": {"shared_bytes": 90_000},
        "gfx942": {"shared_bytes": 60_000},
    }
    fake = gpu({"one": variant(**rows)}, major=7, minor=5, shared=65_536)
    device = fake.open()
    assert (device.arch, device.mode) == ("sm_90", "jit")
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(fake.errors.NoBinaryError, match="one for sm_90 needs 90000 bytes .* has 65536"),
    ):
        device.load_all()
    assert not fake.standin.logged("cuModuleLoadData")


def test_just_in_time_refuses_inside_a_capture_and_a_missing_source(gpu):
    fake = gpu({"one": variant(sm_90={}), "two": variant(sm_90={})}, major=8, minor=6)
    device = fake.open()
    fake.standin.set(capturing=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fake.errors.CaptureError):
            device.kernel("one")
    fake.standin.set(capturing=0)
    (fake.path / "kernels" / "two.py").unlink()
    with pytest.warns(RuntimeWarning), pytest.raises(
        fake.errors.DamagedBinaryError, match="two.py is missing"
    ):
        device.kernel("two")


def test_just_in_time_names_a_kernel_that_does_not_compile(gpu):
    fake = gpu({"one": variant(sm_90={})}, major=8, minor=6)
    source = fake.path / "kernels" / "one.py"
    source.write_text(source.read_text().replace("tl.load(lse_a_ptr + row)", "tl.nothing(row)"))
    with pytest.warns(RuntimeWarning), pytest.raises(
        fake.errors.NoBinaryError, match="one does not compile for sm_86 with Triton"
    ):
        fake.open().kernel("one")


def test_the_cpu_needs_the_interpreter(gpu):
    fake = gpu({"one": variant(sm_90={})})
    with pytest.raises(fake.errors.NoBinaryError, match="CPU tensors need TRITON_INTERPRET=1"):
        fake.open("cpu")


def run(script: str, folder: Path, **environment: str) -> str:
    """Run a script in a fresh process with `folder` on its path; its standard output."""
    environment = {"PYTHONPATH": str(folder), **environment}
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


OPEN = """
import json, sys, torch
from importlib import import_module
from pathlib import Path
path = Path({path!r})
manifest = json.loads({manifest!r})
runtime = lambda name: import_module(f"{{path.name}}.runtime.{{name}}")
def open_device(name):
    return runtime("device").Device.open(path, manifest, torch.device(name))
"""


@pytest.fixture
def script(gpu, tmp_path):
    """A fake package, and the beginning of a script that can open it in another process."""
    fake = gpu({"one": variant(sm_90={}), "two": variant(sm_90={})})
    return fake, OPEN.format(path=str(fake.path), manifest=json.dumps(fake.manifest)), tmp_path


def test_the_interpreter_runs_the_shipped_source(script):
    _, head, folder = script
    body = """
device = open_device("cpu")
device.load_all()
a, b, out = torch.arange(5.0), torch.full((5,), 10.0), torch.zeros(5)
device.kernel("one")(3, 0, a, a, b, b, out, out, 5)
print(device.mode, device.arch, device.multiprocessors, out.tolist())
"""
    assert (
        run(head + body, folder, TRITON_INTERPRET="1") == "interpret sm_90 3 [10.0, 11.0, 12.0, 13.0, 14.0]\n"
    )
    text = run(head + body, folder, TRITON_INTERPRET="1", SPECGEN_INTERPRET_MULTIPROCESSORS="7")
    assert text.startswith("interpret sm_90 7 ")


def test_the_interpreter_s_multiprocessors_are_checked(gpu, monkeypatch):
    fake = gpu({"one": variant(sm_90={})})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SPECGEN_INTERPRET_MULTIPROCESSORS", "none")
    with pytest.raises(fake.errors.NoBinaryError, match="SPECGEN_INTERPRET_MULTIPROCESSORS: 'none' came"):
        fake.open("cpu")


NO_TRITON = """
import importlib.abc
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise AssertionError("triton was imported")
sys.meta_path.insert(0, Refuse())
import os
os.environ["PATH"] = ""
from types import SimpleNamespace
torch.cuda.current_stream = lambda index: SimpleNamespace(cuda_stream=0)
"""


def test_binaries_run_where_triton_cannot_be_imported(script):
    """And with no compiler on PATH (fault 21)."""
    fake, head, folder = script
    body = """
device = open_device("cuda:0")
device.load_all()
device.kernel("one")(1, 0, *[0] * 7)
print(device.mode, [name for name in sys.modules if name.partition(".")[0] == "triton"])
"""
    assert run(head + NO_TRITON + body, folder, SPECGEN_CUDA_LIBRARY=str(fake.standin.path)) == "binary []\n"


def test_import_needs_no_gpu_no_driver_and_no_triton(script):
    """And opening a device without a driver is a named error (fault 22)."""
    _, head, folder = script
    body = """
for name in ("arguments", "errors", "driver", "launcher", "ctypes_launch", "choice", "jit", "device"):
    runtime(name)
try:
    open_device("cuda:0")
except runtime("errors").DriverError as error:
    print(error)
"""
    text = run(head + NO_TRITON + body, folder, SPECGEN_CUDA_LIBRARY="/nowhere/libcuda.so.1")
    assert text.startswith("no driver library could be opened") and "SPECGEN_CUDA_LIBRARY" in text


def test_a_forked_child_is_refused(script):
    fake, head, folder = script
    body = """
import os
from types import SimpleNamespace
torch.cuda.current_stream = lambda index: SimpleNamespace(cuda_stream=0)
device = open_device("cuda:0")
device.kernel("one")
child = os.fork()
if child == 0:
    try:
        device.kernel("two")
    except runtime("errors").DriverError as error:
        os._exit(7 if "use the spawn start method" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(head + body, folder, SPECGEN_CUDA_LIBRARY=str(fake.standin.path)) == "7\n"


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
