"""What a package keeps per device: the kernels and grid of each table row, ready to launch, and the default
workspaces.

Loads kernels through device.py at first use, or all of them in `warm`; launches nothing itself.
"""

from collections.abc import Callable

import torch

from . import sizes
from .errors import CaptureError
from .extras import model_slopes
from .geometry import Geometry
from .table import AttentionRow, Table
from .workspace import WorkspacePool, is_capturing

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class AttentionPlan:
    """One attention row on one device: the callables and grids of a launch. `ready` once the kernels are
    loaded.
    """

    __slots__ = ("row", "ready", "decode", "decode_grid", "prefill", "prefill_grid")

    def __init__(self, row: AttentionRow):
        self.row = row
        self.ready = False
        self.decode = self.prefill = None
        self.decode_grid = self.prefill_grid = 0


class DevicePlans:
    """One device of one package.

    `device` is the open Device, `size` the workspace size of this package here. Every lookup is by shapes and
    host integers.
    """

    def __init__(self, device, torch_device: torch.device, table: Table, variants: dict, make_workspace):
        self.device = device
        self.torch_device = torch_device
        self.is_cuda = torch_device.type == "cuda"
        self.index = torch_device.index if self.is_cuda else -1
        self.current_stream = _stream_reader(torch_device)
        self._table = table
        self._variants = variants
        rows = [row for row in table.attention_rows if row.arch == device.arch]
        self.size = sizes.workspace_size(
            device.multiprocessors, [variants[device.serving(symbol)] for row in rows for symbol in row.symbols]
        )
        self.workspaces = WorkspacePool(torch_device, lambda: make_workspace(self))
        self._attention: dict[tuple[Geometry, bool], tuple[Callable, dict[int, AttentionPlan]]] = {}
        self._append: dict[tuple[Geometry, bool], tuple] = {}
        self._merge: dict[Geometry, tuple] = {}
        self._varlen: dict[tuple[Geometry, bool], tuple] = {}
        self._slopes: dict[int, torch.Tensor] = {}

    def attention(self, geometry: Geometry, aligned: bool, *bounds: int) -> AttentionPlan:
        """The plan of the row for a call of these `bounds` (table.Bounds), each at least 1, kernels loaded. Raises
        what Device.kernel raises, and NoRowError beyond the limits.
        """
        found = self._attention.get((geometry, aligned))
        if found is None:
            key = self.device.arch, geometry.layer, geometry.query_heads, geometry.kv_heads, aligned
            plans = {row.index: AttentionPlan(row) for row in self._table.attention_group(*key)}
            found = self._attention[geometry, aligned] = self._table.selector(*key), plans
        select, plans = found
        plan = plans[select(*bounds)]
        if not plan.ready:
            self._load(plan)
        return plan

    def append(self, geometry: Geometry, aligned: bool) -> tuple:
        """(kernel, grid) of append_kv."""
        found = self._append.get((geometry, aligned))
        if found is None:
            row = self._table.append(self.device.arch, geometry.layer, geometry.kv_heads, aligned)
            found = self._append[geometry, aligned] = self.device.kernel(row.symbol), self.grid(row.symbol)
        return found

    def merge(self, geometry: Geometry) -> tuple:
        """(kernel, grid, whether pointers must be multiples of 16 bytes) of merge_states."""
        found = self._merge.get(geometry)
        if found is None:
            row = self._table.merge(self.device.arch, geometry.query_heads, geometry.v_dim)
            aligned = bool(self._variants[row.symbol].get("aligned"))
            found = self._merge[geometry] = self.device.kernel(row.symbol), self.grid(row.symbol), aligned
        return found

    def varlen(self, geometry: Geometry, aligned: bool) -> tuple:
        """(kernel, grid) of attention_varlen."""
        found = self._varlen.get((geometry, aligned))
        if found is None:
            heads = geometry.query_heads, geometry.kv_heads
            row = self._table.varlen(self.device.arch, geometry.layer, *heads, aligned)
            found = self._varlen[geometry, aligned] = self.device.kernel(row.symbol), self.grid(row.symbol)
        return found

    def alibi_slopes(self, heads: int) -> torch.Tensor:
        """The model's own ALiBi slopes on this device, float32 [heads]; made once. Raises CaptureError in a
        capture.
        """
        found = self._slopes.get(heads)
        if found is None:
            if is_capturing(self.torch_device):
                raise CaptureError(
                    "alibi_slopes: a graph is being captured and the model's own are not on the device yet; "
                    "needed: call warmup() before the capture, or pass alibi_slopes="
                )
            with torch.inference_mode(False):
                made = torch.tensor(model_slopes(heads), dtype=torch.float32, device=self.torch_device)
            found = self._slopes.setdefault(heads, made)
        return found

    def grid(self, symbol: str) -> int:
        """Programs of one launch of a variant here."""
        return sizes.programs(self.device.multiprocessors, self._variants[symbol])

    def warm(self) -> None:
        """Load every kernel, make slopes, the current stream's workspace and the spare; wait until the device
        has done so.
        """
        self.device.load_all()
        for variant in self._variants.values():
            if variant.get("alibi"):
                self.alibi_slopes(variant["query_heads"])
        stream = self.current_stream(self.index)
        if self.workspaces.by_stream.get(stream) is None:
            self.workspaces.missing(stream)
        self.workspaces.renew_spare()
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def _load(self, plan: AttentionPlan) -> None:
        row, late = plan.row, 0
        if row.decode:
            symbol = self.device.serving(row.decode)
            plan.decode, plan.decode_grid = self.device.kernel(symbol), self.grid(symbol)
            taken = sizes.taken(self.device.multiprocessors, self._variants[symbol])
            late = taken if taken < self.device.multiprocessors else 0
        if row.prefill:
            symbol = self.device.serving(row.prefill)
            # Decode is launched before it, and they may overlap: they write other rows, and no scratch is of both.
            plan.prefill = self.device.beside(symbol, late) if row.decode else self.device.kernel(symbol)
            plan.prefill_grid = self.grid(symbol)
        plan.ready = True


def _stream_reader(device: torch.device):
    if device.type != "cuda":
        return lambda index: 0
    return _raw_stream or (lambda index: torch.cuda.current_stream(index).cuda_stream)
