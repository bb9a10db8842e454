"""The promises that are judged after a run, by name, each as a sentence."""

from __future__ import annotations

PROMISES: dict[str, str] = {
    "bit-identical": "the final state is that of an uninterrupted run without Toprope, bit for bit",
    "no torn step": "after a restart all ranks go on from one step, and a step done again loses what it lost before",
    "little lost": "no more steps are lost than the cadence and what was protected allow",
    "verified": "every READY checkpoint verifies, byte for byte",
    "READY once": "the job log is whole and legal, no step of an attempt is READY twice, none that was is lost",
    "READY again": "once the faults are mended, the newest step that is due, and was saved by all ranks, becomes READY",
    "protected again": "when nothing disturbs it any more, a newer step is protected within its bound",
    "training goes on": "no fault outside the trainer ends or restarts it",
    "short stall": "no step is held up by saving for longer than its bound",
    "recovers": "after each blow a new step is done within its bound",
    "told": "what cost protection, or was refused, was said aloud",
    "nothing left": "no process, no file in shared memory, no temporary, no open file and no memory is left over",
}
