"""A trainer that stops for ever in the midst of a lazy copy, to be killed there; started again, it restores and ends.

Arguments: ``OUT``. ``OUT/digests.jsonl`` has a digest of the state at the end of each step, ``OUT/midst`` the step that
was being copied, ``OUT/restored.json`` the step and the digest that it began with the second time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.support.job_in_training import JOB
from tests.support.lazy_trial import Net
from tests.support.tiny_trainer import raw

from toprope.trainer_hooks import Checkpointer
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.save import lazy

LAZY = 2
"""How many lazy snapshots come before the one that is not finished."""


def main(arguments: Sequence[str]) -> None:
    """Train until a lazy copy, or restore."""
    out, socket = Path(arguments[0]), os.environ["CKPT_SOCKET"]
    torch.manual_seed(int(out.joinpath("digests.jsonl").exists()))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    parts = Parts(model=model, optimizer=optimizer)
    ckpt = Checkpointer(job=JOB, model=model, optimizer=optimizer, socket=socket)
    step = ckpt.restore()
    if step:
        (out / "restored.json").write_text(json.dumps([step, _digest(parts)]))
        ckpt.close("nothing")
        return
    while True:
        step += 1
        (model(torch.randn(8, 128)) ** 2).mean().backward()
        optimizer.step()
        with (out / "digests.jsonl").open("a") as journal:
            journal.write(json.dumps([step, _digest(parts)]) + "\n")
        if ckpt.stats.lazy_snapshots >= LAZY:
            lazy._copied = lambda part: _half(part, out, step)  # noqa: B023 - the last one
        ckpt.end_step(step)
        _wait_for_slots(ckpt)


def _half(part: lazy._Part, out: Path, step: int) -> bool:
    """Copy one tensor, and no more."""
    part.moves[0].run()
    (out / "midst.new").write_text(str(step))
    (out / "midst.new").rename(out / "midst")
    threading.Event().wait()
    return False


def _digest(parts: Parts) -> str:
    hashed = hashlib.sha256()
    for name, tensor in sorted(capture(parts, rank=0, world=1).tensors.items()):
        hashed.update(name.encode() + raw(tensor))
    return hashed.hexdigest()


def _wait_for_slots(ckpt: Checkpointer) -> None:
    """Wait until the sidecar has taken what was saved and lends a slot, for as long as it takes."""
    session = ckpt._session
    assert session is not None
    with session._news:
        assert session._news.wait_for(lambda: bool(session.slots._free), 60)
