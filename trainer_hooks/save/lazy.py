"""Copies made while the next forward and backward run, of what only an optimizer changes.

An optimizer is trusted when several snapshots, copied at once, were found unchanged byte for byte at the fence before
its next update. From then on its tensors are copied by a background thread; its fence waits for that. Of each tensor a
sample, taken at the end of the step, is compared with the slot and with the tensor when the copy is done. Where they
differ, something else changes the tensors: the snapshot is void, and all is copied at once for the rest of the attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from toprope.trainer_hooks.capture.state import Snapshot
from toprope.trainer_hooks.image import copying, cuda
from toprope.trainer_hooks.image.copying import LARGE_BYTES, Copier, Move
from toprope.trainer_hooks.image.shard import MappedFile, Plan, is_plain
from toprope.trainer_hooks.save.fence import raise_fence, why_unfit

logger = logging.getLogger("toprope")
PROOFS = 3
"""How many snapshots in a row must be found unchanged before an optimizer is trusted."""
AnyMove: TypeAlias = Move | cuda.DeviceMove


@dataclass(slots=True)
class _Part:
    """The tensors of one optimizer in a snapshot that is being copied. ``checks`` say whether the copy is sound."""

    moves: Sequence[AnyMove]
    checks: Sequence[Callable[[], bool]]
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Trust:
    """What is known of one optimizer, as far as it updates ``names``.

    ``proof`` are the copies to compare at its next fence, ``part`` those that it must wait for.
    """

    optimizer: torch.optim.Optimizer
    names: frozenset[str] = frozenset()
    proofs: int = 0
    unfit: str = ""
    proof: Sequence[AnyMove] = ()
    part: _Part | None = None

    @property
    def given(self) -> bool:
        return not self.unfit and self.proofs >= PROOFS


class Lazy:
    """The lazy copies of one attempt. All but the copying itself is done on the training thread."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], copier: Copier) -> None:
        self.waited_s = 0.0
        """How long the fences have held up training."""
        self._copier = copier
        self._turn = 0
        self._form: object = None
        """Of the snapshot that the optimizers' ``names`` are of."""
        self._trouble = ""
        self._abandoned = False
        self._ended = threading.Event()
        self._ended.set()
        self._trust = {section: _Trust(optimizer) for section, optimizer in optimizers.items()}
        self._take_away = [
            raise_fence(trust.optimizer, lambda trust=trust: self._arrive(trust))  # type: ignore[misc]
            for trust in self._trust.values()
        ]

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being copied."""
        return not self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is; return whether that came true."""
        return self._ended.wait(timeout_s)

    def trouble(self) -> str:
        """Return once what made a copy void since this was last asked."""
        if self.busy:
            return ""
        trouble, self._trouble = self._trouble, ""
        return trouble

    def later(self, snapshot: Snapshot) -> frozenset[str]:
        """Return the tensors that may be copied after the end of the step."""
        if self._form is not snapshot.form:
            self._form = snapshot.form
            for section, names in self._worth_it(snapshot).items():
                trust = self._trust[section]
                if trust.names != names:
                    trust.names, trust.proofs = names, 0
        return frozenset().union(*(trust.names for trust in self._trust.values() if trust.given))

    def _worth_it(self, snapshot: Snapshot) -> dict[str, frozenset[str]]:
        """Return for each optimizer which of its tensors are worth a copy of their own."""
        found: dict[str, set[str]] = {section: set() for section in self._trust}
        for name, section in snapshot.updated_by.items():
            if section in found and _is_worth_it(snapshot.tensors[name]):
                found[section].add(name)
        return {section: frozenset(names) for section, names in found.items()}

    def prove(self, target: MappedFile, plan: Plan, snapshot: Snapshot) -> None:
        """Compare what was copied at once with what is there at the fence of each optimizer that is not trusted yet."""
        for trust in self._trust.values():
            trust.proof = () if trust.given or trust.unfit else _moves(target, plan, snapshot, trust.names)

    def start(
        self, target: MappedFile, plan: Plan, snapshot: Snapshot, later: frozenset[str], then: Callable[[], None]
    ) -> None:
        """Begin to copy these tensors; when all are copied and sound, ``then`` is called by the thread that did it."""
        self._turn += 1
        parts = []
        for trust in self._trust.values():
            moves = _moves(target, plan, snapshot, trust.names & later)
            if moves:
                trust.part = _Part(moves, _checks(moves, self._turn))
                parts.append(trust.part)
        self._ended.clear()
        self._copier.start(lambda: self._copy(parts, then))

    def abandon(self) -> None:
        """Let the copy that is being made come to nothing: from now on the state may change under it."""
        self._abandoned = True

    def close(self) -> None:
        """Take the fences away. To be called when no copy is being made."""
        for take_away in self._take_away:
            take_away()

    def _copy(self, parts: Sequence[_Part], then: Callable[[], None]) -> None:
        """Copy part by part, on the copying thread. Whatever happens, nobody waits for it for ever."""
        self._trouble = "the copy failed in a way that was not foreseen; standard error has a traceback"
        try:
            sound = all([_copied(part) for part in parts])  # noqa: C419 - each part, also after one that is not sound
            if sound and not self._abandoned:
                then()
            self._trouble = "" if sound else "the state was changed while it was copied, by other than its optimizer"
        except (RuntimeError, OSError) as error:
            self._trouble = f"the copy failed: {error}"
        finally:
            for part in parts:
                part.done.set()
            self._ended.set()

    def distrust(self, reason: str) -> None:
        """Copy all at once from now on."""
        for trust in self._trust.values():
            trust.unfit = trust.unfit or reason

    def _arrive(self, trust: _Trust) -> None:
        """Stand before an update."""
        if trust.part is not None:
            began = time.perf_counter()
            trust.part.done.wait()
            self.waited_s += time.perf_counter() - began
            trust.part = None
        proof, trust.proof = trust.proof, ()
        trust.unfit = trust.unfit or why_unfit(trust.optimizer)
        if not proof or trust.unfit:
            return
        with cuda.copying(move.source for move in proof):
            same = all(move.same() for move in proof)
        if same:
            trust.proofs += 1
        else:
            trust.unfit = "something else changes what it updates, between the end of a step and the next update"
            logger.info("%s: %s; its tensors are copied at once", type(trust.optimizer).__name__, trust.unfit)


def _is_worth_it(tensor: torch.Tensor) -> bool:
    size = tensor.numel() * tensor.dtype.itemsize
    return size >= LARGE_BYTES and (is_plain(tensor) or cuda.is_plain(tensor))


def _moves(target: MappedFile, plan: Plan, snapshot: Snapshot, names: Collection[str]) -> list[AnyMove]:
    """Return the copies of these tensors; they keep the memory alive that the tensors have now."""
    found: list[AnyMove] = []
    for extent in plan.extents:
        if extent.name in names:
            source = snapshot.tensors[extent.name].detach()
            at = plan.start + extent.begin
            if source.is_cuda:
                found.append(cuda.DeviceMove(target.typed_view(at, source), source))
            else:
                found.append(target.move(at, source, extent.bytes))
    return found


def _checks(moves: Sequence[AnyMove], turn: int) -> list[Callable[[], bool]]:
    """Return what says later whether copies are sound. A version that moved is a change, one that did not nothing."""

    def versions() -> list[int]:
        return [move.source._version for move in moves]  # noqa: SLF001 - no public name counts a tensor's changes

    before = versions()
    here = [move for move in moves if isinstance(move, Move)]
    of_devices = [move for move in moves if isinstance(move, cuda.DeviceMove)]
    return [lambda: versions() == before, copying.sampled(here, turn), cuda.sampled(of_devices, turn)]


def _copied(part: _Part) -> bool:
    """Copy a part; return whether it is sound. Its fence opens."""
    devices = cuda.devices_of(move.source for move in part.moves)
    with cuda.beside(devices):
        for move in part.moves:
            move.run()
    with cuda.beside(devices):
        sound = all(check() for check in part.checks)
    part.done.set()
    return sound
