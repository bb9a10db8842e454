"""A world under torchrun: an agent on each node starts its ranks, and all agents theirs again when one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toprope.chaos.live.cluster import Cluster
from toprope.chaos.live.processes import Process, kill_tree
from toprope.chaos.live.training import Training, start_agent, start_rendezvous


@dataclass(slots=True, kw_only=True)
class Agents:
    """The agents of a world, and the store that they meet in, which outlives them all.

    ``is_down`` says of a node whether its agent was killed and is to come back: that ends nothing.
    """

    cluster: Cluster
    out: Path
    training: Training
    is_down: Callable[[str], bool]
    env: Callable[[str], Mapping[str, str]] = lambda _: {}
    """What else the ranks of a node find in their environment."""
    pids: dict[int, int] = field(default_factory=dict)
    """Of no rank: an agent starts another one in its place at any time."""
    restarts_itself: bool = True
    _rendezvous: Process | None = None
    _port: int = 0

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.training.nodes * self.training.ranks

    def start(self) -> None:
        """Start an agent on each node."""
        if self._rendezvous is None:
            self._rendezvous, self._port = start_rendezvous(self.cluster)
        for name in sorted(self.cluster.nodes):
            self.start_on(name)

    def start_on(self, name: str) -> None:
        """Start the agent of a node."""
        node = self.cluster.nodes[name]
        start_agent(self.cluster, node, self.training, rendezvous_port=self._port, env=self.env(name))

    def statuses(self) -> dict[int, int]:
        """Return the status of the agent for each of its ranks, of those that have ended and won't come back."""
        ended: dict[int, int] = {}
        for number, name in enumerate(sorted(self.cluster.nodes)):
            agent = self.cluster.nodes[name].agent
            status = None if agent is None or self.is_down(name) else agent.status()
            if status is not None:
                ended |= {number * self.training.ranks + local: status for local in range(self.training.ranks)}
        return ended

    def ended(self) -> dict[int, int]:
        """Return the ranks that are known to have ended, by process id: none, since they are their agents'."""
        return {}

    def kill(self, rank: int) -> int:
        """Kill no rank: they die with their agent."""
        raise AssertionError(rank)

    def log(self, rank: int) -> Path:
        """Return where a rank's standard output and error go, with those of its agent."""
        return self.cluster.log(f"agent-{sorted(self.cluster.nodes)[rank // self.training.ranks]}")

    def stop(self) -> None:
        """Kill all agents with their ranks, and end the store."""
        for node in self.cluster.nodes.values():
            if node.agent is not None and node.agent.status() is None:
                kill_tree(node.agent)
            node.agent = None
        if self._rendezvous is not None:
            self._rendezvous.stop()
            self._rendezvous = None
