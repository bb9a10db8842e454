"""Which objects somebody needs, as the oracle sees it: what is deleted must be none of them, and all others must go."""

from __future__ import annotations

from toprope.chaos.sim.store import SimStore
from toprope.store.checkpoint.manifest import Index, Manifest
from toprope.store.checkpoint.manifest import decode as decode_manifest
from toprope.store.log.fold import JobState
from toprope.store.log.records import Attempt, Held, Ready
from toprope.store.names import Key, index_sha256, manifest_key, parse_hold, shards_prefix, step_prefix, written_at


class Needed:
    """What the READYs and the current attempt need. ``state`` is the log as it is at the time of the question."""

    def __init__(self, store: SimStore) -> None:
        self._store = store
        self._named: dict[int, frozenset[str]] = {}
        self._keeps_source = False
        self._of_source: frozenset[str] = frozenset()

    def on_ready(self, record: Ready, state: JobState) -> None:
        """Take in a READY that is about to be in the log."""
        key = manifest_key(state.job, attempt=record.attempt, step=record.step, sha256=record.manifest_sha256)
        objects, named = self._store.objects, {str(key)}
        if key in objects:
            manifest = decode_manifest(objects[key], Manifest, key=key, expected_sha256=record.manifest_sha256)
            for shard in manifest.shards:
                named.add(shard.index_key)
                if (body := objects.get(Key(shard.index_key))) is not None:
                    index = decode_manifest(body, Index, key=shard.index_key, expected_sha256=shard.index_sha256)
                    named |= {file.key for file in index.files}
        self._named[state.n] = frozenset(named)

    def on_attempt(self, record: Attempt, state: JobState) -> None:
        """Take in an attempt that is about to be in the log: its source is needed, unless it was condemned before.

        A source that the nodes hold may be READY by now; then the shards that it names are needed, whoever retires it.
        """
        held, before = record.held, state.attempt
        again = before is not None and held is not None and before.held == held
        if held is None:
            self._keeps_source, self._of_source = False, frozenset()
        elif not again:
            number = next((one.attempt for one in state.attempts if one.uid == held.attempt_uid), 0)
            self._keeps_source = _may_be_begun_from(state, (number, held.step))
            ready = (seq for seq in state.live if _place(state.readies[seq]) == (held.attempt_uid, held.step))
            named = self._named.get(next(ready, -1), frozenset())
            self._of_source = frozenset(key for key in named if key.startswith(shards_prefix(state.job)))

    def why(self, state: JobState, key: Key, at: tuple[int, int]) -> str:
        """Return why an object may not be deleted, or nothing if the log has condemned it."""
        if (seq := next((seq for seq in state.live if key in self._named[seq]), None)) is not None:
            return f"READY {seq} names it"
        if at[0] > state.attempt_number or (at[0] == state.attempt_number and at[1] > state.last_step):
            return "it may become READY yet"
        if _may_be_begun_from(state, at):
            return "a later attempt may begin with it"
        source = state.attempt.held if state.attempt is not None and self._keeps_source else None
        if key in self._of_source or (source is not None and key in self._with_source(state, source)):
            return "the current attempt began with it"
        return ""

    def condemned(self, state: JobState) -> set[Key]:
        """Return the objects that garbage collection is to delete by now: what nobody needs and nobody holds.

        What lies with the source of the current attempt may stay as long as that lasts.
        """
        held = {
            name
            for key in self._store.objects
            if (hold := parse_hold(state.job, key)) is not None
            for name in self._named.get(hold[0], ())
        }
        source = state.attempt.held if state.attempt is not None else None
        held |= self._with_source(state, source) if source is not None else set()
        return {
            key
            for key in self._store.objects
            if (at := written_at(state.job, key)) is not None and key not in held and not self.why(state, key, at)
        }

    def _with_source(self, state: JobState, held: Held) -> set[str]:
        """Return the objects of a source that the nodes hold, and what its indexes name."""
        number = next(one.attempt for one in state.attempts if one.uid == held.attempt_uid)
        prefix = step_prefix(state.job, attempt=number, step=held.step)
        keys = {key for key in self._store.objects if key.startswith(prefix)}
        named: set[str] = set()
        for key in keys:
            if (sha256 := index_sha256(key)) is not None:
                index = decode_manifest(self._store.objects[key], Index, key=key, expected_sha256=sha256)
                named |= {file.key for file in index.files}
        return keys | named


def _place(ready: Ready) -> tuple[str, int]:
    return ready.attempt_uid, ready.step


def _may_be_begun_from(state: JobState, at: tuple[int, int]) -> bool:
    """Say whether objects of a step, as attempt and step, may be a source though they never became READY."""
    if any((ready.attempt, ready.step) >= at for ready in state.readies.values()):
        return False
    uid = next((one.uid for one in state.attempts if one.attempt == at[0]), "")
    good = (uid, at[1]) not in state.struck and not state.is_tainted(attempt=at[0], step=at[1])
    return good and state.is_on_lineage(attempt_uid=uid, step=at[1])
