"""How long a killed rank keeps training from its next step: ``ckpt launch`` cold, and with ``--warm``.

Two ranks on one node, DDP, with a sidecar beside them. A rank is killed with SIGKILL; torchrun ends the other one,
meets, starts both again, they restore from memory and train. The time is from the kill to the end of the first step
after it, on rank 0.

    python benchmarks/restart.py [--kills 5] [--warm MODULES ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from toprope.chaos.live.cluster import Cadences, running_cluster
from toprope.chaos.live.processes import Process, become_subreaper, kill_tree, wait_until
from toprope.chaos.live.scratch import DISK, Scratch

JOB, EVERY = "restart", 5
PATIENCE_S = 120.0
SETTLES = 25
"""Steps between two kills."""
WARM = ("torch", "torch,torch._dynamo")
"""Without the second module, which optimizers load at their first step, that import is left."""
RANK = """
import os, sys, time
import torch
from torch import distributed, nn
from toprope.trainer_hooks import Checkpointer

distributed.init_process_group("gloo")
torch.manual_seed(1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = Checkpointer(job=sys.argv[1], model=model, optimizer=optimizer)
step = checkpointer.restore()
with open(sys.argv[2], "a", buffering=1) as journal:
    while True:
        optimizer.zero_grad()
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        step += 1
        checkpointer.end_step(step)
        journal.write(f"{os.environ['RANK']} {os.getpid()} {step} {time.monotonic()}\\n")
        time.sleep(0.02)
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a rank has ended, and when."""

    rank: int
    pid: int
    step: int
    at_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=5, help="how often a rank is killed in each way")
    parser.add_argument("--warm", nargs="*", default=WARM, metavar="MODULES", help="what --warm is given, way by way")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times as data")
    options = parser.parse_args()
    become_subreaper()
    ways = {"cold": [], **{f"--warm {modules}": ["--warm", modules] for modules in options.warm}}
    found = {}
    for way, words in ways.items():
        with Scratch(DISK) as scratch:
            found[way] = restarts(scratch.path, words, kills=options.kills)
        times = " ".join(f"{one:.2f}" for one in found[way])
        print(f"{way:30} median {statistics.median(found[way]):5.2f} s   of {times}", flush=True)
    if options.json:
        load = os.getloadavg()
        machine = {"machine": platform.platform(), "cpus": os.cpu_count(), "load": load, "python": sys.version}
        options.json.write_text(json.dumps({"seconds": found, **machine}, indent=2))


def restarts(directory: Path, words: list[str], *, kills: int) -> list[float]:
    """Train, kill a rank so often, and return how long each took to the next step."""
    script, journal = directory / "rank.py", directory / "journal"
    script.write_text(RANK)
    often = Cadences(every=EVERY, local_every=EVERY, object_every=4 * EVERY)
    chance = random.Random(1)
    with running_cluster(directory / "cluster", job=JOB, nodes=("a",), cadences=often) as cluster:
        torchrun = ["torchrun", "--nproc-per-node=2", f"--max-restarts={kills}", f"--log-dir={directory / 'logs'}"]
        command = [sys.executable, "-m", "toprope", "launch", *words, "--", *torchrun, str(script), JOB, str(journal)]
        env = {"CKPT_SOCKET": str(cluster.nodes["a"].socket), "OMP_NUM_THREADS": "1"}
        agent = Process("agent", command, log=cluster.log("agent"), env=env)
        try:
            return [one_restart(agent, journal, rank=chance.randrange(2)) for _ in range(kills)]
        finally:
            if agent.status() is None:
                kill_tree(agent)


def one_restart(agent: Process, journal: Path, *, rank: int) -> float:
    """Let it train a while, kill a rank, and return how many seconds later rank 0 ends a step in another process."""

    def settled() -> bool:
        done = [step.pid for step in steps(journal) if step.rank == 0]
        return bool(done) and done.count(done[-1]) >= SETTLES

    wait_until(settled, what=f"{SETTLES} steps", timeout_s=PATIENCE_S, alive=[agent])
    dead = {step.pid for step in steps(journal)}
    victim = next(step.pid for step in reversed(steps(journal)) if step.rank == rank)
    began_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def again() -> list[float]:
        return [step.at_s for step in steps(journal) if step.rank == 0 and step.pid not in dead]

    wait_until(again, what="a step after the restart", timeout_s=PATIENCE_S, alive=[agent])
    return again()[0] - began_s


def steps(journal: Path) -> list[Step]:
    """Return what the ranks have noted."""
    text = journal.read_text() if journal.exists() else ""
    lines = (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [Step(int(rank), int(pid), int(step), float(at_s)) for rank, pid, step, at_s in lines]


if __name__ == "__main__":
    main()
