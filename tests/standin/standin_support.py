"""Builds the stand-in driver libraries and fake generated packages for the tests of the launcher; no GPU is
touched.

A fake package is a copy of specgen/runtime with a hand-made manifest, arbitrary bytes as binaries, and a
small Triton kernel as every module. Its import name is new each time, so that no test sees another's state.
"""

import ctypes
import hashlib
import importlib
import importlib.util
import itertools
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
RUNTIME = REPOSITORY / "specgen" / "runtime"
SEVEN = [0] * 7  # arguments that merge_states takes: null pointers, no rows
_names = itertools.count()

# The arguments of merge_states: what it computes is its own, so that a test can tell that it ran.
KERNEL = '''"""A kernel of a fake package."""

import triton
import triton.language as tl


@triton.jit
def {symbol}(out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, num_rows):
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        tl.store(lse_ptr + row, tl.load(lse_a_ptr + row) + tl.load(lse_b_ptr + row))
'''


def compile_shared(source: Path, output: Path, *flags: str) -> Path:
    """Compile one C file into a shared library."""
    command = [
        "cc",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        *flags,
        str(source),
        "-o",
        str(output),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return output


def build_extension(folder: Path) -> Path:
    """_launch.abi3.so as the wheel step builds it."""
    include = sysconfig.get_path("include")
    return compile_shared(RUNTIME / "_launch.c", folder / "_launch.abi3.so", f"-I{include}")


class Standin:
    """A stand-in library: its path, its settings and its log."""

    def __init__(self, path: Path):
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.standin_log.restype = ctypes.c_char_p

    def reset(self, **settings: int) -> None:
        """Forget the log and set what a test needs, other settings back to their defaults."""
        self.library.standin_reset()
        self.set(**settings)

    def set(self, **settings: int) -> None:
        for name, value in settings.items():
            assert self.library.standin_set(name.encode(), value) == 0, name

    def kinds(self, kinds: str) -> None:
        """Say of what kinds ("p", "i", "l") the next launches' parameters are."""
        self.library.standin_kinds(kinds.encode())

    @property
    def log(self) -> list[str]:
        return self.library.standin_log().decode().splitlines()

    def logged(self, word: str) -> list[str]:
        """Lines of the log that begin with `word`."""
        return [line for line in self.log if line.startswith(word)]

    @property
    def launches(self) -> list[dict[str, str]]:
        """The launches, each as its fields: call, function, grid, block, shared, stream, extra, on, args."""
        lines = [f"call={line}" for line in self.log if "LaunchKernel" in line]
        return [dict(field.split("=", 1) for field in line.split()) for line in lines]


def build_standins(folder: Path) -> tuple[Standin, Standin]:
    """(CUDA, HIP), compiled against the drivers' own headers, which Triton brings along."""
    triton = importlib.util.find_spec("triton")
    backends = Path(triton.origin).parent / "backends"
    here = Path(__file__).parent
    cuda = compile_shared(here / "libcuda.c", folder / "libcuda.so.1", f"-I{backends / 'nvidia' / 'include'}")
    flags = (f"-isystem{backends / 'amd' / 'include'}", "-D__HIP_PLATFORM_AMD__")
    hip = compile_shared(here / "libamdhip64.c", folder / "libamdhip64.so", *flags)
    return Standin(cuda), Standin(hip)


def variant(family: str = "merge_states", **binaries: dict) -> dict:
    """A manifest entry; `binaries` says per architecture what differs from the defaults, "bytes" included."""
    facts = {"num_warps": 4, "num_stages": 2, "aligned": True, "alignment": 16, "dtype": "bfloat16"}
    return {"family": family, **facts, "binaries": binaries}


def make_package(folder: Path, variants: dict[str, dict], extension: Path | None) -> tuple[Path, dict]:
    """Write a fake package into `folder`: (its directory, its manifest). Without `extension` it launches
    through ctypes.
    """
    name = f"fake_{next(_names)}_kernels"
    package = folder / name
    shutil.copytree(RUNTIME, package / "runtime", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    if extension is not None:
        shutil.copy(extension, package / "runtime" / "_launch.abi3.so")
    (package / "__init__.py").write_text('"""A fake package."""\n')
    (package / "kernels").mkdir()
    (package / "kernels" / "__init__.py").touch()
    archs = dict.fromkeys(arch for entry in variants.values() for arch in entry["binaries"])
    for symbol, entry in variants.items():
        entry["module"] = f"kernels/{symbol}.py"
        (package / entry["module"]).write_text(KERNEL.format(symbol=symbol))
        for arch, binary in entry["binaries"].items():
            image = binary.pop("bytes", f"{symbol}@{arch}\0 and more".encode())
            file = Path("binaries") / arch / f"{symbol}.{'hsaco' if arch.startswith('gfx') else 'cubin'}"
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_bytes(image)
            facts = {
                "file": str(file),
                "sha256": hashlib.sha256(image).hexdigest(),
                "function": f"{symbol}_entry",
            }
            entry["binaries"][arch] = {"shared_bytes": 1024, "num_threads": 128, **facts, **binary}
    manifest = {
        "format": 1,
        "package": name,
        "distribution": name.replace("_", "-"),
        "oldest_driver": dict.fromkeys(archs, "525.60.13"),
        "targets": [],  # a stand-in is like no GPU that is on the market; its binaries say what there is
        "variants": variants,
    }
    return package, manifest


def runtime_module(package: Path, module: str) -> ModuleType:
    """<package>.runtime.<module>; the package's folder must be on sys.path."""
    return importlib.import_module(f"{package.name}.runtime.{module}")


class Bench:
    """A fake package's launcher on one vendor's stand-in."""

    def __init__(self, standin, vendor, path, package):
        self.standin, self.vendor, self.path = standin, vendor, path
        names = ("driver", "launcher", "arguments", "tensor_maps", "errors")
        self.modules = {name: runtime_module(package, name) for name in names}
        self.driver = self.modules["driver"].open_driver(vendor)

    def bind(self, family="merge_states", index=0, threads=128, shared_bytes=1000, maps=(), late=None):
        """(handle, kernel) of a family, its tensor maps as manifest entries, `late` as in launcher.Launch."""
        call = self.modules["arguments"].call_arguments(family)
        taken = self.modules["arguments"].arguments(family)
        maps = self.modules["tensor_maps"].variant_maps({"tensor_maps": maps})
        kinds = {"pointer": "p", "i32": "i", "i64": "l", "tensor_map": "m"}
        ranks = {each.name: len(each.box) for each in maps}
        fillers = {name: "i" * rank + "l" * rank for name, rank in ranks.items()}
        self.standin.kinds("".join(kinds[a.kind] + fillers.get(a.name, "") for a in taken) + "pp")
        handle = self.driver.load(index, b"image\0", "entry", shared_bytes, threads)
        launch = self.modules["launcher"].Launch(
            "the_symbol", handle, threads, shared_bytes, call, taken, "the GPU", maps, late
        )
        return handle, self.modules["launcher"].bind(self.driver, index, launch)

    def error(self, name):
        return getattr(self.modules["errors"], name)


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
