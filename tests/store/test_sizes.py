"""One way to say how large something is."""

from __future__ import annotations

import pytest

from toprope.store.sizes import size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (100 << 20, "100.0 MiB"),
        (3 << 40, "3.00 TiB"),
        (5000 << 50, "5000.0 PiB"),
    ],
)
def test_a_size_has_a_unit_and_three_digits_or_is_exact(count: int, text: str) -> None:
    assert size_text(count) == text
