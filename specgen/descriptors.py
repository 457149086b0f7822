"""Whether a kernel's matrix products read the tiles that they should: a check against one fault of the pinned assembler.

ptxas 12.8 (PTX to machine code) may share part of a tile's descriptor between two loops and compute it on the way into the
first alone; where that loop runs no time, the second reads another tile. The result is silently wrong, for some lengths only.
In the machine code it shows: the descriptor is set outside of the loop, and by more than one instruction. Pure: text in, facts out.
"""

import re
from dataclasses import dataclass

from specgen import loops

_CODE = re.compile(r"/\*.*?\*/")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_PRODUCT = re.compile(r"^HGMMA\S* R\d+, gdesc\[UR(\d+)\]")  # both operands by descriptor, of two registers each
_REGISTER = re.compile(r"\b(UR?|R)(\d+)\b")


@dataclass(frozen=True)
class _Step:
    """An instruction as the search sees it."""

    text: str
    guarded: bool
    sets: tuple[str, ...]
    reads: tuple[str, ...]


def ambiguous_descriptors(listing: str) -> list[str]:
    """One text for each matrix product of a main loop whose descriptor comes from outside of it and has several origins.

    `listing` is that of `cuobjdump -sass`, of one kernel. Empty: there is none.
    """
    instructions = loops.parse_sass(listing)
    steps = [_step(line) for line in loops.sass_lines(listing)]
    search = _Search(instructions, steps)
    found = []
    for loop in loops.main_loops(instructions):
        for index in sorted(loop):
            product = _PRODUCT.match(steps[index].text)
            if product is None:
                continue
            first = int(product[1])
            for register in (f"UR{first}", f"UR{first + 1}"):
                if reason := search.ambiguous(register, index, loop):
                    found.append(f"{steps[index].text}: {reason}")
    return found


def _step(line: str) -> _Step:
    text = " ".join(_CODE.sub("", line).split()).rstrip("; ")
    plain = _PREDICATE.sub("", text)
    name, _, rest = plain.partition(" ")
    operands = [operand.strip().removesuffix(".reuse") for operand in rest.split(",")]
    while operands and re.fullmatch(r"!?U?P(\d|T)", operands[0]):
        operands.pop(0)
    target = re.fullmatch(r"(UR|R)(\d+)", operands[0]) if operands else None
    if target is None or name.startswith(("ST", "RED", "ATOMS", "BAR", "SYNCS", "UTMA", "BRX", "HGMMA")):
        return _Step(plain, text != plain, (), ())
    width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    sets = tuple(f"{target[1]}{int(target[2]) + i}" for i in range(width))
    reads = tuple(f"{kind}{number}" for kind, number in _REGISTER.findall(",".join(operands[1:])) if kind != "U")
    return _Step(plain, text != plain, sets, reads)


class _Search:
    def __init__(self, instructions: list[loops.Instruction], steps: list[_Step]):
        self._steps = steps
        self._blocks, successors = loops.basic_blocks(instructions)
        self._predecessors: list[list[int]] = [[] for _ in self._blocks]
        for block, nexts in enumerate(successors):
            for following in nexts:
                self._predecessors[following].append(block)
        self._block_of = {index: number for number, block in enumerate(self._blocks) for index in block}

    def ambiguous(self, register: str, at: int, loop: frozenset[int]) -> str:
        """Why the value of `register` at an instruction has several origins, or ""; one of them in the loop is right."""
        origins = self._origins(register, at)
        if len(origins) > 1:
            if any(origin in loop for origin in origins):
                return ""
            places = ", ".join("the entry" if i < 0 else repr(self._steps[i].text) for i in sorted(origins)[:3])
            return f"{register} comes from {len(origins)} places: {places}"
        (origin,) = origins
        if origin < 0 or not self._steps[origin].text.startswith("UIADD3"):  # a step from one descriptor to the next
            return ""
        reads = (read for read in self._steps[origin].reads if read.startswith("UR"))
        return next(filter(None, (self.ambiguous(read, origin, loop) for read in reads)), "")

    def _origins(self, register: str, at: int) -> set[int]:
        """Instructions whose value of `register` may be there before the instruction `at`; -1: what was there at the entry."""
        found: set[int] = set()
        seen: set[int] = set()
        waiting = [(self._block_of[at], at)]
        while waiting:
            number, end = waiting.pop()
            block = self._blocks[number]
            for index in range(end - 1, block.start - 1, -1):
                if register in self._steps[index].sets:
                    found.add(index)
                    if not self._steps[index].guarded:
                        break
            else:
                if not self._predecessors[number]:
                    found.add(-1)
                for before in self._predecessors[number]:
                    if before not in seen:
                        seen.add(before)
                        waiting.append((before, self._blocks[before].stop))
        return found
