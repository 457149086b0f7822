"""Gluon kernels through the ahead-of-time compiler: tensor maps in the signature, partitions of warps, main loops, reproducible bytes."""

from dataclasses import replace

import pytest

from specgen.aot import compile_all
from specgen.binary import CompileJob
from specgen.errors import BudgetError, BuildError
from specgen.runtime.arguments import Argument
from specgen.runtime.tensor_maps import TensorMap, parameters

MAP = TensorMap("tile_map", "tile_ptr", "bfloat16", ("rows", 64), ("stride",), (64, 64), 128)
ARGUMENTS = (
    Argument("tile_map", "tensor_map"),
    Argument("out_ptr", "pointer", "f32"),
    Argument("rows", "i32"),
)
# A loader warp copies tiles through a map, the other warps multiply them.
SOURCE = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma


@gluon.jit
def load_tiles(tile_map, rows, tile, full, empty):
    for i in range(rows // 64):
        mbarrier.wait(empty, (i & 1) ^ 1)
        mbarrier.expect(full, 64 * 64 * 2)
        tma.async_copy_global_to_shared(tile_map, [i * 64, 0], full, tile)


@gluon.jit
def multiply(out_ptr, rows, tile, full, empty, BUSY: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout)
    other = gl.zeros([64, 64 * BUSY], gl.float32, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
    for i in range(rows // 64):
        mbarrier.wait(full, i & 1)
        acc = warpgroup_mma(tile, tile.permute([1, 0]), acc)
        other = other * 0.5 + i
        mbarrier.arrive(empty)
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out_ptr + columns, gl.sum(acc, 0) + gl.sum(gl.sum(other, 0), 0))


@gluon.jit
def gluon_kernel(tile_map, out_ptr, rows):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(multiply, (out_ptr, rows, tile, full, empty, 1)), (load_tiles, (tile_map, rows, tile, full, empty))], [4], [24]
    )
"""


def job(**changes) -> CompileJob:
    return replace(
        CompileJob(
            "gluon_kernel",
            "sm_90",
            SOURCE,
            (("tile_map", MAP.triton_type), ("out_ptr", "*fp32"), ("rows", "i32")),
            divisibility=((1, 16),),
            parameters=tuple(size for _, size in parameters(ARGUMENTS, (MAP,))),
            num_warps=4,
            options=(("maxnreg", 128),),
            shared_limit=232448,
            targets=("h200",),
        ),
        **changes,
    )


def compile_one(**changes):
    wanted = job(**changes)
    return compile_all([wanted], workers=1)[wanted.symbol, wanted.arch]


def test_a_gluon_kernel_with_a_tensor_map():
    """The block has the warps of all partitions; two compiles give the same bytes, which name no source."""
    binary = compile_one()
    assert (binary.num_threads, binary.extension, binary.function) == (256, "cubin", "gluon_kernel")
    assert binary.spill_bytes == binary.main_loop_spills == 0 and binary.shared_bytes > 8192
    assert binary.data == compile_one().data
    assert b".py" not in binary.data


def test_a_spill_in_the_main_loop_of_a_partition_is_refused():
    with pytest.raises(BudgetError, match="spills registers in a main loop"):
        compile_one(source=SOURCE.replace("empty, 1)), (load", "empty, 8)), (load"), options=(("maxnreg", 64),))


def test_parameters_that_the_launcher_does_not_pass_are_an_error():
    with pytest.raises(BuildError, match=r"takes parameters of \(128, 4, 4, 8, 8, 8, 4, 8, 8\) bytes, the launcher passes \(128, 4\)"):
        compile_one(parameters=(128, 4))


def test_another_architecture_is_an_error():
    with pytest.raises(BuildError, match="gluon_kernel for sm_80"):
        compile_one(arch="sm_80")
