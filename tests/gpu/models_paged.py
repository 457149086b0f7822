"""transformers' attention over a paged cache, by a generated package or by the float64 reference.

Keys and values of each layer go into shuffled pages through append_kv; every call of a package is also
compared with the package's own reference on the same inputs. Imports torch and the package that it is told;
specgen only for the reference mode.
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

FEATURES = ("sliding_window", "chunk", "softcap")  # of a layer, as the reference takes them
INTERFACE = "specgen_paged"  # our name in transformers' attention interface


@dataclass
class Kernels:
    """Where attention comes from. `layers` as in a manifest: dicts with name, layers, query_heads, kv_heads,
    qk_dim, v_dim, scale, mask, page_size, dtype and features. `package` None: the reference computes.
    """

    layers: list[dict]
    reference: ModuleType
    package: ModuleType | None = None

    def layer(self, index: int, count: int) -> dict:
        """The entry of layer `index` of a model with `count` layers; exactly one has it."""
        found = [entry for entry in self.layers if index in _indices(entry["layers"], count)]
        if len(found) != 1:
            raise ValueError(f"layer {index}: got {len(found)} attention entries; needs one")
        return found[0]


def _indices(layers: str | list[int], count: int) -> list[int]:
    """`layers` of an entry: "all", a slice "0::2", or the list."""
    if not isinstance(layers, str):
        return list(layers)
    parts = [] if layers == "all" else [int(part) if part else None for part in layers.split(":")]
    return list(range(count)[slice(*parts) if parts else slice(None)])


def from_package(name: str) -> Kernels:
    """An installed package; raises ImportError without it."""
    package = importlib.import_module(name)
    manifest = json.loads((Path(package.__file__).parent / "manifest.json").read_text("utf-8"))
    return Kernels(manifest["layers"], importlib.import_module(f"{name}.runtime.reference"), package)


def from_spec(text: str) -> Kernels:
    """The reference with the layers of a spec text. Needs specgen."""
    from specgen.load import loads
    from specgen.runtime import reference

    spec = loads(text).spec
    layers = []
    for entry in spec.attention:
        names = ("name", "layers", "query_heads", "kv_heads", "mask", "sinks", "alibi", *FEATURES)
        layer = {name: getattr(entry, name) for name in names}
        layer |= {"qk_dim": entry.head_dim.qk, "v_dim": entry.head_dim.v, "scale": entry.resolved_scale}
        layers.append(layer | {"page_size": spec.kv_cache.page_size, "dtype": spec.dtype})
    return Kernels(layers, reference)


class Paged:
    """The paged caches of all layers for one batch of sequences, and the attention over them.

    `capacity` is the most tokens of one sequence, `slopes` the model's ALiBi slopes [query_heads].
    `explicit`: the package gets ALiBi slopes and float32 sinks, else its own slopes and the model's sinks.
    After `step(rows)` the next forward pass has rows[i] new tokens of sequence i, padded on the right.
    `calls` counts calls of `attend`; `worst` is the largest error of a call of the package in units of the
    reference's tolerance.
    """

    def __init__(
        self,
        kernels: Kernels,
        count: int,
        seqs: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        slopes: Tensor | None = None,
        explicit: bool = False,
    ):
        self.kernels, self.count, self.dtype, self.device = kernels, count, dtype, device
        self.explicit, self.worst, self.calls = explicit, 0.0, 0
        self.slopes = None if slopes is None else slopes.float().contiguous().to(device)
        self.page_size = kernels.layers[0]["page_size"]
        columns = -(-capacity // self.page_size)
        pages = seqs * columns + 3  # three belong to nobody
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        self.block_table = order[: seqs * columns].view(seqs, columns).to(device, torch.int32)
        self.caches: list[tuple[Tensor, Tensor]] = []
        for index in range(count):
            entry = kernels.layer(index, count)
            shapes = ((pages, self.page_size, entry["kv_heads"], entry[dim]) for dim in ("qk_dim", "v_dim"))
            # A slot that was never written is NaN: reading one would show.
            k, v = (torch.full(shape, float("nan"), dtype=dtype, device=device) for shape in shapes)
            self.caches.append((k, v))
        self.seq_lens = torch.zeros(seqs, dtype=torch.int32)
        self.workspace = kernels.package.workspace(device) if kernels.package else None

    def step(self, rows: list[int]) -> Tensor:
        """Begin a forward pass; returns the positions of its tokens, int64 [seqs, longest]."""
        longest, counts = max(rows), torch.tensor(rows)
        grid = torch.arange(longest)[None, :]
        positions, valid = self.seq_lens[:, None] + grid, grid < counts[:, None]
        seqs = torch.nonzero(valid)[:, 0]
        kept = positions[valid]
        pages = self.block_table.cpu()[seqs, kept // self.page_size].long()
        self.slot_mapping = (pages * self.page_size + kept % self.page_size).to(self.device)
        self.rows = torch.nonzero(valid.flatten())[:, 0].to(self.device)
        self.longest = longest
        self.seq_lens = (self.seq_lens + counts).int()
        self.tables = {
            "block_table": self.block_table,
            "seq_lens": self.seq_lens.to(self.device),
            "cu_seqlens_q": torch.tensor([0, *rows]).cumsum(0).to(self.device, torch.int32),
        }
        return positions.long().to(self.device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Append the new keys and values of a layer and attend: [seqs, longest, query_heads, v_dim]; rows of
        padding give 0.
        """
        entry = self.kernels.layer(module.layer_idx, self.count)
        wanted = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        stated = tuple(entry[name] for name in ("query_heads", "kv_heads", "qk_dim", "v_dim"))
        if wanted != stated:
            raise ValueError(f"layer {module.layer_idx}: got heads and sizes {wanted}; the spec has {stated}")
        if abs(scaling / entry["scale"] - 1) > 1e-6 and not entry.get("wrong"):
            raise ValueError(f"layer {module.layer_idx}: got scale {scaling}; the spec has {entry['scale']}")
        self.calls += 1
        new = [x[:, :, -self.longest :] for x in (query, key, value)]
        q, k, v = (self._pack(x) for x in new)
        k_cache, v_cache = self.caches[module.layer_idx]
        sinks = getattr(module, "sinks", None)
        if sinks is not None and self.explicit:
            sinks = sinks.float()
        packed = self._call(entry, q, k, v, k_cache, v_cache, sinks)
        out = packed.new_zeros(query.shape[0] * self.longest, *packed.shape[1:])
        out[self.rows] = packed
        return out.view(query.shape[0], self.longest, *packed.shape[1:])

    def _pack(self, x: Tensor) -> Tensor:
        """[seqs, heads, longest, dim] -> [tokens, heads, dim]; of one sequence a view with its strides."""
        x = x.transpose(1, 2)
        return x[0] if len(x) == 1 else x.flatten(0, 1)[self.rows]

    def _call(self, entry: dict, q, k, v, k_cache, v_cache, sinks) -> Tensor:
        package, reference = self.kernels.package, self.kernels.reference
        (package or reference).append_kv(
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping=self.slot_mapping,
            **({"layer": entry["name"]} if package else {}),
        )
        features = {name: entry.get(name) for name in FEATURES}
        if entry["sinks"]:
            features["sinks"] = sinks
        if entry["alibi"]:
            features["alibi_slopes"] = self.slopes
        expected, _ = reference.attention(
            q, k_cache, v_cache, **self.tables, mask=entry["mask"], scale=entry["scale"], **features
        )
        if not package:
            return expected.to(q.dtype)
        out = package.attention(
            q,
            k_cache,
            v_cache,
            **self.tables,
            max_seqlen_q=self.longest,
            layer=entry["name"],
            sinks=features.get("sinks"),
            alibi_slopes=features.get("alibi_slopes") if self.explicit else None,
            workspace=self.workspace,
        )
        bounds, found = reference.tolerance(q.dtype), reference.errors(out, expected)
        self.worst = max(self.worst, found.tensor / bounds.tensor, found.row / bounds.row)
        return out


class Interface:
    """What transformers calls under the name INTERFACE; `paged` is set before each forward pass."""

    def __init__(self):
        from transformers import AttentionInterface

        self.paged: Paged | None = None
        AttentionInterface.register(INTERFACE, self)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """`Paged.attend` of the batch that is set."""
        return self.paged.attend(module, query, key, value, scaling)

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        return self.attend(module, query, key, value, scaling), None
