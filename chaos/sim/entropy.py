"""Chance and identity for code that draws them itself: seeded for the length of a run, so that it can be repeated."""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def seeded(rng: random.Random) -> Iterator[None]:
    """Let ids come from ``rng``, and host and process be the same everywhere, until the context ends."""

    def token_hex(nbytes: int | None = None) -> str:
        return rng.randbytes(nbytes or 32).hex()

    before = secrets.token_hex, os.getpid, socket.gethostname
    secrets.token_hex, os.getpid, socket.gethostname = token_hex, lambda: 1, lambda: "simulated"
    try:
        yield
    finally:
        secrets.token_hex, os.getpid, socket.gethostname = before
