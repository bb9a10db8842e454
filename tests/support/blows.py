"""Blows to a job in training, drawn from a seed: what is killed, when, and in which order it comes back."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from tests.support.job_in_training import EVERY, WORLD, Blow, Job

from toprope.chaos.oracle import steps_lost_allowed

KINDS = ("rank", "sidecar", "node", "coordinator", "broker")
NODE = "b"
"""The node that is killed when one is; never both, for then memory can't be asked to hold anything."""


@dataclass(slots=True)
class Trouble:
    """What is dead now in a job, and what was safe before."""

    job: Job
    chance: random.Random
    dead: list[str] = field(default_factory=list)
    blow: Blow | None = None

    def strike(self, kind: str) -> None:
        """Kill one thing of this kind, which must die of it."""
        if self.blow is None:
            self.blow = self.job.before_a_blow()
            self.blow.newest_step = self.job.newest_step()
        match kind:
            case "rank":
                living = [rank for rank in range(WORLD) if NODE not in self.dead or rank == 0]
                assert self.job.ranks.kill(self.chance.choice(living)) != 0  # it may have missed a dead one and ended
            case "node":
                self.job.ranks.kill(1)
                assert {one.status for one in self.job.cluster.kill_node(NODE)} == {-9}
                self.dead = [NODE, *(what for what in self.dead if what != "sidecar b")]
            case "sidecar":
                name = self.chance.choice([name for name in "ab" if name not in self.dead])
                self._kill_sidecar(name)
            case "coordinator":
                assert self.job.cluster.coordinator is not None
                assert self.job.cluster.coordinator.kill().status == -9
                self.dead.append(kind)
            case _:
                assert self.job.cluster.broker is not None
                assert self.job.cluster.broker.kill().status == -9
                self.dead.append(kind)
        if kind in {"rank", "node"} and "world" not in self.dead:
            self.dead.append("world")

    def _kill_sidecar(self, name: str) -> None:
        sidecar = self.job.cluster.nodes[name].sidecar
        assert sidecar is not None
        assert sidecar.kill().status == -9
        self.dead.append(f"sidecar {name}")

    def heal(self, *, within_s: float) -> None:
        """Bring back what is dead, in an order and with pauses that chance chooses."""
        self.chance.shuffle(self.dead)
        if "world" in self.dead:
            self.job.ranks.stop()
            if NODE in self.dead:  # a launcher has nowhere to put ranks before
                self.dead.remove(NODE)
                self.dead.insert(self.dead.index("world"), NODE)
        pause_s = within_s / max(1, len(self.dead))
        while self.dead:
            time.sleep(self.chance.uniform(0, pause_s))
            self._revive(self.dead.pop(0))

    def _revive(self, what: str) -> None:
        match what:
            case "world":
                self.job.ranks.start()
            case "coordinator":
                self.job.cluster.start_coordinator()
            case "broker":
                self.job.cluster.start_broker()
            case _:
                self.job.cluster.start_sidecar(what.removeprefix("sidecar "))

    def assert_little_lost(self) -> None:
        """A world that was started again has lost no more than was allowed when it was hit first."""
        assert self.blow is not None
        newest = self.blow.newest_step
        protected = self.blow.protected_step >= newest - newest % EVERY
        allowed = steps_lost_allowed(newest_due_protected=protected, every=EVERY)
        pids = set(self.job.ranks.pids.values())
        self.job.journal.read()
        began = {event.step for event in self.job.journal.events if event.event == "begin" and event.pid in pids}
        assert len(began) == 1, f"ranks went on from steps {sorted(began)}"
        assert newest - min(began) <= allowed, f"{self.blow}, went on from {began}"
        self.blow = None
