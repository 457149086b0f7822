"""`specgen explain SYMBOL`: one specialization traced from the spec's line to the dispatch rows that launch it.

Composes load, rules, expand and plan to read them, writes nothing. Reads only the specs it looks in, their measurements and what
their builds refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from specgen.data_files import SPECS
from specgen.errors import SpecgenError
from specgen.expand import Expansion, Use
from specgen.load import Loaded
from specgen.measured import measured
from specgen.pipeline import built_over_budget, expanded, load_legal, package_folder
from specgen.plan import Rows, dispatch_rows, package_name, plan
from specgen.runtime.arguments import ROLES
from specgen.runtime.table import AttentionRow, VarlenRow
from specgen.target import load_targets
from specgen.variant import ATTENTION_FAMILIES, Variant


def explain(symbol: str, specs: Sequence[Path] | None = None, build_dir: Path = Path("build")) -> str:
    """Where `symbol` comes from, what it is and which dispatch rows launch it, for every spec that has it.

    `specs` None looks in specs/*.yaml below the current directory, or in those that come with specgen, and passes over
    the specs that cannot be generated. Kernels are those of `specgen list`, which knows what builds in `build_dir` refused.
    Raises the error of a spec that was named and cannot be generated, and SpecgenError with the nearest symbols if none has
    this one.
    """
    paths = list(specs) if specs is not None else _default_specs()
    sections, known, skipped = [], {}, 0
    for path in paths:
        try:
            loaded, expansion = _expanded(path, symbol, build_dir)
        except SpecgenError:
            if specs is not None:
                raise
            skipped += 1
            continue
        known |= expansion.variants
        if symbol in expansion.variants:
            sections.append("\n".join(_section(symbol, loaded, expansion)))
    if not sections:
        raise SpecgenError(_not_found(symbol, known, len(paths) - skipped, skipped))
    return "\n\n".join([symbol, *sections])


def _default_specs() -> list[Path]:
    return sorted(Path("specs").glob("*.yaml")) or sorted(SPECS.glob("*.yaml"))


def _expanded(path: Path, symbol: str, build_dir: Path) -> tuple[Loaded, Expansion]:
    """A spec as it is built; without its measurements, which take seconds, where these cannot choose a kernel of this name."""
    loaded = load_legal(path)
    refused = built_over_budget(package_folder(loaded.spec, build_dir))
    expansion = expanded(loaded, refused)
    if any(v.family in ROLES and f"_{v.shape}_" in symbol for v in expansion.variants.values()):
        expansion = expanded(loaded, refused, measured(loaded)[0])
    return loaded, expansion


def _not_found(symbol: str, known: Iterable[str], searched: int, skipped: int) -> str:
    looked = f"{searched} spec{'s' * (searched != 1)} searched"
    if skipped:
        looked += f", {skipped} skipped that cannot be generated"
    lines = [f"{symbol!r} is no specialization of any spec: {looked}"]
    if close := get_close_matches(symbol, list(known), n=3, cutoff=0.5):
        lines.append(f"did you mean {' or '.join(close)}?")
    else:
        lines.append("`specgen list SPEC` prints the names")
    return "\n".join(lines)


def _section(symbol: str, loaded: Loaded, expansion: Expansion) -> Iterator[str]:
    variant = expansion.variants[symbol]
    uses = [use for use in expansion.uses if use.variant.symbol == symbol]
    for layer in dict.fromkeys(use.layer for use in uses):
        yield from _origin(loaded, layer, [use for use in uses if use.layer == layer])
    yield from _identity(variant)
    yield from _files(symbol, loaded, expansion)
    if replaced := [other for other, stand_in in expansion.stand_ins.items() if stand_in == symbol]:
        yield f"  stands in for   {', '.join(replaced)}, where kernels are compiled just in time or interpreted"
    rows = list(_rows(symbol, dispatch_rows(loaded.spec, expansion)))
    yield f"  dispatch rows   {len(rows)}, in dispatch.py"
    yield from (f"    {row}" for row in rows)
    yield "  arguments"
    yield from (f"    {line}" for line in _arguments(variant))


def _origin(loaded: Loaded, layer: str, uses: list[Use]) -> Iterator[str]:
    position = next(i for i, entry in enumerate(loaded.spec.attention) if entry.name == layer)
    line, column = loaded.positions[f"attention.{position}"]
    yield f"{loaded.path}:{line}:{column}: attention.{position}, layer {layer!r}"
    for degree in dict.fromkeys(use.degree for use in uses):
        g = next(use.variant.geometry for use in uses if use.degree == degree)
        heads = f"{g.query_heads} query heads over {g.kv_heads} key/value heads per rank"
        yield f"  tensor_parallel {degree}: {heads}, {g.group} to 1"


def _identity(variant: Variant) -> Iterator[str]:
    g, c = variant.geometry, variant.config
    tiles = f"in tiles of {' + '.join(map(str, variant.qk_tiles))} and {' + '.join(map(str, variant.v_tiles))}"
    pages = "" if variant.family in ("varlen", "merge_states") else f", pages of {g.page_size}"
    yield f"  geometry        qk_dim {g.qk_dim}, v_dim {g.v_dim} ({tiles}), {g.dtype}{pages}"
    if variant.family in ATTENTION_FAMILIES:
        yield f"                  {g.mask}, scale {g.scale!r}"
    if role := ROLES.get(variant.family):
        takes = "at most" if role == "decode" else "more than"
        yield f"  takes           sequences of {takes} {variant.max_query_len} query rows"
    options = "".join(f", {name} {value}" for name, value in c.options)
    yield (
        f"  configuration   block_m {c.block_m}, tile_n {c.tile_n}, {c.num_warps} warps, {c.num_stages} stages, "
        f"{c.ctas_per_multiprocessor} programs per multiprocessor{options}"
    )
    yield f"  chosen by       {c.origin}"
    promise = "nothing beyond the element"
    if variant.aligned:
        promise = "pointers of 16 bytes"
        if variant.family != "merge_states":
            promise += f", strides of {g.alignment} bytes"
    yield f"  alignment       {promise}"


def _files(symbol: str, loaded: Loaded, expansion: Expansion) -> Iterator[str]:
    artifacts = {artifact.path: artifact for artifact in plan(loaded, expansion)}
    for name, path in (("kernel", f"kernels/{symbol}.py"), ("test", f"tests/test_{symbol}.py")):
        yield f"  {name:15s} templates/{artifacts[path].template} -> {package_name(loaded.spec.name)}/{path}"
    archs = {
        arch: [t for t in loaded.spec.targets if load_targets()[t].arch == arch]
        for arch in expansion.archs(symbol)
    }
    yield "  compiled for    " + ", ".join(
        f"{arch} ({', '.join(targets)})" for arch, targets in archs.items()
    )


def _rows(symbol: str, rows: Rows) -> Iterator[str]:
    for row in rows.attention:
        if symbol in row.symbols:
            yield f"attention {row.index}: {row.arch}, {_condition(row)}: {row.reason}"
    for row in rows.varlen:
        if symbol == row.symbol:
            yield f"attention_varlen {row.index}: {row.arch}, {_rank(row)}: {row.reason}"
    for row in rows.append:
        if symbol == row.symbol:
            yield f"append_kv {row.index}: {row.arch}, layer {row.layer}, {row.kv_heads} kv heads: {row.reason}"
    for row in rows.merge:
        if symbol == row.symbol:
            yield f"merge_states {row.index}: {row.arch}, {row.query_heads} query heads of {row.v_dim}: {row.reason}"


def _condition(row: AttentionRow) -> str:
    others = "".join(f", {name} {low}..{high}" for name, (low, high) in row.narrowed)
    return f"{_rank(row)}, max_seqlen_q {row.min_query_len}..{row.max_query_len}{others}"


def _rank(row: AttentionRow | VarlenRow) -> str:
    guard = "aligned" if row.aligned else "unaligned"
    return f"layer {row.layer}, {row.query_heads}/{row.kv_heads} heads, {guard}"


def _arguments(variant: Variant) -> Iterator[str]:
    promised = dict(variant.divisibility)
    for i, (argument, (name, kind)) in enumerate(
        zip(variant.arguments, variant.signature, strict=True)
    ):
        unit = "bytes" if argument.kind == "pointer" else "elements"
        promise = f"  a multiple of {promised[i]} {unit}" if i in promised else ""
        yield f"{name:22s} {kind}{promise}"
