"""Values of no type that we know, pickled because the trainer said ``allow_pickle=True``.

Unpickling runs what the bytes say. So this is off by default at both ends, nothing but ``Checkpointer.restore()`` of a
trainer that says the same does it, and the bytes are checked against their digest before.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
from typing import Any

from toprope.trainer_hooks.errors import UnsupportedLeafError


def pickled(value: object, refusal: UnsupportedLeafError) -> dict[str, Any]:
    """Return the JSON of a value that ``refusal`` says can't be kept otherwise.

    Raises:
        UnsupportedLeafError: it can't be pickled either.
    """
    try:
        body = pickle.dumps(value, protocol=4)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise UnsupportedLeafError(f"{refusal}; nor can it be pickled: {error}") from error
    return {"$": "pickle", "sha256": hashlib.sha256(body).hexdigest(), "v": base64.b64encode(body).decode()}


def body_of(entry: dict[str, Any]) -> bytes:
    """Return the pickled bytes of an entry, checked.

    Raises:
        ValueError: they are not those that were written.
    """
    body = base64.b64decode(entry["v"], validate=True)
    if hashlib.sha256(body).hexdigest() != entry["sha256"]:
        raise ValueError("a pickled value whose bytes do not have its digest")
    return body


def unpickle(body: bytes) -> Any:  # noqa: ANN401 - whatever was pickled
    """Return the value; this runs what the bytes say."""
    return pickle.loads(body)  # noqa: S301 - the trainer asked for it
