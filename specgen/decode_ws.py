"""The numbers of the decode_ws family, derived once from geometry and configuration: template, legality, scratch and
tests read them here. Pure integers; imports only nouns.
"""

from dataclasses import dataclass

from specgen.runtime import sizes
from specgen.variant import BOX_COLUMNS, Variant, next_power_of_two

KEY_PARTS = 4  # of a tile whose keys are divided among the warps
HEADS = (1, 4, 8)  # key/value heads of a program that there may be
MATRIX_ROWS = 16  # query rows of a matrix instruction
MATRIX_KEYS = 16  # keys of a matrix instruction
LANES = 32
# What an item costs besides its keys (waiting for its first tile, joining warps, writing), in bytes of keys and values that a
# program alone on its multiprocessor reads in that time; of several programs each reads its part of them. On an H200, where that is
# 32 KB/us, an item of one tile takes 1.7 to 2.4 us, of 32 rows 3.1 to 3.8, whatever the head size. Counted too low, one program is
# given all short sequences of a batch: sequences of 32475, 7 and 3 keys took 76 us, the first alone 41.
ITEM_BYTES = 48 * 1024
ROWS_BYTES = 32 * 1024  # for each MATRIX_ROWS rows of its tile
# What cutting an item costs beside that: keeping the states of its parts, meeting, merging them; in keys x heads that a program
# alone attends to. Fitted to times of 736 batches of up to 30 us on an H200: merging 1.7 to 2.5 us, 16 keys 0.10 to 0.34.
MERGE_KEYS = 128
MIN_SHARE_KEYS = 64  # keys x heads of an item worth a program: fewer cost more in merging than they save
SHARE_SLACK = 16  # a share may be larger by one in so many to end where items do
PLAN_SEQS = 256  # sequences whose lengths one warp reads at once
MOST_PROGRAMS = 1024  # of a launch on any GPU that may have the family
LOADER_REGISTERS = 48  # of a thread of the loading warp: so many lengths and what its loop needs
UNSEEN = "-3.4028234663852886e38"  # the lowest float32


@dataclass(frozen=True)
class Shape:
    """Tiles, warps and layouts of one specialization; counts of elements, keys, query rows or warps."""

    variant: Variant

    @property
    def heads(self) -> int:
        """Key/value heads that a program attends to at once: one, its keys divided among the warps, or one a part."""
        return self.variant.heads_box

    @property
    def parts(self) -> int:
        """Parts of a tile, one a warp; `row_warps` warps where a tile has more query rows than a matrix instruction."""
        return self.heads if self.heads > 1 else KEY_PARTS

    @property
    def unit(self) -> int:
        """Keys of one box, all of one page: the grain of the even split."""
        return self.variant.keys_box

    @property
    def tile_rows(self) -> int:
        """Rows of a tile in shared memory: key x head."""
        return self.variant.config.tile_n * self.heads

    @property
    def part_keys(self) -> int:
        """Keys of a tile that one warp attends to."""
        return self.tile_rows // self.parts

    @property
    def item_units(self) -> int:
        """Units that an item counts for besides its own."""
        g = self.variant.geometry
        return self._units((ITEM_BYTES + ROWS_BYTES * self.row_warps) // ((g.qk_dim + g.v_dim) * g.itemsize))

    @property
    def merge_units(self) -> int:
        """Units that cutting an item counts for."""
        return self._units(MERGE_KEYS)

    def _units(self, keys: int) -> int:
        """Units that a program attends to while one alone on its multiprocessor attends to `keys` keys x heads."""
        return -(-keys // (self.unit * self.heads * self.variant.config.ctas_per_multiprocessor))

    def axis_end(self, units: int) -> int:
        """What int32 must count to where the items have so many units, their costs among them: the end of the last program's share."""
        return units + units // SHARE_SLACK + MOST_PROGRAMS * (self.item_units + self.merge_units + 1)

    @property
    def min_share(self) -> int:
        """Units that a program takes at least of an item that has as many."""
        return max(1, MIN_SHARE_KEYS // (self.unit * self.heads))

    @property
    def row_warps(self) -> int:
        """Warps that divide the query rows of a tile among them."""
        return self.variant.config.block_m // MATRIX_ROWS

    @property
    def partial_rows(self) -> int:
        """Rows of a tile that can hold a query row: those that a partial state keeps of a head."""
        g, c = self.variant.geometry, self.variant.config
        return sizes.partial_rows(c.block_m, g.group, self.variant.max_query_len)

    @property
    def state_rows(self) -> int:
        """Rows of a partial state, of all its heads."""
        return self.heads * self.partial_rows

    @property
    def join_rows(self) -> int:
        """Rows of a head that leave the matrix layout: half a matrix instruction where that is enough."""
        half = MATRIX_ROWS // 2
        return half if self.partial_rows <= half else self.variant.config.block_m

    @property
    def row_lanes(self) -> int:
        """Lanes along the rows of a state, each thread holding 4 elements of a row; the others lie along the head."""
        return max(1, LANES * 4 // self.variant.block_v)

    @property
    def join_warps(self) -> int:
        """Warps along the rows of a joined state; the others lie along the head."""
        return min(self.variant.config.num_warps, self.join_rows // self.row_lanes)

    @property
    def merge_warps(self) -> int:
        """Warps along the rows of merged partial states; the others lie along the partial states."""
        return min(self.variant.config.num_warps, self.state_rows)

    @property
    def partials_at_once(self) -> int:
        """Partial states that the merging program loads at once: 128 registers a thread where there are as many, else 64."""
        roomy = self.variant.tunable("maxnreg", 0) >= 160 and self.row_warps == 1 and self.variant.block_v < 256
        elements = self.variant.config.num_warps * LANES * (128 if roomy else 64)
        return max(1, min(sizes.MERGE_GROUP, elements // (self.state_rows * self.variant.block_v)))

    @property
    def row_lines(self) -> int:
        """Lines of 128 bytes of a query row of one head."""
        return -(-self.variant.geometry.qk_dim // BOX_COLUMNS)

    @property
    def plans_in_groups(self) -> bool:
        """A batch may have more sequences than one warp reads at once."""
        return self.variant.max_seqs > PLAN_SEQS

    @property
    def plan_seqs(self) -> int:
        """Length of the plan's vectors, one or more sequences a lane: limits.max_seqs rounded up to a power of two, or a group."""
        return min(PLAN_SEQS, max(LANES, next_power_of_two(self.variant.max_seqs)))

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, at most: the ring of tiles, what joining warps pass through, barriers."""
        g, c = self.variant.geometry, self.variant.config
        ring = c.num_stages * self.tile_rows * (self.variant.block_qk + self.variant.block_v) * g.itemsize
        join = self.parts * self.join_rows * self.variant.block_v * 4 if self.heads == 1 else 0
        return ring + join + 2048

    def view(self) -> dict:
        """The names that the family's template may use besides those of every kernel."""
        g, c = self.variant.geometry, self.variant.config
        many_rows = self.variant.max_query_len > 1
        causal_rows = g.mask == "causal" and many_rows
        edge_rows = (g.sliding_window is not None or g.chunk is not None) and many_rows
        return {
            "total_warps": c.num_warps + 4,
            "vector_plan": not self.plans_in_groups,
            "beside_prefill": c.shares,
            "plans_in_groups": self.plans_in_groups,
            "block_seqs": self.plan_seqs,
            "seqs_per_lane": self.plan_seqs // LANES,
            "heads": self.heads,
            "head_a_warp": self.heads > 1,
            "head_groups": g.kv_heads // self.heads,
            "unit": self.unit,
            "units_per_tile": c.tile_n // self.unit,
            "item_units": self.item_units,
            "min_share": self.min_share,
            "merge_units": self.merge_units,
            "share_slack": SHARE_SLACK,
            "panel": BOX_COLUMNS,
            "parts": self.parts,
            "part_keys": self.part_keys,
            "row_warps": self.row_warps,
            "one_row_block": self.variant.max_query_len * g.group <= c.block_m,
            "attending_threads": c.num_warps * LANES,
            "loader_registers": LOADER_REGISTERS,
            "join_rows": self.join_rows,
            "partial_rows": self.partial_rows,
            "state_rows": self.state_rows,
            "line_elements": BOX_COLUMNS,
            "row_lines": self.row_lines,
            "query_lines": max(LANES, next_power_of_two(self.state_rows * self.row_lines)),
            "partials_at_once": self.partials_at_once,
            "merge_group": sizes.MERGE_GROUP,
            "row_lanes": self.row_lanes,
            "dim_lanes": LANES // self.row_lanes,
            "join_warps": self.join_warps,
            "join_dim_warps": c.num_warps // self.join_warps,
            "merge_warps": self.merge_warps,
            "merge_state_warps": c.num_warps // self.merge_warps,
            "unseen": UNSEEN,
            "itemsize": g.itemsize,
            "map_parameters": self.variant.map_parameters,
            # Where rows of one item may differ in what they see.
            "causal_rows": causal_rows,
            "edge_rows": edge_rows,
            "position_rows": causal_rows or edge_rows,
        }
