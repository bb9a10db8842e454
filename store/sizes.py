"""Sizes as people read them."""

from __future__ import annotations

import re

from toprope.store.errors import UsageError

KIBI = 1024


def size_text(count: int) -> str:
    """Return a number of bytes with a unit of 1024 and at least three digits, unless it is exact."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    while value >= KIBI and unit != "PiB":
        value, unit = value / KIBI, next(units)
    if unit == "B":
        return f"{count} B"
    return f"{value:.{2 if value < 10 else 1}f} {unit}"  # noqa: PLR2004 - one digit before the point


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGT]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the number of bytes that people write as ``5GB`` (of 1000), ``512MiB`` (of 1024) or ``4096``.

    Raises:
        UsageError: it is no size, or none above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * (KIBI if match[3] else 1000) ** _POWERS[match[2]])
    if size < 1:
        raise UsageError(f"{text!r} is not a size; give one like 5GB, 512MiB or 4096")
    return size
