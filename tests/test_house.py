"""The house: imports point one way, only the command line prints, files stay small and name no machine.

Every module of specgen/ stands in one layer below. A module may import any noun, and what EXTRA lists for it by name;
`pipeline` and `provenance` may import every verb, `cli` the compositions and nouns. runtime/ is copied into wheels: it
imports nothing of specgen, and the generator only those of its modules that state something both sides read.
"""

import ast
import re
import sys
from pathlib import Path

import jinja2
import pytest
from jinja2 import nodes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specgen"

LAYERS = {
    "noun": "__init__ errors dtypes fields explanations document json_text target spec variant decode_ws prefill_ws artifact binary data_files"
    " tuning.records tuning.trial bench bench.workloads",
    # Importing a model's config: facts about published models, and how they are read.
    "noun of hf": "hf_models hf_config",
    "verb": "load hf hf_facts hf_layers rules tuning expand plan measured manifest render format write"
    " cache toolchain loops descriptors resources ptx child aot aot_worker wheel verify"
    " tuning.jsonl tuning.shipped tuning.current tuning.store tuning.matrix tuning.cover tuning.tree tuning.regret"
    " tuning.evidence tuning.relatives tuning.parts tuning.choose"
    " tuning.space tuning.grid tuning.bundle tuning.problems tuning.search tuning.executors tuning.trial_worker tuning.sweep"
    " bench.batch bench.timing bench.machine bench.peers bench.vllm_triton bench.results bench.contest bench.step"
    " bench.report bench.pictures bench.output",
    "composition": "pipeline provenance bench.run tune_compile tune_measure tune_data",
    "talk": "cli __main__",
}
# What a verb (or a noun) imports beyond nouns, and why that arrow is right.
EXTRA = {
    "variant": "runtime.arguments runtime.sizes runtime.tensor_maps",  # signature, tile sizes: one statement for kernel and launch
    "decode_ws": "runtime.sizes",  # what a partial state is: one statement for kernel and scratch
    "prefill_ws": "runtime.sizes",
    "bench.workloads": "runtime.explain runtime.geometry",  # bytes, operations and the floor have one formula
    "bench.batch": "runtime.extras runtime.reference",
    "bench.peers": "bench.batch bench.vllm_triton",  # a batch is what they are asked; parts of one verb
    "bench.vllm_triton": "bench.batch",
    "bench.results": "bench.timing",  # samples are its input
    "bench.contest": "bench.batch bench.peers bench.results bench.timing runtime.reference",
    "bench.step": "bench.batch bench.peers bench.results",
    "bench.report": "bench.results",
    "bench.pictures": "bench.results",
    "bench.output": "bench.report bench.pictures write",
    "hf_facts": "hf_config hf_models hf_layers",  # parts of one verb
    "hf_layers": "hf_config hf_models",
    "hf_config": "hf_models",
    "hf": "hf_config hf_facts",
    # Enumerating asks what is preferred, what is legal, and what was measured.
    "expand": "rules runtime.arguments tuning tuning.choose tuning.grid tuning.tree",
    "measured": "expand load plan render runtime.arguments toolchain tuning.current tuning.jsonl tuning.shipped",
    "tuning.shipped": "tuning.jsonl",
    "tuning.store": "tuning.jsonl write",
    # What tune tries, and how.
    "tuning.space": "rules runtime.arguments tuning",
    "tuning.problems": "tuning.bundle",
    "tuning.search": "tuning.problems",
    "tuning.executors": "child",
    "tuning.trial_worker": "bench.batch bench.machine bench.timing child runtime.reference",
    "tuning.sweep": "tuning.bundle tuning.current tuning.executors tuning.problems tuning.search tuning.store",
    # From measurements to a tree: parts of one verb, each on those before it.
    "tuning.records": "runtime.table",  # the bounds of a call: one statement for table and tree
    "tuning.matrix": "tuning.current runtime.table",
    "tuning.cover": "tuning.matrix",
    "tuning.tree": "runtime.table",
    "tuning.evidence": "tuning.matrix",
    "tuning.parts": "tuning.tree",
    "tuning.choose": "runtime.table tuning.cover tuning.evidence tuning.matrix tuning.parts tuning.regret tuning.relatives tuning.tree",
    "plan": "expand load runtime.arguments runtime.table tuning.tree",  # an Expansion and a Loaded are its input; rows are what the package reads
    "render": "load",  # a Loaded is its input
    "manifest": "expand plan runtime.installed",  # an Expansion is its input; the package's name; the format that the package reads
    "descriptors": "loops",
    "resources": "loops toolchain",
    "aot": "cache child ptx resources toolchain",
    "aot_worker": "child descriptors ptx resources toolchain",
    "wheel": "cache write",
    "verify": "wheel",  # the digest format of RECORD
    "provenance": "pipeline runtime.arguments runtime.table",
    "tune_compile": "pipeline",
    # init is one verb; the cache is made where its warning is printed
    "cli": "pipeline provenance bench.run bench.output tune_compile tune_measure tune_data hf cache write",
    "__main__": "cli",
}
MAX_LINES = 400
GENERATOR = sorted(path for path in PACKAGE.rglob("*.py") if "runtime" not in path.relative_to(PACKAGE).parts)
RUNTIME = sorted((PACKAGE / "runtime").rglob("*.py"))
TEMPLATES = sorted((ROOT / "templates").rglob("*.jinja"))
SOURCES = [*GENERATOR, *RUNTIME, *sorted((PACKAGE / "runtime").glob("*.[ch]")), *TEMPLATES]
# Libraries that a generated package may import; everything else would be a dependency that it does not declare.
PACKAGE_LIBRARIES = {"torch", "triton", "numpy", "pytest"}


def module(path: Path) -> str:
    """Dotted name inside specgen: "load", "tuning", "runtime.table"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module(path) for path in (*GENERATOR, *RUNTIME)}


def imports(path: Path) -> set[str]:
    """What a file imports, anywhere in it: modules of specgen as "specgen.load", of others by their top name."""
    package = ["specgen", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        found |= {
            _own(name.split(".")) if name.split(".")[0] == "specgen" else name.split(".")[0] for name in names
        }
    return found


def _own(parts: list[str]) -> str:
    """The module that "specgen.load.Loaded" or "specgen.load" is of; "specgen.__init__" for specgen's own names."""
    while len(parts) > 1 and ".".join(parts[1:]) not in MODULES:
        parts = parts[:-1]
    return ".".join(parts) if len(parts) > 1 else "specgen.__init__"


def layer_of(name: str) -> str:
    layers = [layer for layer, names in LAYERS.items() if name in names.split()]
    assert len(layers) == 1, f"specgen/{name.replace('.', '/')}.py stands in {layers or 'no layer'} of LAYERS"
    return layers[0]


def test_the_table_names_the_modules_that_exist():
    named = [name for names in LAYERS.values() for name in names.split()]
    assert sorted(named) == sorted(module(path) for path in GENERATOR)
    assert set(EXTRA) <= set(named)


@pytest.mark.parametrize("path", GENERATOR, ids=module)
def test_no_arrow_runs_back(path):
    name = module(path)
    allowed = set(LAYERS["noun"].split()) | set(EXTRA.get(name, "").split())
    if layer_of(name) == "composition":
        allowed |= set(LAYERS["verb"].split())
    used = {other.removeprefix("specgen.") for other in imports(path) if other.startswith("specgen.")} - {
        name
    }
    assert sorted(used - allowed) == []
    assert sorted(set(EXTRA.get(name, "").split()) - used) == [], "EXTRA lists an import that is gone"


def test_imports_make_no_circle():
    arrows = {f"specgen.{module(path)}": imports(path) for path in (*GENERATOR, *RUNTIME)}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(arrows[name] & arrows.keys() - {name}):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(arrows):
        visit(name, ())


@pytest.mark.parametrize("path", RUNTIME, ids=module)
def test_the_runtime_stands_alone(path):
    for name in imports(path):
        if name.startswith("specgen."):
            assert name.split(".")[1] == "runtime", f"{module(path)} imports {name}"
        else:
            assert name in PACKAGE_LIBRARIES or name in sys.stdlib_module_names or name == "__future__", name
    assert not re.search(
        r"^\s*(from|import) specgen", path.read_text(), re.MULTILINE
    ), "needs relative imports"


@pytest.mark.parametrize(
    "path", [path for path in (*GENERATOR, *RUNTIME) if module(path) != "cli"], ids=module
)
def test_only_the_command_line_prints(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert not (isinstance(node.func, ast.Name) and node.func.id == "print"), f"{path}:{node.lineno}"
            assert ast.unparse(node.func) not in (
                "sys.stdout.write",
                "sys.stderr.write",
            ), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", GENERATOR, ids=module)
def test_every_module_says_what_it_is(path):
    if module(path) != "__main__":
        assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.relative_to(ROOT / "templates").as_posix())
def test_templates_compute_nothing(path):
    """A template branches on named booleans: no arithmetic, no comparison, no test of a text."""
    tree = jinja2.Environment().parse(path.read_text())
    kinds = (nodes.BinExpr, nodes.Compare, nodes.CondExpr, nodes.Test, nodes.Concat)
    assert [f"{path.name}:{node.lineno}: {type(node).__name__}" for node in tree.find_all(kinds)] == []


def test_files_stay_small():
    long = {path.name: count for path in SOURCES if (count := len(path.read_text().splitlines())) > MAX_LINES}
    assert long == {}


def test_no_file_names_a_machine():
    machine = re.compile(r"(?<![\w.$~<])/(home|root|work|tmp|Users|mnt|scratch)/")
    others = [*sorted((ROOT / "specs").glob("*")), *sorted(PACKAGE.rglob("*.yaml"))]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*SOURCES, *others)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if machine.search(line)
    ]
    assert found == []
