"""A whole job's services on one machine: broker, coordinator, and nodes with memory and disk of their own."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from toprope.chaos.live.ask import get_desired, get_inventory
from toprope.chaos.live.broker import start_broker
from toprope.chaos.live.mounts import Mounts
from toprope.chaos.live.processes import Killed, Process, Running, free_port, kill_tree, wait_ready
from toprope.chaos.live.scratch import Scratch
from toprope.coordinator.wire import Desired


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadences:
    """Every how many steps a snapshot goes to memory and peer, to the local tier, to the object tier."""

    every: int = 4
    local_every: int = 8
    object_every: int = 8


class Launch(Protocol):
    """Starts ``ckpt`` with these words."""

    def __call__(self, name: str, words: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Running:
        """Start it."""


def spawn(name: str, words: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Running:
    """Start ``ckpt`` as a user would."""
    return Process(name, [sys.executable, "-m", "toprope", *words], log=log, env=env)


@dataclass(slots=True, kw_only=True)
class Node:
    """One node: its directories, its sidecar while that lives, and a trainer or agent that was put on it."""

    name: str
    memory_dir: Path
    local_dir: Path
    url: str = ""
    sidecar: Running | None = None
    agent: Process | None = None

    @property
    def socket(self) -> Path:
        """Where its sidecar listens for trainers."""
        return self.memory_dir / "sidecar.sock"

    @property
    def boot_id(self) -> str:
        """The id of its memory."""
        return (self.memory_dir / "boot_id").read_text().strip()


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Starts and kills the services of one job. Use it in a ``with``: at its end nothing is left running.

    Stores, disks and logs lie under ``directory``; memory lies in tmpfs, and moves to ``directory`` at the end. What is
    mounted for them stays until the ``with`` ends.
    """

    directory: Path
    job: str
    cadences: Cadences = field(default_factory=Cadences)
    launch: Launch = field(default_factory=lambda: spawn)
    """Starts ``ckpt`` with some words; a fork server does it faster."""
    root: str = ""
    """The object store that the services use; without one, a directory."""
    coordinator_words: tuple[str, ...] = ()
    """What else the coordinator is told."""
    sidecar_words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What else the sidecars of some nodes are told."""
    memory_mib: int = 0
    """The size of each node's memory, a tmpfs of its own; 0: it lies in the shared memory of this machine."""
    disk_mib: int = 0
    """The size of each node's disk and of the store's, ext4 in a file; 0: they lie under ``directory``."""
    broker_detour: int = 0
    """The port on which sidecars reach the broker, if it is not its own: a proxy stands before it."""
    nodes: dict[str, Node] = field(init=False, default_factory=dict)
    broker: Process | None = field(init=False, default=None)
    coordinator: Running | None = field(init=False, default=None)
    _broker_port: int = field(init=False, default_factory=free_port)
    standby: Running | None = field(init=False, default=None)
    _coordinator_port: int = field(init=False, default_factory=free_port)
    _standby_port: int = field(init=False, default_factory=free_port)
    _scratch: Scratch = field(init=False, default_factory=Scratch)
    mounts: Mounts = field(init=False, default_factory=Mounts)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.root:
            self.store.mkdir(exist_ok=True)
            self._mount_disk(self.store, "store")
            self.root = str(self.store)

    @property
    def memory(self) -> Path:
        """What stands for the memory of all nodes."""
        return self._scratch.path

    @property
    def store(self) -> Path:
        """The directory that is the object store, unless another ``root`` is."""
        return self.directory / "store"

    @property
    def coordinator_url(self) -> str:
        """Where the coordinator serves, now or after its restart."""
        return f"http://127.0.0.1:{self._coordinator_port}"

    @property
    def standby_url(self) -> str:
        """Where the second coordinator serves, if there is one."""
        return f"http://127.0.0.1:{self._standby_port}"

    @property
    def broker_port(self) -> int:
        """Where the broker serves, now or after its restart."""
        return self._broker_port

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.directory / "logs" / f"{name}.log"

    def start_broker(self) -> Process:
        """Start the broker, on the same port each time."""
        self.broker = start_broker(port=self._broker_port, directory=self.directory, log=self.log("broker"))
        return self.broker

    def start_coordinator(self, *, env: Mapping[str, str] | None = None) -> Running:
        """Start a coordinator and wait until it serves, on the same port each time."""
        self.coordinator = self._start_coordinator("coordinator", self._coordinator_port, env=env or {})
        return self.coordinator

    def start_standby(self) -> Running:
        """Start a second coordinator, which stands by; sidecars that are started later are told of both."""
        self.standby = self._start_coordinator("standby", self._standby_port, env={})
        return self.standby

    def _start_coordinator(self, name: str, port: int, *, env: Mapping[str, str]) -> Running:
        ready = self._ready_file(name)
        every = self.cadences
        arguments = ["--job", self.job, "--store", self.root, "--listen", f"127.0.0.1:{port}"]
        arguments += ["--broker", f"127.0.0.1:{self._broker_port}", "--ready-file", str(ready)]
        arguments += ["--every", str(every.every), "--local-every", str(every.local_every)]
        arguments += ["--object-every", str(every.object_every)]
        words = ["coordinator", *arguments, *self.coordinator_words]
        coordinator = self.launch(name, words, log=self.log(name), env=env)
        wait_ready(coordinator, ready)
        return coordinator

    def move_coordinator(self) -> None:
        """Let the next coordinator serve on another port: one that runs goes on where it is."""
        self._coordinator_port = free_port()

    def start_sidecar(self, name: str, *, env: Mapping[str, str] | None = None) -> Node:
        """Start a node's sidecar and wait until it serves; a node of a new name, or one that was erased, is empty."""
        node = self.nodes.setdefault(name, self._new_node(name))
        node.memory_dir.mkdir(parents=True, exist_ok=True)
        node.local_dir.mkdir(parents=True, exist_ok=True)
        self._mount_disk(node.local_dir, name)
        if self.memory_mib:
            self.mounts.memory(node.memory_dir, mib=self.memory_mib)
        ready = self._ready_file(f"sidecar-{name}")
        urls = ",".join((self.coordinator_url, *((self.standby_url,) if self.standby is not None else ())))
        arguments = ["--job", self.job, "--node", name, "--coordinator", urls]
        broker = self.broker_detour or self._broker_port
        arguments += ["--broker", f"127.0.0.1:{broker}", "--memory-dir", str(node.memory_dir)]
        arguments += ["--local-dir", str(node.local_dir), "--store", self.root, "--socket", str(node.socket)]
        arguments += ["--ready-file", str(ready), "--grace", "0"]
        words = ["sidecar", *arguments, *self.sidecar_words.get(name, ())]
        node.sidecar = self.launch(f"sidecar of node {name}", words, log=self.log(f"sidecar-{name}"), env=env or {})
        node.url = str(wait_ready(node.sidecar, ready)["url"])
        return node

    def kill_node(self, name: str, *, keep_disk: bool = False) -> list[Killed]:
        """Kill a node: SIGKILL to its sidecar, agent and ranks; memory erased, and its disk unless that is kept."""
        node = self.nodes.pop(name)
        processes = [process for process in (node.agent, node.sidecar) if process is not None]
        killed = [one for process in processes for one in kill_tree(process)]
        for directory in (node.memory_dir, *(() if keep_disk else (node.local_dir,))):
            self.mounts.remove(directory)
            shutil.rmtree(directory)
        return killed

    def desired(self) -> Desired | None:
        """Return the coordinator's desired state, or None while it does not answer."""
        desired = get_desired(self.coordinator_url)
        return desired if desired is not None or self.standby is None else get_desired(self.standby_url)

    def describe(self) -> str:
        """Return what coordinator and nodes say of themselves now, for a message."""
        desired = self.desired()
        lines = ["the coordinator does not answer"]
        if desired is not None:
            keep, dropped = [one.step for one in desired.keep], [one.step for one in desired.dropped]
            lines = [f"desired {desired.version}: protected {desired.protected_step}, READY {desired.ready_step}"]
            lines += [f"  keep {keep}, dropped {dropped}, read back {[task.key for task in desired.read_backs]}"]
        for node in self.nodes.values():
            inventory = get_inventory(node.url)
            if inventory is None:
                lines.append(f"node {node.name} does not answer")
                continue
            copies = sorted((copy.rank, copy.tier, copy.step) for copy in inventory.copies)
            skipped = [(skip.rank, skip.step, skip.reason) for skip in inventory.skipped]
            lines.append(f"node {node.name}: copies (rank, tier, step) {copies}, skipped {skipped}")
        return "\n".join(lines)

    def stop(self) -> None:
        """End what still runs, trainers first; keep the memory directories with the rest. Once is enough."""
        if not self.memory.exists():
            return
        processes = [node.agent for node in self.nodes.values()] + [node.sidecar for node in self.nodes.values()]
        for process in (*processes, self.coordinator, self.standby, self.broker):
            if process is not None and process.status() is None:
                process.stop()
        for node in self.nodes.values():
            with contextlib.suppress(FileNotFoundError):
                node.socket.unlink()
            if node.memory_dir.is_dir():
                shutil.copytree(node.memory_dir, self.directory / "nodes" / node.name / "memory", dirs_exist_ok=True)
            self.mounts.remove(node.memory_dir)
        self._scratch.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self.mounts.remove_all()

    def _mount_disk(self, at: Path, name: str) -> None:
        if self.disk_mib:
            self.mounts.disk(at, mib=self.disk_mib, image=self.directory / "disks" / f"{name}.img")

    def _new_node(self, name: str) -> Node:
        return Node(name=name, memory_dir=self.memory / name, local_dir=self.directory / "nodes" / name / "local")

    def _ready_file(self, name: str) -> Path:
        ready = self.directory / "ready" / f"{name}-{secrets.token_hex(4)}.json"
        ready.parent.mkdir(exist_ok=True)
        return ready


@contextlib.contextmanager
def running_cluster(
    directory: Path,
    *,
    job: str,
    nodes: tuple[str, ...] = ("a", "b"),
    cadences: Cadences | None = None,
    launch: Launch = spawn,
    standby: bool = False,
) -> Iterator[Cluster]:
    """Yield a cluster whose broker, coordinator and sidecars are up, with a coordinator that stands by if wanted."""
    with Cluster(directory=directory, job=job, cadences=cadences or Cadences(), launch=launch) as cluster:
        cluster.start_broker()
        cluster.start_coordinator()
        if standby:
            cluster.start_standby()
        for name in nodes:
            cluster.start_sidecar(name)
        yield cluster
