"""Watches from outside: every applied store operation, every restore, every claim, against what the trainers sealed.

It binds the rules of the log (``violation``, ``fold``) when it is imported, so that a mutant of them does not change
its judgement. ``golden`` is T of PROTOCOL.md 3.8: the digest of what a trainer handed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from msgspec import UNSET

from toprope.chaos.sim.needed import Needed
from toprope.chaos.sim.store import SimStore, image_in
from toprope.chaos.sim.trace import Trace
from toprope.chaos.sim.unlogged import Unlogged
from toprope.coordinator.wire import Desired, Provisional
from toprope.store.checkpoint.manifest import Index, Manifest
from toprope.store.checkpoint.manifest import decode as decode_manifest
from toprope.store.checkpoint.shard import identity_of, parse_header
from toprope.store.digest import digest
from toprope.store.errors import CorruptObjectError
from toprope.store.log.fold import JobState, fold, violation
from toprope.store.log.records import NOBODY, Attempt, AttemptFacts, Elected, Metric, Pin, Ready, Record
from toprope.store.names import Key, facts_key, manifest_key, parse_hold, written_at

_NOTICED_S = 15.0
"""So long after a loss a step that is called protected may have been counted before the loss was noticed."""

HOLD_TTL_S = 8.0
"""So long a hold may be silent in a history."""

Snapshot = tuple[str, int, int]
"""Attempt uid, step, rank."""
Place = tuple[str, int]
"""Attempt uid, step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A promise that was broken, with the step that it is about (0: none)."""

    invariant: str
    text: str
    step: int

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


class Oracle:
    """Judges one history, in which so many ``copies`` are wanted. ``stop`` is called at the first violation."""

    def __init__(self, job: str, store: SimStore, trace: Trace, *, stop: Callable[[], None], copies: int = 1) -> None:
        self.golden: dict[Snapshot, str] = {}
        self.violation: Violation | None = None
        self.state = JobState(job=job)
        self.unlogged = Unlogged()
        self.over = False
        self._floor: tuple[str, int] | None = None
        self._flipped = False
        self._protected: tuple[str, int] = ("", 0)
        self._lost_since: tuple[str, int] | None = None
        self._lost_at_s = -_NOTICED_S
        self._lost = 0
        self._copies = copies
        self._store = store
        self._trace = trace
        self._stop = stop
        self._heard: dict[str, tuple[tuple[int, int], int, str]] = {}
        self._left: dict[str, int] = {}
        self._training: set[str] = set()
        self._needed = Needed(store)
        self._holders: dict[str, str] = {}
        self._left_behind: set[tuple[str, int]] = set()
        self._beats: dict[str, list[tuple[int, float]]] = {}
        store.on_create = self._on_create
        store.on_delete = self._on_delete

    def fail(self, invariant: str, text: str, *, step: int = 0) -> None:
        """Note that a promise was broken."""
        if self.violation is None and not self.over:
            self.violation = Violation(invariant=invariant, text=text, step=step)
            self._trace.note("oracle", f"VIOLATION {invariant}: {text}", step=step)
            self._stop()

    # The store

    def _on_create(self, key: Key, body: bytes, who: str) -> None:
        if self.over:
            return
        _, kind, *rest = key.split("/")
        if kind == "log":
            self._on_record(int(rest[0].partition(".")[0]), body, who)
        elif kind == "shards":
            self._trace.note("store", f"{who} created {key}", step=int(rest[1][1:]))
        elif kind == "holds":
            self._on_beat(key, who)
            self._trace.note("store", f"{who} created {key}")

    def _on_delete(self, key: Key, who: str) -> None:
        if self.over:
            return
        kind, at = key.split("/")[1], written_at(self.state.job, key)
        self._trace.note("store", f"{who} deleted {key}", step=0 if at is None else at[1])
        if kind == "holds" and self._holders.get(key) != who:
            self._on_left_behind(key, who)
        elif kind in {"log", "facts"}:
            self.fail("I8", f"{who} deleted {key}, which is never deleted")
        elif at is not None:
            self._trace.sometimes("an object was deleted")
            if why := self._needed.why(self.state, key, at):
                self.fail("I8", f"{who} deleted {key}: {why}", step=at[1])

    def _on_beat(self, key: Key, who: str) -> None:
        _, hold_id, beat = _hold(self.state.job, key)
        beats = self._beats.setdefault(hold_id, [])
        if not beats or beat > beats[-1][0]:
            beats.append((beat, self._trace.now_s()))
        self._holders[key] = who

    def _on_left_behind(self, key: Key, who: str) -> None:
        """Take in that a hold was deleted by somebody else: only one that did not beat for the whole of the time."""
        seq, hold_id, _ = _hold(self.state.job, key)
        self._left_behind.add((self._holders.get(key, ""), seq))
        self._trace.sometimes("a hold was left behind")
        times = [*(at_s for _, at_s in self._beats[hold_id]), self._trace.now_s()]
        if max(after - before for before, after in pairwise(times)) < HOLD_TTL_S:
            self.fail("I8", f"{who} deleted {key}, which has beaten all the time")

    def condemned(self) -> set[Key]:
        """Return the objects that garbage collection is to delete by now."""
        return self._needed.condemned(self.state)

    # Readers

    def on_read(self, who: str, ready: Ready, rank: int, image: bytes) -> None:
        """Take in what a reader has read, verified as far as it could."""
        if digest(image) != self.golden.get((ready.attempt_uid, ready.step, rank)) and not self._store.corrupt:
            self.fail("I7", f"{who} reads wrong bytes of rank {rank} of READY step {ready.step}", step=ready.step)

    def on_refused(self, who: str, ready: Ready, rank: int) -> None:
        """Take in that what a reader was sent is not what the index says."""
        self._trace.sometimes("a reader refused wrong bytes")
        if not self._store.corrupt and not self._store.spoiled:
            self.fail("I7", f"{who} is sent wrong bytes of rank {rank} of READY step {ready.step}", step=ready.step)

    def on_missing(self, who: str, seq: int, text: str, *, held: bool) -> None:
        """Take in that a reader met an object that is not there."""
        if (who, seq) in self._left_behind or not held:
            self._trace.sometimes("a reader without a hold met a missing object")
        else:
            self.fail("I8", f"{who} holds READY {seq}, and of it is missing: {text}", step=self.state.readies[seq].step)

    def _on_record(self, number: int, body: bytes, who: str) -> None:
        state = self.state
        if number != state.n:
            self.fail("I3", f"{who} created record {number}; the next is {state.n}")
            return
        record: Record = msgspec.json.decode(body, type=Record)
        step = record.step if isinstance(record, Ready) else 0
        self._trace.note("store", f"{who} appended {_told(record)} as {number}", step=step)
        self._check_term(record)
        if isinstance(record, Attempt):
            self._check_attempt(record)
        if isinstance(record, Ready):
            self._check_ready(record)
        if why := violation(state, record):
            self.fail("I5", f"record {number}, {_told(record)}: {why}", step=step)
            return
        self.state = fold(state, record, record_sha256=hashlib.sha256(body).hexdigest())
        ends, why = self.unlogged.appended(record, self.state)
        for uid in ends:
            self._trace.sometimes("an attempt opened without the log was fenced off")
            self._trace.note("oracle", f"record {number} fences off attempt {uid[:8]}, opened without the log")
        if why:
            self.fail("I12", f"record {number}, {_told(record)}: {why}", step=step)
        if isinstance(record, Elected) and record.term > 1:
            self._trace.sometimes("a coordinator took over")

    def _check_term(self, record: Record) -> None:
        if isinstance(record, Elected):
            if record.term <= self.state.term:
                self.fail("I4", f"term {record.term} is elected again after {self.state.term}")
        elif record.term < self.state.term:
            self.fail("I6", f"{_told(record)} is of term {record.term}, after the election of {self.state.term}")

    def _check_attempt(self, record: Attempt) -> None:
        state = self.state
        if any((one.launch_id, one.round) == (record.launch_id, record.round) for one in state.attempts):
            self.fail("I13", f"launch {record.launch_id[:8]} round {record.round} is given a second attempt")
        facts = msgspec.json.decode(self._store.objects[facts_key(state.job, record.facts_sha256)], type=AttemptFacts)
        self.unlogged.worlds[record.uid] = facts.world
        struck = {*state.struck, *((one.attempt_uid, one.step) for one in record.struck)}
        if record.struck:
            self._trace.sometimes("a source was struck off")
            if not (self._flipped or self._store.corrupt or self._store.spoiled):
                place = record.struck[0]
                text = f"step {place.step} is struck off although nothing was ever damaged: {place.why}"
                self.fail("I14", text, step=place.step)
        if record.launch_id == NOBODY and state.attempt is not None and state.attempt.decided_at is not UNSET:
            self._trace.sometimes("an attempt opened without the log was rolled back")
        self._check_source(record, facts, struck)
        if record.decided_at is UNSET:
            self._check_floor(record, struck)
            return
        self._trace.sometimes("an attempt opened without the log came into it")
        between = self.unlogged.records[record.decided_at :]
        for kind in (Pin, Metric):
            if any(isinstance(later, kind) for later in between):
                self._trace.sometimes(f"{kind.__name__.upper()} came before an attempt opened without the log")
        if why := self.unlogged.enter(record, state):
            self.fail("I5", f"attempt {record.attempt}, decided without the log, comes into it: {why}")

    def _check_source(self, record: Attempt, facts: AttemptFacts, struck: set[Place]) -> None:
        for seq, ready in self.state.restorable():
            if record.decided_at is not UNSET and seq >= record.decided_at:
                self._trace.sometimes("an attempt opened without the log passed over a READY")
                continue
            if record.from_step < ready.step and (ready.attempt_uid, ready.step) not in struck:
                text = f"attempt {record.attempt} begins at step {record.from_step} and passes over READY {ready.step}"
                self.fail("I14", text, step=ready.step)
        held = record.held
        self._needed.on_attempt(record, self.state)
        if held is not None:
            self._trace.sometimes("restored from what is not READY")
            for rank, said in enumerate(facts.held_digests):
                if self.golden.get((held.attempt_uid, held.step, rank)) != said:
                    text = f"attempt {record.attempt} swears to a shard of rank {rank} that no trainer sealed"
                    self.fail("I17", text, step=held.step)
        elif record.ready is not None:
            self._trace.sometimes("restored from a READY")

    def _check_floor(self, record: Attempt, struck: set[Place]) -> None:
        floor, current = self._floor, self.state.attempt
        self._floor = None
        if record.launch_id == NOBODY:  # somebody goes back, wherever the job has come to meanwhile
            return
        if floor is None or current is None or self.state.is_tainted(attempt=current.attempt, step=floor[1]):
            return
        if floor[0] == current.uid and floor not in struck:
            self._trace.sometimes("an attempt followed a protected step")
            if record.from_step < floor[1]:
                text = f"attempt {record.attempt} begins at {record.from_step} although step {floor[1]} was protected"
                self.fail("I14", text, step=floor[1])

    def _check_ready(self, record: Ready) -> None:
        current = self.state.attempt
        if current is None or record.attempt_uid != current.uid:
            self.fail(
                "I18", f"step {record.step} is READY for an attempt that is not the current one", step=record.step
            )
            return
        key = manifest_key(self.state.job, attempt=record.attempt, step=record.step, sha256=record.manifest_sha256)
        if (why := self._why_not_whole(key, record, world=current.world_size)) is not None:
            self.fail(why[0], f"READY {record.step} of attempt {record.attempt}: {why[1]}", step=record.step)
        self._needed.on_ready(record, self.state)
        self._trace.sometimes("a step became READY")

    def _why_not_whole(self, key: Key, record: Ready, *, world: int) -> tuple[str, str] | None:
        """Return which invariant a READY breaks, and how."""
        objects = self._store.objects
        if key not in objects:
            return "I1", "its manifest is not there"
        manifest = decode_manifest(objects[key], Manifest, key=key, expected_sha256=record.manifest_sha256)
        if [shard.rank for shard in manifest.shards] != list(range(world)):
            return "I1", f"its shards are of ranks {[s.rank for s in manifest.shards]}, its world has {world}"
        for shard in manifest.shards:
            if Key(shard.index_key) not in objects:
                return "I1", f"the index of rank {shard.rank} is not there"
            index = decode_manifest(
                objects[Key(shard.index_key)], Index, key=shard.index_key, expected_sha256=shard.index_sha256
            )
            body = image_in(objects, index)
            if _said(body) not in {None, (record.attempt_uid, record.step, shard.rank)}:
                return "I2", f"the shard of rank {shard.rank} is that of another snapshot"
            if digest(body) != self.golden.get((record.attempt_uid, record.step, shard.rank)):
                return "I1", f"the shard of rank {shard.rank} is not what the trainer sealed"
        return None

    def check_readies(self) -> None:
        """Check that all that is READY is still whole."""
        for ready in (self.state.readies[seq] for seq in self.state.live):
            world = next(one.world_size for one in self.state.attempts if one.uid == ready.attempt_uid)
            key = manifest_key(self.state.job, attempt=ready.attempt, step=ready.step, sha256=ready.manifest_sha256)
            if (why := self._why_not_whole(key, ready, world=world)) is not None:
                self.fail(
                    "I7", f"READY {ready.step} of attempt {ready.attempt} is whole no more: {why[1]}", step=ready.step
                )

    # Trainers

    def on_sealed(self, snapshot: Snapshot, image: bytes) -> None:
        """Take in what a trainer hands over."""
        self.golden[snapshot] = digest(image)

    def on_restored(self, *, attempt_uid: str, rank: int, images: Iterable[tuple[int, bytes]]) -> None:
        """Take in what a rank is about to apply: the shards by rank."""
        record = self._attempt(attempt_uid)
        if record is None:
            self.fail("I17", f"rank {rank} restores in attempt {attempt_uid[:8]}, which the log does not know")
            return
        source = self.state.source_of(record)
        given = dict(images)
        wanted = set() if source is None else set(range(record.world_size))
        if set(given) != wanted:
            self.fail("I17", f"rank {rank} is given shards {sorted(given)}, expected {sorted(wanted)}")
            return
        if source is None:
            return
        self._trace.sometimes("a rank restored")
        for shard, image in sorted(given.items()):
            if _said(image) not in {None, (*source, shard)}:
                self.fail("I17", f"rank {rank} is given another snapshot as shard {shard} of {source}", step=source[1])
            elif digest(image) != self.golden.get((*source, shard)):
                self.fail("I10", f"rank {rank} is given wrong bytes as shard {shard} of {source}", step=source[1])

    def on_training(self, attempt_uid: str) -> None:
        """Take in that a rank was told to train."""
        self._training.add(attempt_uid)

    def on_told_to_end(self, *, attempt_uid: str, rank: int, why: str) -> None:
        """Take in that a training rank was told that its attempt is over."""
        current = self.state.attempt
        if current is not None and current.uid == attempt_uid and not self._opened_since(current.attempt):
            self.fail("I12", f"rank {rank} trains in the current attempt and is told to end: {why}")
        unlogged = self.unlogged.record_of(attempt_uid)
        if unlogged is None or self._opened_since(unlogged.attempt):
            return
        if self.unlogged.obstacle(attempt_uid, self.state):
            self._trace.sometimes("ranks were told that the log went on without their attempt")
        elif current is None or current.attempt <= unlogged.attempt:
            self.fail("I12", f"rank {rank} trains in an attempt that the log may take, and is told to end: {why}")

    def _opened_since(self, number: int) -> bool:
        """Say whether an attempt of a later number was opened without the log."""
        return any(self.unlogged.attempts[uid].number > number for uid in self.unlogged.opened)

    def _attempt(self, uid: str) -> Attempt | None:
        """Return the attempt of a uid, in the log or opened without it."""
        return next((one for one in self.state.attempts if one.uid == uid), self.unlogged.record_of(uid))

    def on_left(self, *, attempt_uid: str, rank: int, step: int) -> None:
        """Take in that a rank that was to be ended ends at a step that it takes for safe: all have sealed that one."""
        self._trace.sometimes("a launch ended at a step that was safe")
        record = self._attempt(attempt_uid)
        assert record is not None
        world = record.world_size
        missing = [one for one in range(world) if (attempt_uid, step, one) not in self.golden]
        if missing or self._left.setdefault(attempt_uid, step) != step:
            text = f"rank {rank} ends at step {step}, of which ranks {missing} have no snapshot; {self._left}"
            self.fail("I14", text, step=step)

    # Sidecars

    def on_heard(self, life: str, desired: Desired, *, said: Desired) -> None:
        """Take in the document that a sidecar goes by now, and what a coordinator ``said`` that led to it."""
        attempt = desired.attempt
        number, uid = (attempt.number, attempt.uid) if attempt is not None else (0, "")
        unlogged = attempt is not None and all(one.uid != uid for one in self.state.attempts)
        if attempt is not None and unlogged and uid not in self.unlogged.opened:
            self._trace.sometimes("an attempt was opened without the log")
            if why := self.unlogged.open(attempt, term=desired.term):
                self.fail("I18", why)
            elif self.unlogged.follows_another(attempt, self.state):
                self._trace.sometimes("a second attempt in a row was opened without the log")
        if said.attempt is not None and all(one.uid != said.attempt.uid for one in self.state.attempts):
            self.unlogged.give(said.attempt, term=said.term)
        at = ((desired.term, desired.version), number, uid)
        before = self._heard.get(life, ((0, 0), 0, ""))
        over = self.unlogged.may_leave(life.partition(".")[0], before[2], self.state)
        if at[0] < before[0] or (at[1] < before[1] and not over):
            self.fail("I9", f"sidecar {life} goes back from {before} to {at}")
        self._heard[life] = at
        if desired.term > self.state.term or (number > self.state.attempt_number and not unlogged):
            self.fail("I9", f"sidecar {life} hears of term {desired.term}, attempt {number}, which no log knows")

        if desired.attempt is not None and desired.protected_step:
            self._on_protected((desired.attempt.uid, desired.protected_step))

    def on_adopted(self, node: str, disk: object, one: Provisional) -> None:
        """Take in that a node has adopted an attempt, durably."""
        new = one.uid not in self.unlogged.attempts
        if why := self.unlogged.adopt(node, disk, one, self.state):
            self.fail("I18", why)
        if new:
            self._check_unlogged(one)

    def _check_unlogged(self, one: Provisional) -> None:
        """Check where an attempt begins that is proposed while the log is away."""
        record, state = one.record, self.state
        struck = {*state.struck, *((each.attempt_uid, each.step) for each in record.struck)}
        assert record.held is not None
        if (record.held.attempt_uid, record.held.step) in struck:
            self.fail("I14", f"attempt {record.attempt} begins with a step that was struck off", step=record.from_step)
        for rank, said in enumerate(one.facts.held_digests):
            if self.golden.get((record.held.attempt_uid, record.held.step, rank)) != said:
                text = f"attempt {record.attempt} swears to a shard of rank {rank} that no trainer sealed"
                self.fail("I17", text, step=record.from_step)
        if state.attempt is not None and state.attempt.uid == one.parent:
            self._check_floor(record, struck)

    def _on_protected(self, at: tuple[str, int]) -> None:
        """A step that is protected is there for the next attempt, whichever nodes are lost, no more than copies."""
        if at[0] == self._protected[0] and at[1] <= self._protected[1]:
            return
        self._protected = at
        self._trace.sometimes("a step was protected")
        if self._trace.now_s() - self._lost_at_s >= _NOTICED_S:
            self._floor = at

    def on_node_lost(self) -> None:
        """Take in that memory of a node is lost: protection is for as many losses as there are copies."""
        again = self._lost_since == self._protected or self._trace.now_s() - self._lost_at_s < _NOTICED_S
        self._lost = self._lost + 1 if again else 1
        if self._lost > self._copies:
            self._floor = None
        elif self._lost > 1 and self._floor is not None:
            self._trace.sometimes("a second loss was what copies are for")
        self._lost_since = self._protected
        self._lost_at_s = self._trace.now_s()

    def on_flip(self) -> None:
        """Take in that some copy was damaged."""
        self._floor, self._flipped = None, True

    def on_claim(self, where: str, snapshot: Snapshot, *, said: str, found: bytes | None, spoiled: bool) -> None:
        """Take in that somebody says that a copy is there, verified, with this digest."""
        if spoiled:
            return
        held = "nothing" if found is None else digest(found)
        if held != said or said != self.golden.get(snapshot):
            text = f"{where} claims step {snapshot[1]} of rank {snapshot[2]} as {said[:8]} and holds {held[:8]}"
            self.fail("I11", text, step=snapshot[1])

    def on_scanned(self, where: str, snapshot: Snapshot, *, found: bytes | None, spoiled: bool) -> None:
        """Take in that a scan of a disk lists a copy: it has just read it, so only damage since then is an excuse."""
        if not spoiled and (found is None or digest(found) != self.golden.get(snapshot)):
            self.fail("I16", f"the scan of {where} lists step {snapshot[1]} of rank {snapshot[2]}", step=snapshot[1])


def _hold(job: str, key: Key) -> tuple[int, str, int]:
    """Return seq, id and beat of a hold."""
    hold = parse_hold(job, key)
    assert hold is not None, key
    return hold


def _said(image: bytes) -> Snapshot | None:
    """Return which snapshot an image says that it is; None when it is no image."""
    try:
        said = identity_of(parse_header(image, size=len(image), name="shard"), name="shard")
    except CorruptObjectError:
        return None
    return said.attempt_uid, said.step, said.rank


def _told(record: Record) -> str:
    match record:
        case Ready():
            return f"READY step {record.step} of attempt {record.attempt}"
        case Attempt():
            source = "held" if record.held is not None else "READY" if record.ready is not None else "fresh"
            return f"ATTEMPT {record.attempt} from step {record.from_step} ({source})"
        case Elected():
            return f"ELECTED {record.term}"
        case _:
            return type(record).__name__.upper()
