"""A paged cache and the tensors of a batch over it, in static buffers, with everything that must not be read
poisoned.

One class, `Pool`: allocated once for the largest of some batches, loaded with one batch after another (which
is what a graph replay needs). Touches only the tensors it allocates.
"""

from collections.abc import Sequence

import torch

from ..extras import model_slopes
from ..reference import attention, visible
from .cases import Batch, Case

CANARY = 0x7F  # byte of memory that nobody may write, and of outputs before they are written
GUARD_ROWS = 16  # rows in front of and behind the output; 16 rows of any size keep 16-byte alignment
LAYOUTS = ("plain", "views", "odd")
RANGES = 3  # prefix ranges of a sequence
BIT_TYPES = {2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers, contiguous: NaN equals itself, -0 differs from 0."""
    return tensor.contiguous().view(BIT_TYPES[tensor.element_size()])


class Pool:
    """Queries, caches, tables and output for batches of a case.

    `layout` says how tensors lie in memory:
    - "plain": dense, caches apart.
    - "views": q is a slice of a fused QKV tensor; the caches are the halves of one [pages, 2, page_size,
      kv_heads, dim] buffer (padded by a head instead where that would break the 16-byte alignment); out has
      padded rows and heads; block_table has padded rows.
    - "odd": every data tensor starts one element off and has odd strides; the alignment that aligned variants
      promise is broken.

    Queries beyond the batch, gaps of views, and every cache slot without a key, or with one that is left of
    every row's window or chunk, hold `fill`; entries of block_table without a visible key hold -1 or the id
    of a page full of `fill`. Outputs and what lies around and between them hold canary bytes.

    `sinks` (bfloat16 in the "views" layout, else float32, of equal values, the last of several -inf),
    `alibi_slopes` (not the model's own: those of the second half of a model of twice the heads) and
    `prefix_ranges` (int32 [seqs, RANGES, 2], some empty) are None where the case has them not.
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
        """`min_tokens`: at least so many rows of q; those that no batch uses are canaries. spare_pages >= 1
        stay poisoned.
        """
        self.case, self.device, self.layout = case, device, layout
        self.seqs = max(len(batch.sequences) for batch in batches)
        self.tokens = max(min_tokens, max(batch.tokens for batch in batches))
        self.columns = max(1, *(self._pages(batch.longest) for batch in batches))
        used = max(sum(self._pages(q + c) for q, c in batch.sequences) for batch in batches)
        self.pages = used + spare_pages
        self._bases: dict[str, torch.Tensor] = {}
        self._allocate_queries()
        self._allocate_caches()
        self._allocate_out()
        table = torch.empty(
            self.seqs, self.columns + (5 if layout == "views" else 0), dtype=torch.int32, device=device
        )
        self.block_table = table[:, : self.columns]
        self.seq_lens = torch.zeros(self.seqs, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.zeros(self.seqs + 1, dtype=torch.int32, device=device)
        self._allocate_extras()
        self.total = 0

    def load(
        self,
        batch: Batch,
        *,
        fill: float = 0.0,
        seed: int = 0,
        values: str = "random",
        pages: Sequence[int] | None = None,
    ) -> None:
        """Put a batch into the buffers: same `seed`, same keys, values and queries in any layout and with any
        fill.

        `values` "random": standard normal q, k and v. "positions": k = 0 and v[j] = j, so that a row is the
        mean of the positions it sees (exact in bfloat16 up to 128 keys). "ones": k = 0 and v = 1. `pages`:
        page ids in the order of use; None shuffles them.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        lengths = [max(0, q + c) for q, c in batch.sequences] + [0] * (self.seqs - len(batch.sequences))
        rows = [q for q, _ in batch.sequences] + [0] * (self.seqs - len(batch.sequences))
        self.total = sum(rows)
        self._bases["q"].fill_(fill)
        self.q[: self.total] = self._normal(generator, self.total, self.case.query_heads, self.case.qk_dim)
        if pages is None:  # the last page is spare
            pages = torch.randperm(self.pages - 1, generator=torch.Generator().manual_seed(seed)).tolist()
        unused = iter(pages)
        table = torch.full(self.block_table.shape, -1 if fill != fill else self.pages - 1, dtype=torch.int32)
        slots, positions = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for seq, n in enumerate(lengths):
            own = torch.tensor([next(unused) for _ in range(self._pages(n))], dtype=torch.int64)
            ranges = self._load_ranges(seq, rows[seq], n)
            first = self._first_visible(rows[seq], n, ranges)
            hidden = first // self.case.page_size
            table[seq, hidden : len(own)] = own[hidden:]
            keys = torch.arange(first, n)
            positions.append(keys)
            slots.append(own[keys // self.case.page_size] * self.case.page_size + keys % self.case.page_size)
        self.block_table.copy_(table)
        self.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        if batch.beyond:
            self.seq_lens[-1] += batch.beyond
        self.cu_seqlens_q.copy_(torch.tensor([0, *rows], dtype=torch.int32).cumsum(0))
        self._load_caches(torch.cat(slots), torch.cat(positions), generator, fill, values)
        self.poison_out()

    def poison_out(self) -> None:
        """Fill the output and what lies around it with canary bytes."""
        self._bases["out"].view(torch.uint8).fill_(CANARY)

    def poison_caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill both caches, gaps included, with canary bytes; returns (k_cache, v_cache)."""
        for base in self.cache_memory():
            base.view(torch.uint8).fill_(CANARY)
        return self.k_cache, self.v_cache

    def cache_memory(self) -> list[torch.Tensor]:
        """The flat buffers that hold the caches: one if they are views of one, with all gaps."""
        return [base for name, base in self._bases.items() if "cache" in name]

    def arguments(self) -> dict:
        """Keyword arguments of `attention`, without bounds and options; out and tensors of features included."""
        names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "out")
        return {name: getattr(self, name) for name in names} | {"layer": self.case.layer} | self.extras()

    def call(self, package, **options):
        """What `attention` returns for the loaded batch."""
        return package.attention(**self.arguments(), **options)

    def explain(self, package, **options):
        """What the package says that `call` would do."""
        return package.explain(**self.arguments(), **options)

    def only(self, seq: int) -> dict:
        """`arguments` of one loaded sequence alone, its rows and pages as views."""
        start, end = self.cu_seqlens_q[seq : seq + 2].tolist()
        pages = max(1, self._pages(int(self.seq_lens[seq])))
        one = slice(seq, seq + 1)
        alone = {
            "q": self.q[start:end],
            "out": self.out[start:end],
            "block_table": self.block_table[one, :pages],
            "seq_lens": self.seq_lens[one],
            "cu_seqlens_q": self.cu_seqlens_q[seq : seq + 2] - start,
        }
        if self.prefix_ranges is not None:
            alone["prefix_ranges"] = self.prefix_ranges[one]
        return self.arguments() | alone

    def extras(self) -> dict:
        """The tensors of the case's features, by argument."""
        names = ("sinks", "alibi_slopes", "prefix_ranges")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's (out, lse) for the rows of the loaded batch, float64."""
        tables = dict(block_table=self.block_table, seq_lens=self.seq_lens, cu_seqlens_q=self.cu_seqlens_q)
        q = self.q[: self.total]
        return attention(q, self.k_cache, self.v_cache, **tables, **self.extras(), **self.case.formula)

    def by_slot(self, cache: torch.Tensor) -> torch.Tensor:
        """A cache as a view [pages, page_size, kv_heads, dim], whatever its layout."""
        return cache.transpose(1, 2) if self.case.layout == "HND" else cache

    def result(self) -> torch.Tensor:
        """A copy of the output rows that the batch owns, [total, query_heads, v_dim]."""
        return self.out[: self.total].clone()

    def canaries_intact(self) -> bool:
        """True if nothing but the batch's own output rows was written."""
        # As integers: in float16 the canary bytes are a NaN, whose payload an assignment need not keep.
        base = bits(self._bases["out"]).clone()
        view = base.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset())
        view[: self.total] = int.from_bytes(bytes([CANARY]) * base.element_size(), "little")
        return bool((base.view(torch.uint8) == CANARY).all())

    def _pages(self, keys: int) -> int:
        return -(-max(0, keys) // self.case.page_size)

    def _normal(self, generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=self.device).to(self.case.torch_dtype)

    def _empty(self, name: str, *shape: int) -> torch.Tensor:
        """A new buffer, remembered under `name` to be filled whole. The "odd" layout hands out a view one
        element in.
        """
        odd = self.layout == "odd"
        count = torch.Size(shape).numel()
        base = torch.empty(count + odd, dtype=self.case.torch_dtype, device=self.device)
        self._bases[name] = base
        return base[odd:].view(shape)

    def _allocate_queries(self) -> None:
        case, heads = self.case, self.case.query_heads
        if self.layout == "views":
            width = heads * case.qk_dim
            fused = self._empty("q", self.tokens, width + case.kv_heads * (case.qk_dim + case.v_dim))
            self.q = fused[:, :width].view(self.tokens, heads, case.qk_dim)
        else:
            odd = self.layout == "odd"
            self.q = self._empty("q", self.tokens, heads, case.qk_dim + odd)[..., : case.qk_dim]

    def _allocate_caches(self) -> None:
        case = self.case
        hnd = case.layout == "HND"
        near = (case.kv_heads, case.page_size) if hnd else (case.page_size, case.kv_heads)
        half = case.page_size * case.kv_heads * case.v_dim * case.itemsize
        if self.layout == "views" and case.qk_dim == case.v_dim and half % 16 == 0:
            both = self._empty("kv_cache", self.pages, 2, *near, case.v_dim)
            self.k_cache, self.v_cache = both[:, 0], both[:, 1]
            return
        more, more_dim = int(self.layout == "views"), int(self.layout == "odd")
        shape = (self.pages, near[0], near[1] + more)
        self.k_cache, self.v_cache = (
            self._empty(name, *shape, dim + more_dim)[:, :, : near[1], :dim]
            for name, dim in (("k_cache", case.qk_dim), ("v_cache", case.v_dim))
        )

    def _allocate_extras(self) -> None:
        case, heads = self.case, self.case.query_heads
        self.sinks = self.alibi_slopes = self.prefix_ranges = None
        if case.sinks:
            generator = torch.Generator().manual_seed(heads)
            sinks = (4 + 2 * torch.randn(heads, generator=generator)).bfloat16()
            if heads > 1:
                sinks[-1] = -torch.inf  # as if there were none
            self.sinks = sinks.to(self.device, torch.bfloat16 if self.layout == "views" else torch.float32)
        if case.alibi:
            slopes = model_slopes(2 * heads)[heads:]
            self.alibi_slopes = torch.tensor(slopes, dtype=torch.float32, device=self.device)
        if case.prefix_ranges:
            self.prefix_ranges = torch.zeros(self.seqs, RANGES, 2, dtype=torch.int32, device=self.device)

    def _load_ranges(self, seq: int, m: int, n: int) -> torch.Tensor | None:
        """Ranges of a sequence with m rows and n keys: two that adjoin across the cached keys and an empty one,
        or one of old keys alone, one of the last rows and an empty one.
        """
        if self.prefix_ranges is None:
            return None
        c = n - m
        middle = c + -(-m // 2)
        if seq % 2 == 0:
            ranges = [(c - 40, middle), (middle, n), (7, 7)]
        else:
            ranges = [(0, 3), (n, 0), (n - 2 - m // 3, n)]
        ranges = torch.tensor(ranges, dtype=torch.int32).clamp(0, max(n, 0))
        self.prefix_ranges[seq] = ranges.to(self.device)
        return ranges

    def _first_visible(self, m: int, n: int, ranges: torch.Tensor | None) -> int:
        """The first key of a sequence that one of its m rows sees; 0 if nothing bounds the rows on the left."""
        if self.case.reach is None or m == 0:
            return 0
        case = self.case
        seen = visible(torch.arange(n - m, n), n, case.mask, case.sliding_window, case.chunk, ranges).any(0)
        return int(seen.nonzero()[0]) if seen.any() else n

    def _allocate_out(self) -> None:
        case = self.case
        more_heads = int(self.layout == "views")
        more_dim = {"plain": 0, "views": 16 // case.itemsize, "odd": 1}[self.layout]
        rows = GUARD_ROWS + self.tokens + GUARD_ROWS
        whole = self._empty("out", rows, case.query_heads + more_heads, case.v_dim + more_dim)
        self.out = whole[GUARD_ROWS : GUARD_ROWS + self.tokens, : case.query_heads, : case.v_dim]

    def _load_caches(
        self, slots: torch.Tensor, positions: torch.Tensor, generator, fill: float, values: str
    ) -> None:
        case = self.case
        for base in self.cache_memory():
            base.fill_(fill)
        if values == "random":
            keys = self._normal(generator, len(slots), case.kv_heads, case.qk_dim)
            new_values = self._normal(generator, len(slots), case.kv_heads, case.v_dim)
        else:
            keys = torch.zeros((), dtype=case.torch_dtype, device=self.device)
            if values == "ones":
                positions = torch.ones_like(positions)
            new_values = positions.to(self.device, case.torch_dtype)[:, None, None]
        slots = slots.to(self.device)
        place = slots // case.page_size, slots % case.page_size
        self.by_slot(self.k_cache)[place] = keys
        self.by_slot(self.v_cache)[place] = new_values
