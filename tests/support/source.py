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
    found = []
    for package in packages or PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(("toprope", *(parts[:-1] if parts[-1] == "__init__" else parts))))
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file given relative to the root."""
    return ast.parse((ROOT / path).read_text(), filename=str(path))


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
