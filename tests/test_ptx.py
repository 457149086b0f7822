"""Rewritings of PTX: what they change, and what they refuse."""

import re

import pytest

from specgen import ptx
from specgen.aot import job_key
from specgen.binary import CompileJob
from specgen.errors import BuildError
from specgen.ptx import REWRITINGS, rewritten, taken

ENTRY = """
	mov.u32 	%r1, %tid.x;
	shr.u32 	%r2, %r1, 5;
	shfl.sync.idx.b32 	%r3, %r2, 0, 31, -1;
"""
TURNS = "	.reg .u32 warp_number, own_turn; shfl.sync.idx.b32 warp_number, %r9, 0, 31, -1;\n"
WAIT = "	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r11], %r12;\n"
ARRIVE = "	cp.async.mbarrier.arrive.noinc.shared.b64 [%r11];\n"
MEET = "	bar.sync 	0, 256;\n	add.s32 %r30, %r31, 8;\n"
PRODUCT = """	bar.sync own_turn, 256;
	shfl.sync.idx.b32 	%r40, %r2, 0, 31, -1;
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r50}, %rd1, %rd2;
"""
LAID = "	st.shared.v4.b32 [ %r60 + 0 ], { %r61, %r62, %r63, %r64 };\n	bar.warp.sync 	-1;\n	ld.shared.b32 %r65, [%r66];\n"


def test_warps_do_not_meet_and_know_their_number():
    kernel = ENTRY + TURNS + MEET + WAIT + PRODUCT + MEET + ARRIVE + MEET + LAID
    out = rewritten(kernel, ["warps_apart"])
    assert not re.search(r"bar\.sync\s+0,", out)
    assert out.count("bar.warp.sync -1;") == 3  # and the one that was there
    assert "bar.sync own_turn, 256;" in out, "what the kernel itself says stays"
    assert "mov.b32 %r40, warp_number;" in out
    assert out.count("shfl.sync.idx.b32") == 2, "how a warp finds its partition, and its number"


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (ENTRY + TURNS + MEET + "	ld.shared.b32 %r65, [%r66];\n", "warps meet before ld.shared.b32"),
        (ENTRY + TURNS + MEET + "	atom.shared.add.u32 %r65, [%r66], 1;\n", "warps meet before atom.shared"),
        (ENTRY + TURNS + MEET + "	mbarrier.arrive.shared::cta.b64 _, [%r66];\n", "warps meet before mbarrier.arrive"),
        (ENTRY + TURNS + MEET + LAID + MEET + LAID, "warps meet before st.shared"),
        (ENTRY + TURNS + MEET, "warps meet before the end"),
        (ENTRY + MEET + WAIT, "no register warp_number"),
        (TURNS, "no partitions"),
    ],
)
def test_a_meeting_with_another_purpose_is_refused(kernel, reason):
    with pytest.raises(BuildError, match=f"option warps_apart: .*{re.escape(reason)}"):
        rewritten(kernel, ["warps_apart"])


def test_copies_leave_l2_first():
    copy = "	@%p7 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r3, %r4}], [%r5];\n"
    out = rewritten(copy, ["evict_first"])
    assert "complete_tx::bytes.L2::cache_hint [%r1]" in out and out.rstrip().endswith("[%r5], policy; }")
    with pytest.raises(BuildError, match="option evict_first: the kernel has no copy by tensor map"):
        rewritten(ENTRY, ["evict_first"])


def test_a_changed_rewriting_makes_other_binaries(monkeypatch):
    plain, hinted = (CompileJob("kernel", "sm_90", "", (), options=options) for options in ((), (("evict_first", 1),)))
    before = job_key(plain), job_key(hinted)
    monkeypatch.setattr(ptx, "digest", lambda: "another")
    assert job_key(plain) == before[0] and job_key(hinted) != before[1]


def test_options_that_are_rewritings():
    options = {"maxnreg": 168, "warps_apart": 1, "evict_first": 0}
    assert taken(options) == ["warps_apart"] and options == {"maxnreg": 168}
    assert set(REWRITINGS) == {"evict_first", "warps_apart"}
