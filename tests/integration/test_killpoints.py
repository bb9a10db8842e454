"""``kill -9`` before and after every port call from seal to READY: what was READY stays, and no half one shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from toprope.chaos.killpoints import FILE_VARIABLE, LOG_VARIABLE, arm, disarm, passed
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.forking import Forked, ForkedServices, ForkServer
from toprope.chaos.live.processes import LiveError, Running, wait_until
from toprope.store.log.chain import read_log
from toprope.store.log.fold import JobState
from toprope.store.look.verify import verify_checkpoint, verify_facts
from toprope.store.objects.directory import DirectoryStore

JOB = "points"
FIRE_TIMEOUT_S = 20.0
READY_TIMEOUT_S = 30.0
ROLES = ("trainer", "sidecar-a", "sidecar-b", "coordinator")
"""Node a has the trainer; node b holds its peer copies and reads its objects back."""

MUST_PASS = {
    "trainer": {"page.write", "slot.write", "socket.sealed"},
    "sidecar-a": {"pages.write", "disk.write", "disk.rename", "disk.sync_directory", "objects.create"},
    "sidecar-b": {"peers.receive", "peers.acknowledge", "pages.write", "objects.read"},
    "coordinator": {"store.create_manifest", "store.create_record"},
}
"""What the path from seal to READY is known to call; the clean run may find more, and must not find less."""


@dataclass(slots=True)
class Theatre:
    """A job in training, whose four processes can each be killed at a point."""

    directory: Path
    trainers: ForkServer
    cluster: Cluster
    processes: dict[str, Running] = field(default_factory=dict)

    def kill_file(self, role: str) -> Path:
        return self.directory / f"{role}.kill"

    def start(self, role: str) -> None:
        disarm(self.kill_file(role))
        points = self.directory / f"{role}.points"
        env = {FILE_VARIABLE: str(self.kill_file(role)), LOG_VARIABLE: str(points)}
        match role.partition("-"):
            case ("trainer", _, _):
                env |= {"CKPT_SOCKET": str(self.cluster.nodes["a"].socket)}
                path = self.directory / "logs" / "trainer.log"
                target = "tests.support.looping_trainer:main"
                self.processes[role] = Forked(role, self.trainers, target, [JOB], log=path, env=env)
            case ("sidecar", _, node):
                sidecar = self.cluster.start_sidecar(node, env=env).sidecar
                assert sidecar is not None
                self.processes[role] = sidecar
            case _:
                self.processes[role] = self.cluster.start_coordinator(env=env)

    def state(self) -> JobState:
        return read_log(DirectoryStore(self.cluster.store), JOB)

    def ready_steps(self) -> list[int]:
        """The steps that a reader of the store sees as READY, each of them read in full and verified."""
        store = DirectoryStore(self.cluster.store)
        state = read_log(store, JOB)
        reports = [verify_checkpoint(store, state, seq) for seq in state.live[-2:]]
        assert [damage for report in reports for damage in report.damages] == []
        assert verify_facts(store, state) == ()
        return [state.readies[seq].step for seq in state.live]

    def wait_for_a_new_ready(self, *, above: int, what: str) -> None:
        try:
            wait_until(lambda: len(self.state().live) > above, what="READY", timeout_s=READY_TIMEOUT_S)
        except LiveError as error:
            raise AssertionError(f"nothing new was READY {what}\n{self.cluster.describe()}") from error


@pytest.fixture(scope="module")
def theatre(
    tmp_path_factory: pytest.TempPathFactory, services: ForkedServices, fork_server: ForkServer
) -> Iterator[Theatre]:
    directory = tmp_path_factory.mktemp("killpoints")
    cadences = Cadences(every=2, local_every=4, object_every=4)
    with Cluster(directory=directory, job=JOB, cadences=cadences, launch=services) as cluster:
        cluster.start_broker()
        theatre = Theatre(directory, fork_server, cluster)
        for role in ("coordinator", "sidecar-a", "sidecar-b", "trainer"):
            theatre.start(role)
        yield theatre
        theatre.processes["trainer"].kill()


def points_of(theatre: Theatre, role: str, *, from_s: float, to_s: float) -> list[str]:
    noted = passed(theatre.directory / f"{role}.points")
    return sorted({point for at_s, point in noted if from_s <= at_s <= to_s})


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("occurrence", [1, *(pytest.param(again, marks=pytest.mark.long) for again in (2, 3))])
def test_each_kill_between_seal_and_ready_leaves_what_was_ready_and_nothing_half(
    occurrence: int, theatre: Theatre
) -> None:
    """The first time that a point is passed often is of another rank, tier or step than the second and third."""
    theatre.wait_for_a_new_ready(above=1, what="twice, so that all is warm")
    began_s = time.monotonic()
    theatre.wait_for_a_new_ready(above=len(theatre.state().live) + 1, what="once more, from a seal on")
    found = {role: points_of(theatre, role, from_s=began_s, to_s=time.monotonic()) for role in ROLES}
    for role, calls in MUST_PASS.items():
        assert {f"{when}:{call}" for call in calls for when in ("before", "after")} <= set(found[role]), role

    for role in ROLES:
        for point in found[role]:
            _strike(theatre, role, point, occurrence)


def _strike(theatre: Theatre, role: str, point: str, occurrence: int) -> None:
    """Arm a point, see the process die there, look at the store, restart it, see a new READY."""
    before = theatre.ready_steps()
    victim = theatre.processes[role]
    arm(theatre.kill_file(role), point, occurrence)
    try:
        wait_until(lambda: victim.status() is not None, what="it dies", timeout_s=FIRE_TIMEOUT_S)
    except LiveError as error:
        raise AssertionError(f"{role} did not die at {point}\n{theatre.cluster.describe()}") from error
    assert victim.status() == -9, f"{role} ended at {point} with {victim.status()}"

    after = theatre.ready_steps()
    assert after[: len(before)] == before, f"{role} {point}: what was READY is no longer"

    theatre.start(role)
    theatre.wait_for_a_new_ready(above=len(after), what=f"after {role} was killed at {point}")
