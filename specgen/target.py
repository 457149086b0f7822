"""The GPUs that a spec may name, and the architectures that binaries are made for.

A GPU is one file, targets/<id>.yaml; an architecture is one row of ARCHS. Nouns only: reads the files beside
it.
"""

from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .document import read
from .errors import Diagnostic, SpecError
from .explanations import near

DIRECTORY = Path(__file__).parent / "targets"


@dataclass(frozen=True)
class Arch:
    """One instruction set: what its binaries are called and what loads them.

    `vendor` is "nvidia" or "amd"; `backend` and `triton_arch` are the arguments of Triton's GPUTarget, with
    `warp_size` (lanes); `capability` is NVIDIA's compute capability, None for AMD; `binary` is the file
    ending; `oldest_driver` is the lowest driver (NVIDIA, Linux) or ROCm release (AMD) that loads a binary of
    the pinned compiler.
    """

    arch: str
    vendor: str
    backend: str
    triton_arch: int | str
    capability: tuple[int, int] | None
    warp_size: int
    binary: str
    oldest_driver: str


def _nvidia(major: int, minor: int, oldest_driver: str) -> Arch:
    number = 10 * major + minor
    return Arch(f"sm_{number}", "nvidia", "cuda", number, (major, minor), 32, "cubin", oldest_driver)


def _amd(gfx: str, oldest_rocm: str) -> Arch:
    return Arch(gfx, "amd", "hip", gfx, None, 64, "hsaco", f"ROCm {oldest_rocm}")


# Drivers: the pinned Triton assembles sm_80 to sm_90 with ptxas 12.8 and Blackwell with ptxas 13.1. By CUDA's minor-version
# compatibility a cubin loads from the first driver of its major version on: 525.60.13 for CUDA 12, 580.65.06 for CUDA 13
# (CUDA release notes, table of drivers).
ARCHS: dict[str, Arch] = {
    arch.arch: arch
    for arch in (
        _nvidia(8, 0, "525.60.13"),
        _nvidia(8, 9, "525.60.13"),
        _nvidia(9, 0, "525.60.13"),
        _nvidia(10, 0, "580.65.06"),
        _nvidia(12, 0, "580.65.06"),
        _amd("gfx90a", "6.2"),
        _amd("gfx942", "6.2"),
        _amd("gfx950", "7.0"),
    )
}

NUMBERS = (
    "multiprocessors",
    "shared_memory_per_block",
    "registers_per_multiprocessor",
    "warp_size",
    "memory_bandwidth",
    "matrix_rate",
)


class Target(BaseModel):
    """One GPU, as one device of the driver (a multi-die card that shows as two devices is described by one of
    them).
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$", description="The file's name: what a spec writes under `targets`."
    )
    name: str = Field(min_length=1, max_length=80, description="The product name.")
    arch: str = Field(description="The architecture its binaries are compiled for, a row of ARCHS.")
    multiprocessors: int = Field(
        ge=1, le=4096, description="Streaming multiprocessors (NVIDIA) or compute units (AMD)."
    )
    shared_memory_per_block: int = Field(
        ge=1024,
        le=1 << 20,
        multiple_of=1024,
        description="Bytes a block may use, with the opt-in where there is one.",
    )
    registers_per_multiprocessor: int = Field(
        ge=1024, le=1 << 20, description="32-bit registers of a multiprocessor."
    )
    warp_size: int = Field(ge=1, description="Lanes of a warp or wavefront.")
    memory_bandwidth: float = Field(
        gt=0, allow_inf_nan=False, description="Peak memory bandwidth, GB/s (10^9)."
    )
    matrix_rate: float = Field(
        gt=0, allow_inf_nan=False, description="Peak dense bfloat16 matrix rate with float32 sums, TFLOP/s."
    )
    sources: dict[str, Annotated[str, Field(min_length=8, max_length=300)]] = Field(
        description="For each number, where it is from."
    )

    @property
    def vendor(self) -> str:
        """ "nvidia" or "amd"."""
        return ARCHS[self.arch].vendor

    @field_validator("arch")
    @classmethod
    def _known_arch(cls, arch: str) -> str:
        if arch not in ARCHS:
            raise ValueError(
                f"unknown architecture {arch!r}; {near(arch, ARCHS) or 'known: ' + ', '.join(ARCHS)}"
            )
        return arch

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warp_size != ARCHS[self.arch].warp_size:
            raise ValueError(
                f"warp_size {self.warp_size} is not that of {self.arch}, {ARCHS[self.arch].warp_size}"
            )
        if missing := [number for number in NUMBERS if number not in self.sources]:
            raise ValueError(f"sources names no source for {', '.join(missing)}")
        if extra := [name for name in self.sources if name not in NUMBERS]:
            raise ValueError(f"sources names {', '.join(extra)}, which is no number of a target")
        return self


def load_target(path: str | PathLike[str]) -> Target:
    """The GPU described by one YAML file, its id the file's name; raises SpecError with every mistake and its
    place.
    """
    document = read(path)
    if isinstance(document.data, dict) and "id" in document.data:
        place = document.positions["id",]
        raise SpecError(
            [Diagnostic(document.path, *place, "id", "unknown field", "the id is the file's name")]
        )
    return document.validate(Target, id=Path(path).stem)


@cache
def load_targets() -> dict[str, Target]:
    """Every GPU of the targets folder by id, in the order of ids; raises SpecError with the mistakes of all
    files.
    """
    targets: dict[str, Target] = {}
    mistakes: list[Diagnostic] = []
    for path in sorted(DIRECTORY.glob("*.yaml")):
        try:
            targets[path.stem] = load_target(path)
        except SpecError as error:
            mistakes.extend(error.diagnostics)
    if mistakes:
        raise SpecError(mistakes)
    return targets
