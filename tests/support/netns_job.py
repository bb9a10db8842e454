"""A job in training whose nodes are network namespaces: they reach each other over a bridge alone."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.training import Reference

from toprope.chaos.journal import JournalReader, read_finals
from toprope.chaos.live.ask import get_desired
from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.netns import INTERFACE, NetNode, Network
from toprope.chaos.live.processes import LiveError, Process, free_port, wait_ready, wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.live.scratch import Scratch
from toprope.chaos.oracle import compare, torn_restores
from toprope.coordinator.wire import Desired
from toprope.store.log.chain import read_log
from toprope.store.look.verify import verify_checkpoint, verify_facts
from toprope.store.objects.directory import DirectoryStore

JOB = "networks"
EVERY = 4
READY_S = 90.0
LOST_AFTER_S = 8.0
"""When a rank gives up those that it does not hear: the timeout of the process group."""


def arguments(*, steps: int) -> tuple[str, ...]:
    return ("--job", JOB, "--size", "tiny", "--steps", str(steps))


@dataclass(slots=True, kw_only=True)
class NetJob:
    """Services, nodes and ranks. The coordinator runs beside the test, where no node takes it along."""

    directory: Path
    network: Network
    memory: Path
    server: ForkServer
    steps: int
    delay_s: float = 0.1
    coordinator_port: int = field(default_factory=free_port)
    way_to_coordinator: str = ""
    """Where sidecars find it, if not directly."""
    ranks: World = field(init=False)
    journal: JournalReader = field(init=False)
    _running: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.directory / "token").write_text(secrets.token_hex(16))
        (self.directory / "token").chmod(0o600)
        (self.directory / "store").mkdir()

    @property
    def coordinator_url(self) -> str:
        return f"http://{self.network.address}:{self.coordinator_port}"

    def start_coordinator(self) -> Process:
        every = ["--every", str(EVERY), "--local-every", str(EVERY), "--object-every", str(EVERY)]
        listen = f"{self.network.address}:{self.coordinator_port}"
        return self._start("coordinator", (), [*every, "--store", str(self.directory / "store"), "--listen", listen])

    def start_sidecar(self, node: NetNode) -> Process:
        memory, local = self.memory / node.name, self.directory / node.name
        local.mkdir(exist_ok=True)
        words = ["--node", node.name, "--memory-dir", str(memory), "--local-dir", str(local)]
        words += ["--store", str(self.directory / "store"), "--socket", str(self.socket(node.name)), "--grace", "0"]
        words += ["--coordinator", self.way_to_coordinator or self.coordinator_url, "--listen", f"{node.address}:0"]
        return self._start("sidecar", node.inside, words, name=f"sidecar-{node.name}")

    def socket(self, name: str) -> Path:
        return self.memory / f"{name}.sock"

    def train(self, nodes: str) -> None:
        """Start a world of a rank on each of these nodes."""
        names = list(nodes)
        first = self.network.nodes[names[0]].address

        def env(rank: int) -> Mapping[str, str]:
            node = self.network.nodes[names[rank]]
            place = {"NETNS": node.namespace, "CKPT_SOCKET": str(self.socket(node.name))}
            return place | {"MASTER_ADDR": first, "GLOO_SOCKET_IFNAME": INTERFACE}

        self.ranks = World(
            server=self.server,
            directory=self.directory / "ranks",
            arguments=(
                *arguments(steps=self.steps),
                *("--step-delay", str(self.delay_s), "--timeout", str(LOST_AFTER_S)),
            ),
            world=len(names),
            target="tests.support.netns_rank:main",
            env=env,
        )
        self.journal = JournalReader(self.ranks.out)
        self.ranks.start()

    def train_to(self, step: int) -> None:
        self.ranks.until(lambda: self.newest_step() >= step, what=f"step {step}", timeout_s=READY_S)

    def newest_step(self) -> int:
        self.journal.read()
        return self.journal.newest_step()

    def wait_lost(self) -> None:
        """Wait until all ranks have given up: each has missed the others."""
        wait_until(
            lambda: len(self.ranks.statuses()) == self.ranks.world, what="the ranks miss each other", timeout_s=READY_S
        )
        assert 0 not in self.ranks.statuses().values()

    def desired(self) -> Desired:
        found: list[Desired] = []

        def asked() -> bool:
            found[:] = [one for one in (get_desired(self.coordinator_url, token=self.token),) if one is not None]
            return bool(found)

        wait_until(asked, what="the coordinator answers", timeout_s=READY_S)
        return found[0]

    @property
    def token(self) -> str:
        return (self.directory / "token").read_text()

    def wait(self, good: Callable[[Desired], bool], *, what: str) -> Desired:
        """Return what the coordinator says once it is as wanted."""
        try:
            wait_until(lambda: good(self.desired()), what=what, timeout_s=READY_S)
        except LiveError as error:
            error.add_note(str(self.desired()))
            raise
        return self.desired()

    def _start(self, word: str, inside: tuple[str, ...], words: list[str], *, name: str = "") -> Process:
        name = name or word
        ready = self.directory / f"{name}-{secrets.token_hex(4)}.json"
        command = [*inside, sys.executable, "-m", "toprope", word, "--job", JOB, *words]
        command += ["--token-file", str(self.directory / "token"), "--ready-file", str(ready)]
        log = self.directory / "logs" / f"{name}.log"
        process = Process(name, command, log=log, env={"PATH": f"{os.environ['PATH']}:/usr/sbin"})
        self._running.append(process)
        wait_ready(process, ready, timeout_s=READY_S)
        return process

    def stop(self) -> None:
        """Kill what still runs."""
        if hasattr(self, "ranks"):
            self.ranks.stop()
        for process in self._running:
            if process.status() is None:
                process.kill()


@contextmanager
def net_job(directory: Path, server: ForkServer, *, steps: int, nodes: str = "ab") -> Iterator[NetJob]:
    """Yield a job whose coordinator runs and whose nodes are there, without sidecars yet."""
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        memory = stack.enter_context(Scratch())
        for name in nodes:
            network.add(name)
        job = NetJob(directory=directory, network=network, memory=memory.path, server=server, steps=steps)
        stack.callback(job.stop)
        job.start_coordinator()
        yield job


def begin(job: NetJob, nodes: str = "ab", *, to: int) -> None:
    """Start all nodes and a world on some of them; return once a step is protected and another one has ended."""
    for node in job.network.nodes.values():
        job.start_sidecar(node)
    job.train(nodes)
    job.train_to(to)
    job.wait(lambda desired: desired.protected_step >= EVERY, what="a step is protected")


def finish(job: NetJob) -> None:
    """Let the ranks come to their end, and what is due become READY."""
    job.ranks.finish(timeout_s=300.0)
    job.wait(lambda desired: desired.ready_step == job.steps - job.steps % EVERY, what="the last step is READY")


def assert_as_if_nothing_had_happened(job: NetJob, reference: Reference) -> None:
    """The end is bit for bit that of a run to which nothing happened."""
    job.journal.read()
    assert torn_restores(job.journal.events) == ()
    judgement = compare(read_finals(job.ranks.out), reference(world=2, arguments=arguments(steps=job.steps)), world=2)
    assert judgement.differences == ()
    assert judgement.identical


def assert_no_false_commit(job: NetJob) -> None:
    """Each READY has all that it names; nothing of an attempt came after the next had opened."""
    store = DirectoryStore(job.directory / "store")
    state = read_log(store, JOB)  # it replays the log by the rules, and fails where one is broken
    assert state.live
    assert [damage for seq in state.live for damage in verify_checkpoint(store, state, seq).damages] == []
    assert verify_facts(store, state) == ()
