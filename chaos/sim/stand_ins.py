"""What takes the place of a safeguard in a mutant: functions that do not care, each made from what was there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from toprope.coordinator.intents import CommitStep
from toprope.coordinator.phases import Progress
from toprope.coordinator.wire import ReadBack
from toprope.store.errors import AlreadyExistsError, CkptError, UnavailableError
from toprope.store.log.chain import Appended, Create, append_steps, drive
from toprope.store.log.fold import JobState
from toprope.store.log.records import Elected, Metric, Pin, Ready, Unpin
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore


def always(value: object) -> Callable[[Any], Any]:
    """Return what gives this value, whatever it is asked."""
    return lambda _before: lambda *_args, **_kwargs: value


def unfenced(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Append without a look at later terms."""

    async def append(self: Any, make: Any) -> Appended:  # noqa: ANN401 - as Log.append
        async with self._one_at_a_time:
            steps = append_steps(self.state, make, term=1 << 30, writer_id=self._writer_id)
            done = await drive(steps, self._call)
            self.state = done.state
            return done

    return append


def ready_whatever(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Make any step READY."""

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


def believed(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Believe the digest that was to be found."""

    def found_digest(result: ReadBack) -> str:
        return result.digest

    return found_digest


def exists_is_ours(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take a record that exists, or no answer, for one of our own."""

    def put(key: Any, body: bytes) -> Any:  # noqa: ANN401 - as log._put
        with contextlib.suppress(AlreadyExistsError, UnavailableError):
            yield Create(key=key, body=body)
        return True

    return put


def first_word(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Go on at the word of one rank."""

    def advance(now: Progress, said: Any, *, world: int, trains: bool, overdue_s: float) -> Progress:  # noqa: ANN401 - as phases.advance
        return before(now, said, world=min(world, 1) if said else world, trains=trains, overdue_s=overdue_s)  # type: ignore[no-any-return]

    return advance


def any_document(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take any document, however old."""

    def on_desired(self: Any, event: Any) -> list[Any]:  # noqa: ANN401 - as Core._on_desired
        self.desired = event.desired
        return []

    return on_desired


def as_it_came(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take a document as it is."""

    def held_to(_self: Any, new: Any, _old: Any) -> Any:  # noqa: ANN401 - as AdoptionBook.held_to
        return new

    return held_to


def any_proposal(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Adopt what is proposed, whatever was adopted of its number."""

    def may_adopt(self: Any, proposed: Any, desired: Any) -> bool:  # noqa: ANN401 - as AdoptionBook.may_adopt
        others = {number: one for number, one in self.adopted.items() if number != proposed.number}
        same = self.adopted.get(proposed.number)
        another = same is None or same.uid != proposed.uid
        return another and bool(before(replace(self, adopted=others), proposed, desired))

    return may_adopt


def new_world(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Ask the nodes of the new world alone."""

    def concerned(_old: Any, new: Any, dead: Any) -> Any:  # noqa: ANN401 - as provisional.concerned
        return before((), new, dead)

    return concerned


def as_soon_as_settled(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Speak before what was opened without the log is in it."""

    def may_speak(self: Any, now_s: float) -> bool:  # noqa: ANN401 - as Core._may_speak
        return bool(self._settled(now_s))

    return may_speak


def with_pulling(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """List peer copies that are on their way."""

    def held(self: Any) -> list[Any]:  # noqa: ANN401 - as PeerBook.held
        found = [(number, spare.held or spare.pulling) for (_, number), spare in sorted(self.spares.items(), key=at)]
        return [(number, shard) for number, shard in found if shard is not None]

    return held


def at(item: Any) -> Any:  # noqa: ANN401 - a pair of which the first is wanted
    """Return what a pair is sorted by."""
    return item[0]


def with_flying(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """List local copies that are on their way."""

    def copies(self: Any) -> list[Any]:  # noqa: ANN401 - as TierBook.copies
        return [
            *before(self),
            *(shard.copy("local") for (tier, _), shard in sorted(self.flying.items()) if tier == "local"),
        ]

    return copies


def any_staged(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take one shard for all."""

    def complete(self: Any, attempt: Any, _trainer: Any) -> bool:  # noqa: ANN401 - as RestoreBook.complete
        return self.attempt_uid == attempt.uid and bool(self.staged or not attempt.restore)

    return complete


def guessed(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take no answer for success."""

    def put(key: Any, body: bytes) -> Any:  # noqa: ANN401 - as log._put
        with contextlib.suppress(UnavailableError):
            yield Create(key=key, body=body)
        return True

    return put


def without(*reasons: str) -> Callable[[Any], Any]:
    """Return what stands in for ``needed_by``: it does not know these reasons to keep a READY."""

    def make(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
        def needed_by(state: JobState) -> dict[int, str]:
            return {seq: why for seq, why in before(state).items() if why not in reasons}

        return needed_by

    return make


def as_it_was(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Read nothing more of the log."""

    def read_on(_store: Any, state: JobState) -> JobState:  # noqa: ANN401 - as log.read_on
        return state

    return read_on


def only_head(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Look at the newest checkpoint alone."""

    def named_by_kept(store: Any, state: JobState, seqs: Any) -> Any:  # noqa: ANN401 - as gc._named_by_kept
        return before(store, state, {max(seqs)} if seqs else seqs)

    return named_by_kept


def unread_is_empty(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take what could not be read for naming nothing."""

    def named_by_kept(store: Any, state: JobState, seqs: Any) -> Any:  # noqa: ANN401 - as gc._named_by_kept
        with contextlib.suppress(UnavailableError):
            yield from before(store, state, seqs)

    return named_by_kept


def only_retired(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take for dead only what was READY once."""

    def is_dead(state: JobState, *, attempt: int, step: int) -> bool:
        retired = (state.readies[seq] for seq in state.retired)
        return any((ready.attempt, ready.step) == (attempt, step) for ready in retired)

    return is_dead


def marks_decide(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take a pin or a metric for what decides about an attempt."""

    def settled(state: JobState, record: Any) -> Any:  # noqa: ANN401 - as fold._settled
        return state.n + 1 if isinstance(record, Pin | Unpin | Metric) else before(state, record)

    return settled


@dataclass(frozen=True, slots=True)
class _Forgetful:
    """Streams of a store that all begin at the same place."""

    store: ObjectStore
    start: int

    def stream(self, key: Key, *, start: int, length: int) -> Any:  # noqa: ANN401, ARG002 - as ObjectStore.stream
        return self.store.stream(key, start=self.start, length=length)


def from_its_beginning(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Ask for what is left of a range from its beginning on."""

    def stream(self: Any, key: Key, *, start: int, length: int) -> Any:  # noqa: ANN401 - as RetryStore.stream
        forgetful = type(self)(_Forgetful(self._store, start), self._back_off)
        return before(forgetful, key, start=start, length=length)

    return stream


class _EndsError(CkptError):
    """An answer ended."""


def short_is_whole(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take what came of a range for all of it."""

    def pieces_of(read_into: Any, *, start: int, length: int, short: Any) -> Any:  # noqa: ANN401, ARG001 - as pieces.pieces_of
        with contextlib.suppress(_EndsError):
            yield from before(read_into, start=start, length=length, short=_EndsError)

    return pieces_of


def same_term(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Be elected for the term that there is."""

    def stamped(state: JobState, record: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as log._stamped
        after = before(state, record, **kwargs)
        return structs.replace(after, term=state.term) if isinstance(after, Elected) and state.term else after

    return stamped


def all_silent(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Take every hold for left behind."""

    def stale(_self: Any, _job: str, keys: Any, **_seconds: float) -> Any:  # noqa: ANN401 - as HoldWatch.stale
        return keys

    return stale


def patient(before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Wait for a leader for ever."""

    def reason(self: Any, *, now_s: float) -> Any:  # noqa: ANN401 - as Election.reason
        return "" if self.asks else before(self, now_s=now_s)

    return reason


def nothing(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Do nothing, and find nothing."""
    return lambda *_args, **_kwargs: None


def nothing_more(_before: Any) -> Any:  # noqa: ANN401 - stands in for any function
    """Yield nothing."""
    return lambda *_args: iter(())
