"""Who is there: what each node last said, and which life of a node is believed. Pure.

A node is a name; a *life* is one sidecar process that uses it, named by its incarnation. Documents of a life are
ordered by their version, so late and doubled ones are known as such. Two lives of one name at once are one too many:
a newcomer with other memory is taken only when the life before it no longer answers. A newcomer with the *same*
memory (boot id) is taken at once: the lock on the memory directory proves that the one before it is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from toprope.coordinator.wire import Copy, Inventory, Presence

REFUSED_TOLD = 16
"""So many refused lives are told of: one that is started again and again is told of under its newest name."""

Heard = Literal["news", "known", "contested", "stale", "foreign"]
"""What a document was: news; what we knew; of a second life; of a life that is over; of another job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as it is believed to be. ``alive``: heard lately, or it answered when asked."""

    inventory: Inventory
    heard_s: float
    alive: bool = True
    hinted_dead: bool = False
    silent_probes: int = 0

    @property
    def name(self) -> str:
        """Return the node's name."""
        return self.inventory.node

    @property
    def url(self) -> str:
        """Return where its sidecar answers."""
        return self.inventory.url

    @property
    def domain(self) -> tuple[tuple[str, str], ...]:
        """Return what fails together with this node: its labels, or the node alone when it has none."""
        return tuple(sorted(self.inventory.domain.items())) or (("node", self.name),)

    def copies(self, attempt_uid: str) -> tuple[Copy, ...]:
        """Return what it holds of an attempt."""
        return tuple(copy for copy in self.inventory.copies if copy.attempt_uid == attempt_uid)


@dataclass(slots=True, kw_only=True)
class Roll:
    """The nodes by name, in sorted order wherever they are listed."""

    job_uid: str
    nodes: dict[str, Node] = field(default_factory=dict)
    """By name, in the order of the names."""
    newcomers: dict[str, Inventory] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    last_wills: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    """Nodes that have said something, come, or gone, since somebody has emptied this."""
    asking: set[str] = field(default_factory=set)
    """Nodes with ranks that are about to end, or know that ranks are."""
    moves: int = 0
    """Grows with each change of who is alive and where."""
    _listed: tuple[Node, ...] | None = None
    _alive: tuple[Node, ...] | None = None
    _alive_names: tuple[int, tuple[str, ...]] = (-1, ())
    """By ``moves``."""

    def hear(self, inventory: Inventory, *, now_s: float, live: bool) -> Heard:
        """Take in a document. ``live``: its sender was there just now (it came by HTTP), whatever its version."""
        if inventory.job_uid not in ("", self.job_uid):
            return "foreign"
        if inventory.incarnation in self.over:
            return "stale"
        known = self.nodes.get(inventory.node)
        if known is None:
            return self._take(inventory, now_s)
        if known.inventory.incarnation != inventory.incarnation:
            if known.inventory.boot_id == inventory.boot_id or not known.alive:
                return self._take(inventory, now_s)
            self.newcomers[inventory.node] = inventory
            return "contested"
        newer = inventory.version > known.inventory.version
        if newer or live:
            self._put(Node(inventory=inventory if newer else known.inventory, heard_s=now_s))
        return "news" if newer else "known"

    def _take(self, inventory: Inventory, now_s: float) -> Heard:
        known = self.nodes.get(inventory.node)
        if known is not None:
            self.over.add(known.inventory.incarnation)
        self.newcomers.pop(inventory.node, None)
        self.refused.pop(inventory.incarnation, None)
        gone = self.last_wills.get(inventory.node) == inventory.incarnation
        self._put(Node(inventory=inventory, heard_s=now_s, hinted_dead=gone))
        return "news"

    def hint(self, presence: Presence) -> bool:
        """Take in a presence; say whether it hints that a node believed alive is gone, so that it should be asked."""
        if presence.alive:
            self.last_wills.pop(presence.node, None)
        else:
            self.last_wills[presence.node] = presence.incarnation
        known = self.nodes.get(presence.node)
        if known is None or known.inventory.incarnation != presence.incarnation:
            return False
        self._put(replace(known, hinted_dead=not presence.alive))
        return known.alive and not presence.alive

    def answered(self, name: str, inventory: Inventory | None, *, now_s: float, silent_probes_max: int) -> bool:
        """Take in what came of asking a node at its url; say whether anything about it has changed.

        A node that gave no answer ``silent_probes_max`` times, or once after its last will, is not alive. When a
        newcomer waits for its name, the answer decides between the two. When another life of the node answers where
        the known one did, it has taken its place, and nothing that the known one held is counted on any more.
        """
        known = self.nodes.get(name)
        if known is None:
            return False
        same_life = inventory is not None and inventory.incarnation == known.inventory.incarnation
        if inventory is not None and same_life:
            changed = not known.alive
            changed |= self.hear(inventory, now_s=now_s, live=True) == "news"
            return self._refuse_newcomer(name) or changed
        if name in self.newcomers:
            self._take(self.newcomers[name], now_s)
            return True
        if inventory is not None and self._follows(known.inventory, inventory):
            self._take(inventory, now_s)
            return True
        silent = known.silent_probes + 1
        gone = known.hinted_dead or silent >= silent_probes_max
        self._put(replace(known, silent_probes=silent, alive=known.alive and not gone))
        return known.alive and gone

    def _follows(self, before: Inventory, inventory: Inventory) -> bool:
        ours = inventory.job_uid in ("", self.job_uid)
        return ours and inventory.node == before.node and inventory.incarnation not in self.over

    def _refuse_newcomer(self, name: str) -> bool:
        newcomer = self.newcomers.pop(name, None)
        if newcomer is None:
            return False
        holder = self.nodes[name].inventory
        self.refused[newcomer.incarnation] = (
            f"node {name} is already served by a living sidecar at {holder.url} (boot id {holder.boot_id}); "
            "give this one another --node"
        )
        for oldest in list(self.refused)[:-REFUSED_TOLD]:
            del self.refused[oldest]
        return True

    def _put(self, node: Node) -> None:
        before = self.nodes.get(node.name)
        self.nodes[node.name], self._listed, self._alive = node, None, None
        if before is None:
            self.nodes = dict(sorted(self.nodes.items()))
        if before is None or before.alive != node.alive or before.inventory is not node.inventory:
            self.told.add(node.name)
            about_to_end = any(state.ask is not None or state.extra_step for state in node.inventory.ranks)
            (self.asking.add if about_to_end else self.asking.discard)(node.name)
        if before is None or _place(before) != _place(node):
            self.moves += 1

    def alive(self) -> tuple[Node, ...]:
        """Return the nodes believed alive, by name."""
        if self._alive is None:
            self._alive = tuple(node for node in self.all() if node.alive)
        return self._alive

    def alive_names(self) -> tuple[str, ...]:
        """Return the names of the nodes believed alive, in their order."""
        if self._alive_names[0] != self.moves:
            self._alive_names = self.moves, tuple(node.name for node in self.alive())
        return self._alive_names[1]

    def all(self) -> tuple[Node, ...]:
        """Return all nodes that were ever heard in this reign, by name."""
        if self._listed is None:
            self._listed = tuple(self.nodes.values())
        return self._listed


def _place(node: Node) -> tuple[bool, str, str, dict[str, str], tuple[str, ...]]:
    return node.alive, node.inventory.boot_id, node.url, node.inventory.domain, node.inventory.no_room_for
