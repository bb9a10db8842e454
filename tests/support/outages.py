"""Outages of a job in training: what is away at once, for how long, and in which order it comes back."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.job_in_training import EVERY, JOB, WORLD, Blow, Job, arguments

from toprope.chaos.journal import JournalReader
from toprope.chaos.live.cluster import Cadences, Cluster, Launch
from toprope.chaos.live.detour import Detour, detour
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import Running
from toprope.chaos.live.ranks import World
from toprope.chaos.live.s3_server import running_s3

NODE = "b"
"""The node that is lost when one is."""
KINDS = ("coordinator", "broker", "store", "node")


@dataclass(slots=True, kw_only=True)
class Outages:
    """What is away now. ``way_to_store``: the proxy before the object store, without which it can't be away."""

    job: Job
    way_to_store: Detour | None = None
    away: list[str] = field(default_factory=list)

    def begin(self, kind: str) -> None:
        """Take one thing away; its processes must die of it."""
        cluster = self.job.cluster
        match kind:
            case "coordinator":
                assert cluster.coordinator is not None
                assert cluster.coordinator.kill().status == -9
            case "broker":
                assert cluster.broker is not None
                assert cluster.broker.kill().status == -9
            case "store":
                assert self.way_to_store is not None
                self.way_to_store.tell("cut")
            case _:
                assert kind == "node"
                assert self.job.ranks.kill(1) == -9
                assert {one.status for one in cluster.kill_node(NODE)} == {-9}
        self.away.append(kind)

    def end(self, kind: str) -> None:
        """Bring it back; a node comes back empty."""
        self.away.remove(kind)
        match kind:
            case "coordinator":
                self.job.cluster.start_coordinator()
            case "broker":
                self.job.cluster.start_broker()
            case "store":
                assert self.way_to_store is not None
                self.way_to_store.tell("pass")
            case _:
                self.job.cluster.start_sidecar(NODE)


def lost_steps(job: Job, blow: Blow) -> tuple[int, bool]:
    """Return how many steps were lost that a rank had ended, and whether the newest due one was protected."""
    pids = set(job.ranks.pids.values())
    job.journal.read()
    (began,) = {event.step for event in job.journal.events if event.event == "begin" and event.pid in pids}
    return blow.newest_step - began, blow.protected_step >= blow.newest_step - blow.newest_step % EVERY


@contextmanager
def job_with_a_bucket(  # noqa: PLR0913 - what a job is like
    directory: Path,
    server: ForkServer,
    services: ForkedServices,
    *,
    steps: int,
    delay_s: float,
    env: Mapping[str, str] | None = None,
    coordinator_words: tuple[str, ...] = (),
) -> Iterator[tuple[Job, Detour]]:
    """Yield a job in training whose object store is a bucket, and the proxy on the way to it.

    ``env`` is what sidecars find in their environment.
    """
    with ExitStack() as stack:
        s3 = stack.enter_context(running_s3(directory / "s3"))
        s3.make_bucket("checkpoints")
        way = stack.enter_context(detour(directory / "proxy", target=str(urlsplit(s3.endpoint).port)))
        root = s3.root("checkpoints", "team", endpoint=f"http://127.0.0.1:{way.port}")
        launch = functools.partial(_launched, services, s3.environment)
        cadences = Cadences(every=EVERY, local_every=EVERY, object_every=2 * EVERY)
        cluster = stack.enter_context(
            Cluster(
                directory=directory,
                job=JOB,
                cadences=cadences,
                launch=launch,
                root=root,
                coordinator_words=coordinator_words,
            )
        )
        cluster.start_broker()
        cluster.start_coordinator()
        for name in "ab":
            cluster.start_sidecar(name, env=env)
        ranks = World(
            server=server,
            directory=directory / "ranks",
            arguments=(*arguments(steps=steps), "--step-delay", str(delay_s)),
            world=WORLD,
            cluster=cluster,
            placement=lambda rank: "ab"[rank],
        )
        ranks.start()
        stack.callback(ranks.stop)
        yield Job(cluster, ranks, JournalReader(ranks.out), steps), way


def _launched(
    launch: Launch, more: Mapping[str, str], name: str, words: Sequence[str], *, log: Path, env: Mapping[str, str]
) -> Running:
    return launch(name, words, log=log, env={**more, **env})
