"""The project's own source, as the meta-tests read it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("store", "trainer_hooks", "coordinator", "sidecar", "chaos")
PROGRAMS = ("benchmarks", "examples", "scripts", "docs")


def shipped_files() -> list[Path]:
    """The Python files of the packages, relative to the root."""
    files = [*(ROOT / "src" / "toprope").glob("*.py"), *_python_files(PACKAGES)]
    return sorted(path.relative_to(ROOT) for path in files)


def all_files() -> list[Path]:
    """Every Python file of the project, relative to the root."""
    others = (path.relative_to(ROOT) for path in _python_files((*PROGRAMS, "tests")))
    return sorted([*shipped_files(), *others])


def modules(*packages: str) -> list[str]:
    """The dotted names of the modules in these packages (all when none is named), as Python sees them."""
    return [name for package in packages or PACKAGES for name, _ in _named(package)]


def _named(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        file = path.relative_to(ROOT)
        parts = file.with_suffix("").parts
        yield ".".join(("toprope", *(parts[:-1] if parts[-1] == "__init__" else parts))), file


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file given relative to the root."""
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def loaded_by(name: str) -> frozenset[str]:
    """The modules of ours that an import of this one loads, itself among them, as its text and theirs say."""
    found: set[str] = set()
    left = [name]
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            left += _imported_by(one)
    return frozenset(found)


@functools.cache
def _paths() -> dict[str, Path]:
    return {name: path for package in PACKAGES for name, path in _named(package)}


@functools.cache
def _imported_by(name: str) -> tuple[str, ...]:
    """The modules of ours that one imports while it is loaded: not those in its functions, nor those for types."""
    known, found = _paths(), [name.rpartition(".")[0]]
    left: list[ast.AST] = [tree_of(known[name])]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return tuple(one for one in found if one in known)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""


def _python_files(folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts)


def load_program(name: str) -> Any:  # noqa: ANN401 - a module whose names mypy doesn't know
    """The module in a file that belongs to no package, given relative to the root."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
