"""Float64 reference of every public function, written from the formulas, and the tolerances that follow from
the dtype.

Meant to be read and believed, not to be fast: loops over sequences, one block of query rows at a time, so
that 128k keys or an 8k x 8k prefill fit in memory. Works on the device of the tensors it is given and reads
lengths on the host. Imports only torch.
"""

from dataclasses import dataclass

import torch

BLOCK_ELEMENTS = 1 << 25  # scores held at once, in float64: 256 MiB


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    mask: str = "causal",
    scale: float | None = None,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    prefix_ranges: torch.Tensor | None = None,
    layout: str = "NHD",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Paged attention over a batch: softmax(scores + mask) v, in float64.

    Shapes as the package's `attention`: q [tokens, query_heads, qk_dim], caches [pages, page_size, kv_heads,
    dim] (`layout` "HND": [pages, kv_heads, page_size, dim]), block_table [seqs, max_pages], seq_lens [seqs]
    (keys, the new ones included), cu_seqlens_q [seqs + 1]. Query head h reads key/value head h //
    (query_heads // kv_heads). Row r of a sequence with m rows and n keys sits at position i = n - m + r and
    sees the keys that `visible` says. n is clamped to what the sequence's row of block_table can hold.

    The score of key j is s = q k_j scale (`scale` None: 1/sqrt(qk_dim)), then with `softcap` s = softcap
    tanh(s / softcap), then with `alibi_slopes` [query_heads] s - slope |i - j|. `sinks` [query_heads] are raw
    logits that join the denominator of a row once, and give no value. prefix_ranges integer [seqs, ranges, 2].

    Returns out [tokens, query_heads, v_dim] and lse [tokens, query_heads], float64, lse the natural logarithm
    of the sum of exponentials, the sink's included. A row without a visible key gives 0 and -inf, sink or
    not, as does a row of no sequence. Only visible keys, and the entries of block_table for them, are read.
    """
    if layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    tokens, query_heads, qk_dim = q.shape
    page_size, kv_heads, v_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    group = query_heads // kv_heads
    scale = qk_dim**-0.5 if scale is None else scale
    out = torch.zeros(tokens, query_heads, v_dim, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, query_heads), -torch.inf, dtype=torch.float64, device=q.device)
    starts = cu_seqlens_q.tolist()
    for seq, n in enumerate(seq_lens.tolist()):
        first, m = starts[seq], starts[seq + 1] - starts[seq]
        n = max(0, min(n, block_table.shape[1] * page_size))
        if m <= 0 or n == 0:
            continue
        ranges = None if prefix_ranges is None else prefix_ranges[seq]
        rows_at_once = max(1, BLOCK_ELEMENTS // (query_heads * n))
        for row in range(0, m, rows_at_once):
            rows = torch.arange(row, min(m, row + rows_at_once), device=q.device)
            positions = n - m + rows
            seen = visible(positions, n, mask, sliding_window, chunk, ranges)  # [rows, n]
            keys = torch.nonzero(seen.any(0))[:, 0]  # [keys that a row of the block sees]
            hidden = ~seen[:, keys]
            pages, slots = block_table[seq].long()[keys // page_size], keys % page_size
            k = k_cache[pages, slots].double()  # [keys, kv_heads, qk_dim]
            v = v_cache[pages, slots].double()  # [keys, kv_heads, v_dim]
            block = q[first + rows].double().unflatten(1, (kv_heads, group))  # [rows, kv_heads, group, qk_dim]
            scores = torch.einsum("rkgd,nkd->rkgn", block, k).flatten(1, 2) * scale  # [rows, query_heads, keys]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                distance = (positions[:, None] - keys[None, :]).abs()[:, None, :]
                scores = scores - alibi_slopes.double()[:, None] * distance
            scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
            block_lse = torch.logsumexp(scores, dim=-1)  # [rows, query_heads]; -inf without a key
            if sinks is not None:
                with_sink = torch.logaddexp(block_lse, sinks.double())
                block_lse = torch.where(block_lse == -torch.inf, block_lse, with_sink)
            shift = torch.where(block_lse == -torch.inf, 0.0, block_lse)
            weights = torch.exp(scores - shift[..., None])  # rows without a visible key: all 0
            weights = weights.unflatten(1, (kv_heads, group))
            out[first + rows] = torch.einsum("rkgn,nkd->rkgd", weights, v).flatten(1, 2)
            lse[first + rows] = block_lse
    return out, lse


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    **formula,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` over contiguous keys: pages of one key, those of sequence s cu_seqlens_k[s] and on.

    q [tokens, query_heads, qk_dim], k [key_tokens, kv_heads, qk_dim], v [key_tokens, kv_heads, v_dim];
    `formula` and the result as in `attention`.
    """
    lengths = cu_seqlens_k.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    pages = cu_seqlens_k[:-1, None] + torch.arange(longest, device=k.device)  # [seqs, longest]
    tables = dict(block_table=pages, seq_lens=lengths, cu_seqlens_q=cu_seqlens_q)
    return attention(q, k[:, None], v[:, None], **tables, **formula)


def visible(
    positions: torch.Tensor,
    n: int,
    mask: str = "causal",
    sliding_window: int | None = None,
    chunk: int | None = None,
    ranges: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which of the keys j = 0 .. n - 1 the rows at `positions` [rows] see: bool [rows, n].

    "bidirectional": all. "causal": j <= i; with `sliding_window` W also i - W < j, so W keys with the own
    one; with `chunk` C also j // C == i // C. `ranges` [ranges, 2]: key and row both in one [start, end) see
    each other whatever the rest says; start >= end is empty.
    """
    if mask not in ("causal", "bidirectional"):
        raise ValueError(f"mask: got {mask!r}; the reference knows 'causal' and 'bidirectional'")
    i, j = positions[:, None], torch.arange(n, device=positions.device)[None, :]
    if mask == "bidirectional":
        if sliding_window is not None or chunk is not None:
            raise ValueError("sliding_window and chunk: got mask 'bidirectional'; they need 'causal'")
        return (j >= 0).expand(len(positions), n)
    seen = j <= i
    if sliding_window is not None:
        seen = seen & (i - sliding_window < j)
    if chunk is not None:
        seen = seen & (j // chunk == i // chunk)
    for start, end in [] if ranges is None else ranges.tolist():
        seen = seen | ((start <= i) & (i < end) & (start <= j) & (j < end))
    return seen


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slot_mapping: torch.Tensor,
    layout: str = "NHD",
) -> None:
    """Write k [tokens, kv_heads, qk_dim] and v [tokens, kv_heads, v_dim] into the caches, in place.

    slot_mapping int64 [tokens]: slot = page * page_size + offset; a slot that is negative or past the cache
    is skipped. `layout` as in `attention`.
    """
    if layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    page_size = k_cache.shape[1]
    kept = torch.nonzero((slot_mapping >= 0) & (slot_mapping < k_cache.shape[0] * page_size)).flatten()
    pages, offsets = slot_mapping[kept] // page_size, slot_mapping[kept] % page_size
    k_cache[pages, offsets] = k[kept].to(k_cache.dtype)
    v_cache[pages, offsets] = v[kept].to(v_cache.dtype)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str
) -> torch.Tensor:
    """Rotary embedding (Su et al., RoFormer, 2021) of x `[tokens, heads, dim]` in float64.

    cos, sin `[rows, rotary_dim / 2]`, row positions[t] for token t. Style "half" turns elements d and d + rotary_dim / 2
    by angle d, "interleaved" elements 2d and 2d + 1; what lies behind the leading rotary_dim elements stays.
    """
    half = cos.shape[1]
    c, s = cos.double()[positions][:, None], sin.double()[positions][:, None]  # [tokens, 1, half]
    out = x.double().clone()
    first, second = (slice(0, half), slice(half, 2 * half)) if style == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each; float64.

    out_* [tokens, query_heads, v_dim], lse_* [tokens, query_heads], natural logarithm. Two states without a
    key give 0, -inf.
    """
    lse_a, lse_b = lse_a.double(), lse_b.double()
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    return out_a.double() * weight_a[..., None] + out_b.double() * weight_b[..., None], lse


@dataclass(frozen=True)
class Tolerance:
    """How far a right kernel may be from the reference; `tolerance` derives the numbers.

    tensor: ||out - ref|| / ||ref|| over all rows. row: max |out - ref| / max |ref| of one row of one head.
    lse: |lse - ref| <= lse_absolute + lse_relative * |ref|.
    """

    tensor: float
    row: float
    lse_absolute: float
    lse_relative: float


def tolerance(dtype: torch.dtype) -> Tolerance:
    """The bounds for outputs in `dtype` (float16, bfloat16 or float32), independent of the length.

    Let u be the unit roundoff of `dtype`: 2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32. A kernel
    in a 16-bit dtype rounds twice: the weights P before P V, and the output; scores, sums and accumulators
    are float32. Each rounding is an independent relative error of at most u and of root mean square 0.41 u,
    also through a sum over many keys, whose values and whose errors shrink alike. Together 0.58 u: 2.2e-3 for
    bfloat16, 2.8e-4 for float16.

    - tensor: 2.2 times that, so 5e-3 and 6.25e-4. A key too many or too few among n changes a row by about
      1/sqrt(n) of its norm, so a mask that is off by one everywhere shows up to n = 40 000 in bfloat16, and a
      wrong scale at any length.
    - row: 4 u. The output's rounding is at most u of the row's largest element; the sum of the rounded
      weights is normal with deviation 0.41 u relative to the row's root mean square, at 6 deviations 2.5 u.
      One wrong row of a large batch, which the tensor's error would hide, shows here up to n = 4096 in
      bfloat16.
    - float32 has no rounding of P; what remains is the float32 arithmetic of scores of magnitude about 8 and
      their exponential (a few 1e-7), and a running sum over tiles. 5e-6 for the tensor and 2e-5 for a row are
      an order above that, and far below TF32 (u = 2^-11: 2e-4) or weights rounded to 16 bits.
    - lse never sees a rounded weight: float32 arithmetic in every dtype, 5e-5 (2e-5 in float32) plus 2e-6 of
      its size. One key too many or too few changes it by about 1/n: seen up to n = 10 000.
    """
    unit_roundoff = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    if dtype in unit_roundoff:
        u = unit_roundoff[dtype]
        return Tolerance(tensor=1.28 * u, row=4 * u, lse_absolute=5e-5, lse_relative=2e-6)
    if dtype == torch.float32:
        return Tolerance(tensor=5e-6, row=2e-5, lse_absolute=2e-5, lse_relative=2e-6)
    raise ValueError(f"dtype: got {dtype}; tolerances are known for bfloat16, float16 and float32")


@dataclass(frozen=True)
class Errors:
    """Distances of an output from the reference, in the units of `Tolerance`; `worst` is the (token, head) of
    `row`.

    `lse` is the largest |lse - ref| / (lse_absolute + lse_relative * |ref|), at most 1 when right; 0 if no
    lse was given. A value that is not finite where the reference is, or a row that should be exactly 0 and is
    not, makes its error inf.
    """

    tensor: float
    row: float
    worst: tuple[int, int]
    lse: float

    def within(self, bounds: Tolerance) -> bool:
        """True if every error is inside its bound."""
        return self.tensor <= bounds.tensor and self.row <= bounds.row and self.lse <= 1.0


def errors(
    out: torch.Tensor,
    expected: torch.Tensor,
    lse: torch.Tensor | None = None,
    expected_lse: torch.Tensor | None = None,
) -> Errors:
    """Compare out [tokens, heads, dim] (and lse [tokens, heads]) with the reference's; see `Errors`. Bounds
    of lse: out.dtype.
    """
    if out.shape != expected.shape:
        raise ValueError(f"out: got shape {tuple(out.shape)}; the reference has {tuple(expected.shape)}")
    lse_error = 0.0
    if lse is not None and lse.numel():
        bounds = tolerance(out.dtype)
        empty = expected_lse == -torch.inf
        allowed = bounds.lse_absolute + bounds.lse_relative * expected_lse.abs().masked_fill(empty, 0.0)
        distance = (lse.double() - expected_lse.masked_fill(empty, 0.0)).abs() / allowed
        distance = torch.where(empty, torch.where(lse == -torch.inf, 0.0, torch.inf), distance)
        lse_error = distance.nan_to_num(nan=torch.inf).max().item()
    if out.numel() == 0:
        return Errors(0.0, 0.0, (0, 0), lse_error)
    difference = (out.double() - expected).abs().nan_to_num(nan=torch.inf)
    size = expected.abs().amax(-1)
    rows = difference.amax(-1) / size
    rows = torch.where(size == 0, torch.where(difference.amax(-1) == 0, 0.0, torch.inf), rows)
    worst = int(rows.argmax())
    norm = expected.norm().item()
    tensor = difference.norm().item() / norm if norm else (0.0 if not difference.any() else float("inf"))
    return Errors(tensor, rows.max().item(), (worst // out.shape[1], worst % out.shape[1]), lse_error)
