"""The numbers of the prefill_ws family, derived once from geometry and configuration: template, legality and tests read them
here. Pure integers; imports only nouns.
"""

from dataclasses import dataclass

from specgen.variant import BOX_COLUMNS, Variant

CONSUMERS = 2
CONSUMER_WARPS = 4  # a warpgroup, which issues matrix products together
LOADERS = 4  # warps, one on each scheduler of a multiprocessor: a consumer's warp that shares its scheduler with more falls behind
MATRIX_ROWS = 64  # query rows of a matrix product of a warpgroup
LEAST_PAGE = 16


@dataclass(frozen=True)
class Shape:
    """Tiles, slots and registers of one specialization."""

    variant: Variant

    @property
    def total_warps(self) -> int:
        """Warps of a program."""
        return CONSUMERS * CONSUMER_WARPS + LOADERS

    @property
    def block_tokens(self) -> int:
        """Tokens of a row block."""
        return self.variant.config.block_m // self.variant.packed_heads

    @property
    def head_blocks(self) -> int:
        """Row blocks that cover the query heads of a token."""
        return self.variant.geometry.query_heads // self.variant.packed_heads

    @property
    def query_slots(self) -> int:
        """Query tiles in flight: wider ones leave room for one."""
        return 2 if self.variant.block_qk <= 128 else 1

    @property
    def narrow_weights(self) -> bool:
        """Whether weights become elements of the dtype at once: wide accumulators leave no registers for float32 ones."""
        return self.variant.block_v > 128

    @property
    def overlaps_items(self) -> bool:
        """Whether the first scores of an item are computed with the last values of the item before."""
        return self.query_slots > 1 and not self.narrow_weights

    @property
    def split_keys(self) -> bool:
        """Whether two loaders share a tile by its keys; where it is one box deep, by its panels."""
        return self.variant.keys_box < self.variant.config.tile_n

    @property
    def loader_boxes(self) -> int:
        """Boxes of a panel that one loader copies."""
        return max(self.variant.config.tile_n // self.variant.keys_box // 2, 1)

    @property
    def loader_registers(self) -> int:
        """Registers of a thread of a loader: what its loop needs, or where accumulators are wide the least there is."""
        return 40 if self.variant.block_v <= 64 else 24

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of a consumer: what the loaders leave of `maxnreg` for each warp."""
        pool = self.variant.tunable("maxnreg", 0) * self.total_warps
        return (pool - self.loader_registers * LOADERS) // (CONSUMERS * CONSUMER_WARPS)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, at most: queries, rings of keys and values, what rows pass through on their way out, barriers."""
        g, c, v = self.variant.geometry, self.variant.config, self.variant
        queries = self.query_slots * c.block_m * v.block_qk * g.itemsize
        rings = c.num_stages * c.tile_n * (v.block_qk + v.block_v) * g.itemsize
        rows = CONSUMERS * MATRIX_ROWS * max(v.block_v, 128) * g.itemsize // 2
        return queries + rings + rows + 1024

    def view(self) -> dict:
        """The names that the family's template may use besides those of every kernel."""
        g = self.variant.geometry
        return {
            "total_warps": self.total_warps,
            "maxnreg": self.variant.tunable("maxnreg", 0),
            "consumers": CONSUMERS,
            "consumer_threads": CONSUMER_WARPS * 32,
            "consumer_registers": self.consumer_registers,
            "loader_registers": self.loader_registers,
            "query_slots": self.query_slots,
            "several_queries": self.query_slots > 1,
            "narrow_weights": self.narrow_weights,
            "overlaps_items": self.overlaps_items,
            "packed_heads": self.variant.packed_heads,
            "block_tokens": self.block_tokens,
            "head_blocks": self.head_blocks,
            "box_columns": BOX_COLUMNS,
            "keys_box": self.variant.keys_box,
            "split_keys": self.split_keys,
            "loader_boxes": self.loader_boxes,
            "consumer_rows": MATRIX_ROWS,
            "consumer_tokens": MATRIX_ROWS // self.variant.packed_heads,
            "itemsize": g.itemsize,
        }
