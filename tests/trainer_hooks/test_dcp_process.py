"""``async_save`` in a process: what is left when that process dies and its trainer does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.fake_sidecar import FakeSidecar
from tests.support.source import ROOT

from toprope.chaos.live.processes import free_port
from toprope.trainer_hooks.link.slot import lock_holder
from toprope.trainer_hooks.torchrun import settings


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_saving_process_that_dies_alone_leaves_no_lock_and_its_trainer_is_told(memory_dir: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    env = {**os.environ, **where, **settings.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    with FakeSidecar(memory_dir / "s") as sidecar:
        slots = [sidecar.slot(0, number) for number in range(sidecar.slot_count)]
        command = [sys.executable, "-m", "tests.support.dcp_dying", str(sidecar.socket_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as trainer:
            assert trainer.stdout is not None
            told = trainer.stdout.readline()
            held = [lock_holder(slot.lock) for slot in slots]
            assert trainer.poll() is None
            trainer.communicate(timeout=60)
        left = [lock_holder(slot.lock) for slot in slots]
    assert re.match(r"told: .*(Checkpoint background process is dead|Broken pipe)", told)
    assert (1, 0) in sidecar.images, "the process has taken slots and saved"
    assert set(held) <= {None, trainer.pid}, "the trainer's last lock goes when it sees another process have one"
    assert (left, trainer.returncode) == ([None] * len(slots), 0)
