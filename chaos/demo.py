"""The demo: a training job loses a node in the middle and goes on, bit for bit as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import msgspec

from toprope.chaos.journal import Event, Final, JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.processes import Killed, LiveError, Process, become_subreaper, tail
from toprope.chaos.live.s3_server import running_s3
from toprope.chaos.live.training import Training, example_script, start_agent, start_alone, start_rendezvous
from toprope.chaos.progress import Progress
from toprope.chaos.report import Evidence, KilledProcess, Member, Report, build
from toprope.coordinator.wire import AttemptView, Desired
from toprope.store.look.show import read_job, record_lines
from toprope.store.objects.opening import open_store

JOB = "demo"
BUCKET = "toprope-demo"
NODES = ("a", "b")
RANKS = 2
WORLD = len(NODES) * RANKS
VICTIM = "b"
_POLL_S = 0.01
_TRAIN_TIMEOUT_S = 150.0
_ERROR_CHARS = 54  # what is left of 80 columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the demo does. ``kill_step``: the node is killed as soon as a rank has ended this step."""

    steps: int
    seed: int
    every: int = 4
    step_delay_s: float = 0.1
    spoil: str = ""
    size: str = "small"
    store: str = "directory"

    @property
    def kill_step(self) -> int:
        """A step in the middle third, drawn from the seed.

        The newest due step before it is one that does not go to the object store: what is shown is a peer's memory.
        """
        middle = range(self.steps // 3, 2 * self.steps // 3 + 1)
        return random.Random(self.seed).choice([step for step in middle if step // self.every % 2 == 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blow:
    """The kill: what was true just before it, and what it killed."""

    at_s: float
    at_utc: str
    took_s: float
    killed: list[Killed]
    before: Desired
    boot_id: str


Reference: TypeAlias = Callable[[Plan, Path, Progress], tuple[Final, ...]]
"""Trains as planned, uninterrupted and without Toprope, and returns the final state."""


def run_without_loss(plan: Plan, directory: Path, progress: Progress) -> tuple[Final, ...]:
    """Train under one torchrun agent."""
    progress.say("the same training again, undisturbed and without Toprope")
    out = directory / "reference"
    agent = start_alone(_training(plan, out, hooks=False), log=directory / "logs" / "reference.log")
    reader = JournalReader(out)
    try:
        watch = _Watch(None, reader, progress, steps=plan.steps)
        watch.until(lambda: _ended(reader.events) == WORLD, what="the end of the reference run", alive=[agent])
        agent.wait(30)
    finally:
        if agent.status() is None:
            agent.stop()
    return read_finals(out)


def run(plan: Plan, directory: Path, progress: Progress, *, reference: Reference = run_without_loss) -> Report:
    """Run the job with the loss of a node, run it again without, and return the report.

    Raises:
        LiveError: a process died that should not have, or something took far too long.
    """
    become_subreaper()
    with _object_store(plan, directory, progress) as root:
        evidence = _run_with_loss(plan, directory, root, progress)
    evidence = msgspec.structs.replace(evidence, reference=reference(plan, directory, progress))
    return build(evidence)


@contextlib.contextmanager
def _object_store(plan: Plan, directory: Path, progress: Progress) -> Iterator[str]:
    """Yield the root of an empty object store: a directory, or a bucket on a server that is started for it."""
    if plan.store == "directory":
        (directory / "store").mkdir(parents=True)
        yield str(directory / "store")
        return
    progress.say("starting an S3 server (SeaweedFS) on loopback, and making a bucket")
    with running_s3(directory / "s3") as server:
        server.make_bucket(BUCKET)
        os.environ.update(server.environment)  # of this process, whose children are the services
        yield server.root(BUCKET)


def _run_with_loss(plan: Plan, directory: Path, root: str, progress: Progress) -> Evidence:
    out = directory / "run"
    reader = JournalReader(out)
    with Cluster(directory=directory, job=JOB, cadences=_cadences(plan), root=root) as cluster:
        progress.say("starting broker, coordinator, sidecars of nodes a and b, rendezvous store")
        cluster.start_broker()
        cluster.start_coordinator()
        for name in NODES:
            cluster.start_sidecar(name)
        rendezvous, port = start_rendezvous(cluster)
        try:
            progress.say(f"starting torchrun on both nodes, {RANKS} ranks each; {plan.steps} steps to train")
            training = _training(plan, out)
            agents = [start_agent(cluster, cluster.nodes[name], training, rendezvous_port=port) for name in NODES]
            watch = _Watch(cluster, reader, progress, steps=plan.steps)
            watch.until(lambda: reader.newest_step() >= plan.kill_step, what=f"step {plan.kill_step}", alive=agents)
            blow = _strike(cluster, progress, step=plan.kill_step)
            node = cluster.start_sidecar(VICTIM)
            progress.say(f"a fresh node takes the place of {VICTIM}: boot id {node.boot_id[:12]}")
            start_agent(cluster, node, training, rendezvous_port=port)
            agents = [agent for node in cluster.nodes.values() if (agent := node.agent) is not None]
            watch.until(lambda: _ended(reader.events) == WORLD, what="the last step", alive=agents)
            for agent in agents:
                agent.wait(30)
            after = _attempt(cluster)
            boot_id_new = node.boot_id
        finally:
            rendezvous.stop()
    progress.say("trained to the end; services stopped")
    evidence = _evidence(plan, blow, after=after, boot_id_new=boot_id_new, events=reader.events, directory=directory)
    return msgspec.structs.replace(evidence, log=job_log(root))


def _cadences(plan: Plan) -> Cadences:
    return Cadences(every=plan.every, local_every=2 * plan.every, object_every=2 * plan.every)


def trained(plan: Plan) -> tuple[str, ...]:
    """Return the arguments of the training script that its result depends on."""
    return ("--job", JOB, "--steps", str(plan.steps), "--seed", str(plan.seed), "--size", plan.size)


def _training(plan: Plan, out: Path, *, hooks: bool = True) -> Training:
    arguments = [*trained(plan), "--out", str(out)]
    arguments += ["--step-delay", str(plan.step_delay_s if hooks else 0)]
    spoiled = ("-m", "toprope.chaos.spoil", plan.spoil) if plan.spoil and hooks else ()
    return Training(
        script=example_script(),
        arguments=tuple(arguments if hooks else [*arguments, "--no-hooks"]),
        nodes=len(NODES),
        ranks=RANKS,
        runner=spoiled,
    )


def _strike(cluster: Cluster, progress: Progress, *, step: int) -> _Blow:
    before = cluster.desired()
    if before is None or before.attempt is None:
        raise LiveError("the coordinator knows of no attempt although its ranks train")
    boot_id = cluster.nodes[VICTIM].boot_id
    at_utc = datetime.now(UTC).strftime("%H:%M:%S.%f")[:-3] + " UTC"
    at_s = time.monotonic()
    killed = cluster.kill_node(VICTIM)
    took_s = time.monotonic() - at_s
    progress.say(f"step {step}: killed node {VICTIM} ({len(killed)} processes), erased its memory and disk", alarm=True)
    return _Blow(at_s=at_s, at_utc=at_utc, took_s=took_s, killed=killed, before=before, boot_id=boot_id)


@dataclass(slots=True)
class _Watch:
    """Follows the ranks' journals and shows where they are."""

    cluster: Cluster | None
    reader: JournalReader
    progress: Progress
    steps: int
    _asked_s: float = 0.0
    _safe: str = ""

    def until(self, done: Callable[[], bool], *, what: str, alive: list[Process]) -> None:
        """Return when ``done()``; raise LiveError when an agent fails before, or after far too long."""
        deadline = time.monotonic() + _TRAIN_TIMEOUT_S
        while not done():
            for event in self.reader.read():
                self._tell(event)
            self.progress.show(f"step {self.reader.newest_step()} of {self.steps}{self._safety()}")
            for agent in alive:
                status = agent.status()
                if status:
                    raise LiveError(f"{agent.name} ended with status {status} before {what}{tail(agent)}")
            if time.monotonic() > deadline:
                raise LiveError(f"{what} did not come within {_TRAIN_TIMEOUT_S:.0f} s{tail(alive[0])}")
            time.sleep(_POLL_S)

    def _tell(self, event: Event) -> None:
        if event.event == "begin":
            how = f"restored step {event.step} and goes on" if event.step else "begins"
            self.progress.say(f"rank {event.rank} {how}")
        elif event.event == "failed":
            self.progress.say(f"rank {event.rank} noticed: {first_words(event.error)}", alarm=True)

    def _safety(self) -> str:
        """Return what the coordinator knows to be safe, asked twice a second."""
        if self.cluster is not None and time.monotonic() - self._asked_s > 0.5:  # noqa: PLR2004 - see above
            self._asked_s = time.monotonic()
            desired = self.cluster.desired()
            if desired is not None:
                self._safe = f", protected: {_step(desired.protected_step)}, READY: {_step(desired.ready_step)}"
        return self._safe


def first_words(error: str) -> str:
    """Return the beginning of an error, without the place in a library's source, so that it fits in a line."""
    return re.sub(r"\[/\S+\] ?", "", " ".join(error.split()))[:_ERROR_CHARS]


def _step(step: int) -> str:
    return f"step {step}" if step else "nothing yet"


def _ended(events: list[Event]) -> int:
    return len({event.rank for event in events if event.event == "end"})


def _attempt(cluster: Cluster) -> AttemptView:
    desired = cluster.desired()
    if desired is None or desired.attempt is None:
        raise LiveError("the coordinator does not answer after the last step")
    return desired.attempt


def _evidence(
    plan: Plan, blow: _Blow, *, after: AttemptView, boot_id_new: str, events: list[Event], directory: Path
) -> Evidence:
    before = blow.before.attempt
    assert before is not None
    return Evidence(
        job=JOB,
        steps=plan.steps,
        seed=plan.seed,
        every=plan.every,
        world=WORLD,
        node=VICTIM,
        killed=tuple(KilledProcess(what=one.what, pid=one.pid, status=one.status) for one in blow.killed),
        killed_at_s=blow.at_s,
        killed_at_utc=blow.at_utc,
        kill_took_s=blow.took_s,
        boot_id_old=blow.boot_id,
        boot_id_new=boot_id_new,
        world_before=_members(before),
        world_after=_members(after),
        due_from=blow.before.cadence.from_step,
        protected_at_kill=blow.before.protected_step,
        events=tuple(events),
        log=(),
        finals=read_finals(directory / "run"),
        reference=(),
    )


def _members(attempt: AttemptView) -> tuple[Member, ...]:
    return tuple(Member(rank=place.rank, node=place.node, boot_id=place.boot_id) for place in attempt.world)


def job_log(root: str) -> tuple[str, ...]:
    """Return one line for each record of the job's log, in the words of ``ckpt show``."""
    log = read_job(open_store(root), JOB)
    return tuple(f"{line.number:>3} {line.kind:<8} {line.what}" for line in record_lines(log.entries))
