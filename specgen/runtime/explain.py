"""What one attention call, paged or varlen, would do, and the least time the hardware could need for it.
Launches nothing, loads nothing.

Only `read_lengths`, for checks="full", reads device values. The floor is the larger of bytes / bandwidth and
operations / matrix rate, for each of the package's targets of the row's arch whose manifest entry holds
`memory_bandwidth_GBps` and `matrix_rate_TFLOPs`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import sizes
from .arguments import ROLES, cuts_keys
from .checks import odd_cache
from .geometry import Geometry
from .table import EVERY, AttentionRow, Bounds, VarlenRow, least_query_len
from .visibility import spans

Lengths = list[tuple[int, int, Tensor | None]]


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `grid` programs of `symbol`, and in `split` how the work is shared among them."""

    family: str
    symbol: str
    grid: int
    split: str


@dataclass(frozen=True)
class Explanation:
    """What one call would do; `str()` is the report.

    `row` is the table row, None if there is nothing to launch. `bytes` and `operations` are exact if `exact`,
    else upper bounds at the bounds of shapes and host integers; `floor_us` gives microseconds by target id.
    """

    row: AttentionRow | VarlenRow | None
    why: tuple[str, ...]
    device: str
    mode: str
    launches: tuple[Launch, ...]
    workspace_bytes: int
    bytes: int
    operations: int
    exact: bool
    floor_us: dict[str, float]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"device      {self.device}, {self.mode}"]
        if self.row is None:
            lines += ["row         none: nothing to launch"]
        else:
            table = "attention_varlen" if isinstance(self.row, VarlenRow) else "attention"
            lines += [f"row         {table}[{self.row.index}]: {self.row.reason}"]
        lines += [f"why         {reason}" for reason in self.why]
        for launch in self.launches:
            lines += [
                f"{launch.family:<12}{launch.symbol}",
                f"            grid {launch.grid}: {launch.split}",
            ]
        most = "" if self.exact else "at most "
        lines += [f"workspace   {self.workspace_bytes} bytes"]
        lines += [f"work        {most}{self.bytes} bytes, {most}{self.operations} operations"]
        lines += [f"floor       {most}{time:.1f} us on {target}" for target, time in self.floor_us.items()]
        lines += [f"note        {note}" for note in self.notes]
        return "\n".join(lines)


def read_lengths(cu_seqlens_q: Tensor, seq_lens: Tensor, prefix_ranges: Tensor | None = None) -> Lengths:
    """(query rows, keys, prefix ranges [ranges, 2] or None) of each sequence; synchronises."""
    ranges = [None] * len(seq_lens) if prefix_ranges is None else list(prefix_ranges.cpu().long())
    return list(zip(cu_seqlens_q.diff().tolist(), seq_lens.tolist(), ranges))


def explain(
    package, plans, problem, bound, data, return_lse, max_seqlen_k, lengths, ranged=False
) -> Explanation:
    """The explanation of one checked call.

    `plans` is the device's DevicePlans, or None with `problem` saying why no device could be opened; `bound`
    is what `Eager.bind_attention` returns, `data` the data tensors by name, `lengths` the real lengths or
    None; `ranged`: the call has prefix ranges.
    """
    geometry, tokens, rows_bound, seqs, max_pages, *_ = bound
    manifest, table = package.manifest, package.table
    arch, multiprocessors, device, mode = _device(manifest, table, plans, problem)
    serving = str if plans is None else plans.device.serving
    keys_bound = max_pages * geometry.page_size
    if max_seqlen_k is not None:
        keys_bound = min(keys_bound, max_seqlen_k)
    keys = min(package.limits.max_seq_len, keys_bound)
    reach = None if ranged else geometry.reach
    used, operations = work(geometry, min(tokens, seqs * rows_bound), seqs, keys, reach, lengths, return_lse)
    if reach is not None:  # of one sequence, for all its rows
        keys = min(keys, reach - 1 + rows_bound)
    row, why, launches = None, [], []
    if rows_bound and seqs:
        broken = _broken_promises(geometry, data)
        row = table.attention(
            arch,
            geometry.layer,
            geometry.query_heads,
            geometry.kv_heads,
            not broken,
            bounds := Bounds(
                min(rows_bound, package.limits.max_tokens),
                seqs,
                tokens,
                max(keys_bound, 1),
                least_query_len(rows_bound, seqs, tokens),
            ),
        )
        why = _why(geometry, row, bounds, broken)
        for symbol in map(serving, row.symbols):
            variant = manifest["variants"][symbol]
            grid = sizes.programs(multiprocessors, variant)
            launches.append(
                Launch(variant["family"], symbol, grid, _split(geometry, variant, grid, tokens, seqs, keys))
            )
    symbols = {serving(symbol) for row in table.attention_rows if row.arch == arch for symbol in row.symbols}
    size = sizes.workspace_size(multiprocessors, [manifest["variants"][symbol] for symbol in symbols])
    return Explanation(
        row=row,
        why=tuple(why),
        device=device,
        mode=mode,
        launches=tuple(launches),
        workspace_bytes=size.nbytes,
        bytes=used,
        operations=operations,
        exact=lengths is not None,
        floor_us=_floors(geometry, manifest, arch, used, operations),
        notes=(problem,) if problem else (),
    )


def explain_varlen(
    package, plans, problem, bound, data, return_lse, max_seqlen_k, lengths, ranged=False
) -> Explanation:
    """The explanation of one checked call of attention_varlen; `bound` is what `Eager.bind_varlen` returns,
    the rest as in `explain`.
    """
    geometry, tokens, rows_bound, seqs, *_ = bound
    manifest, table = package.manifest, package.table
    arch, multiprocessors, device, mode = _device(manifest, table, plans, problem)
    key_tokens = data["k"].shape[0]
    keys = min(package.limits.max_seq_len, key_tokens)
    if max_seqlen_k is not None:
        keys = min(keys, max_seqlen_k)
    reach = None if ranged else geometry.reach
    used, operations = work(geometry, min(tokens, seqs * rows_bound), seqs, keys, reach, lengths, return_lse, key_tokens)
    row, why, launches = None, [], []
    if rows_bound and seqs:
        broken = _broken_promises(geometry, data)
        row = table.varlen(arch, geometry.layer, geometry.query_heads, geometry.kv_heads, not broken)
        why = [_why_layer(geometry, row), _why_aligned(geometry, broken)]
        variant = manifest["variants"][row.symbol]
        grid = sizes.programs(multiprocessors, variant)
        split = _split(geometry, variant, grid, tokens, seqs, keys)
        launches.append(Launch(variant["family"], row.symbol, grid, split))
    return Explanation(
        row=row,
        why=tuple(why),
        device=device,
        mode=mode,
        launches=tuple(launches),
        workspace_bytes=0,
        bytes=used,
        operations=operations,
        exact=lengths is not None,
        floor_us=_floors(geometry, manifest, arch, used, operations),
        notes=(problem,) if problem else (),
    )


def _device(manifest, table, plans, problem) -> tuple[str, int, str, str]:
    if plans is not None:
        device = plans.device
        text = f"{plans.torch_device} ({device.multiprocessors} multiprocessors, rows of {device.arch})"
        return device.arch, device.multiprocessors, text, f"mode {device.mode}"
    target = manifest["targets"][0]
    text = (
        f"none here; shown for {target['id']} ({target['multiprocessors']} multiprocessors, {target['arch']})"
    )
    return target["arch"], target["multiprocessors"], text, "cannot run"


def _why(geometry: Geometry, row: AttentionRow, bounds: Bounds, broken: list[str]) -> list[str]:
    why = [
        _why_layer(geometry, row),
        f"at most {bounds.query_len} query row{'s' * (bounds.query_len != 1)} per sequence (tokens {bounds.tokens}): "
        f"row takes {row.min_query_len}..{row.max_query_len}",
    ]
    for name, (low, high) in row.narrowed:
        top = high if high < EVERY[1] else ""
        side = "at least" if name == "least_query_len" else "at most"
        why.append(f"{name} {side} {getattr(bounds, name)}: row takes {low}..{top}")
    return [*why, _why_aligned(geometry, broken)]


def _why_layer(geometry: Geometry, row: AttentionRow | VarlenRow) -> str:
    degree = f"tensor_parallel {geometry.degree}"
    features = f": {geometry.features}" if geometry.features else ""
    return f"layer {row.layer!r}, {row.query_heads}/{row.kv_heads} heads ({degree}){features}"


def _why_aligned(geometry: Geometry, broken: list[str]) -> str:
    if broken:
        return "unaligned: " + "; ".join(broken)
    stride = (geometry.stride_mask + 1) * geometry.dtype.itemsize
    return f"aligned: pointers are multiples of {sizes.POINTER_ALIGNMENT} bytes, strides of {stride} bytes"


def _broken_promises(geometry: Geometry, data: dict[str, Tensor]) -> list[str]:
    broken = []
    for name, tensor in data.items():
        if tensor.data_ptr() % sizes.POINTER_ALIGNMENT:
            broken.append(
                f"{name} starts at an address that is no multiple of {sizes.POINTER_ALIGNMENT} bytes"
            )
        if any(stride & geometry.stride_mask for stride in tensor.stride()[:-1]):
            step = geometry.stride_mask + 1
            broken.append(f"{name} has strides {tuple(tensor.stride())}, not multiples of {step} elements")
        if name.endswith("_cache"):
            page, near, far, _ = tensor.stride()
            slot, head = (far, near) if geometry.hnd else (near, far)
            if odd_cache(geometry, page, slot, head):
                needed = f"needed: pages a multiple of {slot} elements apart, heads less than 2^31 from the first to the last"
                broken.append(f"{name} has strides {tuple(tensor.stride())}; {needed}")
    return broken


def _split(geometry: Geometry, variant: dict, grid: int, tokens: int, seqs: int, keys: int) -> str:
    per_block = variant.get("block_m") or 0
    tile = variant.get("tile_n") or 0
    role = ROLES.get(variant["family"])
    if role == "decode" and tile:
        parts, heads, of = "tiles", geometry.kv_heads, "kv heads"
        if variant.get("tensor_maps"):  # what is split is what one copy moves
            _, at_once, tile, _ = variant["tensor_maps"][0]["box"]
            parts, heads, of = "units", heads // at_once, of if at_once == 1 else f"groups of {at_once} kv heads"
        items = seqs * heads * -(-keys // tile)
        cut = "parts of one sequence and head are merged by the last"
        if variant.get("batch_invariant"):
            splits, least = sizes.max_splits(geometry.kv_heads), sizes.split_tiles(tile)
            cut = f"a sequence is cut into at most {splits} splits of at least {least} tiles, whatever the batch; {cut}"
        return (
            f"programs share at most {items} key {parts} ({seqs} sequences x {heads} {of} x "
            f"{-(-keys // tile)} {parts} of {tile} keys), about {-(-items // grid)} each; {cut}"
        )
    if (role == "prefill" or variant["family"] == "varlen") and per_block:
        group = geometry.query_heads // geometry.kv_heads
        blocks = geometry.kv_heads * (-(-tokens * group // per_block) + seqs)
        packed = f"a kv head's {group} query heads packed"
        cut = "; few blocks of many keys are cut along them into parts, which the last merges" if cuts_keys(variant) else ""
        return f"programs share at most {blocks} blocks of {per_block} rows ({packed}){cut}"
    return "programs share the rows"


def work(
    geometry: Geometry, tokens, seqs, keys, reach: int | None, lengths: Lengths | None, return_lse: bool,
    key_tokens: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """(bytes, operations): the real ones for given lengths, else with `keys` in each sequence, of which a row
    sees at most `reach`. `key_tokens`: of all sequences, where keys are contiguous and no pages are read.
    """
    if lengths is None:
        rows, read, pairs = tokens, seqs * keys, tokens * keys
        if key_tokens is not None:
            read = min(read, key_tokens)
        pages = seqs * -(-keys // geometry.page_size)
        if reach is not None:
            read, pairs = min(read, seqs * (reach - 1) + tokens), min(pairs, tokens * reach)
            pages = min(pages, read // geometry.page_size + 2 * seqs)
    else:
        rows = sum(m for m, _, _ in lengths)
        read = pairs = pages = 0
        for m, n, ranges in lengths:
            first, end = spans(geometry, m, n, ranges)
            seeing = first < end
            if seeing.any():
                first, end = first[seeing], end[seeing]
                pairs += int((end - first).sum())
                low, high = int(first.min()), int(end.max())
                read += high - low
                pages += -(-high // geometry.page_size) - low // geometry.page_size
    dims = geometry.qk_dim + geometry.v_dim
    moved = (rows * geometry.query_heads + read * geometry.kv_heads) * dims * geometry.dtype.itemsize
    moved += 4 * (2 * seqs + 1 + pages) if key_tokens is None else 8 * (seqs + 1)
    if return_lse:
        moved += 4 * rows * geometry.query_heads
    return moved, 2 * pairs * geometry.query_heads * dims


def _floors(geometry: Geometry, manifest: dict, arch: str, moved: int, operations: int) -> dict[str, float]:
    floors = {}
    for target in manifest["targets"]:
        bandwidth, rate = target.get("memory_bandwidth_GBps"), target.get("matrix_rate_TFLOPs")
        if target["arch"] == arch and bandwidth and rate:
            floors[target["id"]] = floor_us(geometry, moved, operations, bandwidth, rate)
    return floors


def floor_us(geometry: Geometry, moved: int, operations: int, bandwidth: float, rate: float) -> float:
    """Microseconds that no kernel can be under, at `bandwidth` in GB/s and a matrix `rate` in TFLOP/s.

    float32 uses no matrix unit: there the bytes alone bound it.
    """
    by_rate = 0.0 if geometry.dtype is torch.float32 else operations / (rate * 1e6)
    return max(moved / (bandwidth * 1e3), by_rate)
