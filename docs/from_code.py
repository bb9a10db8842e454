"""What the reference pages take from the code. Cog runs these functions; each prints Markdown.

``make reference`` writes the pages anew, ``make docs`` fails when one is out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from toprope.__main__ import PROGRAMS

ROOT = Path(__file__).resolve().parents[1]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a Markdown table."""
    columns = list(head)
    print("|", " | ".join(columns), "|")
    print("|", " | ".join("---" for _ in columns), "|")
    for row in rows:
        print("|", " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row), "|")
    print()


def _prose(text: str | None) -> str:
    """Return a docstring for Markdown: reST's double backticks become single ones, its ``::`` a colon."""
    return re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text or "")).replace("::\n", ":\n")


def _first_paragraph(text: str | None) -> str:
    return " ".join(_prose(text).split("\n\n")[0].split())


# Errors ----------------------------------------------------------------------------------------------------------


def errors(module_name: str, root: str) -> None:
    """Print the tree of errors of a module: name, exit status, meaning."""
    rows = [
        (
            "&nbsp;" * 4 * depth + f"`{kind.__name__}`",
            str(getattr(kind, "exit_status", "")),
            _first_paragraph(kind.__doc__),
        )
        for depth, kind in tree_of_errors(module_name, root)
    ]
    table(("error", "exit status", "meaning"), rows)


def tree_of_errors(module_name: str, root: str) -> list[tuple[int, type[Any]]]:
    """Return the errors of a module that descend from ``root``, with their depth, in the order of a tree."""
    return [
        pair for pair in _tree(getattr(importlib.import_module(module_name), root)) if pair[1].__module__ == module_name
    ]


def _tree(kind: type[Any], depth: int = 0) -> Iterator[tuple[int, type[Any]]]:
    yield depth, kind
    for child in sorted(kind.__subclasses__(), key=lambda each: each.__name__):
        yield from _tree(child, depth + 1)


# Frames and documents --------------------------------------------------------------------------------------------


def frames() -> None:
    """Print each frame between hook and sidecar with its fields."""
    wire = importlib.import_module("toprope.trainer_hooks.link.wire")
    for kind in _classes(wire):
        if not dataclasses.is_dataclass(kind):
            continue
        fields = ((field.name, field.type) for field in dataclasses.fields(kind))
        _fields(getattr(kind, "kind", kind.__name__), kind, fields)
    print("Codes of `ERROR`:", ", ".join(f"`{code}`" for code in sorted(wire.ERROR_CODES)) + ".\n")


def documents(module_name: str) -> None:
    """Print each msgspec struct of a module with its fields."""
    module = importlib.import_module(module_name)
    for kind in _classes(module):
        if issubclass(kind, msgspec.Struct) and not kind.__name__.startswith("_"):
            annotations = inspect.get_annotations(kind)
            _fields(kind.__name__, kind, annotations.items())


def docstring(module_name: str) -> None:
    """Print a module's docstring after its first line."""
    print(_prose(_prose(importlib.import_module(module_name).__doc__).split("\n\n", 1)[1]) + "\n")


def _classes(module: types.ModuleType) -> Iterator[type[Any]]:
    return (value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__)


def _fields(title: str, kind: type, fields: Iterable[tuple[str, Any]]) -> None:
    print(f"### {title}\n")
    print(_prose(kind.__doc__) + "\n")
    listed = [f"`{name}: {annotation}`" for name, annotation in fields if "ClassVar" not in str(annotation)]
    if listed:
        print(", ".join(listed) + "\n")


# Command line ----------------------------------------------------------------------------------------------------


def commands() -> dict[str, TyperCommand]:
    """Return each word of ``ckpt`` with its command, but for those that need no typer."""
    found = {}
    for word, program in PROGRAMS.items():
        if program.function:
            continue
        command = typer.main.get_command(importlib.import_module(program.module).app)
        found[word] = command.commands[word] if isinstance(command, TyperGroup) else command
    return found  # type: ignore[return-value]  # typer declares the base class of what it makes


def cli() -> None:
    """Print each word of ``ckpt`` with its arguments and options."""
    for word, command in commands().items():
        _command(f"ckpt {word}", command, level=2)
        for name, below in command.commands.items() if isinstance(command, TyperGroup) else ():
            _command(f"ckpt {word} {name}", below, level=3)
    for word, program in PROGRAMS.items():
        if program.function:
            parser = getattr(importlib.import_module(program.module), f"{program.function}_parser")()
            print(f"## ckpt {word}\n")
            print(f"```text\n{parser.format_help().strip()}\n```\n")


def _command(name: str, command: Any, *, level: int) -> None:  # noqa: ANN401 - typer declares the base class of what it makes
    context = typer.Context(command, info_name=name)
    print(f"{'#' * level} {name}\n")
    print("```text\n" + " ".join(command.get_usage(context).split()) + "\n```\n")
    print(_prose((command.help or "").replace("\b", "")) + "\n")
    rows = [_parameter(each, context) for each in command.params if not getattr(each, "hidden", False)]
    if rows:
        table(("", "meaning"), rows)


def _parameter(parameter: Any, context: typer.Context) -> tuple[str, str]:  # noqa: ANN401 - typer names no public type
    name, text = parameter.get_help_record(context) or (parameter.name, "")
    return f"`{' '.join(name.split())}`", " ".join(text.split())


# Metrics ---------------------------------------------------------------------------------------------------------


def metrics(module_name: str) -> None:
    """Print each metric that a module declares."""
    rows = sorted(declared_metrics(module_name))
    table(("metric", "kind", "labels", "meaning"), rows)


def declared_metrics(module_name: str) -> list[tuple[str, str, str, str]]:
    """Return name, kind, labels and meaning of each metric in the registry that a module declares."""
    module = importlib.import_module(module_name)
    registry = module.REGISTRY if hasattr(module, "REGISTRY") else module.Metrics().registry
    rows = []
    for metric in registry._collector_to_names:  # noqa: SLF001 - the library shows labels in no public way
        name = f"`{metric._name}{'_total' if metric._type == 'counter' else ''}`"  # noqa: SLF001
        rows.append((name, metric._type, ", ".join(metric._labelnames), metric._documentation))  # noqa: SLF001
    return rows


# Faults ----------------------------------------------------------------------------------------------------------


def known_faults() -> dict[str, str]:
    """Return the scenarios of the fault list: id and title."""
    lines = (ROOT / "docs" / "faults.txt").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


def excused_faults() -> dict[str, str]:
    """Return, for each fault id that no test covers in full, the written reason."""
    lines = (ROOT / "docs" / "faults_without_test.txt").read_text().splitlines()
    return dict(line.split(" | ", 1) for line in lines)


def covered_faults() -> dict[str, list[str]]:
    """Return, for each fault id that a test is marked with, the tests."""
    covered: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for fault in _marks(node.decorator_list):
                    covered.setdefault(fault, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return covered


def _marks(decorators: list[ast.expr]) -> Iterator[str]:
    for call in decorators:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "fault":
            yield from (str(argument.value) for argument in call.args if isinstance(argument, ast.Constant))


def faults() -> None:
    """Print the fault list with the tests that cover each, or the reason why none does."""
    covered, excused, known = covered_faults(), excused_faults(), known_faults()
    print(f"{len(covered)} of {len(known)} have a test.\n")
    rows = [
        (fault, title, "<br>".join(f"`{test}`" for test in covered.get(fault, [])), excused.get(fault, ""))
        for fault, title in known.items()
    ]
    table(("id", "fault", "covered by", "why no test covers it in full"), rows)


# Chaos -----------------------------------------------------------------------------------------------------------


def scenarios() -> None:
    """Print each shipped scenario: what is done, when, and the promises that it attacks."""
    scenario = importlib.import_module("toprope.chaos.scenario")
    rows = []
    for name in scenario.shipped():
        one = scenario.load(name).scenario
        faults = "<br>".join(f"{fault.trigger}: {fault.do} {fault.target}" for fault in one.fault)
        rows.append((f"`{name}`", one.about, faults, ", ".join(one.attacks)))
    table(("scenario", "what happens", "when: fault", "attacks"), rows)


def chaos_promises() -> None:
    """Print each promise that is judged after a run."""
    table(("promise", "what must hold"), importlib.import_module("toprope.chaos.promises").PROMISES.items())


def chaos_faults() -> None:
    """Print each kind of fault."""
    kinds = importlib.import_module("toprope.chaos.faults.kinds").KINDS
    table(("do", "what it does"), ((f"`{name}`", _prose(kind.__doc__)) for name, kind in kinds.items()))


def chaos_phases() -> None:
    """Print each phase that a fault can come in."""
    phases = importlib.import_module("toprope.chaos.phases").PHASES
    table(("during", "of"), ((f"`{name}`", f"a {kind}") for name, (kind, _) in phases.items()))


def chaos_defects() -> None:
    """Print each safeguard that a run can be without."""
    defects = importlib.import_module("toprope.chaos.defects").DEFECTS
    rows = ((f"`{name}`", one.safeguard, one.role, one.promise) for name, one in defects.items())
    table(("defect", "the safeguard that is left out", "of the", "must be found broken"), rows)


def chaos_file() -> None:
    """Print the parts of a scenario's file."""
    scenario = importlib.import_module("toprope.chaos.scenario")
    for kind in (
        scenario.Scenario,
        scenario.Fault,
        scenario.Topology,
        scenario.Workload,
        scenario.Bounds,
        scenario.Expected,
    ):
        _fields(kind.__name__, kind, inspect.get_annotations(kind).items())
