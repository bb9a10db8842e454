"""What services use is followed over each life of theirs, and the longest one tells."""

from __future__ import annotations

import os

import pytest

from toprope.chaos import usage
from toprope.chaos.evidence import Use
from toprope.chaos.usage import WARM_AFTER_S, Usage, Used, used_by


def test_the_use_of_a_process_is_that_of_linux() -> None:
    used = used_by(os.getpid())
    assert used is not None
    assert used.open_files >= 3
    assert used.resident_bytes > 1 << 20
    assert used_by(1 << 22) is None


def test_shared_memory_that_is_mapped_is_not_counted() -> None:
    import mmap  # noqa: PLC0415 - of this test alone

    before = used_by(os.getpid())
    with mmap.mmap(-1, 64 << 20) as shared:
        shared.write(bytes(64 << 20))
        after = used_by(os.getpid())
    assert before is not None
    assert after is not None
    assert after.resident_bytes - before.resident_bytes < 32 << 20


def test_the_longest_warm_life_of_each_service_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    uses: dict[int, Used] = {}
    monkeypatch.setattr(usage, "used_by", uses.get)
    known = Usage()
    uses |= {10: Used(20, 1000), 11: Used(30, 2000)}
    known.look({"coordinator": 10, "sidecar a": 11}, now_s=1.0, is_ready=False)
    uses |= {10: Used(21, 1100), 11: Used(31, 2100)}
    known.look({"coordinator": 10, "sidecar a": 11}, now_s=5.0, is_ready=True)
    uses |= {10: Used(22, 1200), 12: Used(90, 9000)}
    known.look({"coordinator": 10, "sidecar a": 12}, now_s=10.0, is_ready=True)
    uses[12] = Used(40, 4000)
    known.look({"sidecar a": 12}, now_s=10.0 + WARM_AFTER_S, is_ready=True)
    uses[12] = Used(41, 4100)
    known.look({"sidecar a": 12}, now_s=70.0 + WARM_AFTER_S, is_ready=True)
    assert known.of_the_longest() == (
        Use(process="coordinator", seconds=5.0, open_files=(21, 22), resident_bytes=(1100, 1200)),
        Use(process="sidecar a", seconds=60.0, open_files=(40, 41), resident_bytes=(4000, 4100)),
    )
