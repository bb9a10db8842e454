"""Sizes as people read them."""

from __future__ import annotations

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
