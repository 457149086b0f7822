"""Format generated Python with the pinned black, and check that it parses and names only what it defines."""

import ast
import builtins

import black

from specgen.errors import BuildError

MODE = black.Mode(target_versions={black.TargetVersion.PY311}, line_length=120, magic_trailing_comma=False)
# All that decides the formatted text: part of its cache key.
FORMATTER = f"black {black.__version__} {MODE.get_cache_key()}"


def format_source(path: str, source: str) -> str:
    """Formatted `source`. A template that renders invalid Python, or a name that nothing defines, is a BuildError."""
    try:
        formatted = black.format_str(source, mode=MODE)
        tree = ast.parse(formatted)
    except (black.InvalidInput, SyntaxError) as error:
        raise BuildError(f"{path}: the template rendered invalid Python: {error}") from error
    if unknown := _unknown_names(tree):
        raise BuildError(f"{path}: the template rendered names that nothing defines: {', '.join(unknown)}")
    return formatted


def _unknown_names(tree: ast.Module) -> list[str]:
    defined = set(dir(builtins)) | {"__file__", "__name__"}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return sorted(used - defined)
