"""vLLM's unified Triton attention operator, as a call over a batch.

Loads it from an installed vLLM, or from its two files in the folder $VLLM_OPS with stand-ins for what they
import of vLLM; the stand-ins leave sys.modules again. vLLM's code is used where it lies, never copied.
"""

import enum
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from specgen.bench.batch import Batch
from specgen.errors import SpecgenError

FOLDER = "VLLM_OPS"
_OPS = "vllm.v1.attention.ops"
_FILES = ("triton_attention_helpers", "triton_unified_attention")
SEGMENTS = 16  # parts of a sequence's keys in the split kernel, as vLLM sets it
SPLIT_PROGRAMS = 128  # vLLM splits the keys below so many programs of (sequence, kv head)


class _Quantization(enum.IntEnum):
    """vLLM's cache quantizations, as far as the operator names them."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class _Silent:
    """Stands for loggers and platforms: whatever is asked of it does nothing and is false."""

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **keywords: False

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


def load() -> tuple[ModuleType, str]:
    """(the operator's module, its version). SpecgenError where neither vLLM nor its files are here."""
    if folder := os.environ.get(FOLDER):
        source = Path(folder) / f"{_FILES[1]}.py"
        if not source.is_file():
            raise SpecgenError(f"${FOLDER} is {folder}, which holds no {source.name}")
        with _stand_ins():
            modules = [_load_file(name, Path(folder) / f"{name}.py") for name in _FILES]
        return modules[-1], f"file {hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if importlib.util.find_spec("vllm") is None:
        raise SpecgenError(
            f"vllm is not installed, and ${FOLDER} names no folder with {' and '.join(_FILES)}"
        )
    return importlib.import_module(f"{_OPS}.{_FILES[1]}"), metadata.version("vllm")


@contextmanager
def _stand_ins() -> Iterator[None]:
    import triton
    import triton.language

    contents = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: _Silent()},
        "vllm.platforms": {"current_platform": _Silent()},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _Quantization},
    }
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "vllm"}
    for name, content in contents.items():
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)


def _load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{_OPS}.{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(operator: ModuleType, batch: Batch) -> Callable[[], torch.Tensor]:
    """The operator over a batch; it writes and returns the batch's `out`. Its scratch is made here, once."""
    layer, (k_cache, v_cache) = batch.layer, batch.caches
    threshold = SPLIT_PROGRAMS // layer["kv_heads"]
    split_rows = max(threshold, batch.workload.tokens if batch.workload.query_len <= 8 else 1)
    scratch = partial(torch.empty, dtype=torch.float32, device=batch.device)
    heads, width = (split_rows, layer["query_heads"], SEGMENTS), 1 << (layer["qk_dim"] - 1).bit_length()
    window, one = layer.get("sliding_window"), torch.ones(1, device=batch.device)
    attend = partial(
        operator.unified_attention,
        q=batch.q,
        k=k_cache,
        v=v_cache,
        out=batch.out,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.workload.query_len,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.workload.keys,
        softmax_scale=layer["scale"],
        causal=layer["mask"] == "causal",
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=batch.block_table,
        softcap=layer.get("softcap") or 0,
        q_descale=None,
        k_descale=one,
        v_descale=one,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=scratch(*heads, width),
        softmax_segm_max=scratch(heads),
        softmax_segm_expsum=scratch(heads),
        **batch.features,
    )

    def run() -> torch.Tensor:
        attend()
        return batch.out

    return run
