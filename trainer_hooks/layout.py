"""Who stores what: each rank computes the same answer alone."""

from __future__ import annotations

from collections.abc import Mapping


def owners(bytes_by_name: Mapping[str, int], *, world: int) -> dict[str, int]:
    """Return the rank that stores each replicated parameter, with the optimizer state that belongs to it.

    Largest first, names breaking ties, each to the rank with the fewest bytes so far, the lowest of equal ones. Only
    the parameter's own bytes count, not those of its optimizer state: so the answer is the same on each rank and stays
    the same when the state appears or grows.
    """
    load = [0] * world
    result = {}
    for name, size in sorted(bytes_by_name.items(), key=lambda item: (-item[1], item[0])):
        rank = min(range(world), key=load.__getitem__)
        result[name] = rank
        load[rank] += size
    return result
