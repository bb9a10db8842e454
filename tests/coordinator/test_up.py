"""What ``ckpt up`` starts: command lines that a user could have typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.coordinator.up import commands, layout
from toprope.coordinator.wire import Cadence

PORTS = {"broker": 1, "coordinator": 2, "sidecar": 3}


@pytest.mark.parametrize("codec", ["auto", "zstd", "none"])
def test_the_codec_goes_to_the_sidecar_and_to_nobody_else(codec: str, tmp_path: Path) -> None:
    where = layout(job="gpt", node="a", store=str(tmp_path), directory=tmp_path, memory_dir=tmp_path)
    cadence = Cadence(from_step=0, every=1, local_every=1, object_every=1)
    lines = commands(where, cadence, ports=PORTS, codec=codec)
    at = lines["sidecar"].index("--codec")
    assert lines["sidecar"][at + 1] == codec
    assert not any("--codec" in line for name, line in lines.items() if name != "sidecar")
