"""The example's rank inside a network namespace, which ``NETNS`` in its environment names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from toprope.chaos.live.netns import enter


def main(arguments: Sequence[str]) -> None:
    enter(os.environ["NETNS"])  # before torch makes a thread or a socket
    importlib.import_module("train").main(arguments)
