"""What people do: restart services one by one, run two coordinators, start a job twice, run any ``ckpt``."""

from __future__ import annotations

import os
import signal
import sys
import time

from toprope.chaos.faults.injector import Base, NotFiredError
from toprope.chaos.live.processes import Process, wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.site import state_of
from toprope.store.errors import UsageError

_ENDS_S = 30.0


class Roll(Base):
    """Restarts each service with SIGTERM, one after another, each once the one before serves."""

    _said: tuple[str, ...] = ()

    def strike(self) -> None:
        """Do it."""
        said = []
        for target in ("coordinator", *(f"sidecar {name}" for name in self.site.scenario.topology.nodes), "broker"):
            running = self.site.service(target)
            if running is None or running.status() is not None:
                raise NotFiredError(f"{target} does not run")
            status = running.stop(_ENDS_S)
            self.site.start(target)
            said.append(f"{target} ended with status {status} and serves again")
        self._said = tuple(said)

    def witness(self) -> str:
        """Return how each ended."""
        return "; ".join(self._said)


class Split(Base):
    """Pauses the coordinator until another one reigns in its place, then lets the first go on: two think they lead."""

    _said = ""

    def strike(self) -> None:
        """Pause the one and start the other."""
        old, desired = self.site.service("coordinator"), self.site.cluster.desired()
        if old is None or desired is None:
            raise NotFiredError("the coordinator does not answer")
        self._old, self._term = old, desired.term
        os.kill(old.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(old.pid) == "T", what="the coordinator stands still", timeout_s=_ENDS_S)
        self._since_s = time.monotonic()
        self._said = f"pid {old.pid} was in state T"
        self.site.cluster.move_coordinator()
        self.site.start("coordinator")

    def mend(self) -> None:
        """Let the first go on, once the other one reigns."""
        self.site.left.append(self._old)
        try:
            wait_until(lambda: self._reign() > self._term, what="another coordinator reigns", timeout_s=_ENDS_S)
        finally:
            os.kill(self._old.pid, signal.SIGCONT)
        paused_s = time.monotonic() - self._since_s
        reign = f"term {self._reign()} began while that of term {self._term}"
        self._said = f"{reign}, pid {self._old.pid}, was in state T for {paused_s:.1f} s"

    def _reign(self) -> int:
        desired = self.site.cluster.desired()
        return 0 if desired is None else desired.term

    def witness(self) -> str:
        """Return who was paused, and how the older one ended if it has."""
        status = self._old.status()
        return self._said and self._said + ("" if status is None else f"; it ended with status {status}")


class Twice(Base):
    """Starts the same job once more beside the one that trains. It must be refused, and change nothing."""

    _said = ""

    def strike(self) -> None:
        """Start a second world on the same nodes."""
        first = self.site.world
        if not isinstance(first, World):
            raise UsageError("twice: the second world is started by this program: not with launcher = 'torchrun'")
        self._second = World(
            server=first.server,
            directory=self.site.directory / "second-world",
            arguments=(str(self.site.directory / "second-world" / "run"), *first.arguments[1:]),
            world=first.world,
            cluster=self.site.cluster,
            placement=first.placement,
            target=first.target,
            tells_out=False,
        )
        self._second.start()

    def mend(self) -> None:
        """End it, and say how far it had come."""
        journal = "".join(path.read_text() for path in self._second.out.glob("rank-*.jsonl"))
        ended = self._second.statuses()
        self._second.stop()
        if '"start"' in journal:
            began = "began to train" if '"begin"' in journal else "was never given an attempt"
            self._said = f"a second world of {self._second.world} ranks {began}; ended by itself: {ended or 'none'}"

    def witness(self) -> str:
        """Return what became of it."""
        return self._said


class Ckpt(Base):
    """Runs ``how.words`` of ``ckpt`` (several with semicolons between), which must each end with status ``how.status``.

    ``{job}``, ``{store}``, ``{coordinator}`` and ``{dir}``, a directory, are filled in.
    """

    _said = ""

    def strike(self) -> None:
        """Run them one after another, and see how they end."""
        wanted = int(self.number("status", 0))
        said = []
        for number, words in enumerate(self.word("words").split(";"), start=1):
            name = f"ckpt-{number}"
            arguments = [sys.executable, "-m", "toprope", *(self._filled(word) for word in words.split())]
            running = Process(name, arguments, log=self.site.directory / "logs" / f"{name}-{time.monotonic_ns()}.log")
            status = running.wait(_ENDS_S)
            last = (running.log.read_text().strip().splitlines() or [""])[-1]
            if status != wanted:
                raise NotFiredError(f"`ckpt {words.strip()}` ended with status {status} and not with {wanted}: {last}")
            said.append(f"`ckpt {words.split()[0]}` ended with status {status}: {last}")
        self._said = "; ".join(said)

    def _filled(self, word: str) -> str:
        site = self.site
        known = {"job": site.job, "store": site.cluster.root, "coordinator": site.cluster.coordinator_url}
        for name, value in (known | {"dir": str(site.directory)}).items():
            word = word.replace(f"{{{name}}}", value)
        return word

    def witness(self) -> str:
        """Return status and last line of each."""
        return self._said
