"""Targets: every GPU has its row, the numbers fit their architecture, and a bad file is refused with its
place.
"""

from pathlib import Path

import pytest

from specgen.errors import SpecError
from specgen.target import ARCHS, DIRECTORY, NUMBERS, load_target, load_targets

SHARED = {
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
EXPECTED = {
    "h100_sxm": ("sm_90", 132),
    "h100_pcie": ("sm_90", 114),
    "h200": ("sm_90", 132),
    "gh200": ("sm_90", 132),
    "a100_sxm": ("sm_80", 108),
    "a100_pcie": ("sm_80", 108),
    "l4": ("sm_89", 58),
    "l40s": ("sm_89", 142),
    "rtx_4090": ("sm_89", 128),
    "b200": ("sm_100", 148),
    "rtx_pro_6000": ("sm_120", 188),
    "rtx_5090": ("sm_120", 170),
    "mi250x": ("gfx90a", 110),
    "mi300x": ("gfx942", 304),
    "mi355x": ("gfx950", 256),
}


def test_every_gpu_of_the_product_has_a_row():
    rows = {name: (t.arch, t.multiprocessors) for name, t in load_targets().items()}
    assert EXPECTED.items() <= rows.items()  # a GPU that someone adds is one file and no change here
    assert {t.arch for t in load_targets().values()} == set(ARCHS)


@pytest.mark.parametrize("target", load_targets().values(), ids=lambda target: target.id)
def test_numbers_fit_the_architecture(target):
    arch = ARCHS[target.arch]
    assert target.shared_memory_per_block == SHARED[target.arch]
    assert target.warp_size == arch.warp_size
    assert target.vendor == arch.vendor
    assert target.registers_per_multiprocessor == (65536 if arch.vendor == "nvidia" else 131072)
    assert set(target.sources) == set(NUMBERS)
    assert 200 < target.memory_bandwidth < 10000 and 100 < target.matrix_rate < 3000


def test_architectures():
    assert (
        ARCHS["sm_90"].triton_arch == 90
        and ARCHS["sm_90"].backend == "cuda"
        and ARCHS["sm_90"].binary == "cubin"
    )
    assert ARCHS["sm_120"].capability == (12, 0) and ARCHS["sm_120"].oldest_driver == "580.65.06"
    assert (
        ARCHS["gfx942"].triton_arch == "gfx942"
        and ARCHS["gfx942"].warp_size == 64
        and ARCHS["gfx942"].binary == "hsaco"
    )


GOOD = (DIRECTORY / "h200.yaml").read_text()


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("arch: sm_90", "arch: sm_91", ":2:7: arch: unknown architecture 'sm_91'; did you mean"),
        ("arch: sm_90", "arch: sparc", ":2:7: arch: unknown architecture 'sparc'; known: sm_80"),
        (
            "multiprocessors: 132",
            "multiprocesors: 132",
            ":3:1: multiprocesors: unknown field; did you mean 'multiprocessors'?",
        ),
        (
            "multiprocessors: 132",
            "multiprocessors: many",
            ":3:18: multiprocessors: needs an integer, got 'many'",
        ),
        ("232448", "232449", ":4:26: shared_memory_per_block: needs a multiple of 1024, got 232449"),
        ("warp_size: 32", "warp_size: 64", ":1:1: warp_size 64 is not that of sm_90, 32"),
        ("memory_bandwidth: 4800", "memory_bandwidth: .nan", ":7:19: memory_bandwidth: needs"),
        ("  warp_size:", "  warp:", ":1:1: sources names no source for warp_size"),
        ("name:", "id: h200\nname:", ":1:1: id: unknown field; the id is the file's name"),
    ],
)
def test_a_bad_row_is_one_clear_line(tmp_path, old, new, line):
    path = tmp_path / "x200.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        load_target(path)
    assert str(caught.value).startswith(f"{path}{line}") and "\n" not in str(caught.value)


def test_a_new_gpu_is_one_file(tmp_path):
    path = tmp_path / "h300_nvl.yaml"
    path.write_text(GOOD)
    assert load_target(path).id == "h300_nvl"


def test_a_bad_file_name_is_refused(tmp_path):
    path = tmp_path / "H300 NVL.yaml"
    path.write_text(GOOD)
    with pytest.raises(SpecError, match="id: "):
        load_target(path)


def test_the_targets_folder_holds_nothing_else():
    assert {path.suffix for path in Path(DIRECTORY).iterdir()} == {".yaml"}
