"""A coordinator that a test holds in its hand, and nodes of real sidecars before it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.coordinator_stub import CoordinatorStub, coordinator_stub
from tests.support.sidecar_node import MakeNode, Node

from toprope.chaos.live.forking import ForkedServices, ForkServer


@pytest.fixture(scope="session")
def sidecars() -> Iterator[ForkedServices]:
    with ForkServer("toprope.sidecar.cli", "toprope.chaos.killpoints") as server:
        yield ForkedServices(server)


@pytest.fixture
def stub() -> Iterator[CoordinatorStub]:
    with coordinator_stub() as found:
        yield found


@pytest.fixture
def nodes(tmp_path: Path, memory_dir: Path, stub: CoordinatorStub, sidecars: ForkedServices) -> Iterator[MakeNode]:
    """Return a function that makes a node; each that still runs is ended."""
    made: list[Node] = []

    def make(name: str = "a") -> Node:
        made.append(Node(name, tmp_path, memory_dir, stub, sidecars))
        return made[-1]

    yield make
    for node in made:
        if node.process is not None:
            node.process.kill()
        if node.log.exists():
            sys.stderr.write(f"--- log of {node.name}\n{node.log.read_text()}")


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 1 MiB."""
    directory = tmp_path / "tmpfs"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("may not mount a tmpfs here")
    assert subprocess.run(["mountpoint", "-q", str(directory)], check=False).returncode == 0
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)
