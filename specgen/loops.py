"""Loops of a disassembled kernel, and which of them are its main loops. Pure: text in, facts out.

A listing becomes `Instruction`s, they become basic blocks, and back edges (to a block that dominates their
source) give the natural loops; where the blocks lie in memory does not matter, as compilers move cold ones
about.
"""

import re
from dataclasses import dataclass

_NVIDIA_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_NVIDIA_MATRIX = re.compile(r"^(?:[HIQOBD]|HG|IG|QG|BG)MMA\b|^UTC\w*MMA\b")
_NVIDIA_WIDTH = re.compile(r"\.(?:[US]?(8|16)|(64)|(128))\b")
_AMD_MATRIX = re.compile(r"^v_(?:mfma|smfmac|s?wmma)")
_AMD_FMA = re.compile(r"^v_(?:pk_)?(?:fma|fmac|mac|dot2)\w*_f32|^v_dual_fmac")
_AMD_SPILL = re.compile(r"^(?:scratch|buffer)_(load|store)_")
_AMD_FOLDED = re.compile(r"(\d+)-byte Folded (?:Spill|Reload)")
_AMD_WIDTHS = {
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
    "b32": 4,
    "b64": 8,
    "b96": 12,
    "b128": 16,
}
_FMA_THRESHOLD = 16  # so many multiply-adds in a loop are a dot product, fewer are softmax arithmetic


@dataclass(frozen=True)
class Instruction:
    """What the analysis needs of one instruction.

    `label` is a name or address that branches may aim at; `target` is where a branch goes; `falls_through` is
    False where control never reaches the next instruction; `indirect` is a jump to an address in a register.
    `matrix` and `fma` mark dot-product work; `spill_load` and `spill_store` are bytes.
    """

    label: str | None = None
    target: str | None = None
    falls_through: bool = True
    indirect: bool = False
    matrix: bool = False
    fma: bool = False
    spill_load: int = 0
    spill_store: int = 0


def parse_sass(text: str) -> list[Instruction]:
    """Instructions of one kernel in the text of `cuobjdump -sass` (machine code of NVIDIA GPUs)."""
    instructions = []
    for line in sass_lines(text):
        address, predicate, name, operands = _NVIDIA_LINE.match(line).groups()
        stem = name.split(".")[0]
        target = None
        falls_through = True
        if stem in ("BRA", "JMP"):
            aims = re.findall(r"0x([0-9a-f]+)", operands)
            target = _address(aims[-1]) if aims else None
            plain = predicate is None and name in ("BRA", "JMP") and "," not in operands
            falls_through = not plain
        elif stem in ("EXIT", "RET", "KILL", "BRX", "JMX", "BRXU", "JMXU"):
            falls_through = predicate is not None
        local = _local_width(name) if stem in ("LDL", "STL") else 0
        instructions.append(
            Instruction(
                label=_address(address),
                target=target,
                falls_through=falls_through,
                indirect=stem in ("BRX", "JMX", "BRXU", "JMXU"),
                matrix=bool(_NVIDIA_MATRIX.match(name)),
                fma=stem in ("FFMA", "FFMA2"),
                spill_load=local if stem == "LDL" else 0,
                spill_store=local if stem == "STL" else 0,
            )
        )
    return instructions


def sass_lines(text: str) -> list[str]:
    """The lines of a `cuobjdump -sass` listing that hold an instruction."""
    return [line for line in text.splitlines() if _NVIDIA_LINE.match(line)]


def parse_amdgcn(text: str) -> list[Instruction]:
    """Instructions of the first kernel in an LLVM assembly listing for AMD GPUs."""
    instructions = []
    for line in text.splitlines():
        code, _, comment = line.partition(";")
        code = code.strip()
        if code.startswith(".Lfunc_end"):
            break
        if code.endswith(":") and " " not in code:
            instructions.append(Instruction(label=code[:-1]))
            continue
        if not code or code.startswith(".") or not line[0].isspace():
            continue
        name, _, operands = code.partition(" ") if " " in code else code.partition("\t")
        spill = _amd_spill(name, comment)
        store = bool(spill) and "_store_" in name
        instructions.append(
            Instruction(
                target=operands.strip() if name.startswith(("s_branch", "s_cbranch")) else None,
                falls_through=name not in ("s_branch", "s_endpgm", "s_setpc_b64", "s_trap"),
                indirect=name == "s_setpc_b64",
                matrix=bool(_AMD_MATRIX.match(name)),
                fma=bool(_AMD_FMA.match(name)),
                spill_load=0 if store else spill,
                spill_store=spill if store else 0,
            )
        )
    return instructions


def main_loops(instructions: list[Instruction]) -> list[frozenset[int]]:
    """The main loops, as sets of instruction indices: innermost loops that do the work of the kernel.

    With matrix instructions, these are the loops that contain one and have no inner loop that does; without,
    the same for 16 or more fp32 multiply-adds; a kernel without dot products has its innermost loops as main
    loops. One with at most half the matrix instructions of another does not do the work: prefill_ws goes twice, once for the code
    alone, through the scores of a launch's first tile.
    """
    loops = _natural_loops(instructions) if instructions else []
    if any(i.matrix for i in instructions):
        working = [loop for loop in loops if any(instructions[i].matrix for i in loop)]
    else:
        working = [
            loop for loop in loops if sum(instructions[i].fma for i in loop) >= _FMA_THRESHOLD
        ] or loops
    innermost = [loop for loop in working if not any(other < loop for other in working)]
    counts = [sum(instructions[i].matrix for i in loop) for loop in innermost]
    return [loop for loop, count in zip(innermost, counts) if 2 * count > max(counts) or not count]


def spill_bytes(instructions: list[Instruction]) -> int:
    """Bytes written by the spill stores of the listing, each counted once."""
    return sum(i.spill_store for i in instructions)


def main_loop_spill_bytes(instructions: list[Instruction]) -> int:
    """Bytes that spill loads and stores move in one pass of the main loops."""
    inside = frozenset().union(*main_loops(instructions))
    return sum(instructions[i].spill_load + instructions[i].spill_store for i in inside)


def _address(digits: str) -> str:
    return f"{int(digits, 16):x}"


def _local_width(name: str) -> int:
    found = _NVIDIA_WIDTH.search(name)
    return int(next(filter(None, found.groups()))) // 8 if found else 4


def _amd_spill(name: str, comment: str) -> int:
    if not _AMD_SPILL.match(name):
        return 0
    folded = _AMD_FOLDED.search(comment)
    if folded:
        return int(folded.group(1))
    return _AMD_WIDTHS.get(name.rsplit("_", 1)[-1], 4) if name.startswith("scratch_") else 0


def _natural_loops(instructions: list[Instruction]) -> list[frozenset[int]]:
    blocks, successors = basic_blocks(instructions)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for block, nexts in enumerate(successors):
        for following in nexts:
            predecessors[following].append(block)
    dominators = _dominators(successors, predecessors)
    bodies: dict[int, set[int]] = {}
    for block, nexts in enumerate(successors):
        for header in nexts:
            if header in dominators[block]:
                body = bodies.setdefault(header, {header})
                waiting = [block]
                while waiting:
                    member = waiting.pop()
                    if member not in body and dominators[member]:  # those that are never reached have none
                        body.add(member)
                        waiting.extend(predecessors[member])
    return [frozenset(i for block in body for i in blocks[block]) for body in bodies.values()]


def basic_blocks(instructions: list[Instruction]) -> tuple[list[range], list[list[int]]]:
    """Blocks of instruction indices in the order of memory, and for each the blocks that may follow it."""
    where = {i.label: index for index, i in enumerate(instructions) if i.label is not None}
    starts = {0} | {where[i.target] for i in instructions if i.target in where}
    starts |= {
        index + 1
        for index, i in enumerate(instructions[:-1])
        if i.target is not None or i.indirect or not i.falls_through
    }
    ordered = sorted(starts)
    blocks = [
        range(start, end) for start, end in zip(ordered, [*ordered[1:], len(instructions)], strict=True)
    ]
    number = {block.start: n for n, block in enumerate(blocks)}
    successors: list[list[int]] = []
    for n, block in enumerate(blocks):
        last = instructions[block[-1]]
        nexts = [number[where[last.target]]] if last.target in where else []
        if last.falls_through and n + 1 < len(blocks):
            nexts.append(n + 1)
        successors.append(nexts)
    jumps = [n for n, block in enumerate(blocks) if instructions[block[-1]].indirect]
    for target in _unentered(successors) if jumps else ():
        for n in jumps:
            successors[n].append(target)
    return blocks, successors


def _unentered(successors: list[list[int]]) -> list[int]:
    """Where a jump to an address in a register may lead: blocks that nothing else leads to.

    Such a block may begin a loop and so lead to itself, as the partitions of a warp-specialized kernel do: then it is the
    first in memory of those that are not reached.
    """
    entered = {0, *(following for nexts in successors for following in nexts)}
    found = [block for block in range(len(successors)) if block not in entered]
    reached = _reached(successors, [0, *found])
    for block in range(len(successors)):
        if block not in reached:
            found.append(block)
            reached |= _reached(successors, [block])
    return found


def _reached(successors: list[list[int]], entries: list[int]) -> set[int]:
    reached: set[int] = set()
    waiting = list(entries)
    while waiting:
        block = waiting.pop()
        if block not in reached:
            reached.add(block)
            waiting.extend(successors[block])
    return reached


def _dominators(successors: list[list[int]], predecessors: list[list[int]]) -> list[set[int]]:
    """Dominators of each block; empty for blocks that the entry does not reach."""
    reached = sorted(_reached(successors, [0]))
    everything = set(reached)
    dominators = [set(everything) if block in everything else set() for block in range(len(successors))]
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in reached:
            if block:
                sources = [dominators[p] for p in predecessors[block] if p in everything]
                found = set.intersection(*sources) | {block}
                if found != dominators[block]:
                    dominators[block] = found
                    changed = True
    return dominators
