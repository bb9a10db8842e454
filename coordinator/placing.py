"""The placement of a reign: made anew when those who live, or the ranks they serve, have changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from toprope.coordinator.placement import Holders, Plan, Site, place, text_of
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import Placement
from toprope.store.log.records import Member

Told: TypeAlias = tuple[Literal["info", "warning"], str, str]
"""How loudly, about which owner, what."""


class Placing:
    """Who holds copies for whom, with ``copies`` holders wanted for each owner."""

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.plan: Plan = place((), before={}, copies=copies)
        self._before: Holders = {}
        self._sites: tuple[Site, ...] = ()
        self._placements: tuple[Placement, ...] | None = ()
        self._seen: tuple[int, Iterable[Member]] | None = None

    def remember(self, placements: Iterable[Placement]) -> None:
        """Take over the placement of the reign before, as far as it still does."""
        before: Holders = {}
        for one in placements:
            before[one.owner] = (*before.get(one.owner, ()), one.holder)
        self._before, self._sites, self._seen, self._placements = before, (), None, None

    def steer(self, nodes: Sequence[Node], world: Iterable[Member], *, moves: int) -> list[Told]:
        """Place anew if anything has changed for it among the living ``nodes``; return what people should know.

        ``moves`` is another number whenever the nodes have changed in a way that may matter here.
        """
        if self._seen is not None and self._seen[0] == moves and self._seen[1] is world:
            return []
        self._seen = moves, world
        boots = {node.name: node.inventory.boot_id for node in nodes}
        ranks = dict.fromkeys(boots, 0)
        for member in world:
            if boots.get(member.node) == member.boot_id:
                ranks[member.node] += 1
        sites = tuple(_site(node, ranks=ranks[node.name]) for node in nodes)
        if sites == self._sites:
            return []
        old, self._sites, self._placements = self.plan, sites, None
        self.plan = place(sites, before=self._before, copies=self.copies)
        self._before = self.plan.holders
        return self._told(old)

    def _told(self, old: Plan) -> list[Told]:
        told: list[Told] = []
        for owner in sorted(self.plan.weakest):
            holders = self.plan.holders.get(owner, ())
            reason = self.plan.unmet.get(owner)
            if reason is not None:
                told.append(("warning", owner, f"snapshots of node {owner} are not safe from its loss: {reason}"))
            elif holders != old.holders.get(owner, ()) or owner in old.unmet:
                text = f"snapshots of node {owner} are copied to {', '.join(holders)}"
                lost = self.plan.weakest[owner]
                weak = f"; {text_of(lost)} lost at once would lose them all" if len(lost) <= len(holders) else ""
                told.append(("info", owner, text + weak))
        return told

    def placements(self) -> tuple[Placement, ...]:
        """Return the placement as the document has it."""
        if self._placements is None:
            urls = {site.node: site.url for site in self._sites}
            self._placements = tuple(
                Placement(owner=owner, holder=holder, url=urls[owner])
                for owner, holders in self.plan.holders.items()
                for holder in holders
            )
        return self._placements


def _site(node: Node, *, ranks: int) -> Site:
    full = frozenset(node.inventory.no_room_for)
    return Site(node=node.name, url=node.url, domain=node.domain, ranks=ranks, no_room_for=full)
