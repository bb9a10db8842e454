"""Who may read what a sidecar writes: objects as the operator's umask has it, memory and local tier nobody else."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode

from toprope.chaos.live.processes import Process
from toprope.coordinator.wire import Cadence


def modes(directory: Path) -> dict[str, set[int]]:
    """Return the modes of the files and of the directories below a directory, itself included."""
    found: dict[str, set[int]] = {"files": set(), "directories": set()}
    for path in [directory, *directory.rglob("*")]:
        found["directories" if path.is_dir() else "files"].add(path.stat().st_mode & 0o777)
    return found


@pytest.mark.fault("B148")
@pytest.mark.parametrize(("umask", "file", "directory"), [("022", 0o644, 0o755), ("027", 0o640, 0o750)])
def test_objects_are_as_open_as_the_umask_says_and_all_else_is_private(
    umask: str, file: int, directory: int, nodes: MakeNode, stub: CoordinatorStub
) -> None:
    node = nodes()

    def launch(name: str, words: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Process:
        script = f'umask {umask}; exec "$@"'
        return Process(name, ["sh", "-c", script, "sh", sys.executable, "-m", "toprope", *words], log=log, env=env)

    node.launch = launch
    stub.change(cadence=Cadence(from_step=0, every=1, local_every=1, object_every=1))
    node.store.mkdir(parents=True)
    node.store.chmod(directory)
    node.start()
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        for step in (1, 2):
            trainer.snapshot(step)
            stub.wait_copy("a", "local", step)
            stub.wait_copy("a", "object", step)
            stub.keep(trainer.attempt_uid, step)
        assert modes(node.store) == {"files": {file}, "directories": {directory}}
        assert modes(node.memory / "job") == {"files": {0o600}, "directories": {0o700}}
        assert modes(node.local / "job") == {"files": {0o600}, "directories": {0o700}}
        assert node.socket.stat().st_mode & 0o777 == 0o600
