"""Rewritings of a kernel's PTX before it is assembled: what PTX can say and Triton cannot. Text in, text out; imports only errors.

Each is an option of a compile job, by its name in REWRITINGS.
"""

import re
from hashlib import sha256
from pathlib import Path

from specgen.errors import BuildError

# What createpolicy.fractional.L2::evict_first gives for the whole of an access.
_EVICT_FIRST = 0x12F0000000000000
_TENSOR_COPY = re.compile(r"(@%p\d+ cp\.async\.bulk\.tensor\.\S+complete_tx::bytes) ([^;]*);")
_MEETING = re.compile(r"\bbar\.sync\s+0, \d+;")  # of all warps of the first partition
_SHARED_ACCESS = re.compile(
    r"\b(?:(?:ld|st|atom|red)\.\S*shared|(?:ld|st)matrix|mbarrier\.|cp\.async\.|wgmma\.mma)\S*"
)
_WARP_NUMBER = re.compile(r"shfl\.sync\.idx\.b32\s+(%r\d+), (%r\d+), 0, 31, -1;")


def evict_first(ptx: str) -> str:
    """Copies by tensor map leave L2 first."""
    hinted = rf"{{ .reg .b64 policy; mov.b64 policy, {_EVICT_FIRST}; \1.L2::cache_hint \2, policy; }}"
    ptx, copies = _TENSOR_COPY.subn(hinted, ptx)
    if not copies:
        raise BuildError("option evict_first: the kernel has no copy by tensor map")
    return ptx


def warps_apart(ptx: str) -> str:
    """The warps of the first partition never wait for each other but where the kernel's own PTX says so.

    Triton lets all of them meet between two operations on barriers in memory, as one warp alone may operate for all, and before it
    writes where rows were laid for another layout. In a kernel of which every thread operates for itself, and whose rows stay within a
    warp, nothing is to be waited for; two groups of warps that take turns would run in step. A meeting with another purpose is an error.
    The number of a warp, which Triton reads anew for every matrix product, is the kernel's register warp_number.
    """
    lines = ptx.split("\n")
    laid = 0
    for place, line in enumerate(lines):
        if _MEETING.search(line):
            access = next((m[0] for each in lines[place + 1 :] if (m := _SHARED_ACCESS.search(each))), "the end")
            laid += access.startswith("st")
            if not access.startswith(("mbarrier.try_wait", "cp.async.mbarrier.arrive", "st")) or laid > 1:
                raise BuildError(f"option warps_apart: warps meet before {access}")
            lines[place] = _MEETING.sub("bar.warp.sync -1;", line)
    ptx = "\n".join(lines)
    entry = _WARP_NUMBER.search(ptx)  # how warps find their partition
    if entry is None or "warp_number" not in ptx:
        raise BuildError("option warps_apart: the kernel has no partitions, or no register warp_number")
    number = re.compile(rf"shfl\.sync\.idx\.b32\s+(%r\d+), {entry[2]}, 0, 31, -1;")
    return ptx[: entry.end()] + number.sub(r"mov.b32 \1, warp_number;", ptx[entry.end() :])


REWRITINGS = {"evict_first": evict_first, "warps_apart": warps_apart}


def digest() -> str:
    """Of this module: what decides a binary besides its kernel and options, for the key of a cache."""
    return sha256(Path(__file__).read_bytes()).hexdigest()


def taken(options: dict) -> list[str]:
    """The names of the rewritings among a job's compiler options, which lose them."""
    return [name for name in REWRITINGS if options.pop(name, 0)]


def rewritten(ptx: str, names: list[str]) -> str:
    """PTX after the rewritings of these names; BuildError where it does not have what one is about."""
    for name in names:
        ptx = REWRITINGS[name](ptx)
    return ptx
