"""A small object with a name that nobody can guess shows that two see the same store, and not one a copy of the other.

Who asks leaves one in its store and names it; who is asked looks for it in its own before it does anything.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque

from toprope.store.errors import MissingObjectError, UnavailableError
from toprope.store.names import PROBES, probe_key
from toprope.store.objects.protocol import ObjectStore


def leave_probe(store: ObjectStore) -> str:
    """Write a probe and return its nonce.

    Raises:
        UnavailableError: the store did not answer, or can't be written.
    """
    nonce = secrets.token_hex(16)
    store.create(probe_key(nonce), b"")
    return nonce


def forget_probe(store: ObjectStore, nonce: str) -> None:
    """Remove a probe, if that is allowed; one that stays goes with the next purge."""
    with contextlib.suppress(UnavailableError):
        store.delete([probe_key(nonce)])


def sees_probe(store: ObjectStore, nonce: str) -> bool:
    """Return whether a probe is in this store.

    Raises:
        UnavailableError: the store did not answer.
        UsageError: the nonce is none.
    """
    key = probe_key(nonce)
    deque(store.list(PROBES), maxlen=0)  # on a file system of the network, to see a new name at once
    try:
        store.read(key)
    except MissingObjectError:
        return False
    return True
