"""A whole tensor on its way out of a store, whatever it is to be written as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A tensor: its name, safetensors' name of the dtype that it is stored as, and its true shape.

    ``true_dtype`` is torch's name of its dtype if safetensors has none for it. ``read`` yields its bytes in order, and
    raises CorruptObjectError, at the end at the latest, unless they are those that were stored.
    """

    name: str
    dtype: str
    true_dtype: str | None
    shape: tuple[int, ...]
    read: Callable[[], Iterator[bytes | bytearray]]
