"""What a package serves, read from its manifest and table: layer classes, head counts per rank, limits.

Nouns of the runtime: imports torch for its dtypes only, touches no tensor and no device.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import sizes
from .errors import ArgumentError, UnsupportedError
from .table import Table


class Limits(NamedTuple):
    """The spec's limits: what one call may hold at most."""

    max_seqs: int
    max_seq_len: int
    max_tokens: int
    max_spec_tokens: int


class Extras(NamedTuple):
    """The features of a layer for which a call takes a tensor, or may."""

    sinks: bool
    alibi: bool
    prefix_ranges: bool


@dataclass(frozen=True, eq=False, slots=True)
class Geometry:
    """One layer class at one tensor-parallel degree; `query_heads` and `kv_heads` are per rank.

    `stride_mask` has the low bits that every stride, in elements, leaves zero where the aligned variant may
    run. `hnd`: caches are [pages, kv_heads, page_size, dim], else [pages, page_size, kv_heads, dim]. `extras`
    is None where a call takes no tensor of a feature; `rotary_dim` is None where append_kv rotates nothing. `features` names all that is on, in words, or is "".
    """

    layer: str
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    mask: str
    page_size: int
    dtype: torch.dtype
    degree: int
    stride_mask: int
    sliding_window: int | None
    chunk: int | None
    hnd: bool
    extras: Extras | None
    features: str
    rotary_dim: int | None

    @property
    def reach(self) -> int | None:
        """Keys that a row sees at most, its own included, prefix ranges apart; None if only the sequence ends
        it.
        """
        return self.sliding_window or self.chunk


class Geometries:
    """Every geometry of a package, found by layer and head counts."""

    def __init__(self, manifest: dict, table: Table):
        self.layers = tuple(layer["name"] for layer in manifest["layers"])
        self.all = tuple(
            geometry_of(layer, query_heads, kv_heads)
            for layer in manifest["layers"]
            for query_heads, kv_heads in table.heads(layer["name"])
        )
        self.by_heads: dict[tuple, Geometry] = {}
        self.by_kv_heads: dict[tuple, Geometry] = {}
        self.by_out: dict[tuple, Geometry] = {}
        self.hnd = self.all[0].hnd if self.all else False  # of the package: a spec has one layout
        for geometry in self.all:
            names = (geometry.layer, None) if len(self.layers) == 1 else (geometry.layer,)
            for name in names:
                self.by_heads[name, geometry.query_heads, geometry.kv_heads] = geometry
                self.by_kv_heads.setdefault((name, geometry.kv_heads), geometry)
            self.by_out.setdefault((geometry.query_heads, geometry.v_dim), geometry)

    def no_heads(
        self, function: str, layer: object, query_heads: int, keys: str, kv_heads: int, cache_shape=None
    ) -> ArgumentError:
        """Why `attention` or `attention_varlen` has no geometry for these: the layer, or the head counts of q
        and of the argument `keys`, a cache of `cache_shape` or none.
        """
        wrong = self._no_layer(function, layer)
        if wrong:
            return wrong
        have = [g for g in self.all if layer in (g.layer, None)]
        legal = ", ".join(f"{g.query_heads}/{g.kv_heads} (tensor_parallel {g.degree})" for g in have)
        return UnsupportedError(
            f"{function}: q has {query_heads} heads and {keys} {kv_heads} kv heads; "
            f"needed for layer {have[0].layer!r}: one of query/kv heads {legal}" + self._layout(cache_shape, have)
        )

    def no_kv_heads(self, layer: object, kv_heads: int, cache_shape) -> ArgumentError:
        """Why `append_kv` has no geometry for these, of a k_cache of `cache_shape`."""
        wrong = self._no_layer("append_kv", layer)
        if wrong:
            return wrong
        have = [g for g in self.all if layer in (g.layer, None)]
        legal = ", ".join(dict.fromkeys(str(g.kv_heads) for g in have))
        return UnsupportedError(
            f"append_kv: k_cache has {kv_heads} kv heads; needed for layer {have[0].layer!r}: one of {legal}"
            + self._layout(cache_shape, have)
        )

    def no_out(self, query_heads: int, v_dim: int) -> ArgumentError:
        """Why `merge_states` has no geometry for these."""
        legal = ", ".join(f"[tokens, {heads}, {dim}]" for heads, dim in self.by_out)
        return UnsupportedError(
            f"merge_states: out_a has shape [tokens, {query_heads}, {v_dim}]; needed: one of {legal}"
        )

    def _layout(self, shape, have: list[Geometry]) -> str:
        """The end of a message about a cache of that shape, if it would fit in the other layout."""
        other, ours = ("NHD", "[pages, kv_heads, page_size, dim]") if self.hnd else ("HND", "[pages, page_size, kv_heads, dim]")
        _, *near, dim = shape or (None, None)
        if tuple(reversed(near)) not in {(g.kv_heads, g.page_size) if self.hnd else (g.page_size, g.kv_heads) for g in have}:
            return ""
        return f". k_cache {list(shape)} has layout {other}; this package's is {'HND' if self.hnd else 'NHD'}: {ours}"

    def _no_layer(self, function: str, layer: object) -> ArgumentError | None:
        names = ", ".join(map(repr, self.layers))
        if layer is None and len(self.layers) > 1:
            return ArgumentError(
                f"{function}: layer is None; this package has several layers; needed: one of {names}"
            )
        if layer is not None and layer not in self.layers:
            return ArgumentError(f"{function}: layer is {layer!r}; needed: one of {names}")
        return None


def features(layer: dict) -> str:
    """What is on in a manifest's layer, in words: "window 1024, softcap 50, sinks"; "" if nothing is."""
    numbers = (("window", "sliding_window"), ("chunk", "chunk"), ("softcap", "softcap"))
    words = [f"{word} {layer[name]}" for word, name in numbers if layer.get(name) is not None]
    switches = ("sinks", "alibi", "prefix_ranges", "cross")
    words += [name.replace("_", " ") for name in switches if layer.get(name)]
    return ", ".join(words + ["HND"] * (layer.get("layout") == "HND"))


def geometry_of(layer: dict, query_heads: int, kv_heads: int) -> Geometry:
    """The geometry of a manifest's layer at a rank's head counts."""
    dtype = getattr(torch, layer["dtype"])
    promised = sizes.alignment(layer["qk_dim"], layer["v_dim"], dtype.itemsize)
    extras = Extras(*(bool(layer.get(name)) for name in Extras._fields))
    return Geometry(
        layer=layer["name"],
        query_heads=query_heads,
        kv_heads=kv_heads,
        qk_dim=layer["qk_dim"],
        v_dim=layer["v_dim"],
        scale=layer["scale"],
        mask=layer["mask"],
        page_size=layer["page_size"],
        dtype=dtype,
        degree=layer["query_heads"] // query_heads,
        stride_mask=promised // dtype.itemsize - 1,
        sliding_window=layer.get("sliding_window"),
        chunk=layer.get("chunk"),
        hnd=layer.get("layout") == "HND",
        extras=extras if any(extras) else None,
        features=features(layer),
        rotary_dim=layer.get("rotary_dim"),
    )
