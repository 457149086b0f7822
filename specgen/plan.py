"""Expansion -> the files of the generated package and the rows of its dispatch table. Pure but for reading the runtime's files."""

from dataclasses import dataclass
from pathlib import Path

from specgen.artifact import Artifact
from specgen.expand import Expansion, Use, decode_query_lens
from specgen.load import Loaded
from specgen.runtime.arguments import ROLES
from specgen.runtime.table import AppendRow, AttentionRow, MergeRow
from specgen.spec import Spec

RUNTIME = Path(__file__).parent / "runtime"
# What reaches the package besides Python: the launcher's source, for a host that has to build its own.
_RUNTIME_SUFFIXES = (".py", ".c", ".h")
_ALIGNED = {True: "every pointer and stride is aligned", False: "a pointer or stride is not aligned"}
# The test template of each kernel family.
_TESTS = {**dict.fromkeys(ROLES, "attention"), "append_kv": "append_kv", "merge_states": "merge_states"}


@dataclass(frozen=True)
class Rows:
    """The dispatch table: total and disjoint over the spec's limits (runtime/table.py states and checks it)."""

    attention: tuple[AttentionRow, ...]
    append: tuple[AppendRow, ...]
    merge: tuple[MergeRow, ...]


def package_name(spec_name: str) -> str:
    """Import name of the generated package."""
    return f"{spec_name}_kernels"


def dispatch_rows(spec, expansion: Expansion) -> Rows:
    """Rows from the same list of uses that everything else derives from."""
    limits = spec.limits
    attention, append, merge = [], [], {}
    groups: dict[tuple, dict] = {}
    for use in expansion.uses:
        v, g = use.variant, use.variant.geometry
        key = (use.arch, use.layer, g.query_heads, g.kv_heads, v.aligned)
        groups.setdefault(key, {})[(v.family, v.max_query_len)] = v.symbol
    for (arch, layer, query_heads, kv_heads, aligned), symbols in groups.items():
        cases = []
        low = 1
        for high in decode_query_lens(spec):
            what = "one query row a sequence" if high == 1 else f"at most {high} query rows a sequence (max_spec_tokens)"
            cases.append((low, high, symbols["decode", high], None, f"{what}: decode alone"))
            low = high + 1
        if low <= limits.max_tokens:
            reason = "a sequence may have more than max_spec_tokens query rows: prefill takes those, decode the others"
            cases.append((low, limits.max_tokens, symbols["decode", high], symbols["prefill", high], reason))
        for low, high, decode, prefill, reason in cases:
            attention.append(
                AttentionRow(len(attention), arch, layer, query_heads, kv_heads, aligned, low, high, decode, prefill, reason)
            )
        append.append(
            AppendRow(len(append), arch, layer, kv_heads, aligned, symbols["append_kv", None], _ALIGNED[aligned])
        )
    for use in expansion.uses:
        v, g = use.variant, use.variant.geometry
        key = (use.arch, g.query_heads, g.v_dim)
        if v.family == "merge_states" and key not in merge:
            merge[key] = MergeRow(len(merge), *key, v.symbol, "contiguous states; misaligned ones are copied first")
    return Rows(tuple(attention), _unique_append(append), tuple(merge.values()))


def _unique_append(rows: list[AppendRow]) -> tuple[AppendRow, ...]:
    """Two tensor-parallel degrees may leave the same key/value heads: one row serves both."""
    unique: dict[tuple, AppendRow] = {}
    for row in rows:
        unique.setdefault((row.arch, row.layer, row.kv_heads, row.aligned), row)
    fields = ((row.arch, row.layer, row.kv_heads, row.aligned, row.symbol, row.reason) for row in unique.values())
    return tuple(AppendRow(i, *rest) for i, rest in enumerate(fields))


def _features(spec: Spec, use: Use) -> list[tuple[str, str]]:
    """(field, literal) of what is on in the layer that a test calls its specialization through; off leaves no trace."""
    entry = next(entry for entry in spec.attention if entry.name == use.layer)
    masks = ("sliding_window", "chunk", "softcap", "sinks", "alibi", "prefix_ranges", "cross")
    values = {name: getattr(entry, name) for name in masks} if use.variant.family != "append_kv" else {}
    values = {name: value for name, value in values.items() if value is not None and value is not False}
    if use.variant.family == "append_kv" and entry.rotary is not None:
        values |= {"rotary_dim": entry.rotary.dim, "rotary_style": entry.rotary.style}
        values["query_heads"] = use.variant.geometry.query_heads
    if spec.kv_cache.layout != "NHD":
        values["layout"] = spec.kv_cache.layout
    return [(name, repr(value)) for name, value in values.items()]


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
            Artifact(f"kernels/{symbol}.py", f"kernels/{variant.family}.py.jinja", context={"variant": variant}),
            Artifact(
                f"tests/test_{symbol}.py",
                f"tests/{_TESTS[variant.family]}.py.jinja",
                context={
                    "package": package,
                    "variant": variant,
                    "layer": use.layer,
                    "limits": spec.limits,
                    "features": _features(spec, use),
                },
            ),
        ]
    for path in sorted(RUNTIME.rglob("*")):
        if path.suffix in _RUNTIME_SUFFIXES:
            artifacts.append(Artifact(f"runtime/{path.relative_to(RUNTIME).as_posix()}", None, path.read_bytes()))
    return tuple(sorted(artifacts, key=lambda artifact: artifact.path))
