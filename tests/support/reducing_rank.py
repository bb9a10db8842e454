"""A rank that adds up with the others, again and again, until a file is there: what torchrun starts in tests of launch.

``reducing_rank.py JOURNAL STOP``: it writes a line when it begins, and one once it has added up three times with all.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

ENOUGH = 3


def main() -> None:
    journal, stop = map(Path, sys.argv[1:])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def note(word: str) -> None:
        with journal.open("a") as stream:
            stream.write(f"{word} {rank} {world} {os.getpid()} {os.environ['NODE']}\n")

    note("begins")
    distributed.init_process_group("gloo", timeout=timedelta(seconds=8))
    sums = 0
    while True:
        value = torch.tensor([1.0, float(stop.exists())])
        distributed.all_reduce(value)
        assert int(value[0]) == world
        sums += 1
        if sums == ENOUGH:
            note("trains")
        if value[1] > 0:
            break
        time.sleep(0.05)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
