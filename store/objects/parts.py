"""How an object is cut into the parts of a multipart upload. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from toprope.store.errors import UsageError

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server allows, and how large we like parts to be. What is no longer than one part is put in one piece."""

    part_bytes: int = 16 * _MIB
    min_part_bytes: int = 5 * _MIB
    max_part_bytes: int = 5 * 1024 * _MIB
    max_parts: int = 10_000
    max_object_bytes: int = 5 * 1024 * 1024 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes ``begin`` to ``end`` of an object, sent as part ``number``, which counts from 1."""

    number: int
    begin: int
    end: int


def plan_parts(size: int, limits: Limits) -> tuple[Part, ...]:
    """Return the parts of an object of ``size`` bytes, in order; one part means a plain put.

    All parts but the last have the same length, which grows with the object so that part numbers never run out.

    Raises:
        UsageError: the object is larger than the server takes.
    """
    part_bytes = max(limits.part_bytes, limits.min_part_bytes, -(-size // limits.max_parts))
    if size > limits.max_object_bytes or part_bytes > limits.max_part_bytes:
        most = min(limits.max_object_bytes, limits.max_part_bytes * limits.max_parts)
        raise UsageError(
            f"{size} bytes are too many for one object: an S3 store takes at most {most}. Nothing was sent; "
            "spread the state over more ranks"
        )
    begins = range(0, size, part_bytes) or range(1)
    return tuple(
        Part(number=number, begin=begin, end=min(begin + part_bytes, size))
        for number, begin in enumerate(begins, start=1)
    )
