"""A job in training on real services, to be hit, and what must be true of it in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.training import Reference

from toprope.chaos.journal import JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import LiveError, wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare, torn_restores

EVERY = 4
WORLD = 2
JOB = "kills"


def arguments(*, steps: int) -> tuple[str, ...]:
    """What the ranks are started with; the run to compare with is, too."""
    return ("--job", JOB, "--size", "tiny", "--steps", str(steps))


@dataclass(slots=True)
class Blow:
    """What was protected just before a kill, and the newest step that any rank had ended when all were dead."""

    protected_step: int
    newest_step: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A job in training on two nodes, a rank on each."""

    cluster: Cluster
    ranks: World
    journal: JournalReader
    steps: int

    def train_to(self, step: int) -> None:
        self.ranks.until(lambda: self.newest_step() >= step, what=f"step {step}")

    def finish(self) -> None:
        self.ranks.finish()
        self.journal.read()

    def restored(self) -> set[int]:
        """The steps that ranks have gone on from, 0 left out."""
        return {event.step for event in self.journal.events if event.event == "begin"} - {0}

    def before_a_blow(self) -> Blow:
        """Note what the coordinator says to be safe."""
        for _ in range(3):  # a busy machine may not answer in time
            desired = self.cluster.desired()
            if desired is not None:
                return Blow(protected_step=desired.protected_step)
        raise AssertionError("the coordinator does not answer")

    def newest_step(self) -> int:
        """The newest step that a rank has ended."""
        self.journal.read()
        return self.journal.newest_step()


@contextmanager
def job_in_training(  # noqa: PLR0913 - what a job is like
    directory: Path,
    server: ForkServer,
    services: ForkedServices,
    *,
    steps: int,
    delay_s: float = 0.0,
    standby: bool = False,
    cadences: Cadences | None = None,
) -> Iterator[Job]:
    cadences = cadences or Cadences(every=EVERY, local_every=EVERY, object_every=2 * EVERY)
    with running_cluster(directory, job=JOB, cadences=cadences, launch=services, standby=standby) as cluster:
        ranks = World(
            server=server,
            directory=directory / "ranks",
            arguments=(*arguments(steps=steps), "--step-delay", str(delay_s)),
            world=WORLD,
            cluster=cluster,
            placement=lambda rank: "ab"[rank],
        )
        ranks.start()
        try:
            yield Job(cluster, ranks, JournalReader(ranks.out), steps)
        finally:
            ranks.stop()


def assert_as_if_nothing_had_happened(job: Job, reference: Reference) -> None:
    expected = reference(world=WORLD, arguments=arguments(steps=job.steps))
    judgement = compare(read_finals(job.ranks.out), expected, world=WORLD)
    assert judgement.differences == ()
    assert judgement.identical
    assert torn_restores(job.journal.events) == ()


def assert_trained_through(job: Job) -> None:
    """No rank was started twice, and what was saved after the kill became READY."""
    assert job.ranks.starts == 1
    assert {event.pid for event in job.journal.events} == set(job.ranks.pids.values())
    assert_the_last_is_ready(job)


def assert_the_last_is_ready(job: Job) -> None:
    """The last step that is due for the object tier becomes READY."""
    last = job.steps - job.steps % (2 * EVERY)
    try:
        wait_until(lambda: ready_step(job.cluster) == last, what="the last one is READY", timeout_s=20)
    except LiveError as error:
        raise AssertionError(f"step {last} is not READY\n{job.cluster.describe()}") from error


def ready_step(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.ready_step
