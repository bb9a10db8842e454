"""Which node holds copies of which other node's snapshots. Pure and deterministic.

An owner's holder is another living node, in another failure domain if there is one; a holder that is still good is
kept, so that a change moves as little as possible; else the holder that has the least to hold, farthest by domain
first, and among equals the next one after the owner in a ring by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Domain = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A living node: where it answers and what fails together with it. ``ranks`` it serves: 0 is a holder only."""

    node: str
    url: str
    domain: Domain
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The holder of each owner, and for each owner that has none in another domain the reason."""

    holders: dict[str, str]
    unmet: dict[str, str]


def apart(one: Domain, other: Domain) -> int:
    """Return how many labels two domains differ in; 0 means that they fail together."""
    return len(set(one) ^ set(other))


def place(sites: Sequence[Site], *, before: Mapping[str, str]) -> Plan:
    """Return a holder for each site that serves ranks; ``before`` are the holders so far."""
    by_name = {site.node: site for site in sorted(sites, key=lambda site: site.node)}
    owners = [site for site in by_name.values() if site.ranks]
    holders: dict[str, str] = {}
    unmet: dict[str, str] = {}
    load = dict.fromkeys(by_name, 0)
    for owner in owners:
        held_by = before.get(owner.node, "")
        if held_by in by_name and held_by != owner.node and apart(owner.domain, by_name[held_by].domain):
            holders[owner.node] = held_by
            load[held_by] += owner.ranks
    for owner in owners:
        if owner.node in holders:
            continue
        holder = _best(owner, tuple(by_name.values()), load)
        if holder is None:
            unmet[owner.node] = "there is no other living node to hold copies"
            continue
        holders[owner.node] = holder.node
        load[holder.node] += owner.ranks
        if not apart(owner.domain, holder.domain):
            unmet[owner.node] = f"every other living node shares its failure domain {_text(owner.domain)}"
    return Plan(holders=dict(sorted(holders.items())), unmet=unmet)


def _best(owner: Site, sites: tuple[Site, ...], load: Mapping[str, int]) -> Site | None:
    names = [site.node for site in sites]
    at = names.index(owner.node)

    def rank(site: Site) -> tuple[bool, int, int, int]:
        distance = apart(owner.domain, site.domain)
        return (distance == 0, load[site.node], -distance, (names.index(site.node) - at) % len(names))

    return min((site for site in sites if site.node != owner.node), key=rank, default=None)


def _text(domain: Domain) -> str:
    return ",".join(f"{key}={value}" for key, value in domain)
