"""Whether a kernel's matrix products read the tiles that they should: a check against a fault of the pinned assembler.

ptxas 12.8 (PTX to machine code) may share part of a tile's descriptor between two loops and compute it on the way into the
first alone, or from a register that holds nothing yet; where the first loop runs no time, the second reads another tile. The
result is silently wrong, for some lengths only. In the machine code it shows: a product's descriptor is read before it is set,
or set outside of its loop and by more than one instruction. Pure: text in, facts out.
"""

import re
from dataclasses import dataclass

from specgen import loops

_CODE = re.compile(r"/\*.*?\*/")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_PRODUCT = re.compile(r"^HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]")  # of four: a descriptor for each operand that is in memory
_REGISTER = re.compile(r"\b(UR?|R)(\d+)\b")


@dataclass(frozen=True)
class _Step:
    """An instruction as the search sees it."""

    text: str
    guarded: bool
    sets: tuple[str, ...]
    reads: tuple[str, ...]


def wrong_descriptors(listing: str) -> list[str]:
    """One text for each matrix product whose descriptor may hold what it should not, see above.

    `listing` is that of `cuobjdump -sass`, of one kernel. Empty: there is none.
    """
    instructions = loops.parse_sass(listing)
    steps = [_step(line) for line in loops.sass_lines(listing)]
    search = _Search(instructions, steps)
    innermost = {index: loop for loop in loops.main_loops(instructions) for index in loop}
    found = []
    for index, step in enumerate(steps):
        if product := _PRODUCT.match(step.text):
            first = int(product[2])
            for number in range(first + 2 if product[1] else first, first + 4):
                if reason := search.unset(f"UR{number}", index) or search.ambiguous(f"UR{number}", index, innermost.get(index)):
                    found.append(f"{step.text}: {reason}")
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
    pair = 2 if name.startswith("UIADD3.64") else 1
    named = _REGISTER.findall(",".join(operands[1:]))
    reads = tuple(f"{kind}{int(number) + i}" for kind, number in named if kind != "U" for i in range(pair))
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

    def unset(self, register: str, at: int) -> str:
        """Why the value of `register` at an instruction may come from one that is read before it is set, or ""."""
        seen: set[tuple[str, int]] = set()
        waiting = [(register, at)]
        while waiting:
            register, at = waiting.pop()
            for origin in self._origins(register, at):
                if origin < 0:
                    return f"{register} is read by {self._steps[at].text!r} before it is set"
                for read in self._steps[origin].reads:
                    if read.startswith("UR") and (read, origin) not in seen:
                        seen.add((read, origin))
                        waiting.append((read, origin))
        return ""

    def ambiguous(self, register: str, at: int, loop: frozenset[int] | None) -> str:
        """Why the value of `register` at an instruction of a loop has several origins, or ""; a value that the loop sets has not.

        R2UR is none: it brings back what was set before and put away.
        """
        origins = {i for i in self._origins(register, at) if i < 0 or not self._steps[i].text.startswith("R2UR")}
        if loop is None or any(origin in loop for origin in origins):
            return ""
        if not origins:
            return ""
        if len(origins) > 1:
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
