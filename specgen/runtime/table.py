"""The dispatch table: rows as frozen data, the lookup, and the proof that rows are total and disjoint.

Generated `dispatch.py` holds tuples of these rows; the package looks rows up by shapes and host integers
only. Pure: imports nothing but the standard library, reads no tensor and no device, so that the generator and
its tests use it as it is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

# Every value of a bound, for a row that does not ask for it: they are int32.
EVERY = (1, (1 << 31) - 1)


class Bounds(NamedTuple):
    """What the host knows of a call for free. All but the last are upper bounds that hold for a graph's replays too.

    query_len: query rows per sequence, min(max_seqlen_q, tokens). seqs: rows of the block table. tokens: rows
    of q. keys: keys per sequence, what the block table's row holds or less by max_seqlen_k. least_query_len: query rows that
    each sequence has at least if q has no rows beyond them, `least_query_len()`; 1 where that says nothing.
    """

    query_len: int
    seqs: int
    tokens: int
    keys: int
    least_query_len: int = 1


def least_query_len(query_len: int, seqs: int, tokens: int) -> int:
    """Query rows of the shortest of `seqs` sequences with so many `tokens` together, if the others have `query_len`; at least 1."""
    return max(tokens - (seqs - 1) * query_len, 1)


@dataclass(frozen=True)
class AttentionRow:
    """One row of the attention table: which kernels one call launches.

    `query_heads` and `kv_heads` are counts per rank. `min_query_len` and `max_query_len`, `seqs`, `tokens`,
    `keys` and `least_query_len` (each (least, most)) are inclusive ranges of a call's Bounds: the row is a box. `decode` and
    `prefill` are symbols; a row with both launches decode and then prefill, which may overlap it, and the device
    decides which sequences are whose.
    """

    index: int
    arch: str
    layer: str
    query_heads: int
    kv_heads: int
    aligned: bool
    min_query_len: int
    max_query_len: int
    decode: str | None
    prefill: str | None
    reason: str
    seqs: tuple[int, int] = EVERY
    tokens: tuple[int, int] = EVERY
    keys: tuple[int, int] = EVERY
    least_query_len: tuple[int, int] = EVERY

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """(least, most) of each of Bounds, in its order."""
        return (self.min_query_len, self.max_query_len), self.seqs, self.tokens, self.keys, self.least_query_len

    @property
    def narrowed(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """(name, range) of the bounds but query_len that the row asks for."""
        return tuple((name, each) for name, each in zip(Bounds._fields[1:], self.box[1:]) if each != EVERY)

    def holds(self, bounds: Bounds) -> bool:
        """Whether the row is for a call of these bounds."""
        return all(low <= value <= high for (low, high), value in zip(self.box, bounds))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols this row launches, in launch order."""
        return tuple(symbol for symbol in (self.decode, self.prefill) if symbol)


@dataclass(frozen=True)
class AppendRow:
    """One row of the append_kv table; `kv_heads` is per rank."""

    index: int
    arch: str
    layer: str
    kv_heads: int
    aligned: bool
    symbol: str
    reason: str

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbol this row launches, as an attention row has them."""
        return (self.symbol,)


@dataclass(frozen=True)
class MergeRow:
    """One row of the merge_states table; `query_heads` is per rank."""

    index: int
    arch: str
    query_heads: int
    v_dim: int
    symbol: str
    reason: str

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbol this row launches, as an attention row has them."""
        return (self.symbol,)


@dataclass(frozen=True)
class VarlenRow:
    """One row of the attention_varlen table, for batches of any lengths; head counts are per rank."""

    index: int
    arch: str
    layer: str
    query_heads: int
    kv_heads: int
    aligned: bool
    symbol: str
    reason: str

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbol this row launches, as an attention row has them."""
        return (self.symbol,)


class NoRowError(LookupError):
    """No row answers; the text says what was asked and what the table has."""


class Table:
    """Rows of one package, indexed for lookup.

    `selectors`: for each (arch, layer, query_heads, kv_heads, aligned), a function of a call's Bounds, one by one,
    that gives the index of its attention row: what generated dispatch.py holds as readable code. Without one the
    rows are searched. Raises ValueError when two rows claim the same case: list order never decides.
    """

    def __init__(
        self,
        attention_rows: Iterable[AttentionRow],
        append_rows: Iterable[AppendRow] = (),
        merge_rows: Iterable[MergeRow] = (),
        varlen_rows: Iterable[VarlenRow] = (),
        selectors: Mapping[tuple, Callable[[int, int, int, int, int], int]] | None = None,
    ):
        self.attention_rows = tuple(attention_rows)
        self.append_rows = tuple(append_rows)
        self.merge_rows = tuple(merge_rows)
        self.varlen_rows = tuple(varlen_rows)
        self._selectors = dict(selectors or {})
        self._attention: dict[tuple, tuple[AttentionRow, ...]] = {}
        for key, rows in _grouped(self.attention_rows, _attention_key):
            rows = sorted(rows, key=lambda row: row.box)
            for one, other in combinations(rows, 2):
                if all(low <= most and least <= high for (low, high), (least, most) in zip(one.box, other.box)):
                    raise ValueError(
                        f"attention rows {one.index} and {other.index} overlap: {one} and {other}"
                    )
            self._attention[key] = tuple(rows)
        self._append = _unique("append_kv", self.append_rows, _append_key)
        self._merge = _unique("merge_states", self.merge_rows, _merge_key)
        self._varlen = _unique("attention_varlen", self.varlen_rows, _attention_key)
        rows = (*self.attention_rows, *self.append_rows, *self.merge_rows, *self.varlen_rows)
        self.archs = _distinct(row.arch for row in rows)
        self.layers = _distinct(row.layer for row in self.attention_rows)

    def heads(self, layer: str) -> tuple[tuple[int, int], ...]:
        """The (query_heads, kv_heads) per rank that the table has for a layer, in row order."""
        return _distinct((row.query_heads, row.kv_heads) for row in self.attention_rows if row.layer == layer)

    def attention_group(
        self, arch: str, layer: str, query_heads: int, kv_heads: int, aligned: bool
    ) -> tuple[AttentionRow, ...]:
        """The rows of one geometry and guard, ordered by query length. Raises NoRowError."""
        try:
            return self._attention[arch, layer, query_heads, kv_heads, aligned]
        except KeyError:
            raise self._no_attention_row(arch, layer, query_heads, kv_heads, aligned) from None

    def selector(
        self, arch: str, layer: str, query_heads: int, kv_heads: int, aligned: bool
    ) -> Callable[[int, int, int, int, int], int]:
        """The function of a call's Bounds, one by one, that gives the index of the row for a call."""
        key = arch, layer, query_heads, kv_heads, aligned
        return self._selectors.get(key) or (lambda *bounds: self.attention(*key, Bounds(*bounds)).index)

    def attention(
        self, arch: str, layer: str, query_heads: int, kv_heads: int, aligned: bool, bounds: Bounds
    ) -> AttentionRow:
        """The one row for a call of these bounds, each at least 1. Raises NoRowError."""
        rows = self.attention_group(arch, layer, query_heads, kv_heads, aligned)
        for row in rows:
            if row.holds(bounds):
                return row
        have = _distinct(f"{row.min_query_len}..{row.max_query_len}" for row in rows)
        asked = ", ".join(f"{name} {value}" for name, value in bounds._asdict().items())
        raise NoRowError(f"no attention row for {asked}: rows cover query_len {', '.join(have)}")

    def append(self, arch: str, layer: str, kv_heads: int, aligned: bool) -> AppendRow:
        """The one append_kv row. Raises NoRowError."""
        try:
            return self._append[arch, layer, kv_heads, aligned]
        except KeyError:
            have = _distinct(
                f"{row.layer} with {row.kv_heads} kv heads on {row.arch}" for row in self.append_rows
            )
            asked = f"arch {arch}, layer {layer!r}, {kv_heads} kv heads, aligned {aligned}"
            raise NoRowError(f"no append_kv row for {asked}; the table has {_listed(have)}") from None

    def merge(self, arch: str, query_heads: int, v_dim: int) -> MergeRow:
        """The one merge_states row. Raises NoRowError."""
        try:
            return self._merge[arch, query_heads, v_dim]
        except KeyError:
            have = _distinct(
                f"{row.query_heads} heads of {row.v_dim} on {row.arch}" for row in self.merge_rows
            )
            asked = f"arch {arch}, {query_heads} query heads, v_dim {v_dim}"
            raise NoRowError(f"no merge_states row for {asked}; the table has {_listed(have)}") from None

    def varlen(self, arch: str, layer: str, query_heads: int, kv_heads: int, aligned: bool) -> VarlenRow:
        """The one attention_varlen row. Raises NoRowError."""
        try:
            return self._varlen[arch, layer, query_heads, kv_heads, aligned]
        except KeyError:
            have = _distinct(
                f"{row.layer} with {row.query_heads}/{row.kv_heads} heads on {row.arch}"
                for row in self.varlen_rows
            )
            asked = f"arch {arch}, layer {layer!r}, {query_heads}/{kv_heads} heads, aligned {aligned}"
            raise NoRowError(f"no attention_varlen row for {asked}; the table has {_listed(have)}") from None

    def faults(self, most: Bounds) -> list[str]:
        """Why the rows are not total and disjoint over bounds of 1 up to `most`; an empty list is the proof.

        Checked by boxes: each (arch, layer, heads) has both guards, each guard's rows fill the whole box
        without a gap, a selector gives the row of every box's corners, each row launches something, and each
        layer has its append_kv, merge_states and attention_varlen rows where the table has any of those.
        """
        found = []
        for arch in self.archs:
            for layer in self.layers:
                for query_heads, kv_heads in self.heads(layer):
                    for aligned in (True, False):
                        key = (arch, layer, query_heads, kv_heads, aligned)
                        name = (
                            f"{arch} {layer} {query_heads}/{kv_heads} {'aligned' if aligned else 'unaligned'}"
                        )
                        rows = self._attention.get(key, ())
                        found += _row_faults(name, rows, most)
                        if key in self._selectors:
                            found += _selector_faults(name, rows, self._selectors[key], most)
                        if self.append_rows and (arch, layer, kv_heads, aligned) not in self._append:
                            found.append(f"{name}: no append_kv row")
                        if self.varlen_rows and key not in self._varlen:
                            found.append(f"{name}: no attention_varlen row")
        if self.merge_rows:
            wanted = _distinct((row.arch, row.query_heads) for row in self.attention_rows)
            have = {(row.arch, row.query_heads) for row in self.merge_rows}
            found += [
                f"{arch} {heads} query heads: no merge_states row"
                for arch, heads in wanted
                if (arch, heads) not in have
            ]
        for rows in (self.attention_rows, self.append_rows, self.merge_rows, self.varlen_rows):
            found += [
                f"row {row.index} stands at place {place}: {row}"
                for place, row in enumerate(rows)
                if row.index != place
            ]
        return found

    def _no_attention_row(self, arch, layer, query_heads, kv_heads, aligned) -> NoRowError:
        if arch not in self.archs:
            return NoRowError(f"no attention row for arch {arch}; the table has {_listed(self.archs)}")
        if layer not in self.layers:
            return NoRowError(
                f"no attention row for layer {layer!r}; the table has {_listed(map(repr, self.layers))}"
            )
        if (query_heads, kv_heads) not in self.heads(layer):
            have = _listed(f"{query}/{kv}" for query, kv in self.heads(layer))
            return NoRowError(
                f"no attention row of layer {layer!r} for {query_heads}/{kv_heads} heads; "
                f"the table has {have}"
            )
        return NoRowError(
            f"no attention row for {arch}, layer {layer!r}, {query_heads}/{kv_heads} heads, aligned {aligned}"
        )


def _attention_key(row: AttentionRow | VarlenRow) -> tuple:
    return row.arch, row.layer, row.query_heads, row.kv_heads, row.aligned


def _append_key(row: AppendRow) -> tuple:
    return row.arch, row.layer, row.kv_heads, row.aligned


def _merge_key(row: MergeRow) -> tuple:
    return row.arch, row.query_heads, row.v_dim


def _row_faults(name: str, rows: tuple[AttentionRow, ...], most: Bounds) -> Iterator[str]:
    for row in rows:
        for bound, (low, high) in zip(Bounds._fields, row.box):
            if low > high:
                yield f"{name}: row {row.index} is empty, {bound} {low}..{high}"
        if not row.symbols:
            yield f"{name}: row {row.index} launches nothing"
    yield from (f"{name}: {gap} have no row" for gap in _gaps(rows, most))


def _selector_faults(name: str, rows: tuple[AttentionRow, ...], select, most: Bounds) -> Iterator[str]:
    """Where a selector leaves its rows: it is constant within a box if it is right at the corners of all."""
    for row in rows:
        for corner in product(*((low, min(high, top)) for (low, high), top in zip(row.box, most))):
            if row.holds(Bounds(*corner)) and (given := select(*corner)) != row.index:
                call = ", ".join(f"{bound} {value}" for bound, value in zip(Bounds._fields, corner))
                yield f"{name}: {call}: the selector gives row {given}, the call is in row {row.index}"


def _gaps(rows: Iterable[AttentionRow], most: Bounds, place: int = 0) -> Iterator[str]:
    """The boxes that no row fills: one bound after another is cut where a row begins or ends."""
    if place == len(most):
        return
    ranges = [row.box[place] for row in rows]
    starts = {1, *(low for low, _ in ranges), *(high + 1 for _, high in ranges)}
    starts = sorted(start for start in starts if start <= most[place])
    for low, high in zip(starts, [start - 1 for start in starts[1:]] + [most[place]]):
        inside = [row for row, (least, top) in zip(rows, ranges) if least <= low and high <= top]
        here = f"{Bounds._fields[place]} {low}..{high}"
        if not inside:
            yield here
        else:
            yield from (f"{here}, {gap}" for gap in _gaps(inside, most, place + 1))


def _grouped(rows, key) -> Iterator[tuple[tuple, list]]:
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return iter(groups.items())


def _unique(name, rows, key) -> dict:
    table = {}
    for row in rows:
        other = table.setdefault(key(row), row)
        if other is not row:
            raise ValueError(f"{name} rows {other.index} and {row.index} overlap: {other} and {row}")
    return table


def _distinct(items: Iterable) -> tuple:
    return tuple(dict.fromkeys(items))


def _listed(items: Iterable[str]) -> str:
    return ", ".join(items) or "none"
