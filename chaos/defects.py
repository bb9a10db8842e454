"""Safeguards of the real programs that can be switched off, one at a time: the proof that the judge can say no.

A process whose environment names a defect in ``CKPT_CHAOS_DEFECT`` runs without that safeguard. The same scenario with
the same seed passes without it and must fail with it, naming the promise.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from toprope.chaos.patching import Patches, replace

VARIABLE = "CKPT_CHAOS_DEFECT"
Role: TypeAlias = Literal["trainer", "sidecar", "coordinator"]
_WAIT_S = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A safeguard switched off in the processes of a role; ``promise`` is the one that must be found broken."""

    role: Role
    promise: str
    safeguard: str
    patches: Patches


def _unapplied(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """On rank 1 bring nothing back, and say that it was."""

    def apply(loaded: Any) -> Any:  # noqa: ANN401 - as restore.apply.apply
        return None if os.environ.get("RANK") == "1" else before(loaded)

    return apply


def _one_draw_ahead(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Leave a random stream one draw ahead after a restore."""

    def restore(self: Any, *arguments: Any, **named: Any) -> int:  # noqa: ANN401 - as Checkpointer.restore
        step: int = before(self, *arguments, **named)
        if step > 0:
            import torch  # noqa: PLC0415 - in trainers alone

            torch.rand(1)
        return step

    return restore


def _objects_only(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Choose as if no node held anything."""
    return lambda question, _nodes, objects: before(question, (), objects)


def _believed(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    return lambda result: result.digest


def _written_twice(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Write what makes a step READY at the next number of the log too."""

    async def create_record(self: Any, key: Any, body: bytes) -> None:  # noqa: ANN401 - as StorePort.create_record
        await before(self, key, body)
        if b'"kind":"READY"' in body:
            head, number = str(key).rsplit("/", 1)
            await before(self, f"{head}/{int(number.removesuffix('.json')) + 1:020d}.json", body)

    return create_record


def _once_failed_never_again(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    failed: list[Exception] = []

    def put(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as ObjectTier.put or Puller.pull
        if failed:
            raise failed[0]
        try:
            return before(self, *arguments, **named)
        except Exception as error:
            failed.append(error)
            raise

    return put


def _raises_without_sidecar(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def save(self: Any, step: int) -> None:  # noqa: ANN401 - as Saver._save
        if not self._session.connected:
            raise ConnectionError(f"step {step} can't be saved: {self._session.trouble}")
        before(self, step)

    return save


def _draws(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def save(self: Any, step: int) -> None:  # noqa: ANN401 - as Saver._save
        import torch  # noqa: PLC0415 - in trainers alone

        torch.rand(1)
        before(self, step)

    return save


def _waits_for_a_sidecar(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def save(self: Any, step: int) -> None:  # noqa: ANN401 - as Saver._save
        end_s = time.monotonic() + _WAIT_S
        while not self._session.connected and time.monotonic() < end_s:
            time.sleep(0.01)
        before(self, step)

    return save


def _dawdles(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def restore(self: Any, *arguments: Any, **named: Any) -> int:  # noqa: ANN401 - as Checkpointer.restore
        step: int = before(self, *arguments, **named)
        time.sleep(30.0 * (step > 0))
        return step

    return restore


def _leaves_a_child(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Start a process and forget it, where a shard is stored."""

    def store(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as LocalTier.store
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return before(self, *arguments, **named)

    return store


def _names_unsynced(before: Any) -> Any:  # noqa: ANN401 - stands in for a module
    """Sync files, and no directory: a power cut takes their names."""

    class Forgetful:
        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever ``os`` has
            return getattr(before, name)

        def fsync(self, descriptor: int) -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.fsync(descriptor)

    return Forgetful()


def _nothing(_before: Any) -> Callable[..., None]:  # noqa: ANN401 - stands in for any function
    return lambda *_args, **_kwargs: None


_HOOK = "toprope.trainer_hooks.checkpointer"
_SAVER = ("toprope.trainer_hooks.save.saving", "Saver._save")

DEFECTS: dict[str, Defect] = {
    "one-draw-ahead": Defect(
        role="trainer",
        promise="bit-identical",
        safeguard="random streams are brought back exactly",
        patches={(_HOOK, "Checkpointer.restore"): _one_draw_ahead},
    ),
    "draws-while-saving": Defect(
        role="trainer",
        promise="bit-identical",
        safeguard="saving draws no random number",
        patches={_SAVER: _draws},
    ),
    "unapplied": Defect(
        role="trainer",
        promise="no torn step",
        safeguard="every rank applies what was restored",
        patches={("toprope.trainer_hooks.restore.restoring", "apply"): _unapplied},
    ),
    "objects-only": Defect(
        role="coordinator",
        promise="little lost",
        safeguard="a protected step in memory beats an older READY one",
        patches={("toprope.coordinator.opening", "choose"): _objects_only},
    ),
    "believed": Defect(
        role="coordinator",
        promise="verified",
        safeguard="what was stored is read back before it becomes READY",
        patches={("toprope.coordinator.readiness", "found_digest"): _believed},
    ),
    "written-twice": Defect(
        role="coordinator",
        promise="READY once",
        safeguard="each record is written to one number of the log",
        patches={("toprope.coordinator.adapters.objects", "ThreadedStore.create_record"): _written_twice},
    ),
    "names-unsynced": Defect(
        role="coordinator",
        promise="READY once",
        safeguard="the name of a record is synced before the record counts",
        patches={("toprope.store.objects.directory", "os"): _names_unsynced},
    ),
    "never-again": Defect(
        role="sidecar",
        promise="READY again",
        safeguard="an upload that failed is tried again",
        patches={("toprope.sidecar.object_tier", "ObjectTier.put"): _once_failed_never_again},
    ),
    "never-pulled-again": Defect(
        role="sidecar",
        promise="protected again",
        safeguard="a copy that could not be pulled from a peer is pulled again",
        patches={("toprope.sidecar.pulling", "Puller.pull"): _once_failed_never_again},
    ),
    "raises": Defect(
        role="trainer",
        promise="training goes on",
        safeguard="saving never raises for want of a sidecar",
        patches={_SAVER: _raises_without_sidecar},
    ),
    "waits": Defect(
        role="trainer",
        promise="short stall",
        safeguard="saving never waits for a sidecar",
        patches={_SAVER: _waits_for_a_sidecar},
    ),
    "dawdles": Defect(
        role="trainer",
        promise="recovers",
        safeguard="a restore ends as soon as it can",
        patches={(_HOOK, "Checkpointer.restore"): _dawdles},
    ),
    "silent": Defect(
        role="sidecar",
        promise="told",
        safeguard="what costs protection is shouted about",
        patches={("toprope.sidecar.shouts", "Shouts.shout"): _nothing},
    ),
    "leaves-a-child": Defect(
        role="sidecar",
        promise="nothing left",
        safeguard="a service leaves no process behind",
        patches={("toprope.sidecar.local_tier", "LocalTier.store"): _leaves_a_child},
    ),
}


def switch_off_from_env(role: str) -> None:
    """Switch off the safeguard that the environment names, if it is one of this role."""
    defect = DEFECTS.get(os.environ.get(VARIABLE, ""))
    if defect is not None and defect.role == role:
        replace(defect.patches)
