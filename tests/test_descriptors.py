"""Descriptors of matrix products: where they come from, read off machine code as ptxas writes it."""

import pytest

from specgen.descriptors import ambiguous_descriptors

# A masked loop that may not run, then an unmasked one; both multiply tiles that descriptors in UR4 to UR11 name.
LISTING = """
        /*0000*/                   S2UR UR4, SR_CTAID.X ;
        /*0010*/              @P0 BRA {skip} ;
        /*0020*/                   R2UR UR4, R8 ;
        /*0030*/                   UIADD3 UR8, UP0, UR4, 0x2, URZ ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0060*/              @P1 BRA 0x40 ;
        /*0070*/                   {before}
        /*0080*/                   UIADD3 UR8, UP0, UR{base}, 0x2, URZ ;
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*00a0*/                   HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR16].tnspB, R24, gsb0 ;
        /*00b0*/              @P2 BRA {back} ;
        /*00c0*/                   EXIT ;
"""


def listing(skip: str = "0x70", before: str = "R2UR UR12, R9 ;", base: int = 12, back: str = "0x90") -> str:
    return LISTING.format(skip=skip, before=before, base=base, back=back)


def test_each_loop_with_descriptors_of_its_own_is_right():
    assert ambiguous_descriptors(listing()) == []


@pytest.mark.parametrize("back", ["0x90", "0x80"])
def test_a_part_that_only_the_skipped_loop_sets_is_found(back):
    """The second loop's descriptor is a step from UR4, before the loop or in it, and the way past the first loop leaves UR4 as it was."""
    found = ambiguous_descriptors(listing(before="NOP ;", base=4, back=back))
    assert len(found) == 1
    assert "gdesc[UR8]" in found[0] and "UR4 comes from 2 places: 'S2UR UR4, SR_CTAID.X', 'R2UR UR4, R8'" in found[0]


def test_what_the_loop_sets_itself_is_its_own():
    """A ring's slot changes from pass to pass: set before the loop and in it."""
    assert ambiguous_descriptors(listing(before="R2UR UR8, R9 ;", base=8, back="0x80")) == []


def test_nothing_where_the_first_loop_always_runs():
    assert ambiguous_descriptors(listing(skip="0x20", before="NOP ;", base=4)) == []
