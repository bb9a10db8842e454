"""Safeguards that can be switched off, one at a time: an oracle that lets such a mutant live is worth nothing.

Each mutant names what it replaces, in all modules that know it by name, with a function that does not care; the
invariant that kills it; and a seed on which it dies, while the same history passes with the safeguard on. Where a
second safeguard would stop the program before the oracle can see (the writer's own check of its record), the mutant
switches that off too. ``pull-or-stage`` switches off a rule of the simulated performer, which copies the real one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from toprope.coordinator.intents import CommitStep
from toprope.coordinator.phases import Progress
from toprope.coordinator.wire import ReadBack
from toprope.store.errors import AlreadyExistsError, UnavailableError
from toprope.store.fold import JobState
from toprope.store.log import Appended, Create, append_steps, drive
from toprope.store.records import Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A safeguard switched off. ``patches``: module and dotted name to what takes its place, given what was there."""

    name: str
    safeguard: str
    invariant: str
    seed: int
    patches: dict[tuple[str, str], Callable[[Any], Any]]


def _always(value: object) -> Callable[[Any], Any]:
    return lambda _before: lambda *_args, **_kwargs: value


YES = True
_NO_OWN_CHECK = {("toprope.store.log", "violation"): _always(None)}


def _unfenced(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    async def append(self: Any, make: Any) -> Appended:  # noqa: ANN401 - as Log.append
        async with self._one_at_a_time:
            steps = append_steps(self.state, make, term=1 << 30, writer_id=self._writer_id)
            done = await drive(steps, self._call)
            self.state = done.state
            return done

    return append


def _ready_whatever(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def make_ready(state: JobState, intent: CommitStep, *, manifest_sha256: str, bases: object) -> Ready:  # noqa: ARG001
        return Ready(
            attempt=intent.attempt,
            attempt_uid=intent.attempt_uid,
            step=intent.step,
            parent=state.head,
            manifest_sha256=manifest_sha256,
            bytes=sum(receipt.copy.bytes for receipt in intent.receipts),
        )

    return make_ready


def _believed(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def found_digest(result: ReadBack) -> str:
        return result.digest

    return found_digest


def _exists_is_ours(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def put(key: Any, body: bytes) -> Any:  # noqa: ANN401 - as log._put
        with contextlib.suppress(AlreadyExistsError, UnavailableError):
            yield Create(key=key, body=body)
        return True

    return put


def _first_word(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def advance(now: Progress, said: Any, *, world: int, trains: bool, overdue_s: float) -> Progress:  # noqa: ANN401 - as phases.advance
        return before(now, said, world=min(world, 1) if said else world, trains=trains, overdue_s=overdue_s)  # type: ignore[no-any-return]

    return advance


def _any_document(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def on_desired(self: Any, event: Any) -> list[Any]:  # noqa: ANN401 - as Core._on_desired
        self.desired = event.desired
        return []

    return on_desired


def _with_pulling(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def held(self: Any) -> list[Any]:  # noqa: ANN401 - as PeerBook.held
        found = [(number, spare.held or spare.pulling) for (_, number), spare in sorted(self.spares.items(), key=_at)]
        return [(number, shard) for number, shard in found if shard is not None]

    return held


def _at(item: Any) -> Any:  # noqa: ANN401 - a pair of which the first is wanted
    return item[0]


def _with_flying(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def copies(self: Any) -> list[Any]:  # noqa: ANN401 - as TierBook.copies
        return [
            *before(self),
            *(shard.copy("local") for (tier, _), shard in sorted(self.flying.items()) if tier == "local"),
        ]

    return copies


def _any_staged(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def complete(self: Any, attempt: Any, _trainer: Any) -> bool:  # noqa: ANN401 - as RestoreBook.complete
        return self.attempt_uid == attempt.uid and bool(self.staged or not attempt.restore)

    return complete


def _impatient(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    def on_failed(self: Any, event: Any, *, now_s: float) -> None:  # noqa: ANN401, ARG001 - as RestoreBook.on_failed
        if event.attempt_uid == self.attempt_uid:
            self.failed[event.rank] = event.reason

    return on_failed


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="fence",
        safeguard="a writer of an older term appends nothing",
        invariant="I5",
        seed=3,
        patches={("toprope.coordinator.log", "Log.append"): _unfenced, **_NO_OWN_CHECK},
    ),
    Mutant(
        name="dead-attempt",
        safeguard="READY only for the current attempt and past the last step",
        invariant="I18",
        seed=104,
        patches={("toprope.coordinator.performer", "make_ready"): _ready_whatever, **_NO_OWN_CHECK},
    ),
    Mutant(
        name="read-back",
        safeguard="an object counts only when it was read back with its digest",
        invariant="I1",
        seed=37,
        patches={("toprope.coordinator.readiness", "found_digest"): _believed},
    ),
    Mutant(
        name="whose-record",
        safeguard="a record that exists is read before it is taken for one's own",
        invariant="I3",
        seed=31,
        patches={("toprope.store.log", "_put"): _exists_is_ours},
    ),
    Mutant(
        name="protected",
        safeguard="a step is protected only with a copy in another failure domain",
        invariant="I14",
        seed=46,
        patches={("toprope.coordinator.protection", "_guarded"): lambda _before: lambda own, _peers: bool(own)},
    ),
    Mutant(
        name="scan",
        safeguard="a file of the local tier is listed only with its digest",
        invariant="I16",
        seed=115,
        patches={("toprope.sidecar.local_tier", "_check"): _always(None)},
    ),
    Mutant(
        name="older-document",
        safeguard="of the coordinators' documents the greatest term and version wins",
        invariant="I9",
        seed=0,
        patches={("toprope.sidecar.core", "Core._on_desired"): _any_document},
    ),
    Mutant(
        name="first-word",
        safeguard="no rank applies or trains before all have come as far",
        invariant="I10",
        seed=12,
        patches={("toprope.coordinator.phases", "advance"): _first_word},
    ),
    Mutant(
        name="early-peer",
        safeguard="a peer copy is listed only once it was received and hashed",
        invariant="I11",
        seed=0,
        patches={("toprope.sidecar.peer_book", "PeerBook.held"): _with_pulling},
    ),
    Mutant(
        name="early-local",
        safeguard="a local copy is listed only once it is durable",
        invariant="I11",
        seed=0,
        patches={("toprope.sidecar.tier_book", "TierBook.copies"): _with_flying},
    ),
    Mutant(
        name="half-staged",
        safeguard="a rank is told of its source only when all its shards are there",
        invariant="I17",
        seed=2,
        patches={("toprope.sidecar.restore_book", "RestoreBook.complete"): _any_staged},
    ),
    Mutant(
        name="impatient",
        safeguard="who does not answer for a moment speaks not against a source, which would be struck off for ever",
        invariant="I15",
        seed=16,
        patches={("toprope.sidecar.restore_book", "RestoreBook.on_failed"): _impatient},
    ),
    Mutant(
        name="pull-or-stage",
        safeguard="what was received or staged is hashed before it is believed",
        invariant="I10",
        seed=137,
        patches={("toprope.chaos.sim.sidecar", "_is_right"): _always(YES)},
    ),
)


@contextmanager
def switched_off(mutant: Mutant) -> Iterator[None]:
    """Run without the mutant's safeguard until the context ends."""
    with contextlib.ExitStack() as undo:
        for (module, dotted), make in mutant.patches.items():
            owner: Any = importlib.import_module(module)
            *path, name = dotted.split(".")
            for part in path:
                owner = getattr(owner, part)
            before = getattr(owner, name)
            setattr(owner, name, make(before))
            undo.callback(setattr, owner, name, before)
        yield
