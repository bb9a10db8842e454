"""Who stores what: each rank computes the same answer alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SMALL_BYTES = 16
"""A number, of whatever dtype: not worth a split, since each rank that needs it would read one more shard for it."""


def owners(bytes_by_name: Mapping[str, int], *, ranks: Sequence[int]) -> dict[str, int]:
    """Return the one of the ``ranks`` that stores each parameter that is the same on all of them, with its state.

    Largest first, names breaking ties, each to the rank with the fewest bytes so far, the first of equal ones; all
    numbers to the first rank. Only the parameter's own bytes count, not those of its optimizer state: so the answer
    is the same on each rank and stays the same when the state appears or grows.
    """
    load = dict.fromkeys(ranks, 0)
    result = {}
    for name, size in sorted(bytes_by_name.items(), key=lambda item: (-item[1], item[0])):
        rank = min(ranks, key=load.__getitem__) if size > SMALL_BYTES else ranks[0]
        result[name] = rank
        load[rank] += size
    return result
