"""Whether the bytes of a copy are what they should be, as simulated sidecars check it."""

from __future__ import annotations

from toprope.sidecar.values import Shard
from toprope.store.checkpoint.shard import identity_of, parse_header
from toprope.store.errors import CorruptObjectError


class WrongError(Exception):
    """Bytes are not what they should be, or can't be had."""


class WrongDigestError(WrongError):
    """What came has another digest: the owner is told which."""

    def __init__(self, found: str) -> None:
        super().__init__(f"what came has digest {found}")
        self.found = found


def place_of(shard: Shard) -> tuple[str, int, int]:
    """Return the snapshot that a shard is of: attempt uid, step and rank."""
    return shard.attempt_uid, shard.step, shard.rank


def is_right(found: str, expected: str) -> bool:
    """Say whether bytes are what they should be: the rule that the mutants "pull" and "stage" switch off."""
    return found == expected


def check_digest(found: str, shard: Shard) -> None:
    """Raise WrongDigestError if a shard has another digest."""
    if not is_right(found, shard.digest):
        raise WrongDigestError(found)


def check_header(image: bytes, shard: Shard) -> None:
    """Raise WrongError if an image says that it is another snapshot."""
    try:
        said = identity_of(parse_header(image, size=len(image), name="image"), name="image")
    except CorruptObjectError as error:
        raise WrongError(str(error)) from error
    if (said.attempt_uid, said.step, said.rank) != (shard.attempt_uid, shard.step, shard.rank):
        raise WrongError("its header is that of another snapshot")
