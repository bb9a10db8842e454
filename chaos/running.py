"""Runs a scenario: real services, real ranks, faults when their time has come; then it is judged from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from toprope.chaos import gathering
from toprope.chaos.evidence import Evidence, Protection, Restart
from toprope.chaos.faults.kinds import check
from toprope.chaos.hits import costs_slots
from toprope.chaos.journal import Event, JournalReader, read_finals
from toprope.chaos.judging import judge
from toprope.chaos.live.agents import Agents
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.processes import LiveError, descendants
from toprope.chaos.live.ranks import World
from toprope.chaos.live.training import Training
from toprope.chaos.oracle import step_to_become_ready
from toprope.chaos.permit import Permit
from toprope.chaos.planned import Planned, Recurring
from toprope.chaos.progress import Progress
from toprope.chaos.scenario import Loaded
from toprope.chaos.site import Site
from toprope.chaos.stage import WATCH, Stage, script_of, watched
from toprope.chaos.usage import Usage
from toprope.chaos.verdict import Injection, Verdict

BUCKET = "toprope-chaos"
_POLL_S = 0.01
_ASK_S = 0.2
_USED_S = 2.0
_STILL_S = 150.0
"""A job in which nothing happens for so long has hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be run, in an empty directory. ``defect``: the safeguard that the processes are to lack."""

    loaded: Loaded
    seed: int
    permit: Permit
    directory: Path
    defect: str = ""

    @property
    def job(self) -> str:
        """The name of the job: what is broken on purpose is called so."""
        return f"chaos-{self.loaded.scenario.name}"


def run(order: Order, stage: Stage, progress: Progress) -> Verdict:
    """Run it and return the verdict.

    Raises:
        UsageError: it may not be done here, or the scenario can't be used; nothing was touched.
        LiveError: the services did not come up, or the undisturbed run failed.
    """
    scenario = order.loaded.scenario
    order.permit.check(order.job)
    check(scenario)
    progress.say(f"{scenario.name}, seed {order.seed}: {scenario.about}")
    reference = stage.reference(order.loaded, order.job, order.seed, order.directory / "reference")
    progress.say("the undisturbed run is done; starting broker, coordinator and sidecars")
    with _site(order, stage) as (site, root):
        before = descendants(os.getpid())
        course = Course(site, progress)
        evidence = course.run()
        orphans = (*gathering.end_orphans(before), *gathering.files_left(site))
        evidence = _with_store(evidence, root, order.job)
    evidence = msgspec.structs.replace(evidence, reference=reference, leftovers=orphans)
    return judge(evidence, stopped=course.stopped)


def _with_store(evidence: Evidence, root: str, job: str) -> Evidence:
    log, trouble = gathering.log_lines(root, job)
    count, damages = (0, ()) if trouble else gathering.verified(root, job)
    return msgspec.structs.replace(
        evidence,
        readies=gathering.readies(root, job),
        log=log,
        log_trouble=trouble,
        verified=count,
        damages=damages,
    )


@contextlib.contextmanager
def _site(order: Order, stage: Stage) -> Iterator[tuple[Site, str]]:
    """Yield a site on which nothing runs yet, and the root by which judges reach its store; at the end nothing runs."""
    scenario = order.loaded.scenario
    topology = scenario.topology
    cadences = Cadences(every=topology.every, local_every=topology.local_every, object_every=topology.object_every)
    with contextlib.ExitStack() as stack:
        cluster = Cluster(
            directory=order.directory,
            job=order.job,
            cadences=cadences,
            launch=stage.launch,
            coordinator_words=topology.coordinator,
            memory_mib=topology.memory_mib,
            disk_mib=topology.disk_mib,
        )
        site = Site(
            scenario=scenario,
            job=order.job,
            seed=order.seed,
            directory=order.directory,
            cluster=cluster,
            services=stage.services,
            chance=random.Random(order.seed),
            defect=order.defect,
        )
        stack.callback(site.stop_left)
        stack.enter_context(cluster)
        root = stack.enter_context(_store(site))
        links = {fault.target for fault in scenario.fault if fault.do == "network"}
        if "broker" in links:
            cluster.broker_detour = site.proxy("broker", target_port=cluster.broker_port)
        site.world = _agents(order, site) if topology.launcher == "torchrun" else _world(order, site, stage)
        site.journal = JournalReader(site.world.out)
        stack.callback(site.world.stop)
        yield site, root


def _world(order: Order, site: Site, stage: Stage) -> World:
    """Return the ranks as this program starts them."""
    topology = site.scenario.topology
    return World(
        server=stage.trainers,
        directory=order.directory / "ranks",
        arguments=watched(order.loaded, order.job, order.seed, order.directory / "ranks" / "run"),
        world=topology.world,
        cluster=site.cluster,
        placement=topology.node_of,
        target=WATCH,
        env=lambda rank: site.env(f"rank {rank}"),
        tells_out=False,
    )


def _agents(order: Order, site: Site) -> Agents:
    """Return the ranks as torchrun starts them; those of a node do what the first of them is told at its points."""
    topology = site.scenario.topology
    out, script = order.directory / "ranks" / "run", script_of(order.loaded)
    words = watched(order.loaded, order.job, order.seed, out)
    at = words.index(str(script))
    runner = ("-m", WATCH.partition(":")[0], *words[:at])
    return Agents(
        cluster=site.cluster,
        out=out,
        training=Training(
            script=script,
            arguments=words[at + 1 :],
            nodes=len(topology.nodes),
            ranks=topology.ranks,
            runner=runner,
        ),
        is_down=lambda name: not site.down.isdisjoint({f"agent {name}", f"node {name}"}),
        env=lambda name: site.env(f"rank {topology.nodes.index(name) * topology.ranks}"),
    )


@contextlib.contextmanager
def _store(site: Site) -> Iterator[str]:
    """Let the cluster use the store that the scenario asks for, through a proxy if its link is to be broken."""
    if site.scenario.topology.store == "directory":
        yield site.cluster.root
        return
    from toprope.chaos.live.s3_server import running_s3  # noqa: PLC0415 - it loads botocore, which most runs do not need

    with running_s3(site.directory / "s3") as server, _environment(server.environment):
        server.make_bucket(BUCKET)
        port = site.proxy("store", target_port=int(server.endpoint.rpartition(":")[2]))
        near = dataclasses.replace(server, endpoint=f"http://127.0.0.1:{port}")
        site.more_env = dict(server.environment)
        site.cluster.root = near.root(BUCKET)
        yield server.root(BUCKET)


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Let this process, which reads the store back in the end, have this environment too."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(slots=True)
class Course:
    """The course of one run: launcher, faults, and notes of what happened."""

    site: Site
    progress: Progress
    restarts: list[Restart] = field(default_factory=list)
    stopped: str = ""
    protected_step: int = 0
    ready_step: int = 0
    due_from: int = 0
    _faults: list[Planned | Recurring] = field(default_factory=list)
    _down: Restart | None = None
    _asked_s: float = 0.0
    _used_s: float = 0.0
    _alive_s: float = 0.0
    _told: int = 0
    _started: set[int] = field(default_factory=set)
    """The ranks that a launcher of its own has started this time."""
    _protections: list[Protection] = field(default_factory=list)
    _usage: Usage = field(default_factory=Usage)
    _ready_after_s: float = -1.0

    def run(self) -> Evidence:
        """Train to the end, or until it can't go on; end all that runs."""
        site = self.site
        try:
            site.start_all()
            self._faults = [self._planned(number) for number in range(len(site.scenario.fault))]
            site.world.start()
            self._alive_s = time.monotonic()
            while not self._turn():
                time.sleep(_POLL_S)
            self._mend()
            self._wait_for_ready()
        except LiveError as error:
            self.stopped = str(error)
            self.progress.say(self.stopped, alarm=True)
            self._mend()
        site.journal.read()
        self._usage.look(site.service_pids(), now_s=site.now_s(), is_ready=self.ready_step > 0)
        site.world.stop()
        site.cluster.stop()
        site.stop_left()
        return self._evidence()

    def _planned(self, number: int) -> Planned | Recurring:
        fault = self.site.scenario.fault[number]
        if fault.mtbf_s is not None:
            return Recurring(self.site, fault, self._tell, random.Random(f"{self.site.seed} {number}"))
        return Planned(self.site, fault.drawn(self.site.chance), self._tell)

    def _tell(self, text: str) -> None:
        self.progress.say(text, alarm=True)

    def _turn(self) -> bool:
        """Do what is to be done now; say whether all ranks have ended well."""
        site = self.site
        self._look()
        statuses = site.world.statuses() if self._down is None else {}
        failed = {rank: status for rank, status in statuses.items() if status != 0}
        if failed:
            self._fell(failed)
        elif self._down is not None and site.nodes_are_there():
            self._start_again()
        elif self._down is None and len(statuses) == site.world.world:
            return True
        for fault in self._faults:
            fault.turn()
        if time.monotonic() - self._alive_s > _STILL_S:
            raise LiveError(f"no rank has written a line for {_STILL_S:.0f} s\n{site.cluster.describe()}")
        return False

    def _look(self) -> None:
        """Read the journals, and ask what is safe, some times a second."""
        site = self.site
        newest = site.newest_step()
        for event in site.journal.events[self._told :]:
            self._alive_s = time.monotonic()
            if event.event == "start" and site.world.restarts_itself:
                self.was_started(event, newest=newest)
            if event.event == "begin":
                self.protected_step = event.step  # what ranks begin from is kept until a later step is protected
                how = f"goes on from step {event.step}" if event.step else "begins"
                self.progress.say(f"rank {event.rank} {how}")
        self._told = len(site.journal.events)
        self.progress.show(f"step {newest} of {site.scenario.workload.steps}, protected {self.protected_step}")
        if time.monotonic() - self._asked_s > _ASK_S:
            self._asked_s = time.monotonic()
            self._ask()

    def _ask(self) -> None:
        desired = self.site.cluster.desired()
        if desired is None:
            return
        if not self._protections or desired.protected_step != self._protections[-1].step:
            self._protections.append(Protection(at_s=time.monotonic(), step=desired.protected_step))
        # a coordinator that has just come knows of nothing yet; what was protected in this launch is kept all the same
        self.protected_step = max(self.protected_step, desired.protected_step)
        self.ready_step = desired.ready_step
        self.site.hear_ready(desired)
        self.due_from = desired.cadence.from_step
        if self.ready_step and time.monotonic() - self._used_s > _USED_S:
            self._used_s = time.monotonic()
            self._usage.look(self.site.service_pids(), now_s=self.site.now_s(), is_ready=True)

    def was_started(self, event: Event, *, newest: int) -> None:
        """Note that the launcher has started a rank; with a rank that was there before all start again."""
        if event.rank in self._started:
            self._started.clear()
            restart = Restart(
                at_s=event.monotonic_s, newest_step=newest, protected_step=self.protected_step, ended={}, pids=()
            )
            self.restarts.append(restart)
        self._started.add(event.rank)
        if self.restarts:
            self.restarts[-1] = msgspec.structs.replace(self.restarts[-1], pids=(*self.restarts[-1].pids, event.pid))

    def _fell(self, failed: dict[int, int]) -> None:
        at_s = time.monotonic()
        self.site.world.stop()
        newest = self.site.newest_step()
        self._down = Restart(at_s=at_s, newest_step=newest, protected_step=self.protected_step, ended=failed, pids=())
        self._tell(f"ranks ended at step {newest}: {failed}; all start again")

    def _start_again(self) -> None:
        assert self._down is not None
        self.site.world.start()
        if not self.site.world.restarts_itself:  # else it is noted when ranks say that they were started
            pids = tuple(self.site.world.pids.values())
            self.restarts.append(msgspec.structs.replace(self._down, pids=pids))
        self._down = None

    def _mend(self) -> None:
        for fault in self._faults:
            for one in fault.come if isinstance(fault, Recurring) else [fault]:
                with contextlib.suppress(LiveError):
                    one.mend()

    def _due(self) -> int:
        """Return the newest step that must become READY."""
        topology, steps = self.site.scenario.topology, self.site.scenario.workload.steps
        due = range(self.due_from + topology.object_every, steps + 1, topology.object_every)
        mended_s = max((max(one.at_s, one.until_s) for one in self._injections() if costs_slots(one)), default=0.0)
        mended_s += self.site.began_s
        return step_to_become_ready(self.site.journal.events, due, world=topology.world, mended_s=mended_s)

    def _wait_for_ready(self) -> None:
        began_s, due = time.monotonic(), self._due()
        while time.monotonic() - began_s < self.site.scenario.bounds.ready_s:
            self._ask()
            if self.ready_step >= due:
                self._ready_after_s = time.monotonic() - began_s
                return
            time.sleep(_POLL_S * 5)

    def _evidence(self) -> Evidence:
        site = self.site
        return Evidence(
            scenario=site.scenario,
            seed=site.seed,
            began_s=site.began_s,
            seconds=site.now_s(),
            events=tuple(site.journal.events),
            finals=read_finals(site.world.out),
            injections=self._injections(),
            restarts=tuple(self.restarts),
            protections=tuple(self._protections),
            told_ready=dict(site.told_ready),
            ready_due=self._due(),
            ready_after_s=self._ready_after_s,
            told=gathering.told(site),
            uses=self._usage.of_the_longest(),
        )

    def _injections(self) -> tuple[Injection, ...]:
        found: list[Injection] = []
        for fault in self._faults:
            come = fault.come if isinstance(fault, Recurring) else [fault]
            found += [one.result() for one in come]
        return tuple(found)
