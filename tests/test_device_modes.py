"""Device without a binary (compiled, interpreted), and without Triton, compiler or driver. No GPU."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))
from standin_support import SEVEN, built, gpu, variant  # noqa: E402, F401 (fixtures)


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
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(fake.errors.DamagedBinaryError, match="two.py is missing"),
    ):
        device.kernel("two")


@pytest.mark.parametrize(("text", "reason"), [("", "it has no one"), ("import triton\n@triton.jit\ndef one(", "")])
def test_a_damaged_source_is_named(gpu, text, reason):
    fake = gpu({"one": variant(sm_90={})}, major=8, minor=6)
    (fake.path / "kernels" / "one.py").write_text(text)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(fake.errors.DamagedBinaryError, match=f"kernels/one.py is damaged: {reason}.*; reinstall fake"),
    ):
        fake.open().kernel("one")


def test_just_in_time_names_a_kernel_that_does_not_compile(gpu):
    fake = gpu({"one": variant(sm_90={})}, major=8, minor=6)
    source = fake.path / "kernels" / "one.py"
    source.write_text(source.read_text().replace("tl.load(lse_a_ptr + row)", "tl.nothing(row)"))
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(fake.errors.NoBinaryError, match="one does not compile for sm_86 with Triton"),
    ):
        fake.open().kernel("one")


def test_the_cpu_needs_the_interpreter(gpu):
    fake = gpu({"one": variant(sm_90={})})
    with pytest.raises(fake.errors.NoBinaryError, match="the tensors are on the CPU; needed: tensors on a GPU .*TRITON_INTERPRET=1"):
        fake.open("cpu")


def test_the_interpreter_is_not_named_where_it_would_refuse(gpu):
    """Which is where a kernel multiplies bfloat16, whatever else the package has."""
    fake = gpu({"one": variant(sm_90={}), "two": variant("decode", sm_90={})})
    with pytest.raises(fake.errors.NoBinaryError) as caught:
        fake.open("cpu")
    assert str(caught.value).endswith("tensors on a GPU (%s has binaries for sm_90)" % fake.manifest["package"])


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


def test_two_packages_take_turns_in_the_interpreter(script):
    """It patches triton.language for the time of a call: two calls at once would spoil each other."""
    fake, head, folder = script
    shutil.copytree(fake.path, fake.path.with_name("another"))
    body = """
import threading
from triton.runtime import interpreter
for path in (path, path.with_name("another")):
    kernel = open_device("cpu").kernel("one")
    a, b, out = torch.arange(5.0), torch.full((5,), 10.0), torch.zeros(5)
    thread = threading.Thread(target=kernel, args=(3, 0, a, a, b, b, out, out, 5))
    with interpreter._specgen_lock:
        thread.start()
        thread.join(0.5)
        waited = thread.is_alive() and not out.any()
    thread.join()
    print(path.name != "another", waited, out.tolist())
"""
    done = "True [10.0, 11.0, 12.0, 13.0, 14.0]\n"
    assert run(head + body, folder, TRITON_INTERPRET="1") == f"True {done}False {done}"


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


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("qk_dim", "dtype"), [(128, "bfloat16"), (20, "float16"), (36, "float32")])
@pytest.mark.parametrize("family", ["decode", "prefill", "varlen", "append_kv", "merge_states"])
def test_just_in_time_promises_what_the_build_promises(family, qk_dim, dtype, aligned):
    """The compiler gets one signature and one set of divisors, ahead of time and just in time."""
    from specgen.runtime import jit
    from specgen.variant import Config, Geometry, Variant

    geometry = Geometry(8, 2, qk_dim, 64, dtype, 16, 0.125, "causal")
    built = Variant(family, geometry, Config(16, 64, 4, 2, 2), aligned, max_seqs=8)
    entry = {"family": family, "dtype": dtype, "aligned": aligned, "alignment": geometry.alignment}
    assert jit.signature(entry) == tuple(kind for _, kind in built.signature)
    assert jit.divisibility(entry) == built.divisibility
