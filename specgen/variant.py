"""The semantic model of a specialization: geometry, configuration, symbol. Frozen data; imports only nouns."""

from dataclasses import dataclass, field

from specgen.dtypes import DTYPES
from specgen.runtime import sizes
from specgen.runtime.arguments import ARGUMENTS, ROLES, Argument, arguments
from specgen.runtime.tensor_maps import MAP_BYTES, TensorMap, parameters

FAMILIES = tuple(ARGUMENTS)
ATTENTION_FAMILIES = (*ROLES, "varlen")
# Written in Gluon, Triton's dialect of explicit layouts: compiled ahead of time alone, neither just in time nor interpreted.
GLUON_FAMILIES = ("decode_ws", "prefill_ws")
# Elements of a 128-byte row of a swizzled tile: what one copy of a tensor map moves of a head, at 2 bytes an element.
BOX_COLUMNS = 64
# Query rows of a tile that one matrix product of four warps multiplies: what one copy moves of q.
MATRIX_ROWS = sizes.MATRIX_ROWS
# Extent of a dimension of a tensor map that nothing is beyond: coordinates are made from a block table and are in range.
UNBOUNDED = (1 << 31) - 1
# Options that a template reads; the others are the compiler's. decode_ws: bytes that L2 fetches for what a copy misses,
# key/value heads of a program, the percentage of the multiprocessors that a launch takes, keys of a box. prefill_ws: warps
# that load, whether row blocks are cut along their keys (1: yes).
TUNABLES = ("fetch", "heads", "loaders", "share", "split", "unit")
DECODE_UNIT = 16
# What an item of plain decode costs besides its key tiles, in tiles of any size: reading queries, joining, writing.
ITEM_TILES = 1
LOG2E = 1.4426950408889634


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def _identifier(number: int | float) -> str:
    """A number spelt with what an identifier may hold; different numbers stay different."""
    return repr(number).replace(".", "_").replace("-", "m").replace("+", "")


@dataclass(frozen=True, order=True)
class Geometry:
    """What one rank's attention looks like: heads, head sizes in elements, page size in keys, softmax scale, mask."""

    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: str
    page_size: int
    scale: float
    mask: str
    sliding_window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    prefix_ranges: bool = False
    rotary_dim: int | None = None  # leading elements of a head that append_kv rotates; None leaves keys as they come
    rotary_style: str | None = None
    batch_invariant: bool = False  # decode cuts a sequence's keys by its own length alone

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def packed_heads(self) -> int:
        """Query heads of one key/value head that a row block of prefill_ws holds: the largest power of two in the group, at most 16."""
        return min(self.group & -self.group, 16)

    @property
    def itemsize(self) -> int:
        """Bytes per element of queries, keys, values and outputs."""
        return DTYPES[self.dtype].itemsize

    @property
    def qk_tiles(self) -> tuple[int, ...]:
        """Widths of the one or two tiles that hold a head of queries or keys."""
        return sizes.head_tiles(self.qk_dim)

    @property
    def v_tiles(self) -> tuple[int, ...]:
        """Widths of the tiles that hold a head of values."""
        return sizes.head_tiles(self.v_dim)

    @property
    def plain(self) -> bool:
        """Whether scores are only scaled and masked by causality: a cap, a bias or a left edge costs registers."""
        return self.softcap is self.sliding_window is self.chunk is None and not (self.alibi or self.prefix_ranges)

    @property
    def alignment(self) -> int:
        """Bytes that every stride of a densely packed tensor is a multiple of, at most 16 (the widest load)."""
        return sizes.alignment(self.qk_dim, self.v_dim, self.itemsize)


@dataclass(frozen=True, order=True)
class Config:
    """Tunables of one specialization. block_m, tile_n in rows and keys; origin says which measurement chose it."""

    block_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    ctas_per_multiprocessor: int
    options: tuple[tuple[str, int], ...] = ()  # TUNABLES, and compiler options of the vendor, such as waves_per_eu
    origin: str = field(default="", compare=False)  # two measurements may choose the same configuration

    @property
    def shares(self) -> bool:
        """Whether a launch leaves multiprocessors to a prefill beside it."""
        return "share" in dict(self.options)

    @property
    def cuts(self) -> bool:
        """Whether row blocks of many keys are cut into parts, as many as the batch leaves programs without work."""
        return dict(self.options).get("split", 0) == 1


@dataclass(frozen=True, order=True)
class Variant:
    """One specialization: a kernel family for a geometry and a configuration. Its symbol names module, function and binaries."""

    family: str
    geometry: Geometry
    config: Config
    aligned: bool
    max_seqs: int
    max_query_len: int | None = None  # decode: rows it takes; prefill: rows it leaves to decode

    @property
    def symbol(self) -> str:
        """Name of module and function. Within a package (one max_seqs), equal names are equal code."""
        g, c = self.geometry, self.config
        parts = [self.family]
        if self.family in ATTENTION_FAMILIES:
            parts.append(self.shape)
            if self.max_query_len is not None:
                parts.append(f"q{self.max_query_len}")
            parts.append(f"m{c.block_m}n{c.tile_n}")
        elif self.family == "append_kv":
            heads = f"h{g.kv_heads}" if g.rotary_dim is None else f"h{g.query_heads}x{g.kv_heads}"
            rotary = [] if g.rotary_dim is None else [f"rotary{g.rotary_dim}", g.rotary_style]
            parts += [heads, self._dims, f"p{g.page_size}", DTYPES[g.dtype].short, *rotary, f"m{c.block_m}"]
        else:
            parts += [f"d{g.v_dim}", DTYPES[g.dtype].short, f"m{c.block_m}"]
        parts.append(f"w{c.num_warps}s{c.num_stages}c{c.ctas_per_multiprocessor}")
        parts += [f"{''.join(word[0] for word in name.split('_'))}{value}" for name, value in c.options]
        if not self.aligned:
            parts.append("unaligned")
        return "_".join(parts)

    @property
    def shape(self) -> str:
        """What the symbol of an attention kernel says of its geometry."""
        g = self.geometry
        paged = [] if self.family == "varlen" else [f"p{g.page_size}"]
        heads = f"h{g.query_heads}x{g.kv_heads}"
        return "_".join([heads, self._dims, *paged, DTYPES[g.dtype].short, g.mask, *self._features])

    @property
    def _features(self) -> list[str]:
        g = self.geometry
        numbers = (
            ("scale", None if g.scale == g.qk_dim**-0.5 else g.scale),
            ("window", g.sliding_window),
            ("chunk", g.chunk),
            ("cap", g.softcap),
        )
        named = [f"{name}{_identifier(value)}" for name, value in numbers if value is not None]
        invariant = g.batch_invariant and ROLES.get(self.family) == "decode"  # no other family's keys are split then
        switches = (("sinks", g.sinks), ("alibi", g.alibi), ("ranges", g.prefix_ranges), ("invariant", invariant))
        return named + [name for name, is_on in switches if is_on]

    @property
    def _dims(self) -> str:
        g = self.geometry
        return f"d{g.qk_dim}" if g.qk_dim == g.v_dim else f"d{g.qk_dim}x{g.v_dim}"

    @property
    def scale_log2e(self) -> float:
        """Softmax scale times log2(e), so that exp2 can stand for exp."""
        return self.geometry.scale * LOG2E

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What a launch passes, in order."""
        g = self.geometry
        return arguments(
            self.family,
            sinks=g.sinks,
            alibi=g.alibi,
            prefix_ranges=g.prefix_ranges,
            rotary=g.rotary_dim is not None,
            split=self.cuts_keys,
        )

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        """(argument, Triton type) in launch order."""
        data = DTYPES[self.geometry.dtype].triton
        names = {"data": data, "bf16": "bf16", "f32": "fp32", "i32": "i32", "i64": "i64"}
        types = {each.name: each.triton_type for each in self.tensor_maps}
        types |= {a.name: f"*{names[a.dtype]}" for a in self.arguments if a.kind == "pointer"}
        return tuple((a.name, types.get(a.name, a.kind)) for a in self.arguments)

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """What the tensor maps of the kernel are made of, in the order of its arguments; () for a plain-Triton family.

        A box is BOX_COLUMNS elements of every row that one copy moves: of one page for keys and values.
        """
        made = {
            "q_map": self._map("q", (self.geometry.query_heads, "num_tokens", self.geometry.qk_dim), ("head", "token"), self.query_box),
            "k_map": self._cache_map("k", self.geometry.qk_dim),
            "v_map": self._cache_map("v", self.geometry.v_dim),
        }
        return tuple(made[argument.name] for argument in self.arguments if argument.kind == "tensor_map")

    @property
    def cuts_keys(self) -> bool:
        """Whether it is a prefill that cuts row blocks along their keys."""
        return self.family == "prefill_ws" and self.config.cuts

    @property
    def query_box(self) -> tuple[int, int]:
        """(heads, tokens) of the query rows that one copy moves: a row block, heads of one key/value head packed."""
        return self.packed_heads, self.config.block_m // self.packed_heads

    @property
    def packed_heads(self) -> int:
        """Query heads of one key/value head in a row block."""
        return self.geometry.packed_heads

    @property
    def qk_tiles(self) -> tuple[int, ...]:
        """Widths of the tiles that hold a head of queries or keys: one or two for plain matrix products, else one."""
        return self._tiles(self.geometry.qk_tiles, self.geometry.qk_dim)

    @property
    def v_tiles(self) -> tuple[int, ...]:
        """Widths of the tiles that hold a head of values."""
        return self._tiles(self.geometry.v_tiles, self.geometry.v_dim)

    def _tiles(self, parted: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """Gluon's tiles hold whole boxes; where elements are only moved, idle lanes cost nothing."""
        if self.family in ATTENTION_FAMILIES and self.family not in GLUON_FAMILIES:
            return parted
        return (max(self._box_columns, sizes.head_tile(dim)),)

    @property
    def block_qk(self) -> int:
        """Columns of a tile of queries or keys."""
        return sum(self.qk_tiles)

    @property
    def block_v(self) -> int:
        """Columns of a tile of values."""
        return sum(self.v_tiles)

    @property
    def _box_columns(self) -> int:
        return BOX_COLUMNS if self.family in GLUON_FAMILIES else 0

    @property
    def keys_box(self) -> int:
        """Keys that one copy moves: a page, or where pages are larger a tile, in decode_ws a unit of the split."""
        most = self.tunable("unit", DECODE_UNIT) if self.family == "decode_ws" else self.config.tile_n
        return min(self.geometry.page_size, most)

    @property
    def heads_box(self) -> int:
        """Key/value heads that one copy moves."""
        return self.tunable("heads", 1)

    @property
    def max_splits(self) -> int:
        """Splits at most of the keys of a sequence and key/value head, where they depend on these alone."""
        return sizes.max_splits(self.geometry.kv_heads)

    @property
    def min_split_tiles(self) -> int:
        """Key tiles at least of such a split, but for a sequence's last."""
        return sizes.split_tiles(self.config.tile_n)

    @property
    def item_tiles(self) -> int:
        """Key tiles that plain decode counts for an item besides its own, where its splits may depend on the whole batch."""
        return 0 if self.geometry.batch_invariant else ITEM_TILES

    def tunable(self, name: str, default: int | None) -> int | None:
        """An option of the configuration."""
        return dict(self.config.options).get(name, default)

    @property
    def compiler_options(self) -> tuple[tuple[str, int], ...]:
        """The options that are the compiler's."""
        chosen = tuple(option for option in self.config.options if option[0] not in TUNABLES)
        take_turns = self.family == "prefill_ws" and self.config.block_m > MATRIX_ROWS
        return (*chosen, ("warps_apart", 1)) if take_turns else chosen

    def _cache_map(self, operand: str, dim: int) -> TensorMap:
        pages, slots, heads = "num_pages", self.geometry.page_size, self.geometry.kv_heads
        if self.family == "decode_ws":  # keys of one head after those of another: a box of several has a part for each
            return self._map(
                operand, (pages, heads, slots, dim), ("page", "head", "slot"), (1, self.heads_box, self.keys_box)
            )
        if self._is_flat(dim):
            return self._map(operand, (UNBOUNDED, UNBOUNDED), ("slot",), (self.keys_box,))
        return self._map(operand, (pages, slots, heads, dim), ("page", "slot", "head"), (1, self.keys_box, 1))

    def _is_flat(self, dim: int) -> bool:
        """Whether prefill_ws sees a cache as a matrix, slots by elements, in which pages and heads are offsets: TMA moves a box of two
        dimensions faster than one of four. What is beyond a head is then its neighbour's, so heads fill their tiles.
        """
        return dim == sum(self._tiles((), dim))

    def _map(self, operand: str, extents: tuple, strides: tuple, box: tuple) -> TensorMap:
        tensor = "q" if operand == "q" else f"{operand}_cache"
        return TensorMap(
            name=f"{operand}_map",
            tensor=f"{tensor}_ptr",
            dtype=self.geometry.dtype,
            extents=extents,
            strides=tuple(f"{tensor}_stride_{dim}" for dim in strides),
            box=(*box, BOX_COLUMNS),
            swizzle=BOX_COLUMNS * 2,
            fetch=self.tunable("fetch", 128),
        )

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Bytes of each parameter of the compiled kernel, in the order in which the launcher passes them."""
        return tuple(size for _, size in parameters(self.arguments, self.tensor_maps))

    @property
    def map_parameters(self) -> list[str]:
        """Names of the tensor maps among the compiled kernel's parameters, in PTX."""
        return [f"{self.symbol}_param_{i}" for i, size in enumerate(self.parameter_bytes) if size == MAP_BYTES]

    @property
    def divisibility(self) -> tuple[tuple[int, int], ...]:
        """(argument index, divisor) promised to the compiler: bytes for pointers, elements for strides."""
        if not self.aligned:
            return ()
        elements = self.geometry.alignment // self.geometry.itemsize
        promised = ((i, 16 if a.kind == "pointer" else elements) for i, a in enumerate(self.arguments) if a.aligned)
        return tuple((i, divisor) for i, divisor in promised if divisor > 1)
