"""Garbage collection: deletes the objects that the job log has condemned, and no others.

``survey`` reads and decides, ``execute`` deletes what the plan says; the order of both is what makes each crash, and
each collector that wakes up late, harmless. An object goes if no checkpoint that is kept names it, the source of the
current attempt does not need it, and its step is dead: it can't become READY any more, and no attempt can begin with
it. No age and no clock decides. What is dead stays dead, and names are never used again, so what is condemned stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from toprope.store.checkpoint.manifest import MAX_INDEX_BYTES, Index, decode
from toprope.store.checkpoint.ready import read_capped
from toprope.store.errors import CorruptObjectError, MissingObjectError, StoreError
from toprope.store.log.chain import read_on
from toprope.store.log.fold import JobState
from toprope.store.log.records import Ready
from toprope.store.look.show import objects_of
from toprope.store.names import (
    Key,
    holds_prefix,
    index_sha256,
    manifests_prefix,
    parse_hold,
    shards_prefix,
    snaps_prefix,
    step_prefix,
    written_at,
)
from toprope.store.objects.protocol import ObjectStore

DELETED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The keys of a job, listed in this order."""

    holds: tuple[Key, ...]
    objects: tuple[Key, ...]
    snaps: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Condemned:
    """An object to be deleted, and why; ``bytes`` is None where it was not asked for."""

    key: Key
    why: str
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What is to be deleted, in this order. ``held`` are retired READYs that stay for a reader's sake this time."""

    condemned: tuple[Condemned, ...] = ()
    held: tuple[int, ...] = ()
    kept: int = 0

    @property
    def bytes(self) -> int:
        """The sizes that are known, added up."""
        return sum(one.bytes or 0 for one in self.condemned)


def survey(
    store: ObjectStore,
    state: JobState,
    *,
    list_holds: Callable[[], tuple[Key, ...]] | None = None,
    as_if_retired: AbstractSet[int] = frozenset(),
    weigh: bool = False,
) -> GcPlan:
    """Return what may be deleted. ``state`` is the log as it was read before: what was retired by then is looked at.

    What is retired after that stays for this time, since a reader may have begun with it before. ``list_holds`` returns
    the holds that count, all of them unless told otherwise; ``weigh`` looks up the sizes of what is condemned. With
    ``as_if_retired`` it is a plan of what could be deleted if these were retired, and not to be executed.

    Raises:
        StoreError: a manifest or an index of what is kept can't be read, so nothing may be deleted.
        UnavailableError: the store did not answer.
    """
    job, read = state.job, state
    holds = list_holds() if list_holds is not None else tuple(store.list(holds_prefix(job)))
    listing = Listing(
        holds=holds,
        objects=tuple(store.list(shards_prefix(job))) + tuple(store.list(manifests_prefix(job))),
        snaps=tuple(store.list(snaps_prefix(job))),
    )
    frozen = read_on(store, read)
    if as_if_retired:
        state, frozen = (replace(one, retired=one.retired | as_if_retired) for one in (state, frozen))
    held = held_seqs(job, listing.holds) & frozen.retired
    named = set(_named_by_kept(store, frozen, {*state.live, *frozen.live}))
    named |= set(_named_by_held(store, frozen, held))
    named |= set(_needed_by_sources(store, frozen, listing))
    plan = plan_gc(frozen, listing, named=named, held=held)
    return _weighed(store, plan) if weigh else plan


def held_seqs(job: str, holds: tuple[Key, ...]) -> AbstractSet[int]:
    """Return the READYs that readers hold."""
    return {hold[0] for key in holds if (hold := parse_hold(job, key)) is not None}


def plan_gc(state: JobState, listing: Listing, *, named: AbstractSet[str], held: AbstractSet[int]) -> GcPlan:
    """Return which of the listed objects the log condemns, manifests last. Pure."""
    steps = _steps_of(state.job, listing.objects)
    dead = {at: is_dead(state, attempt=at[0], step=at[1]) for at in steps}
    retired = {place: seq for seq in state.retired if (place := _place(state.readies[seq])) in steps}
    shards: list[Condemned] = []
    manifests: list[Condemned] = []
    for key in listing.objects:
        at = written_at(state.job, key)
        if at is None or key in named or not dead[at]:
            continue
        why = f"READY {retired[at]} is retired" if at in retired else "no checkpoint names it, and its attempt is over"
        into = manifests if key.startswith(manifests_prefix(state.job)) else shards
        into.append(Condemned(key=key, why=why))
    snaps = [Condemned(key=key, why="a later fold of the log is there") for key in listing.snaps[:-1]]
    return GcPlan(
        condemned=(*shards, *manifests, *snaps),
        held=tuple(sorted(held)),
        kept=sum(key in named for key in listing.objects),
    )


def _place(ready: Ready) -> tuple[int, int]:
    return ready.attempt, ready.step


def _steps_of(job: str, keys: tuple[Key, ...]) -> AbstractSet[tuple[int, int]]:
    return {at for key in keys if (at := written_at(job, key)) is not None}


def is_dead(state: JobState, *, attempt: int, step: int) -> bool:
    """Return whether what was written for a step of an attempt is of no use unless a checkpoint that is kept names it.

    It can't become READY any more, and no attempt can begin with it as a step that is not READY. What is dead in a
    state is dead in all states after it.
    """
    current = state.attempt_number
    may_become_ready = attempt > current or (attempt == current and step > state.last_step)
    return not may_become_ready and not _may_be_begun_from(state, attempt=attempt, step=step)


def _may_be_begun_from(state: JobState, *, attempt: int, step: int) -> bool:
    """Return whether an attempt may begin with objects of a step that is not READY, of this attempt or an older one.

    The step is on the lineage, not struck off and not tainted, and nothing that was written later is READY. The last is
    not asked of copies in memory: those that one would go back to are kept by other rules.
    """
    newest = next(reversed(state.readies), None)
    if newest is not None and (attempt, step) <= (state.readies[newest].attempt, state.readies[newest].step):
        return False
    uid = next((one.uid for one in state.attempts if one.attempt == attempt), None)
    if uid is None or (uid, step) in state.struck or state.is_tainted(attempt=attempt, step=step):
        return False
    return state.is_on_lineage(attempt_uid=uid, step=step)


def execute(store: ObjectStore, plan: GcPlan) -> None:
    """Delete what the plan says, in its order.

    Raises:
        UnavailableError: the store did not answer; what is left goes the next time.
    """
    keys = [one.key for one in plan.condemned]
    for begin in range(0, len(keys), DELETED_AT_ONCE):
        store.delete(keys[begin : begin + DELETED_AT_ONCE])


def _named_by_kept(store: ObjectStore, state: JobState, seqs: AbstractSet[int]) -> Iterator[str]:
    for seq in sorted(seqs):
        try:
            yield from (one.key for one in objects_of(store, state, seq))
        except (CorruptObjectError, MissingObjectError) as error:
            step = state.readies[seq].step
            pinned = f", `ckpt unpin` it (READY {seq} is pinned)" if seq in state.pins else ""
            raise StoreError(
                f"{error}. Nothing was deleted, since what step {step} of job {state.job} names is not known: put it "
                f"back from a copy of the store{pinned}, or let a policy retire that checkpoint"
            ) from error


def _named_by_held(store: ObjectStore, state: JobState, seqs: AbstractSet[int]) -> Iterator[str]:
    """Yield what retired READYs name. What is missing of one has been deleted before anybody held it."""
    for seq in sorted(seqs):
        try:
            yield from (one.key for one in objects_of(store, state, seq))
        except MissingObjectError:
            continue


def _needed_by_sources(store: ObjectStore, state: JobState, listing: Listing) -> Iterator[str]:
    """Yield all objects of steps that are not READY and that an attempt began or may begin with, and what they name.

    What the current attempt itself writes is left out: it becomes READY only if what it names is still there.
    """
    for key in (*_of_source(store, state), *_of_steps_before(state, listing)):
        yield key
        if (sha256 := index_sha256(key)) is not None:
            index = decode(read_capped(store, key, limit=MAX_INDEX_BYTES), Index, key=key, expected_sha256=sha256)
            yield from (file.key for file in index.files)


def _of_source(store: ObjectStore, state: JobState) -> Iterator[Key]:
    """Yield all objects of the step that the current attempt began with, if it is not READY.

    They are listed once the log is frozen: an index that came after the listing of the job may name older files.
    """
    attempt = state.attempt
    if attempt is None or attempt.held is None or state.is_base(state.source_of(attempt)):
        return  # what a base names is in another job, and pinned there
    number = next(one.attempt for one in state.attempts if one.uid == attempt.held.attempt_uid)
    yield from store.list(step_prefix(state.job, attempt=number, step=attempt.held.step))


def _of_steps_before(state: JobState, listing: Listing) -> Iterator[Key]:
    """Yield the objects of earlier attempts that the next one may begin with, when this one's source is struck off."""
    steps = _steps_of(state.job, listing.objects)
    before = {at for at in steps if at[0] < state.attempt_number and not is_dead(state, attempt=at[0], step=at[1])}
    yield from (key for key in listing.objects if written_at(state.job, key) in before)


def _weighed(store: ObjectStore, plan: GcPlan) -> GcPlan:
    def weighed(one: Condemned) -> Condemned:
        try:
            return Condemned(key=one.key, why=one.why, bytes=store.size(one.key))
        except MissingObjectError:
            return Condemned(key=one.key, why=one.why, bytes=0)

    return GcPlan(condemned=tuple(weighed(one) for one in plan.condemned), held=plan.held, kept=plan.kept)
