"""What a measurement ran on: the current GPU and the software around it. Reads; changes nothing."""

import importlib.util
import platform
import shutil
import subprocess
from importlib import metadata

import torch


def gpu() -> str:
    """The product name of the current GPU, as its driver gives it."""
    return torch.cuda.get_device_name()


def software() -> dict[str, str]:
    """Versions of driver, torch, its CUDA or ROCm, Triton where it is installed, and Python."""
    versions = {"driver": driver(), "torch": torch.__version__}
    versions |= {"rocm": torch.version.hip} if torch.version.hip else {"cuda": str(torch.version.cuda)}
    if importlib.util.find_spec("triton"):
        versions["triton"] = metadata.version("triton")
    return versions | {"python": platform.python_version()}


def driver() -> str:
    """The driver's version, or "unknown" where no tool of the driver tells it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return (
        asked.stdout.splitlines()[0].strip() if asked.returncode == 0 and asked.stdout.strip() else "unknown"
    )
