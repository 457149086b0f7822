"""The numbers of the prefill_ws family, derived once from geometry and configuration: template, legality and tests read them
here. Pure integers; imports only nouns.
"""

from dataclasses import dataclass

from specgen.runtime import sizes
from specgen.variant import BOX_COLUMNS, MATRIX_ROWS, Variant

GROUPS = (1, 2)  # of warps that compute; two take turns at the tensor cores, one leaves that to the programs of a multiprocessor
GROUP_WARPS = 4  # a warpgroup, which issues matrix products together
# Warps that load: of keys and of values, or two of each, one on each scheduler of a multiprocessor: a warp that computes and shares
# its scheduler with more falls behind. Registers are those of a warpgroup: warps that are not there have theirs.
LOADERS = (2, 4)
LOADER_WARPS = 4
MOST_REGISTERS = 240  # of a thread that computes
RESERVED_SHARED = 1024  # bytes of shared memory that the system takes of every program; what a single one may have is without them
LEAST_PAGE = 16


@dataclass(frozen=True)
class Shape:
    """Tiles, slots and registers of one specialization."""

    variant: Variant

    @property
    def groups(self) -> int:
        """Groups of GROUP_WARPS warps that compute, MATRIX_ROWS of a row block each."""
        return self.variant.config.block_m // MATRIX_ROWS

    @property
    def compute_warps(self) -> int:
        """Warps that compute: the kernel's num_warps."""
        return self.groups * GROUP_WARPS

    @property
    def loaders(self) -> int:
        """Warps that load, one of LOADERS."""
        return self.variant.tunable("loaders", max(LOADERS))

    @property
    def total_warps(self) -> int:
        """Warps of a program."""
        return self.compute_warps + LOADER_WARPS

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
    def share_tiles(self) -> bool:
        """Whether two loaders share a tile; else one copies all of it."""
        return self.loaders == max(LOADERS)

    @property
    def split_keys(self) -> bool:
        """Whether two loaders share a tile by its keys; where it is one box deep, by its panels."""
        return self.share_tiles and self.variant.keys_box < self.variant.config.tile_n

    @property
    def loader_boxes(self) -> int:
        """Boxes of a panel that one loader copies."""
        boxes = self.variant.config.tile_n // self.variant.keys_box
        return boxes // 2 if self.split_keys else boxes

    @property
    def loader_registers(self) -> int:
        """Registers of a thread of a loader: what its loop needs, or where two groups have wide accumulators the least there is."""
        return 40 if self.variant.block_v <= 64 or self.groups == 1 else 24

    @property
    def compute_registers(self) -> int:
        """Registers of a thread that computes: what the loaders leave of `maxnreg` for each warp."""
        pool = self.variant.tunable("maxnreg", 0) * self.total_warps
        return (pool - self.loader_registers * LOADER_WARPS) // self.compute_warps

    @property
    def part_keys(self) -> int:
        """Row blocks of K keys are done first in sqrt(K / part_keys) parts: N parts take 1 / N of the time of the keys, and N times that
        of merging one. The numbers are where each power of two began to pay on an H200; wider states take longer to merge.
        """
        return 32 if self.variant.block_v <= 64 else 48

    @property
    def least_cut_keys(self) -> int:
        """Keys of a row block from which it may be cut: of fewer, a cut costs more than it saves."""
        return 768 if self.variant.block_v <= 64 else 1024

    @property
    def registers(self) -> int:
        """Registers of a program."""
        return self.variant.tunable("maxnreg", 0) * self.total_warps * 32

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, at most: queries, rings of keys and values, what rows pass through on their way out, barriers."""
        g, c, v = self.variant.geometry, self.variant.config, self.variant
        queries = self.query_slots * c.block_m * v.block_qk * g.itemsize
        rings = c.num_stages * c.tile_n * (v.block_qk + v.block_v) * g.itemsize
        rows = c.block_m * min(v.block_v, 64 * self.groups) * g.itemsize  # so many columns at a time
        return queries + rings + rows + 1024

    def view(self) -> dict:
        """The names that the family's template may use besides those of every kernel."""
        g = self.variant.geometry
        return {
            "total_warps": self.total_warps,
            "maxnreg": self.variant.tunable("maxnreg", 0),
            "take_turns": self.groups > 1,
            "worker_warps": [1] * self.loaders,
            "other_loaders": self.loaders - 1,
            "share_tiles": self.share_tiles,
            "compute_threads": self.compute_warps * 32,
            "compute_registers": self.compute_registers,
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
            "itemsize": g.itemsize,
            "cuts_keys": self.variant.cuts_keys,
            "item_fields": 11 if self.variant.cuts_keys else 8,
            "part_keys": self.part_keys,
            "least_cut_tiles": self.least_cut_keys // self.variant.config.tile_n,
            "state_words": sizes.prefill_state_words(self.variant.geometry.v_dim),
            "tickets": sizes.TICKETS,
        }
