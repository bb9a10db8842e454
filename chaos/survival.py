"""What a placement claims to survive, tried: every set of so many losses, in every small world. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from toprope.coordinator.config import COPIES_MAX
from toprope.coordinator.placement import Domain, Plan, Site, place
from toprope.sidecar.budget import needed_bytes

NODES_MAX = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What copies over racks come to: so many worlds, sets of losses tried in them, and those that lost a snapshot.

    ``lines``: the power lines that the racks are shared out among; 0: there is no such label. ``survives`` is the least
    that was claimed in any of the worlds, ``unmet`` counts those that have too few racks.
    """

    copies: int
    racks: int
    lines: int
    worlds: int
    losses: int
    lost: int
    survives: int
    unmet: int
    bytes_per_state_byte: int


def worlds(*, nodes_max: int, racks: int, lines: int) -> Iterator[list[Site]]:
    """Yield every world of at most so many nodes in exactly so many racks."""
    for count in range(racks, nodes_max + 1):
        for where in combinations_with_replacement(range(racks), count):
            if len(set(where)) == racks:
                yield [_site(number, rack, lines) for number, rack in enumerate(where)]


def _site(number: int, rack: int, lines: int) -> Site:
    domain: Domain = (("rack", f"r{rack}"),)
    if lines:
        domain = (("power", f"p{rack % lines}"), *domain)
    return Site(node=f"n{number}", url=f"http://n{number}", domain=domain, ranks=1)


def survived(plan: Plan, sites: list[Site], owner: str, lost: Domain) -> bool:
    """Say whether a snapshot of this owner is left when all that has one of these labels is lost."""
    gone = {site.node for site in sites if site.labels & set(lost)}
    return bool({owner, *plan.holders.get(owner, ())} - gone)


def table(*, nodes_max: int = NODES_MAX) -> list[Row]:
    """Return a row for each number of copies, of racks and of power lines."""
    return [
        _row(copies, racks, lines, list(worlds(nodes_max=nodes_max, racks=racks, lines=lines)))
        for copies in range(COPIES_MAX + 1)
        for racks in range(1, nodes_max)
        for lines in (0, 2)
    ]


def _row(copies: int, racks: int, lines: int, those: list[list[Site]]) -> Row:
    tried = lost = unmet = 0
    claims: list[int] = []
    for sites in those:
        plan = place(sites, before={}, copies=copies)
        labels = sorted({label for site in sites for label in site.labels})
        unmet += bool(plan.unmet)
        for owner, weakest in plan.weakest.items():
            claims.append(len(weakest) - 1)
            for size in range(len(weakest)):
                for some in combinations(labels, size):
                    tried += 1
                    lost += not survived(plan, sites, owner, some)
    return Row(
        copies=copies,
        racks=racks,
        lines=lines,
        worlds=len(those),
        losses=tried,
        lost=lost,
        survives=min(claims),
        unmet=unmet,
        bytes_per_state_byte=needed_bytes(state_size=1, ranks=1, copies=copies),
    )


def as_markdown(rows: list[Row]) -> str:
    """Return the rows as a table."""
    head = (
        "copies",
        "bytes per state byte",
        "racks",
        "power lines",
        "survives any",
        "worlds",
        "unmet",
        "tried",
        "lost",
    )
    lines = [f"| {' | '.join(head)} |", "|" + " ---: |" * len(head)]
    for row in rows:
        where = row.copies, row.bytes_per_state_byte, row.racks, row.lines or "-"
        cells = (*where, row.survives, row.worlds, row.unmet, row.losses, row.lost)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
