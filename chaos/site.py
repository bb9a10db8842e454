"""A job in training on this machine, as those who break it and those who judge it see it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from toprope.chaos import defects, killpoints
from toprope.chaos.journal import JournalReader
from toprope.chaos.live.agents import Agents
from toprope.chaos.live.cluster import Cluster
from toprope.chaos.live.forking import Forked, ForkServer
from toprope.chaos.live.processes import LiveError, Running, free_port, wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.scenario import Scenario
from toprope.coordinator.wire import Desired
from toprope.store.errors import UsageError


def role_of(target: str) -> str:
    """Return the name of the files by which a process is told what to do at its points."""
    return target.replace(" ", "-")


@dataclass(slots=True, kw_only=True)
class Site:
    """The services, the ranks and what they write. ``down``: services that are dead and not yet started again."""

    scenario: Scenario
    job: str
    seed: int
    directory: Path
    cluster: Cluster
    services: ForkServer
    chance: random.Random
    defect: str = ""
    world: World | Agents = field(init=False)
    journal: JournalReader = field(init=False)
    began_s: float = field(default_factory=time.monotonic)
    down: set[str] = field(default_factory=set)
    left: list[Running] = field(default_factory=list)
    """Processes that were started besides and are ended with the rest."""
    more_env: dict[str, str] = field(default_factory=dict)
    """What else each process finds in its environment: how a store is reached."""
    told_ready: dict[int, int] = field(default_factory=dict)
    """The steps that a coordinator has said to be READY."""
    proxies: dict[str, Path] = field(default_factory=dict)
    """For each link with a proxy the file that tells it what to do; its log lies beside it."""

    # What there is

    def pid(self, target: str) -> int:
        """Return the process id of a rank or a service.

        Raises:
            UsageError: there is no such thing in this scenario.
            LiveError: it does not run now.
        """
        kind, _, which = target.partition(" ")
        if kind == "rank" and which.isdecimal() and int(which) < self.scenario.topology.world:
            pid = self.world.pids.get(int(which), 0)
            if not pid or pid in self.world.ended():
                raise LiveError(f"{target} does not run now")
            return pid
        running = self.service(target)
        if running is None or running.status() is not None:
            raise LiveError(f"{target} does not run now")
        return running.pid

    def service(self, target: str) -> Running | None:
        """Return the process of a service, or None while there is none; raises as ``pid``."""
        kind, _, which = target.partition(" ")
        if kind == "sidecar" and which in self.scenario.topology.nodes:
            node = self.cluster.nodes.get(which)
            return None if node is None else node.sidecar
        if kind == "agent" and isinstance(self.world, Agents):
            node = self.cluster.nodes.get(which)
            return None if node is None else node.agent
        if target == "coordinator":
            return self.cluster.coordinator
        if target == "broker":
            return self.cluster.broker
        ranks, nodes = self.scenario.topology.world, ", ".join(self.scenario.topology.nodes)
        known = f"rank 0 to {ranks - 1}, sidecar and node {nodes}, coordinator, broker, with torchrun agent {nodes}"
        raise UsageError(f"target {target!r}: there are {known}")

    def service_pids(self) -> dict[str, int]:
        """Return the process ids of coordinator and sidecars, of those that run."""
        found = {}
        for target in ("coordinator", *(f"sidecar {name}" for name in self.scenario.topology.nodes)):
            running = self.service(target)
            if running is not None and running.status() is None:
                found[target] = running.pid
        return found

    def status(self, pid: int) -> int | None:
        """Return how a process that we started has ended, negative for a signal, or None while it lives."""
        ours = (self.cluster.broker, *(node.agent for node in self.cluster.nodes.values()))
        for process in ours:
            if process is not None and process.pid == pid:
                return process.status()
        return {**self.world.ended(), **self.services.poll()}.get(pid)

    def now_s(self) -> float:
        """Return seconds since the run began."""
        return time.monotonic() - self.began_s

    def begun_s(self) -> float | None:
        """Return when training began, in seconds since the run began; None before the first step has ended."""
        first = self.journal.events[0].monotonic_s if self.newest_step() else None
        return None if first is None else first - self.began_s

    def newest_step(self) -> int:
        """Return the newest step that a rank has ended."""
        self.journal.read()
        return self.journal.newest_step()

    def protected_step(self) -> int | None:
        """Return the newest step that the coordinator says to be protected, or None while it does not answer."""
        desired = self.cluster.desired()
        return None if desired is None else desired.protected_step

    def ready_step(self) -> int:
        """Return the newest step that the coordinator says to be READY, 0 for none or while it does not answer."""
        desired = self.cluster.desired()
        if desired is None:
            return 0
        self.hear_ready(desired)
        return desired.ready_step

    def hear_ready(self, desired: Desired) -> None:
        """Keep in mind what a coordinator says to be READY, and in which attempt it was said first."""
        if desired.ready_step and desired.attempt is not None:
            self.told_ready.setdefault(desired.ready_step, desired.attempt.number)

    # Points

    def armed(self, target: str) -> Path:
        """Return the file that tells a process what to do at its points."""
        return self.directory / "points" / f"{role_of(target)}.armed"

    def passed(self, target: str) -> Path:
        """Return the file in which a process notes its points."""
        return self.directory / "points" / f"{role_of(target)}.log"

    def env(self, target: str) -> dict[str, str]:
        """Return what makes a process pass points, and lack the safeguard that is to be switched off."""
        self.armed(target).parent.mkdir(parents=True, exist_ok=True)
        env = {killpoints.FILE_VARIABLE: str(self.armed(target)), killpoints.LOG_VARIABLE: str(self.passed(target))}
        if any(fault.do == "clock" for fault in self.scenario.fault):
            env[killpoints.CLOCK_VARIABLE] = "1"
        return env | self.more_env | ({defects.VARIABLE: self.defect} if self.defect else {})

    # Start and stop

    def start(self, target: str) -> None:
        """Start a service, or a node with its sidecar."""
        match target.split(" "):
            case ["coordinator"]:
                self.cluster.start_coordinator(env=self.env(target))
            case ["broker"]:
                self.cluster.start_broker()
            case ["node" | "sidecar", name]:
                self.cluster.start_sidecar(name, env=self.env(f"sidecar {name}"))
                if target.startswith("node") and isinstance(self.world, Agents):
                    self.world.start_on(name)
            case ["agent", name] if isinstance(self.world, Agents):
                self.world.start_on(name)
            case _:
                raise UsageError(f"{target!r} can't be started alone: a rank comes back with its world")
        self.down -= {target}

    def start_all(self) -> None:
        """Start all services."""
        for target in ("broker", "coordinator", *(f"sidecar {name}" for name in self.scenario.topology.nodes)):
            self.start(target)

    def nodes_are_there(self) -> bool:
        """Say whether each node that ranks sit on has a sidecar, so that they have somewhere to start."""
        sidecars = (self.cluster.nodes.get(name) for name in self.scenario.topology.nodes)
        return all(node is not None and node.sidecar is not None for node in sidecars)

    def kill_node(self, name: str, *, keep_disk: bool = False) -> dict[str, int]:
        """Kill a node with all that runs on it; memory is gone, and its disk unless kept. Return the wait statuses."""
        ranks = [rank for rank in self.world.pids if self.scenario.topology.node_of(rank) == name]
        statuses = {f"rank {rank}": self.world.kill(rank) for rank in ranks}
        statuses |= {one.what: one.status for one in self.cluster.kill_node(name, keep_disk=keep_disk)}
        self.down.add(f"node {name}")
        return statuses

    def proxy(self, link: str, *, target_port: int) -> int:
        """Put a proxy before a port and return the port to use in its place."""
        from toprope.chaos.live.proxy import tell  # noqa: PLC0415 - most scenarios need none

        mode = self.directory / "proxies" / f"{link}.mode"
        mode.parent.mkdir(parents=True, exist_ok=True)
        tell(mode, "pass")
        port = free_port()
        words = [str(port), str(target_port), str(mode), str(mode.with_suffix(".log"))]
        log = self.directory / "logs" / f"proxy-{link}.log"
        process = Forked(f"proxy of {link}", self.services, "toprope.chaos.live.proxy:main", words, log=log, env={})
        self.left.append(process)
        self.proxies[link] = mode
        wait_until(lambda: _listens(port), what=f"the proxy of {link} listens", timeout_s=15, alive=[process])
        return port

    def stop_left(self) -> None:
        """End what was started besides."""
        for process in self.left:
            if process.status() is None:
                process.kill()


def _listens(port: int) -> bool:
    """Say whether a port is taken, without a connection to it."""
    return f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()


def state_of(pid: int) -> str:
    """Return the state of a process as Linux has it, ``T`` for one that is stopped; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
