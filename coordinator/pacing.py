"""How often: what is cheap in a small job, and done at once there, is done less often in a large one. Pure.

To decide anew: while that takes long, less often, so that most of the time is left for what comes in. To hear of a
node, and to ask one that is silent: so often that the coordinator can read it all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

SHARE = 0.1
"""Deciding anew takes at most this part of the time, unless news would wait for it longer than ``WAIT_S_MAX``."""
WAIT_S_MAX = 0.5
REPORTS_PER_S = 512
"""So many inventories take half of a processor at most to read and take in, which leaves time to think of them."""
AT_ONCE_NODES = 128
"""So few nodes never wait: they don't all have something to say at once."""
SILENT_ROUNDS = 5
"""Beside ``silence_s``, a node may say nothing for so many times ``report_every_s`` before it is asked."""
PROBES_MAX = 64
"""So many silent nodes are asked at once at most; if there are more, the next ones ``PROBE_EVERY_S`` later."""
PROBE_EVERY_S = 0.5


class Pacing:
    """Lets decisions take a tenth of the time, but no news wait for longer than half a second."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def took(self, began_s: float, ended_s: float) -> None:
        """Note how long a decision took."""
        self._next_s = ended_s + min((ended_s - began_s) * (1 - SHARE) / SHARE, WAIT_S_MAX)

    def wait_s(self, *, now_s: float) -> float:
        """Return how long the next one has to wait."""
        return max(0.0, self._next_s - now_s)


def report_every_s(nodes: int) -> float:
    """Return in how long each of so many nodes has one turn to tell its inventory: a power of two, so that it stays."""
    return 0.0 if nodes < AT_ONCE_NODES else float(2 ** (nodes.bit_length() - 1)) / REPORTS_PER_S


class Asking:
    """Which silent nodes are asked when there are many: some at a time, one after the other, round and round."""

    def __init__(self) -> None:
        self._last = ""
        self._next_s = 0.0

    def turn(self, silent: Sequence[str], *, now_s: float) -> Sequence[str]:
        """Return which of these, in order of their names, to ask now."""
        if len(silent) <= PROBES_MAX:
            return silent
        if now_s < self._next_s:
            return ()
        at = bisect_right(silent, self._last)
        chosen = [*silent[at:], *silent[:at]][:PROBES_MAX]
        self._last, self._next_s = chosen[-1], now_s + PROBE_EVERY_S
        return chosen
