"""A workload's tensors: random queries, paged caches of shuffled pages, and the error of an output.

Touches only the tensors it allocates. Memory is bounded: caches are drawn in place, in their own dtype, and
the reference checks at most PIECES pieces of PIECE query rows each, spread evenly over a batch that has more.
"""

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from specgen.bench.workloads import Workload
from specgen.runtime import reference
from specgen.runtime.extras import model_slopes

PIECE, PIECES = 64, 256  # query rows, and how many pieces at most


class Batch:
    """One workload of one layer, on one device.

    `layer` is an entry of a manifest's `layers`; its `query_heads` and `kv_heads` are a rank's. Tensors, in
    the layer's dtype: q [tokens, query_heads, qk_dim], k_cache and v_cache in the layer's layout, out
    [tokens, query_heads, v_dim]; int32: block_table [seqs, pages of the longest], seq_lens [seqs],
    cu_seqlens_q [seqs + 1]. Every page belongs to one sequence, in shuffled order. `features` holds the
    tensors of the layer's features (sinks, alibi_slopes).
    """

    def __init__(
        self,
        workload: Workload,
        layer: Mapping,
        device: torch.device | str,
        seed: int = 0,
        q: Tensor | None = None,
    ):
        """Draw the tensors from `seed`; `q`, where given, takes the place of drawn queries."""
        self.workload, self.layer, self.device = workload, layer, torch.device(device)
        self.dtype = getattr(torch, layer["dtype"])
        self._generator = torch.Generator(self.device).manual_seed(seed)
        tokens, heads, kv_heads = workload.tokens, layer["query_heads"], layer["kv_heads"]
        self.q = self._normal(tokens, heads, layer["qk_dim"]) if q is None else q
        page_size = layer["page_size"]
        self.pages = [-(-keys // page_size) for _, keys in workload.seqs]
        near = (kv_heads, page_size) if self.layout == "HND" else (page_size, kv_heads)
        self.k_cache = self._normal(sum(self.pages), *near, layer["qk_dim"])
        self.v_cache = self._normal(sum(self.pages), *near, layer["v_dim"])
        shuffled = torch.randperm(sum(self.pages), generator=self._generator, device=self.device).int()
        self.block_table = torch.zeros(
            len(self.pages), max(self.pages), dtype=torch.int32, device=self.device
        )
        for row, of_seq in zip(self.block_table, shuffled.split(self.pages)):
            row[: len(of_seq)] = of_seq
        self.seq_lens = self._int32([keys for _, keys in workload.seqs])
        self.starts = [0, *accumulate(rows for rows, _ in workload.seqs)]
        self.cu_seqlens_q = self._int32(self.starts)
        self.out = torch.empty(tokens, heads, layer["v_dim"], dtype=self.dtype, device=self.device)
        self.features: dict[str, Tensor] = {}
        if layer.get("sinks"):
            self.features["sinks"] = self._normal(heads).float()
        if layer.get("alibi"):
            self.features["alibi_slopes"] = torch.tensor(
                model_slopes(heads), dtype=torch.float32, device=self.device
            )

    @property
    def layout(self) -> str:
        """Of the caches: "NHD" or "HND"."""
        return self.layer.get("layout") or "NHD"

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) as [pages, page_size, kv_heads, dim], views whatever the layout."""
        both = self.k_cache, self.v_cache
        return tuple(cache.transpose(1, 2) for cache in both) if self.layout == "HND" else both

    @cached_property
    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v) as contiguous [seqs, heads, rows or keys, dim]: copies, for sequences of one length."""
        rows, keys = self.workload.uniform
        seqs = len(self.pages)
        q = self.q.view(seqs, rows, *self.q.shape[1:]).transpose(1, 2).contiguous()
        k, v = (
            cache[self.block_table].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous()
            for cache in self.caches
        )
        return q, k, v

    @property
    def arguments(self) -> dict:
        """Arguments of a package's `attention`, the host's bounds and `out` included."""
        return {
            "q": self.q,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": self.workload.query_len,
            "max_seqlen_k": self.workload.keys,
            "layer": self.layer["name"],
            "out": self.out,
            **self.features,
        }

    def poison(self) -> None:
        """Fill `out` with NaN, so that a row which a call leaves unwritten is seen as an error."""
        self.out.fill_(float("nan"))

    def error(self, out: Tensor | None = None) -> float:
        """Relative L2 distance of an output (default: `out`) from float64; inf where it is not finite."""
        return self.errors(out).tensor

    def errors(self, out: Tensor | None = None) -> reference.Errors:
        """The distances that `reference.tolerance` bounds, over the rows that are checked."""
        return reference.errors((self.out if out is None else out)[self._rows], self._expected)

    @cached_property
    def _pieces(self) -> list[tuple[int, int, int]]:
        """(sequence, first row, end) of the pieces that are checked.

        Rows under a causal mask see what they would if the keys ended with their piece, which makes it a
        sequence of its own; under another mask a piece is a whole sequence.
        """
        causal = self.layer["mask"] == "causal"
        pieces = [
            (seq, first, min(first + PIECE, rows) if causal else rows)
            for seq, (rows, _) in enumerate(self.workload.seqs)
            for first in range(0, rows, PIECE if causal else rows)
        ]
        count = min(PIECES, len(pieces))
        return [pieces[round(i * (len(pieces) - 1) / max(1, count - 1))] for i in range(count)]

    @cached_property
    def _rows(self) -> Tensor:
        spans = [
            torch.arange(self.starts[seq] + first, self.starts[seq] + end) for seq, first, end in self._pieces
        ]
        return torch.cat(spans).to(self.device)

    @cached_property
    def _expected(self) -> Tensor:
        """The reference's rows [checked rows, query_heads, v_dim], float64."""
        before = [keys - rows for rows, keys in self.workload.seqs]
        return self._reference(
            self.q[self._rows],
            block_table=self.block_table[[seq for seq, _, _ in self._pieces]],
            seq_lens=self._int32([before[seq] + end for seq, _, end in self._pieces]),
            cu_seqlens_q=self._int32([0, *accumulate(end - first for _, first, end in self._pieces)]),
        )

    def reference(self) -> Tensor:
        """The whole output in float64, from what the tensors hold now."""
        names = ("block_table", "seq_lens", "cu_seqlens_q")
        return self._reference(self.q, **{name: getattr(self, name) for name in names})

    def _reference(self, q: Tensor, **tables: Tensor) -> Tensor:
        names = ("mask", "scale", "sliding_window", "chunk", "softcap")
        formula = {name: self.layer[name] for name in names if self.layer.get(name) is not None}
        return reference.attention(q, *self.caches, **tables, **formula, **self.features)[0]

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=self._generator)

    def _int32(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
