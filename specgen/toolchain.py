"""The installed Triton and its assemblers: where they are, which versions, one digest of them all.

Reads Triton's folder and metadata and asks `ptxas` for its version; never imports Triton, so a build that
finds everything in the cache stays quick.
"""

import functools
import importlib.metadata
import importlib.util
import re
import subprocess
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from specgen.errors import BuildError

_COMPILER_PARTS = (".py", ".so", ".bc")  # and everything in backends/nvidia/bin


def is_nvidia(arch: str) -> bool:
    """Whether "sm_90" or "gfx942" is meant for an NVIDIA GPU."""
    return arch.startswith("sm_")


@functools.cache
def triton_version() -> str:
    """Version of the installed Triton; BuildError without one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(
            "building binaries needs Triton, which is not installed here: pip install triton"
        ) from None


@functools.cache
def triton_folder() -> Path:
    """Folder of the installed `triton` package; BuildError without one."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("building binaries needs Triton, which is not installed here: pip install triton")
    return Path(next(iter(spec.submodule_search_locations)))


def nvidia_tool(name: str) -> Path:
    """Path of a tool that Triton ships, such as "ptxas" or "cuobjdump"; BuildError if it is not there."""
    path = triton_folder() / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise BuildError(f"Triton {triton_version()} has no {name}: {path} is missing")
    return path


def assembler_name(arch: str) -> str:
    """The tool that makes the machine code: "ptxas", "ptxas-blackwell" (sm_100 and newer), or "LLVM"."""
    if not is_nvidia(arch):
        return "LLVM"
    return "ptxas-blackwell" if int(arch.removeprefix("sm_")) >= 100 else "ptxas"


@functools.cache
def _ptxas_version(tool: str) -> str:
    text = subprocess.run([nvidia_tool(tool), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else text.strip().splitlines()[-1]


def assembler(arch: str) -> str:
    """Assembler and version, such as "ptxas 12.8.93" or "LLVM of Triton 3.7.1"."""
    name = assembler_name(arch)
    return f"LLVM of Triton {triton_version()}" if name == "LLVM" else f"ptxas {_ptxas_version(name)}"


def ptxas_versions(archs: Iterable[str]) -> str:
    """The versions of `ptxas` that these architectures need, comma-separated; "" for AMD alone."""
    tools = sorted({assembler_name(arch) for arch in archs} - {"LLVM"})
    return ", ".join(dict.fromkeys(_ptxas_version(tool) for tool in tools))


@functools.cache
def toolchain_digest() -> str:
    """sha256 over everything of the installed Triton that can change a binary: its Python code, libraries and
    tools.

    The digests are those that the installer recorded (and checked); files without a recorded digest are read.
    """
    try:
        recorded = importlib.metadata.distribution("triton").files or []
    except importlib.metadata.PackageNotFoundError:
        recorded = []
    digests = {
        str(file): file.hash.value
        for file in recorded
        if file.hash is not None and _makes_binaries(str(file)) and file.parts[0] == "triton"
    }
    if not digests:  # an editable or hand-made installation
        folder = triton_folder()
        for path in sorted(folder.rglob("*")):
            name = f"triton/{path.relative_to(folder).as_posix()}"
            if _makes_binaries(name) and path.is_file():
                digests[name] = sha256(path.read_bytes()).hexdigest()
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return sha256(f"triton {triton_version()}\n{lines}".encode()).hexdigest()


def _makes_binaries(name: str) -> bool:
    return name.endswith(_COMPILER_PARTS) or "/backends/nvidia/bin/" in name
