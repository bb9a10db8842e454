"""What the integration tests share: a warm process that forks ranks, and the uninterrupted run to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.training import Reference
from tests.support.trials import PERMIT, Try

from toprope.chaos.journal import Final, read_finals
from toprope.chaos.live.forking import ForkedServices, ForkServer, warm_for_services
from toprope.chaos.live.processes import become_subreaper
from toprope.chaos.live.ranks import World, warm_for_training
from toprope.chaos.progress import Progress
from toprope.chaos.running import Order, run
from toprope.chaos.scenario import Loaded
from toprope.chaos.stage import Stage
from toprope.chaos.verdict import Verdict


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    become_subreaper()
    with warm_for_training() as server:
        yield server


@pytest.fixture(scope="session")
def services() -> Iterator[ForkedServices]:
    with warm_for_services() as server:
        yield ForkedServices(server)


@pytest.fixture(scope="session")
def reference(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a function that runs a world without hooks and without interruption, once for each kind."""
    known: dict[tuple[int, tuple[str, ...]], tuple[Final, ...]] = {}

    def run(*, world: int, arguments: tuple[str, ...]) -> tuple[Final, ...]:
        if (world, arguments) not in known:
            directory: Path = tmp_path_factory.mktemp("reference")
            ranks = World(server=fork_server, directory=directory, arguments=(*arguments, "--no-hooks"), world=world)
            ranks.start()
            ranks.finish(timeout_s=300)
            known[world, arguments] = read_finals(ranks.out)
        return known[world, arguments]

    return run


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def attempt(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Return a function that plays a scenario, without a safeguard if one is named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def runs(loaded: Loaded, *, seed: int = 1, defect: str = "") -> Verdict:
        order = Order(loaded=loaded, seed=seed, permit=PERMIT, directory=tmp_path / "run", defect=defect)
        with Progress(Console(stderr=True)) as progress:
            return run(order, stage, progress)

    return runs
