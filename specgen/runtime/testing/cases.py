"""What a generated test is about: the specialization under test, and the batches that have broken kernels of
its kind.

Nouns: plain data and the clipping of a batch to a package's limits. Imports torch only for dtypes.
"""

from dataclasses import dataclass, fields, replace

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One specialization, as its test stub states it: per-rank heads, head sizes in elements, page size in
    keys, limits.

    `layer` is the attention entry to call it through; None for merge_states, which has no layer. Fields that
    a family does not have keep their defaults.
    """

    symbol: str
    family: str  # "decode" | "prefill" | "varlen" | "append_kv" | "merge_states"
    dtype: str
    v_dim: int
    layer: str | None = None
    query_heads: int = 0
    kv_heads: int = 0
    qk_dim: int = 0
    page_size: int = 0
    mask: str = "causal"
    scale: float | None = None
    sliding_window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    prefix_ranges: bool = False
    cross: bool = False
    layout: str = "NHD"  # of the caches: "NHD" | "HND"
    rotary_dim: int | None = None  # append_kv rotates so many leading elements
    rotary_style: str | None = None  # "half" | "interleaved"
    aligned: bool = True
    max_seqs: int = 1
    max_seq_len: int = 1
    max_tokens: int = 1

    @classmethod
    def of_layer(cls, manifest: dict, layer: str, query_heads: int, kv_heads: int) -> "Case":
        """A case of a manifest's layer at a rank's head counts, of no one specialization (symbol "")."""
        names = {field.name for field in fields(cls)} - {"layer", "query_heads", "kv_heads"}
        facts = next(entry for entry in manifest["layers"] if entry["name"] == layer) | manifest["limits"]
        known = {name: value for name, value in facts.items() if name in names}
        heads = dict(query_heads=query_heads, kv_heads=kv_heads)
        return cls(symbol="", family="attention", layer=layer, **heads, **known)

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of queries, keys, values and outputs."""
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.torch_dtype.itemsize

    @property
    def reach(self) -> int | None:
        """Keys of a window or a chunk; None without one."""
        return self.sliding_window or self.chunk

    @property
    def formula(self) -> dict:
        """What `reference.attention` needs to know besides tensors."""
        names = ("mask", "scale", "sliding_window", "chunk", "softcap", "layout")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Batch:
    """Sequences as (q, c): q query rows after c cached keys, so n = c + q keys; c < 0 leaves rows that see no
    key.

    `beyond` is added to the last sequence's seq_lens alone: more keys than its row of the block table can
    hold.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    beyond: int = 0
    large: bool = False  # too large for the interpreter

    @property
    def tokens(self) -> int:
        """Query rows of all sequences."""
        return sum(q for q, _ in self.sequences)

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return max((q + c for q, c in self.sequences), default=0)


# Each is named after the kind of fault that it shows.
BATCHES: tuple[Batch, ...] = (
    Batch("stale_tail", ((1, 16), (1, 0), (5, 27), (1, 30))),
    Batch("empty_split", ((1, 0), (1, 2), (1, 300))),
    Batch("empty_sequences", ((0, 3), (1, 2), (0, 0), (1, 4), (0, 7))),
    Batch("empty_batch", ()),
    Batch("rows_without_keys", ((3, -3), (5, -2), (1, 4), (2, -1))),
    Batch("head_dim", ((1, 40), (7, 9))),
    Batch("groups", ((1, 33), (2, 40), (17, 50))),
    Batch("surplus_programs", ((1, 40), (1, 7))),
    Batch("page_sizes", ((1, 3), (1, 529), (17, 511))),
    Batch("first_prefill", ((70, 0), (1, 0), (33, 0))),
    Batch("beyond_block_table", ((1, 20), (3, 45)), beyond=1000),
    Batch("chunked_prefill", ((300, 0), (257, 700), (64, 1), (1, 4000)), large=True),
    Batch("long", ((1, 20000), (1, 0), (2, 1300), (4, 5000)), large=True),
    Batch("many", tuple((1 + i % 3, (i * 131) % 700) for i in range(200)), large=True),
)

INTERPRETED_REACH = 160  # longer windows and chunks are batches for a GPU: the interpreter is slow


def edge_batches(case: Case) -> tuple[Batch, ...]:
    """Batches at the edges of the case's window or chunk, by its size; the same names for every size."""
    if case.reach is None:
        return ()
    r, large = case.reach, case.reach > INTERPRETED_REACH
    return (
        # One row whose first key, or whose chunk, just begins, and rows far behind it.
        Batch(
            "reach_rows",
            ((1, r - 2), (1, r - 1), (1, r), (1, r + 1), (1, 3 * r + 7), (1, 2 * r)),
            large=large,
        ),
        # Some rows of a tile see a key tile of which others see nothing.
        Batch("reach_tiles", ((17, 2 * r + 11), (3, r + 40), (8, r - 1), (1, 5)), large=large),
        # A whole first prefill across the edge, and a chunk of a prefill.
        Batch("reach_prefill", ((r + 25, 0), (33, r + 3), (1, 2 * r + 1)), large=large),
    )


# Batches that one captured graph replays; it is captured with the first. (0, 0) is a dead sequence.
DECODE_REPLAYS: tuple[Batch, ...] = (
    Batch("captured", ((1, 10),) * 8),
    *(Batch(f"cached_{c}", ((1, c),) * 8) for c in (0, 15, 16, 17, 1000)),
    Batch("dead_sequences", ((1, 500), (1, 3), (1, 77)) + ((0, 0),) * 5),
    Batch("one_long", ((1, 5000),) + ((0, 0),) * 7),
    Batch("ragged", ((3, 40), (0, 5), (1, 0), (2, 300), (1, 9), (1, 0))),
)
PREFILL_REPLAYS: tuple[Batch, ...] = (
    Batch("captured", ((24, 10),) * 8),
    Batch("one_sequence", ((192, 0),) + ((0, 0),) * 7),
    Batch("mixed", ((1, 1000), (17, 5), (100, 0), (1, 3), (40, 200))),
    Batch("dead_sequences", ((20, 500), (1, 3)) + ((0, 0),) * 6),
    Batch("nothing", ((0, 0),) * 8),
)

# Sequences whose bits are compared with those that each has alone: of one split and several, whole and cut anywhere.
NEIGHBOURS: tuple[Batch, ...] = (
    Batch("splits", ((1, 1400), (1, 5), (3, 600), (0, 9), (30, 530), (2, 1030))),
    Batch("long", ((1, 20000), (1, 0), (2, 1300), (4, 5000), (300, 257), (1, 70000)), large=True),
    Batch("many", tuple((1 + i % 3, (i * 131) % 1700) for i in range(100)), large=True),
)

TOKEN_COUNTS = (0, 1, 5, 37, 300)  # of append_kv and merge_states


def fit(batch: Batch, case: Case, max_query_len: int) -> Batch:
    """The batch within the case's limits and `max_query_len` rows a sequence: longer ones are cut, surplus
    ones dropped.
    """
    sequences, tokens = [], 0
    for q, c in batch.sequences[: case.max_seqs]:
        q = min(q, max_query_len, case.max_seq_len, case.max_tokens - tokens)
        sequences.append((q, min(c, case.max_seq_len - q)))
        tokens += q
    fitted = replace(batch, sequences=tuple(sequences))
    if not batch.beyond:
        return fitted
    q, _ = sequences[-1]
    row = (
        -(-fitted.longest // case.page_size) * case.page_size
    )  # the last sequence fills its row of the block table
    if row > case.max_seq_len:
        return replace(fitted, beyond=0)
    return replace(fitted, sequences=(*fitted.sequences[:-1], (q, row - q)))
