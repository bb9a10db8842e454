"""Which nodes hold copies of which other node's snapshots, and what that survives. Pure and deterministic.

An owner has ``copies`` holders: other living nodes, none that was found to have no room for it, in failure domains of
their own as far as there are such. Nobody holds more than its share where that can be helped; then the holder is the
one with the fewest labels in common with the owner and its other holders; among equals the next one after the owner in
a ring by name. A holder stays as long as none would be better, so that a change moves as little as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Domain = tuple[tuple[str, str], ...]
Holders = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A living node: where it answers and what fails together with it. ``ranks`` it serves: 0 is a holder only.

    ``no_room_for``: the owners whose copies don't fit there.
    """

    node: str
    url: str
    domain: Domain
    ranks: int
    no_room_for: frozenset[str] = frozenset()

    @property
    def labels(self) -> frozenset[tuple[str, str]]:
        """Return all that it can be lost with; a node can always be lost alone."""
        return frozenset((*self.domain, ("node", self.node)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The holders of each owner, and for each owner that has too few in domains of their own the reason.

    ``copies``: so many each owner has at least in domains of their own. ``weakest``: for each owner the fewest labels
    that, lost together, lose all its copies: one loss fewer is survived, whichever it is.
    """

    holders: Holders
    unmet: dict[str, str]
    copies: int
    weakest: dict[str, Domain]

    @property
    def survives(self) -> int:
        """Return how many losses the snapshots of every owner survive, whichever they are."""
        return min((len(labels) for labels in self.weakest.values()), default=1) - 1


def apart(one: Domain, other: Domain) -> int:
    """Return how many labels two domains differ in; 0 means that they fail together."""
    return len(set(one) ^ set(other))


def weakest(sites: Iterable[Site]) -> Domain:
    """Return the fewest labels without which none of these sites is left."""
    copies = list(sites)
    sets = [site.labels for site in copies]
    if sum(map(len, sets)) == len(frozenset[tuple[str, str]]().union(*sets)):
        return tuple(("node", site.node) for site in copies)
    labels = sorted(frozenset[tuple[str, str]]().union(*sets), key=lambda label: (label[0] == "node", label))
    return next(
        lost
        for size in range(1, len(sets) + 1)
        for lost in combinations(labels, size)
        if all(set(lost) & s for s in sets)
    )


def place(sites: Sequence[Site], *, before: Mapping[str, Sequence[str]], copies: int) -> Plan:
    """Return ``copies`` holders for each site that serves ranks; ``before`` are the holders so far."""
    placing = _Placing(sorted(sites, key=lambda site: site.node), copies)
    for owner in placing.owners:
        for node in before.get(owner.node, ())[:copies]:
            if placing.has_room(node, owner) and node not in {owner.node, *placing.holders[owner.node]}:
                placing.add(owner, node)
    for held in range(copies):  # one for each before another for any: the far ones must do for all
        for owner in placing.by_need():
            if len(placing.holders[owner.node]) == held and (best := placing.best(owner)) is not None:
                placing.add(owner, best)
    while any(placing.improve(owner) for owner in placing.owners):  # each move is for the better, so this ends
        pass
    return placing.plan()


class _Placing:
    """A placement that is being made."""

    def __init__(self, sites: Sequence[Site], copies: int) -> None:
        self.by_name = {site.node: site for site in sites}
        self.owners = [site for site in sites if site.ranks]
        self.holders: Holders = {owner.node: () for owner in self.owners}
        self._copies = copies
        self._load = dict.fromkeys(self.by_name, 0)
        self._ring = list(self.by_name)
        self._at = {name: at for at, name in enumerate(self._ring)}
        self._share = -(-copies * sum(owner.ranks for owner in self.owners) // max(1, len(sites)))
        self._common = set(sites[0].domain).intersection(*(site.domain for site in sites)) if sites else set()

    def by_need(self) -> list[Site]:
        """Return the owners, those that share a label with most others, and so have the least choice, first."""
        crowd = Counter(label for site in self.by_name.values() for label in set(site.domain) - self._common)
        return sorted(self.owners, key=lambda owner: -max((crowd[label] for label in owner.domain), default=0))

    def has_room(self, node: str, owner: Site) -> bool:
        """Say whether a node is there, and no copy of this owner's was too large for it."""
        return node in self.by_name and owner.node not in self.by_name[node].no_room_for

    def add(self, owner: Site, node: str) -> None:
        self.holders[owner.node] += (node,)
        self._load[node] += owner.ranks

    def best(self, owner: Site) -> str | None:
        """Return the best holder that the owner does not have yet."""
        at, taken = self._at[owner.node], {owner.node, *self.holders[owner.node]}
        found: tuple[tuple[bool, int, int], str] | None = None
        for step in range(1, len(self._ring)):
            name = self._ring[(at + step) % len(self._ring)]
            if name in taken or not self.has_room(name, owner):
                continue
            badness = self._badness(owner, name, self.holders[owner.node])
            if found is None or badness < found[0]:
                found = badness, name
            if badness == (False, 0, 0):
                break
        return found[1] if found is not None else None

    def improve(self, owner: Site) -> bool:
        """Let the first holder that is worse than another node give way to it."""
        before = self.holders[owner.node]
        for node in before:
            others = tuple(other for other in before if other != node)
            self._load[node] -= owner.ranks
            badness = self._badness(owner, node, others)
            if badness != (False, 0, 0):
                self.holders[owner.node] = others
                better = self.best(owner)
                if better is not None and self._badness(owner, better, others) < badness:
                    self.add(owner, better)
                    return True
            self.holders[owner.node] = before
            self._load[node] += owner.ranks
        return False

    def _badness(self, owner: Site, node: str, others: Sequence[str]) -> tuple[bool, int, int]:
        """Say if a node fails together with owner or ``others``, how far it is over its share, what they share."""
        site = self.by_name[node]
        beside = [owner, *(self.by_name[other] for other in others)]
        over = max(0, self._load[node] + owner.ranks - self._share)
        labels = set(site.domain) - self._common
        return (
            any(not apart(site.domain, other.domain) for other in beside),
            over,
            sum(len(labels.intersection(other.domain)) for other in beside),
        )

    def plan(self) -> Plan:
        """Return the placement as it is."""
        counts = {owner.node: self._apart(owner) for owner in self.owners}
        holders = {owner: nodes for owner, nodes in sorted(self.holders.items()) if nodes}
        return Plan(
            holders=holders,
            unmet={owner.node: self._why(owner) for owner in self.owners if counts[owner.node] < self._copies},
            copies=min(counts.values(), default=self._copies),
            weakest={
                owner.node: weakest((owner, *(self.by_name[node] for node in self.holders[owner.node])))
                for owner in self.owners
            },
        )

    def _apart(self, owner: Site) -> int:
        """Return how many copies an owner has in domains of their own."""
        return len({owner.domain, *(self.by_name[node].domain for node in self.holders[owner.node])}) - 1

    def _why(self, owner: Site) -> str:
        if len(self.by_name) == 1:
            return "there is no other living node to hold copies"
        if full := [name for name in self.by_name if not self.has_room(name, owner)]:
            return f"its copies don't fit into the memory of {', '.join(full)}, and no other node can hold them"
        if not self._apart(owner):
            return f"every other living node shares its failure domain {text_of(owner.domain)}"
        wanted = f"{self._copies} copies in failure domains of their own need {self._copies + 1} domains"
        return f"{wanted}, and the living nodes are in {len({site.domain for site in self.by_name.values()})}"


def text_of(domain: Domain) -> str:
    """Return labels as a person gives them."""
    return ",".join(f"{key}={value}" for key, value in domain)
