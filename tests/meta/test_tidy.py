"""Rules of the house that no linter knows, kept over the syntax trees of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.source import ROOT, all_files, dotted, shipped_files, tree_of

UNPICKLING = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
RUNS_WHAT_IT_READS = ("torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec", "numpy.load", "np.load")
COLLECTIVES_THAT_UNPICKLE = re.compile(r"(^|\.)((all_)?gather_object|(broadcast|scatter|send|recv)_object_list)$")

PROCESS_EDGES: dict[str, str] = {
    "chaos/live/forkserver.py::_become": "a forked rank: prints the traceback and ends with status 1",
    "chaos/sim/threads.py::_run": "a simulated thread: ends, and its error is left to who resumes it",
}
"""``file::function`` -> why it may catch every exception: the edge of a process or thread, which logs and ends it."""


MAY_UNPICKLE = Path("trainer_hooks/image/opaque.py")
"""For a trainer that said ``allow_pickle=True``; no service and no word of ``ckpt`` may import it."""
RUNS_THE_TRAINER = Path("trainer_hooks/torchrun/warm.py")
"""Runs the user's own training script, as ``python SCRIPT`` does, in a process that has torch loaded."""


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def dangers(tree: ast.Module) -> list[str]:
    """What in this code unpickles, or runs what it reads."""
    calls = [dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and not _loads_weights(node)]
    return [
        *(f"import {name}" for name in _imports(tree) if name.split(".")[0] in UNPICKLING),
        *(f"{name}()" for name in calls if name in RUNS_WHAT_IT_READS or COLLECTIVES_THAT_UNPICKLE.search(name)),
    ]


def _loads_weights(call: ast.Call) -> bool:
    """Say whether this is a ``torch.load`` that says in so many words that it takes tensors and plain values only."""
    said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return dotted(call.func) == "torch.load" and said.get("weights_only") == "True"


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    """Say whether this handler catches every exception and does not end by raising it again."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    catches_all = any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in kinds)
    return catches_all and not isinstance(handler.body[-1], ast.Raise)


def _broad_handlers(path: Path) -> Iterator[str]:
    """``file::function`` of each handler that swallows everything."""
    functions = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and swallows_everything(node):
                yield f"{path}::{function.name}"


def test_nothing_shipped_unpickles_or_runs_what_it_reads() -> None:
    found = [f"{path}: {danger}" for path in shipped_files() for danger in dangers(tree_of(path))]
    assert found == [f"{MAY_UNPICKLE}: import pickle", f"{RUNS_THE_TRAINER}: exec()"]


def test_only_the_state_of_a_trainer_is_ever_unpickled() -> None:
    opaque = "toprope.trainer_hooks.image.opaque"
    users = {str(path) for path in shipped_files() if opaque in set(_imports(tree_of(path)))}
    assert users == {f"trainer_hooks/{name}.py" for name in ("restore/apply", "dcp/content", "image/tree")}


def test_no_mock_is_used_anywhere() -> None:
    found = [f"{path}: {name}" for path in all_files() for name in _imports(tree_of(path)) if "mock" in name.split(".")]
    assert found == []


def test_only_process_edges_catch_every_exception() -> None:
    found = {place for path in shipped_files() for place in _broad_handlers(path)}
    assert found == set(PROCESS_EDGES), "name what can be caught, or enter the edge and its reason in PROCESS_EDGES"


def test_each_open_task_in_the_code_names_its_issue() -> None:
    marker = re.compile(r"#.*\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b(?!\(#\d+\))")
    found = [
        f"{path}:{number}"
        for path in all_files()
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1)
        if marker.search(line)
    ]
    assert found == []


SHARED_BY_THE_SERVICES = tuple(f"toprope.coordinator.{module}" for module in ("wire", "settings", "serving"))


def test_the_sidecar_knows_of_the_coordinator_only_its_wire_and_what_services_share() -> None:
    found = [
        f"{path}: {name}"
        for path in shipped_files()
        if path.parts[0] == "sidecar"
        for name in _imports(tree_of(path))
        if name.startswith("toprope.coordinator") and not name.startswith(SHARED_BY_THE_SERVICES)
    ]
    assert found == []


def test_package_init_files_import_nothing_of_ours() -> None:
    """Else ``toprope.store.names`` would load whatever its package gathers."""
    found = [
        f"{path}: {name}"
        for path in shipped_files()
        if path.name == "__init__.py" and "trainer_hooks" not in path.parts
        for name in _imports(tree_of(path))
        if name.startswith("toprope")
    ]
    assert found == []
