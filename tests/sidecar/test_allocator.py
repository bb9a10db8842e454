"""Large buffers that were freed are the machine's again, not the process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAME_BYTES = 16 << 20
PROGRAM = f"""
import sys
from pathlib import Path
from toprope.sidecar.adapters.allocator import give_back_large_buffers

def own_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

if sys.argv[1] == "told":
    give_back_large_buffers()
before = own_kib()
small = []
for _ in range(3):
    first, second = b"x" * {FRAME_BYTES}, b"y" * {FRAME_BYTES}
    small.append(b"z" * 100_000)  # lies above them in a heap, and lives on
    del first, second
print(own_kib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("told", "kept"), [("told", False), ("left alone", True)])
def test_a_process_does_not_keep_the_large_buffers_that_it_has_freed(told: str, *, kept: bool) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, told], check=True, capture_output=True, text=True)
    assert (int(done.stdout) * 1024 > FRAME_BYTES // 2) is kept, done.stdout
