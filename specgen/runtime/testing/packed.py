"""Contiguous keys and values of a batch in static buffers: what `attention_varlen` takes.

One class, `PackedPool`: a pool whose pages hold one key and are used in order. Touches only the tensors it
allocates.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..reference import attention_varlen
from .cases import Batch, Case
from .pools import Pool


class PackedPool(Pool):
    """Queries, keys, values and output for batches of a case; keys of a sequence lie behind those of the one
    before.

    `k`, `v` [key_tokens, kv_heads, dim] and `cu_seqlens_k` int32 [seqs + 1] stand in for the caches and the
    block table, in the same layouts: in "views" k and v are the halves of one [key_tokens, 2, kv_heads, dim]
    buffer. `fill` lies behind the last key, and in every key that no row sees: left of a window, or of a
    sequence without queries, between those of its neighbours.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        batches: Sequence[Batch],
        layout: str = "plain",
        min_tokens: int = 0,
        spare_pages: int = 2,
    ):
        super().__init__(
            replace(case, page_size=1, layout="NHD"), device, batches, layout, min_tokens, spare_pages
        )
        self.k, self.v = self.k_cache[:, 0], self.v_cache[:, 0]
        self.cu_seqlens_k = torch.zeros(self.seqs + 1, dtype=torch.int32, device=device)

    def load(self, batch: Batch, *, fill: float = 0.0, seed: int = 0, values: str = "random") -> None:
        """Put a batch into the buffers, as `Pool.load` does; nothing clamps lengths `beyond` the keys."""
        super().load(replace(batch, beyond=0), fill=fill, seed=seed, values=values, pages=range(self.pages))
        self.cu_seqlens_k[1:] = self.seq_lens.cumsum(0)

    def arguments(self) -> dict:
        """Keyword arguments of `attention_varlen`, without bounds and options; out and tensors of features
        included.
        """
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out")
        return {name: getattr(self, name) for name in names} | {"layer": self.case.layer} | self.extras()

    def call(self, package, **options):
        """What `attention_varlen` returns for the loaded batch."""
        return package.attention_varlen(**self.arguments(), **options)

    def explain(self, package, **options):
        """What the package says that `call` would do."""
        return package.explain_varlen(**self.arguments(), **options)

    def only(self, seq: int) -> dict:
        """`arguments` of one loaded sequence alone, its rows and keys as views."""
        alone = super().only(seq)
        start, end = self.cu_seqlens_k[seq : seq + 2].tolist()
        keys = dict(k=self.k[start:end], v=self.v[start:end], cu_seqlens_k=self.cu_seqlens_k[seq : seq + 2] - start)
        return self.arguments() | {name: alone[name] for name in alone if name in self.arguments()} | keys

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's (out, lse) for the rows of the loaded batch, float64."""
        lengths = dict(cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k)
        q = self.q[: self.total]
        return attention_varlen(q, self.k, self.v, **lengths, **self.extras(), **self.case.formula)

    def _first_visible(self, m: int, n: int, ranges: torch.Tensor | None) -> int:
        return n if m == 0 else super()._first_visible(m, n, ranges)
