"""What the assembler may do to descriptors of matrix products, in small listings of machine code."""

from specgen.descriptors import wrong_descriptors

ENTRY = "UMOV UR6, URZ", "UMOV UR7, 0x40000040"
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR36], R24"  # both operands in memory: UR36 to UR39
FROM_REGISTERS = "HGMMA.64x16x16.F32.BF16 R56, R68, gdesc[UR24].tnspB, R56"  # the second operand alone: UR26 and UR27


def listing(*lines: str) -> str:
    """As cuobjdump prints it; "name:" before an instruction is where a branch to `name` goes."""
    code, places = [], {}
    for line in lines:
        name, colon, rest = line.partition(": ")
        if colon:
            places[name] = 16 * len(code)
        code.append(rest if colon else line)
    for name, place in places.items():
        code = [line.replace(f"`{name}`", f"0x{place:04x}") for line in code]
    return "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate([*code, "EXIT"]))


def test_a_descriptor_that_is_set_is_right():
    in_loop = "UMOV UR26, UR6", "UMOV UR27, UR7"
    assert wrong_descriptors(listing(*ENTRY, *in_loop, f"loop: {FROM_REGISTERS}", "@P0 BRA `loop`")) == []
    assert wrong_descriptors(listing(*ENTRY, "loop: UMOV UR26, UR6", in_loop[1], FROM_REGISTERS, "@P0 BRA `loop`")) == []


def test_a_descriptor_from_a_register_that_holds_nothing():
    """Seen with ptxas 12.8: the step from one descriptor to the next, moved before the loop, where there is no first."""
    steps = "UIADD3 UR26, UP0, UR26, 0x20, URZ", "UIADD3.X UR27, UR27, -0x3ffffff0, URZ, UP0, !UPT"
    found = wrong_descriptors(listing(*ENTRY, *steps, f"loop: {FROM_REGISTERS}", "@P0 BRA `loop`"))
    assert [reason.split(": ", 1)[1] for reason in found] == [
        f"UR26 is read by '{steps[0]}' before it is set",
        f"UR27 is read by '{steps[1]}' before it is set",
    ]


def test_a_descriptor_that_one_way_in_leaves_unset():
    found = wrong_descriptors(
        listing(*ENTRY, "UMOV UR27, UR7", "@P1 BRA `loop`", "UMOV UR26, UR6", f"loop: {FROM_REGISTERS}", "@P0 BRA `loop`")
    )
    assert len(found) == 1 and "UR26 is read" in found[0]


def test_a_descriptor_of_two_origins():
    sets = tuple(f"UMOV UR{n}, UR6" for n in range(36, 40))
    ways = (*ENTRY, *sets, "@P1 BRA `loop`", "UIADD3 UR37, UR6, 0x2, URZ", f"loop: {PRODUCT}", "@P0 BRA `loop`")
    (found,) = wrong_descriptors(listing(*ways))
    assert "UR37 comes from 2 places" in found
    kept = (*ENTRY, *sets, "@P1 BRA `loop`", "R2UR UR37, R9", f"loop: {PRODUCT}", "@P0 BRA `loop`")
    assert wrong_descriptors(listing(*kept)) == [], "it was put away and brought back"
