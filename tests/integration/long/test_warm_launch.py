"""``ckpt launch --warm`` under torchrun: both ranks are forked with torch loaded, fail once, and are forked again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys
from pathlib import Path
loaded = "torch" in sys.modules
import torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.ones(1) * (distributed.get_rank() + 1)
distributed.all_reduce(total)
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
with (Path(__file__).parent / "journal").open("a") as journal:
    journal.write(f"{restart} {os.environ['RANK']} {loaded} {total.item():g}\\n")
distributed.barrier()
distributed.destroy_process_group()
sys.exit(7 if restart == "0" else 0)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_are_forked_from_a_process_that_has_torch_at_the_first_start_and_at_a_restart(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    words = ["launch", "--warm", "torch", "--", "torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [sys.executable, "-m", "toprope", *words, f"--log-dir={tmp_path / 'logs'}", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "journal").read_text().splitlines()) == [
        "0 0 True 3",
        "0 1 True 3",
        "1 0 True 3",
        "1 1 True 3",
    ]
    assert done.stderr.count("torch loaded for all ranks") == 1
    assert "starts cold" not in done.stderr
    assert done.stderr.count("ended with status 7") >= 1, "the other may have been told to end before it did"
