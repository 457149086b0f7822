"""The generated parts of docs/: they come from the rules, the kernel arguments, the schema, the package and the measurements, so
they cannot drift.

    python tests/make_docs.py      # rewrites them; then review the difference

combinations.md and functions.md are written whole, in spec.md the quoted lines under each field's heading, in tuning.md the table
of prefill alone and with decode. tests/test_docs.py compares.
"""

import ast
import inspect
import itertools
import json
import re
from pathlib import Path
from statistics import median

from features import FEATURES, spec_of

from specgen.data_files import SPECS, TEMPLATES
from specgen.expand import expand, geometry
from specgen.load import load
from specgen.rules import refusals
from specgen.runtime import errors
from specgen.runtime.arguments import ROLES
from specgen.runtime.package import Package
from specgen.spec import json_schema
from specgen.target import load_targets
from specgen.tuning.matrix import tabulate
from specgen.tuning.shipped import shipped
from specgen.variant import Config, Variant

DOCS = Path(__file__).parent.parent / "docs"
_GENERATED = "<!-- Written by `python tests/make_docs.py`: do not edit. -->"
_CONFIG = Config(16, 16, 4, 1, 1)
# Fields that no attention entry holds, switched on.
_OTHERS: dict[str, dict] = {
    "dtype: float32": {"dtype": "float32", "cache": "{dtype: float32, page_size: 16}"},
    "kv_cache.page_size: 48": {"cache": "{dtype: bfloat16, page_size: 48}"},
    "kv_cache.layout: HND": {"cache": "{dtype: bfloat16, page_size: 16, layout: HND}"},
    "tensor_parallel": {"degrees": "[2]"},
    "batch_invariant": {"more": "batch_invariant: true\n"},
}
_MISSING: dict[str, dict] = {
    "FP8 `kv_cache.dtype`": {"cache": "{dtype: float8_e4m3fn, page_size: 16}"},
    "`kv_cache.scales`": {"cache": "{dtype: bfloat16, page_size: 16, scales: head}"},
}
_LABELS = {"interleaved": "rotary (interleaved)", "rotary": "rotary (half)", "mask": "mask: bidirectional"}


def _label(feature: str) -> str:
    return f"`{_LABELS.get(feature, feature)}`"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _families(spec) -> list[str]:
    """The families that a build makes, in the order of first use."""
    return list(dict.fromkeys(use.variant.family for use in expand(spec, load_targets()).uses))


def _variant(family: str, spec) -> Variant:
    shape = geometry(spec, spec.attention[0], spec.tensor_parallel[0])
    rows = 1 if family in ROLES else None
    return Variant(family, shape, _CONFIG, True, 4, rows)


def _effect(family: str, spec, without) -> str:
    """What a field changes in a family's kernel: equal symbols are equal code (tests/test_dispatch_rows.py)."""
    if family not in _families(spec):
        return f"`{ROLES[family]}` instead"
    plain, other = _variant(family, without), _variant(family, spec)
    if extra := [a.name for a in other.arguments if a not in plain.arguments]:
        tensors = dict.fromkeys(
            re.sub("(_bf16|_f32)?_ptr$", "", name) for name in extra if name.endswith("_ptr")
        )
        return f"own code; takes {', '.join(tensors)}"
    return "own code" if plain.symbol != other.symbol else "same code"


def _pair(first: str, second: str) -> tuple[str, str] | str | None:
    """None for two values of one field, "" where the pair is legal, else (field, reason)."""
    one, two = FEATURES[first], FEATURES[second]
    if any(one[key] != two[key] for key in one.keys() & two.keys()):
        return None
    try:
        found = refusals(spec_of(one | two))
    except Exception as error:  # a mistake of the schema's
        found = [(d.field, d.message) for d in error.diagnostics]
    return (found[0][0].rpartition(".")[2], found[0][1]) if found else ""


def combinations() -> str:
    """docs/combinations.md."""
    families = _families(spec_of())
    lines = [
        "# What works with what",
        "",
        _GENERATED,
        "",
        "## Fields and kernel families",
        "",
        "What a field changes in the kernels of a family, switched on alone. *Same code*: the field works there and the kernel",
        "is the one that a spec without it gets, because the field is data (strides, a bound, another operand), or does not",
        "concern that family. *Own code*: the value is a constant of the kernel, and a kernel without the field has no trace of",
        "it. *Takes*: tensors that a call passes besides. decode_ws and prefill_ws are written for sm_90 and serve aligned tensors;",
        "*instead*: with the field the plain family serves there too.",
        "",
        _row("field", *families),
        _row(*["---"] * (len(families) + 1)),
    ]
    for feature, fields in FEATURES.items():
        needed = {key: value for key, value in fields.items() if key == "mask" and feature != "mask"}
        effects = (_effect(family, spec_of(fields), spec_of(needed)) for family in families)
        value = f"`head_dim: {fields['head_dim']}`" if feature == "head_dim" else _label(feature)
        lines.append(_row(value, *effects))
    for name, arguments in _OTHERS.items():
        effects = (_effect(family, spec_of(**arguments), spec_of()) for family in families)
        lines.append(_row(f"`{name}`", *effects))
    names = [
        name for name in FEATURES if name not in ("interleaved", "scale", "head_dim", "sinks", "softcap")
    ]
    free = [
        name
        for name in FEATURES
        if all(_pair(name, other) in ("", None) for other in FEATURES if other != name)
    ]
    reasons: dict[tuple[str, str], int] = {}
    table = []
    for first in names:
        cells = []
        for second in names:
            found = None if first == second else _pair(first, second)
            mark = "" if found is None else "yes"
            if found:
                mark = f"no ({reasons.setdefault(found, len(reasons) + 1)})"
            cells.append(mark)
        table.append(_row(_label(first), *cells))
    if not set(FEATURES) - set(names) <= {*free, "interleaved"}:
        raise AssertionError("a feature that is left out of the table is refused somewhere")
    lines += [
        "",
        "## Fields of one attention entry together",
        "",
        f"{', '.join(_label(name) for name in FEATURES if name in free)} go with every other field. The others:",
        "",
        _row("", *(_label(name) for name in names)),
        _row(*["---"] * (len(names) + 1)),
        *table,
        "",
        *(f"{number}. `{field}` {reason}" for (field, reason), number in reasons.items()),
        "",
        "An empty cell is the field itself, or another value of a field that it sets. `rotary` also needs that no two degrees",
        "of `tensor_parallel` leave one key/value head each: "
        f"\"{refusals(spec_of(FEATURES['rotary'], degrees='[2, 4]'))[0][1]}\".",
        "",
        "## Refused as not implemented",
        "",
    ]
    lines += [f"- {name}: {refusals(spec_of(**arguments))[0][1]}" for name, arguments in _MISSING.items()]
    return "\n".join(lines) + "\n"


def _schemas() -> dict[str, tuple[dict, bool]]:
    """Field path -> (its JSON Schema, is it required?), in the order of the model; list entries without their index."""
    whole = json_schema()
    found = {}

    def visit(schema: dict, prefix: str) -> None:
        for name, field in schema["properties"].items():
            found[prefix + name] = field, name in schema.get("required", ())
            options = [field, field.get("items", {}), *field.get("anyOf", ())]
            for option in options:
                if "$ref" in option:
                    visit(whole["$defs"][option["$ref"].rpartition("/")[2]], f"{prefix}{name}.")

    visit(whole, "")
    return found


def _values(schema: dict) -> str:
    """The values of a schema in words."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    words = []
    for option in options:
        if "$ref" in option or "properties" in option or option.get("type") == "object":
            words.append(
                "a mapping" if "properties" not in option else f"{{{', '.join(option['properties'])}}}"
            )
        elif "enum" in option or "const" in option:
            words.append(", ".join(f"`{value}`" for value in option.get("enum", [option.get("const")])))
        elif option.get("type") == "array":
            words.append("a list")
        elif option.get("type") == "boolean":
            words.append("`true`, `false`")
        elif option.get("type") == "string":
            words.append(f"text `{option['pattern']}`" if "pattern" in option else "text")
        else:
            words.append({"integer": "an integer", "number": "a number"}[option["type"]] + _bounds(option))
    words += ["null"] * (len(options) < len(schema.get("anyOf", [schema])))
    return " or ".join(words)


def _bounds(option: dict) -> str:
    low, high, step = (option.get(key) for key in ("minimum", "maximum", "multipleOf"))
    text = f" above {option['exclusiveMinimum']}" if "exclusiveMinimum" in option else ""
    if low is not None:
        text += f" from {low}"
    if high is not None:
        text += f" to {high}"
    return text + (f" in steps of {step}" if step else "")


def _users(path: str, default: object) -> list[str]:
    """The shipped specs in which a field of an attention entry is given another value than its default."""
    name = path.removeprefix("attention.")
    found = []
    for file in sorted(SPECS.glob("*.yaml")):
        if any(getattr(entry, name) != default for entry in load(file).spec.attention):
            found.append(file.stem)
    return found


def fields() -> dict[str, list[str]]:
    """Field path -> the quoted lines under its heading in docs/spec.md."""
    facts = {}
    for path, (schema, required) in _schemas().items():
        given = schema.get("default")
        text = given if isinstance(given, str) else json.dumps(given)
        default = "required" if required else f"default `{text}`"
        lines = [
            "> " + schema["description"].replace("<", "\\<"),
            ">",
            f"> Values: {_values(schema)}; {default}.",
        ]
        if re.fullmatch(r"attention\.\w+", path) and not required and path != "attention.layers":
            users = _users(path, schema.get("default"))
            lines += [">", f"> Shipped specs with it: {', '.join(f'`{user}`' for user in users) or 'none'}."]
        facts[path] = lines
    return facts


def spec_page(text: str) -> str:
    """docs/spec.md with the quoted lines under the heading of each field replaced by `fields`."""
    facts = fields()
    lines: list[str] = []
    quoted = False
    for line in text.splitlines():
        if quoted and line.startswith(">"):
            continue
        quoted = False
        lines.append(line)
        if (heading := re.fullmatch(r"#+ `([\w.]+)`", line)) and heading[1] in facts:
            lines += facts[heading[1]]
            quoted = True
    return "\n".join(lines) + "\n"


def functions() -> str:
    """docs/functions.md: the public functions with their signatures and docstrings, as the package has them; its errors."""
    source = (TEMPLATES / "package" / "__init__.py.jinja").read_text(encoding="utf-8")
    names = ast.literal_eval(re.search(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL)[1])
    order = [name for name in vars(Package) if name in names]
    lines = ["# Functions of a generated package", "", _GENERATED, ""]
    for name in [*order, *sorted(set(names) - set(order))]:
        function = getattr(Package, name)
        signature = inspect.signature(function)
        shown = [p for p in signature.parameters.values() if p.name != "self"]
        text = f"{name}{signature.replace(parameters=shown)}".replace("torch._tensor.", "")
        text = re.sub(r"[\w.]+\.([A-Z]\w+)", r"\1", text).replace("'", '"')
        paragraphs = inspect.getdoc(function).split("\n\n")
        lines += [f"## `{name}`", "", "```python", *_wrapped(text), "```", ""]
        lines += itertools.chain.from_iterable((*paragraph.splitlines(), "") for paragraph in paragraphs)
    lines += ["## Errors", "", "In `my_model_kernels.runtime.errors`:", ""]
    for name, error in vars(errors).items():
        if inspect.isclass(error):
            text = " ".join(inspect.getdoc(error).split())
            lines += [f"- `{name}({', '.join(base.__name__ for base in error.__bases__)})`: {text}"]
    return "\n".join(lines).rstrip() + "\n"


def _wrapped(text: str, width: int = 100) -> list[str]:
    """A signature broken at its commas."""
    lines, indent = [""], " " * (text.index("(") + 1)
    for part in re.split(r"(?<=,) ", text):
        if lines[-1].strip() and len(lines[-1]) + len(part) + 1 > width:
            lines.append(indent + part)
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1].strip() else part
    return lines


def tuning_page(text: str) -> str:
    """docs/tuning.md with the table behind the mark, up to the next empty line, replaced by `alone`."""
    head, mark, rest = text.partition(f"{_GENERATED}\n\n")
    return head + mark + "\n".join(alone()) + rest[rest.index("\n\n") :]


def alone() -> list[str]:
    """Of each measured geometry, prefill alone against the same prefill with decode, over batches of several sequences."""
    lines = [_row("heads", "a decode in vain", "prefill alone / with decode, at most"), _row("---", "---:", "---:")]
    settings: dict[tuple, list] = {}
    for m in sorted(shipped(), key=lambda m: m.setting.reference):
        settings.setdefault((m.setting.gpu.name, m.setting.geometry), []).append(m)
    for (gpu, of), measurements in settings.items():
        seqs = {(m.workload, m.bounds): m.seqs for m in measurements}
        matrix, vain, slower = tabulate(measurements), [], []
        for workload, row in zip(matrix.workloads, matrix.cells):
            times = {schedule: cell.time_us for schedule, cell in zip(matrix.schedules, row) if cell}
            prefills = {s.prefill: time for s, time in times.items() if not s.decode}
            pairs = [(prefills[s.prefill], time, s) for s, time in times.items() if s.decode and s.prefill in prefills]
            if workload.bounds.seqs < 2 or not pairs:
                continue
            prefill, both, schedule = min(pairs, key=lambda pair: pair[:2])  # the fastest prefill, with its best decode
            if min(rows for rows, _ in seqs[workload]) > schedule.max_query_len:
                vain.append(both - prefill)
            else:
                slower.append((prefill / both, workload.name))
        worst, where = max(slower)
        cells = f"{median(vain):.1f} us ({len(vain)} batches)", f"{worst:.2f} ({where}; {len(slower)} batches)"
        lines.append(_row(f"{of.query_heads}/{of.kv_heads} of {of.qk_dim}, {gpu}", *cells))
    return lines


def pages() -> dict[str, str]:
    """File name in docs/ -> what it must hold."""
    spec, tuning = ((DOCS / file).read_text(encoding="utf-8") for file in ("spec.md", "tuning.md"))
    whole = {"combinations.md": combinations(), "functions.md": functions()}
    return whole | {"spec.md": spec_page(spec), "tuning.md": tuning_page(tuning)}


if __name__ == "__main__":
    for file, content in pages().items():
        (DOCS / file).write_text(content, encoding="utf-8")
