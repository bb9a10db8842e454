"""Chance, identity and sleep for code that asks for them itself, for the length of a run that can be repeated."""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import SupportsIndex

from toprope.chaos.sim.threads import is_simulated, nap


@contextmanager
def seeded(rng: random.Random) -> Iterator[None]:
    """Let ids come from ``rng``, host and process be the same everywhere, and sleep be virtual, until the end."""

    def token_hex(nbytes: int | None = None) -> str:
        return rng.randbytes(nbytes or 32).hex()

    loop_thread = threading.get_ident()

    def sleep(seconds: float | SupportsIndex, /) -> None:
        if threading.get_ident() == loop_thread or is_simulated():
            nap(seconds)
        else:  # a thread of the process that the history runs in
            really_sleep(seconds)

    before = secrets.token_hex, os.getpid, socket.gethostname, time.sleep
    really_sleep = time.sleep
    secrets.token_hex, os.getpid, socket.gethostname, time.sleep = token_hex, lambda: 1, lambda: "simulated", sleep
    try:
        yield
    finally:
        secrets.token_hex, os.getpid, socket.gethostname, time.sleep = before
