"""Expansion -> the files of the generated package and the rows of its dispatch table. Pure but for reading the runtime's files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specgen.artifact import Artifact
from specgen.expand import Expansion, Use
from specgen.load import Loaded
from specgen.runtime.arguments import ROLES
from specgen.runtime.table import EVERY, AppendRow, AttentionRow, MergeRow, VarlenRow
from specgen.spec import Spec
from specgen.tuning.tree import Split, boxes, domain
from specgen.variant import Variant

RUNTIME = Path(__file__).parent / "runtime"
# What reaches the package besides Python: the launcher's source, for a host that has to build its own.
_RUNTIME_SUFFIXES = (".py", ".c", ".h")
_ALIGNED = {True: "every pointer and stride is aligned", False: "a pointer or stride is not aligned"}
# The test template of each kernel family.
_TESTS = {
    **dict.fromkeys(ROLES, "attention"),
    "varlen": "attention_varlen",
    "append_kv": "append_kv",
    "merge_states": "merge_states",
}


@dataclass(frozen=True)
class SelectorNode:
    """A node of a selector: it splits at a threshold of one of table.Bounds, or it names a row."""

    splits: bool
    feature: str = ""
    threshold: int = 0
    low: object = None
    high: object = None
    row: AttentionRow | None = None


@dataclass(frozen=True)
class Selector:
    """The generated function that finds an attention row: its table key, its name, its tree."""

    key: tuple
    function: str
    tree: SelectorNode


@dataclass(frozen=True)
class Rows:
    """The dispatch table: total and disjoint over the spec's limits (runtime/table.py states and checks it)."""

    attention: tuple[AttentionRow, ...]
    selectors: tuple[Selector, ...]
    append: tuple[AppendRow, ...]
    merge: tuple[MergeRow, ...]
    varlen: tuple[VarlenRow, ...]


def package_name(spec_name: str) -> str:
    """Import name of the generated package."""
    return f"{spec_name}_kernels"


def dispatch_rows(spec, expansion: Expansion) -> Rows:
    """Rows from the same list of uses that everything else derives from."""
    attention, selectors, append, merge, varlen = [], [], {}, {}, {}
    for each in expansion.dispatch:
        heads = next(entry for entry in spec.attention if entry.name == each.layer).per_rank(each.degree)
        key = (each.arch, each.layer, *heads, each.aligned)
        rows, tree = _routed(key, each.tree, spec, len(attention))
        attention += rows
        selectors.append(Selector(key, f"_{each.arch}_{len(selectors)}", tree))
    for use in expansion.uses:
        v, g = use.variant, use.variant.geometry
        if v.family == "append_kv":  # two tensor-parallel degrees may leave the same key/value heads: one row serves both
            key = (use.arch, use.layer, g.kv_heads, v.aligned)
            append.setdefault(key, AppendRow(len(append), *key, v.symbol, _ALIGNED[v.aligned]))
        if v.family == "merge_states":
            key = (use.arch, g.query_heads, g.v_dim)
            reason = "contiguous states; misaligned ones are copied first"
            merge.setdefault(key, MergeRow(len(merge), *key, v.symbol, reason))
        if v.family == "varlen":
            key = (use.arch, use.layer, g.query_heads, g.kv_heads, v.aligned)
            varlen[key] = VarlenRow(len(varlen), *key, v.symbol, _ALIGNED[v.aligned])
    return Rows(tuple(attention), tuple(selectors), *(tuple(rows.values()) for rows in (append, merge, varlen)))


def _routed(key: tuple, tree: object, spec: Spec, start: int) -> tuple[list[AttentionRow], SelectorNode]:
    """The rows of one tree, numbered from `start`, and the tree over them. A range that ends at the limits is open."""
    rows = []
    _, most = domain(spec.limits)
    for box in boxes(tree, spec.limits):
        (low, high), *others = (
            (least, EVERY[1] if top == end and name != "query_len" else top)
            for name, least, top, end in zip(most._fields, box.low, box.high, most)
        )
        decode, prefill = (v.symbol if v else None for v in (box.leaf.decode, box.leaf.prefill))
        rows.append(AttentionRow(start + len(rows), *key, low, high, decode, prefill, box.leaf.reason, *others))
    return rows, _node(tree, iter(rows))


def _node(tree: object, rows: Iterator[AttentionRow]) -> SelectorNode:
    """The tree with `rows`, lowest first, for its leaves."""
    if isinstance(tree, Split):
        return SelectorNode(True, tree.feature, tree.threshold, _node(tree.low, rows), _node(tree.high, rows))
    return SelectorNode(False, row=next(rows))


def _features(spec: Spec, use: Use) -> list[tuple[str, str]]:
    """(field, literal) of what is on in the layer that a test calls its specialization through; off leaves no trace."""
    entry = next(entry for entry in spec.attention if entry.name == use.layer)
    masks = ("sliding_window", "chunk", "softcap", "sinks", "alibi", "prefix_ranges", "cross")
    values = {name: getattr(entry, name) for name in masks} if use.variant.family != "append_kv" else {}
    values = {name: value for name, value in values.items() if value is not None and value is not False}
    if use.variant.family == "append_kv" and entry.rotary is not None:
        values |= {"rotary_dim": entry.rotary.dim, "rotary_style": entry.rotary.style}
        values["query_heads"] = use.variant.geometry.query_heads
    if spec.kv_cache.layout != "NHD" and use.variant.family != "varlen":
        values["layout"] = spec.kv_cache.layout
    return [(name, repr(value)) for name, value in values.items()]


def kernel_artifact(variant: Variant) -> Artifact:
    """The module of one specialization."""
    return Artifact(f"kernels/{variant.symbol}.py", f"kernels/{variant.family}.py.jinja", context={"variant": variant})


def plan(loaded: Loaded, expansion: Expansion) -> tuple[Artifact, ...]:
    """Every generated or copied file of the package except manifest and binaries, paths relative to the package."""
    spec = loaded.spec
    package = package_name(spec.name)
    rows = dispatch_rows(spec, expansion)
    artifacts = [
        Artifact("__init__.py", "package/__init__.py.jinja", context={"package": package, "name": spec.name}),
        Artifact("dispatch.py", "package/dispatch.py.jinja", context={"rows": rows, "limits": spec.limits, "name": spec.name}),
        Artifact("kernels/__init__.py", "package/kernels/__init__.py.jinja", context={"package": package}),
        Artifact("tests/__init__.py", "tests/__init__.py.jinja", context={"package": package}),
        Artifact("spec.yaml", None, loaded.text.encode()),
    ]
    first_use = {use.variant.symbol: use for use in reversed(expansion.uses)}
    for symbol, variant in expansion.variants.items():
        use = first_use[symbol]
        artifacts += [
            kernel_artifact(variant),
            Artifact(
                f"tests/test_{symbol}.py",
                f"tests/{_TESTS[variant.family]}.py.jinja",
                context={
                    "package": package,
                    "variant": variant,
                    "layer": use.layer,
                    "limits": spec.limits,
                    "features": _features(spec, use),
                    "batch_invariant": spec.batch_invariant,
                },
            ),
        ]
    for path in sorted(RUNTIME.rglob("*")):
        if path.suffix in _RUNTIME_SUFFIXES:
            artifacts.append(Artifact(f"runtime/{path.relative_to(RUNTIME).as_posix()}", None, path.read_bytes()))
    return tuple(sorted(artifacts, key=lambda artifact: artifact.path))
