"""The contenders: generated packages and the peers beside them, each asked the same of one batch.

A peer is a class: making it imports what it needs or raises Unavailable with the reason; `make` gives a Run
for a batch, or raises Unavailable where it cannot serve it. Everything that an engine does once a step
(plans, metadata, another layout of the cache) is done in `make`, outside the timed call. To add one: subclass
Peer, and list it in PEERS.
"""

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specgen.bench import vllm_triton
from specgen.bench.batch import Batch
from specgen.bench.workloads import geometry
from specgen.errors import SpecgenError


class Unavailable(Exception):
    """Why a peer is not installed here, or does not serve a batch."""


def _as_it_is(out: Tensor) -> Tensor:
    return out


@dataclass(frozen=True)
class Run:
    """One contender over one batch: `call()` is timed, `post(call())` is [tokens, query_heads, v_dim]."""

    call: Callable[[], Tensor]
    post: Callable[[Tensor], Tensor] = _as_it_is


def needs(layer: Mapping) -> set[str]:
    """In words, what a layer needs beyond causal attention over 16-bit NHD pages with one head size."""
    fields = ("sliding_window", "chunk", "softcap", "sinks", "alibi", "prefix_ranges")
    found = {field.replace("_", " ") for field in fields if layer.get(field)}
    found |= (
        {layer["mask"]} - {"causal"}
        | {layer.get("layout") or "NHD"} - {"NHD"}
        | {layer["dtype"]} & {"float32"}
    )
    return found | ({"value heads of another size"} if layer["v_dim"] != layer["qk_dim"] else set())


class Peer:
    """A contender. `ways` are settings that are measured apart: the best counts. `serves`: of `needs`, what
    it does. `checked`: its output is compared with float64.
    """

    name: str
    title: str
    distribution: str | None = None
    ways: tuple[str, ...] = ("",)
    serves: frozenset[str] = frozenset()
    checked = True

    @property
    def version(self) -> str:
        """Of what was imported; "unknown" where it lies there without its metadata."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return str(getattr(self.module, "__version__", "unknown"))

    def make(self, batch: Batch, way: str = "") -> Run:
        """The call over a batch. Unavailable where the peer does not serve it; whatever the peer raises."""
        if lacking := needs(batch.layer) - self.serves:
            raise Unavailable(f"does not do {', '.join(sorted(lacking))}")
        return self._make(batch, way)

    def _make(self, batch: Batch, way: str) -> Run:
        raise NotImplementedError


def imported(name: str):
    """The module, or Unavailable; a module that is there and fails to load says how."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a binary for another torch raises whatever it likes
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        raise Unavailable(
            f"{name} is not installed" if missing else f"{name} does not load: {one_line(error)}"
        ) from error


def one_line(error: BaseException, limit: int = 200) -> str:
    """An exception as a note: its class, if it is not of ours, and the first line of its text."""
    text = str(error).strip().partition("\n")[0]
    if not isinstance(error, SpecgenError | Unavailable):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Package(Peer):
    """A package that specgen generated: its module, and the label that results know it by."""

    def __init__(self, module, label: str):
        self.module, self.name, self.title = module, label, module.__name__
        self.manifest = json.loads((Path(module.__file__).parent / "manifest.json").read_text("utf-8"))
        self._warm = False

    @cached_property
    def layers(self) -> list[dict]:
        """The manifest's `layers`, with the head counts of its smallest tensor-parallel degree."""
        heads: dict[str, tuple[int, int]] = {}
        for row in importlib.import_module(f"{self.title}.dispatch").ATTENTION_ROWS:
            heads[row.layer] = max(heads.get(row.layer, (0, 0)), (row.query_heads, row.kv_heads))
        counts = (
            dict(zip(("query_heads", "kv_heads"), heads[layer["name"]])) for layer in self.manifest["layers"]
        )
        return [layer | count for layer, count in zip(self.manifest["layers"], counts)]

    @property
    def version(self) -> str:
        """The package's, with the digest of its spec."""
        return f"{self.manifest['version']} (spec {self.manifest['spec']['sha256'][:12]})"

    @property
    def regret(self) -> list[dict]:
        """Of the manifest's dispatch trees those that measurements made: whose they are, and the slowdowns."""
        return [
            {name: tree[name] for name in ("layer", "arch", "measured_on")} | tree["regret"]
            for tree in self.manifest["dispatch"]
            if tree["regret"]
        ]

    def make(self, batch: Batch, way: str = "") -> Run:
        """The call, after the package's warm-up; what its limits exclude is Unavailable."""
        if beyond := batch.workload.beyond(self.manifest["limits"]):
            raise Unavailable(beyond)
        if not self._warm:
            self.module.warmup(batch.q.device)
            self._warm = True
        return Run(partial(self.module.attention, **batch.arguments | {"layer": self._name_of(batch.layer)}))

    def append(self, batch: Batch, k: Tensor, v: Tensor, slot_mapping: Tensor, **rotary: Tensor) -> None:
        """The package's append_kv into a batch's caches."""
        caches = (batch.k_cache, batch.v_cache)
        self.module.append_kv(
            k, v, *caches, slot_mapping=slot_mapping, layer=self._name_of(batch.layer), **rotary
        )

    def _name_of(self, layer: Mapping) -> str:
        return next(mine["name"] for mine in self.layers if geometry(mine) == geometry(layer))


class FlashAttention3(Peer):
    """FlashAttention-3 over pages; "metadata" is its schedule, computed once outside the timed call."""

    name, title, distribution = "fa3", "FlashAttention-3", "tokenspeed-fa3"
    ways = ("plain", "metadata")
    serves = frozenset(
        {"sliding window", "chunk", "sinks", "bidirectional", "HND", "value heads of another size"}
    )

    def __init__(self):
        self.module = imported("flash_attn_interface")
        if torch.cuda.get_device_capability()[0] != 9:
            raise Unavailable("has kernels for sm_90 alone")

    def _make(self, batch: Batch, way: str) -> Run:
        layer, (k_cache, v_cache) = batch.layer, batch.caches
        window, rows = layer.get("sliding_window"), batch.workload.query_len
        shared = {
            "causal": layer["mask"] == "causal",
            "window_size": (window - 1, 0) if window else (-1, -1),
            "attention_chunk": layer.get("chunk") or 0,
            "cu_seqlens_q": batch.cu_seqlens_q,
        }
        more = {name: tensor.to(batch.dtype) for name, tensor in batch.features.items()}  # sinks alone
        if way == "metadata":
            more["scheduler_metadata"] = self.module.get_scheduler_metadata(
                batch_size=len(batch.pages),
                max_seqlen_q=rows,
                max_seqlen_k=batch.block_table.shape[1] * layer["page_size"],
                num_heads_q=layer["query_heads"],
                num_heads_kv=layer["kv_heads"],
                headdim=layer["qk_dim"],
                headdim_v=layer["v_dim"],
                cache_seqlens=batch.seq_lens,
                qkv_dtype=batch.dtype,
                page_size=layer["page_size"],
                **shared,
            )
        call = partial(
            self.module.flash_attn_with_kvcache,
            batch.q,
            k_cache,
            v_cache,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            max_seqlen_q=rows,
            softmax_scale=layer["scale"],
            **shared,
            **more,
        )
        return Run(call)


class FlashInfer(Peer):
    """FlashInfer over pages, planned outside the timed call: decode on tensor cores, prefill for the rest."""

    name, title, distribution = "flashinfer", "FlashInfer", "flashinfer-python"
    serves = frozenset({"sliding window", "softcap", "bidirectional", "HND", "value heads of another size"})

    def __init__(self):
        self.module = imported("flashinfer")
        self._scratch: Tensor | None = None

    def _make(self, batch: Batch, way: str) -> Run:
        layer, workload = batch.layer, batch.workload
        if self._scratch is None:  # one for all plans: they run one after the other
            self._scratch = torch.empty(512 << 20, dtype=torch.uint8, device=batch.device)
        ends = torch.tensor([0, *accumulate(batch.pages)], dtype=torch.int32, device=batch.device)
        pages = torch.cat([row[:count] for row, count in zip(batch.block_table, batch.pages)])
        last = torch.tensor(
            [(keys - 1) % layer["page_size"] + 1 for _, keys in workload.seqs],
            dtype=torch.int32,
            device=batch.device,
        )
        heads = (layer["query_heads"], layer["kv_heads"], layer["qk_dim"], layer["page_size"])
        options = {
            "q_data_type": batch.dtype,
            "kv_data_type": batch.dtype,
            "sm_scale": layer["scale"],
            "window_left": (layer.get("sliding_window") or 0) - 1,
            "logits_soft_cap": layer.get("softcap"),
        }
        if workload.query_len == 1 and layer["qk_dim"] == layer["v_dim"]:
            wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
                self._scratch, batch.layout, use_tensor_cores=True
            )
            wrapper.plan(ends, pages, last, *heads, **options)
        else:
            wrapper = self.module.BatchPrefillWithPagedKVCacheWrapper(self._scratch, batch.layout)
            options |= {"causal": layer["mask"] == "causal", "head_dim_vo": layer["v_dim"]}
            wrapper.plan(batch.cu_seqlens_q, ends, pages, last, *heads, **options)
        return Run(partial(wrapper.run, batch.q, (batch.k_cache, batch.v_cache)))


class VllmTriton(Peer):
    """vLLM's unified Triton operator, from vLLM or from its two files in $VLLM_OPS."""

    name, title = "vllm", "vLLM Triton"
    serves = frozenset({"sliding window", "softcap", "sinks", "alibi", "bidirectional", "HND"})

    def __init__(self):
        try:
            self.operator, self._version = vllm_triton.load()
        except Exception as error:
            raise Unavailable(one_line(error)) from error

    @property
    def version(self) -> str:
        """vLLM's, or the digest of the file."""
        return self._version

    def _make(self, batch: Batch, way: str) -> Run:
        return Run(vllm_triton.call(self.operator, batch))


class Dense(Peer):
    """A peer over contiguous keys of sequences of one length; its output keeps its own layout."""

    serves = frozenset({"bidirectional", "HND", "value heads of another size"})

    def _make(self, batch: Batch, way: str) -> Run:
        if batch.workload.uniform is None:
            raise Unavailable("reads a dense cache: sequences of one length alone")
        rows, keys = batch.workload.uniform
        causal = batch.layer["mask"] == "causal"
        call = self._call(batch, rows, keys, causal)
        return Run(call, lambda out: out.transpose(1, 2).reshape(batch.out.shape))

    def _call(self, batch: Batch, rows: int, keys: int, causal: bool) -> Callable[[], Tensor]:
        """A call over `batch.dense` that returns [seqs, query_heads, rows, v_dim]."""
        raise NotImplementedError


class CudnnSdpa(Dense):
    """torch's scaled_dot_product_attention with cuDNN."""

    name, title, backend = "cudnn", "cuDNN (dense)", "CUDNN_ATTENTION"

    def __init__(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._only = partial(sdpa_kernel, getattr(SDPBackend, self.backend))

    @property
    def version(self) -> str:
        """torch's, and cuDNN's."""
        return f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"

    def _call(self, batch: Batch, rows: int, keys: int, causal: bool) -> Callable[[], Tensor]:
        if causal and 1 < rows < keys:
            raise Unavailable("SDPA's causal mask begins at the first key: no rows behind cached keys")
        options = {"is_causal": causal and rows > 1, "scale": batch.layer["scale"], "enable_gqa": True}
        q, k, v = batch.dense

        def call() -> Tensor:
            with self._only():
                return scaled_dot_product_attention(q, k, v, **options)

        return call


class FlashSdpa(CudnnSdpa):
    """torch's scaled_dot_product_attention with its flash kernels."""

    name, title, backend = "flash", "SDPA flash (dense)", "FLASH_ATTENTION"

    @property
    def version(self) -> str:
        """torch's."""
        return f"torch {torch.__version__}"


class Flex(Dense):
    """torch's FlexAttention, compiled for each shape; prefill alone, where that pays."""

    name, title = "flex", "FlexAttention (dense)"
    serves = Dense.serves | {"sliding window", "chunk", "softcap"}
    least_rows = 128

    def __init__(self):
        self.module = imported("torch.nn.attention.flex_attention")

    @property
    def version(self) -> str:
        """torch's."""
        return f"torch {torch.__version__}"

    def _call(self, batch: Batch, rows: int, keys: int, causal: bool) -> Callable[[], Tensor]:
        if rows < self.least_rows:
            raise Unavailable(
                f"measured from {self.least_rows} query rows on: a compile of its own for each shape"
            )
        layer, mask = batch.layer, None
        window, chunk, cap = layer.get("sliding_window"), layer.get("chunk"), layer.get("softcap")

        def seen(b, h, i, j):
            position = i + (keys - rows)
            visible = j <= position
            if window:
                visible = visible & (position - window < j)
            return visible & (position // chunk == j // chunk) if chunk else visible

        def capped(score, b, h, i, j):
            return cap * torch.tanh(score / cap)

        if causal:
            mask = self.module.create_block_mask(seen, None, None, rows, keys, device=batch.device)
        torch.compiler.reset()  # or the shapes of the workloads before would count against a limit
        attention = torch.compile(self.module.flex_attention, dynamic=False)
        options = {
            "block_mask": mask,
            "scale": layer["scale"],
            "enable_gqa": True,
            "score_mod": capped if cap else None,
        }
        return partial(attention, *batch.dense, **options)


PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (FlashAttention3, FlashInfer, CudnnSdpa, FlashSdpa, Flex, VllmTriton)
}


def open_peers(names: Iterable[str]) -> tuple[list[Peer], dict[str, str]]:
    """The peers that are installed here, and by name the reason why another is not."""
    opened, reasons = [], {}
    for name in names:
        try:
            opened.append(PEERS[name]())
        except Unavailable as reason:
            reasons[name] = str(reason)
    return opened, reasons
