"""Which binaries of the wheel a GPU can run, and whose launch facts serve where none can. Pure: reads a
manifest and numbers.

A cubin runs on its own compute capability, and on a higher minor of the same major unless it was compiled for
the architecture's own features, as Triton does from sm_90 on. An hsaco runs on its own gfx architecture only.
"""

from typing import NamedTuple

from .driver import DeviceProperties


class Choice(NamedTuple):
    """The architecture whose binaries (`binary`) or launch facts (not `binary`: compile just in time) serve;
    `note` says why.
    """

    arch: str
    binary: bool
    note: str


def archs(manifest: dict) -> tuple[str, ...]:
    """Architectures in the wheel, in the manifest's order: those of its targets, then any that only a binary
    names.
    """
    names = [target["arch"] for target in manifest["targets"]]
    for variant in manifest["variants"].values():
        names += variant["binaries"]
    return tuple(dict.fromkeys(names))


def symbols(manifest: dict, arch: str) -> tuple[str, ...]:
    """Symbols of the variants that the wheel holds for `arch`."""
    return tuple(symbol for symbol, variant in manifest["variants"].items() if arch in variant["binaries"])


def largest_shared(manifest: dict, arch: str) -> tuple[int, str]:
    """(bytes, symbol): the variant of `arch` that asks for most shared memory per block; (0, "") if there is
    none.
    """
    sizes = ((manifest["variants"][s]["binaries"][arch]["shared_bytes"], s) for s in symbols(manifest, arch))
    return max(sizes, default=(0, ""))


def vendor_of(arch: str) -> str:
    """The vendor of an architecture: "amd" for gfx, else "nvidia"."""
    return "amd" if arch.startswith("gfx") else "nvidia"


def runs_on(binary: str, device: str) -> bool:
    """Whether a binary for architecture `binary` can be loaded on a GPU of architecture `device`."""
    if binary == device:
        return True
    if vendor_of(binary) != "nvidia" or vendor_of(device) != "nvidia":
        return False
    (binary_major, binary_minor), (device_major, device_minor) = _capability(binary), _capability(device)
    return binary_major == device_major < 9 and binary_minor <= device_minor


def choose(manifest: dict, properties: DeviceProperties) -> Choice:
    """The best architecture of the wheel for a GPU.

    Its own; else the nearest whose binaries run on it and whose every variant fits its shared memory; else,
    to compile just in time, the one of the same vendor (failing that, any) whose variants ask for least
    shared memory.
    """
    held = archs(manifest)
    if properties.arch in held:
        return Choice(properties.arch, True, f"its own binaries, {properties.arch}")
    available = properties.shared_memory_per_block
    notes = []
    for arch in sorted(
        (arch for arch in held if runs_on(arch, properties.arch)), key=_capability, reverse=True
    ):
        needed, symbol = largest_shared(manifest, arch)
        if needed <= available:
            return Choice(arch, True, f"{arch} binaries run on {properties.arch}")
        notes.append(
            f"those for {arch} run on it, but {symbol} needs {needed} bytes of shared memory per block "
            f"of {available}"
        )
    same_vendor = [arch for arch in held if vendor_of(arch) == vendor_of(properties.arch)]
    smallest = min(same_vendor or held, key=lambda arch: largest_shared(manifest, arch)[0])
    return Choice(smallest, False, "; ".join(notes))


def unlisted(manifest: dict, arch: str, properties: DeviceProperties) -> str:
    """What sets a GPU that runs the binaries of `arch` apart from each target with a table for them, "" if one is like it."""
    held = {target["id"]: _size(**target) for target in manifest["targets"] if target["arch"] == arch}
    size = _size(properties.multiprocessors, properties.shared_memory_per_block)
    if not held or size in held.values():
        return ""
    known = ", ".join(f"{name} with {theirs}" for name, theirs in held.items())
    return f"has {size}; the dispatch table that serves it was chosen for {known}. A wheel with a target for this GPU may be faster."


def _size(multiprocessors: int, shared_memory_per_block: int, **_) -> str:
    return f"{multiprocessors} multiprocessors of {shared_memory_per_block} bytes of shared memory per block"


def _capability(arch: str) -> tuple[int, int]:
    """(major, minor) of "sm_86"."""
    digits = arch.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])
