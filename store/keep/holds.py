"""Holds: a reader says which READY it reads, so that garbage collection leaves it until the reader is done.

A hold is an object whose key says all: the READY, an id, and a beat that grows. It is renewed by writing the next beat
before an old one goes, so a listing always finds one. Only a hold that does not beat for ``TTL_S`` of the collector's
own clock is taken for left behind; its reader then finds objects missing, and no wrong ones. A beat without an answer
may have been written, so it is given free with the others.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

from toprope.store.errors import AlreadyExistsError, CkptError, UnavailableError
from toprope.store.log.chain import read_on
from toprope.store.log.fold import JobState
from toprope.store.names import Key, hold_key, holds_prefix, parse_hold
from toprope.store.objects.protocol import ObjectStore

TTL_S = 300.0
BEAT_S = 20.0
_BEATS_KEPT = 2

_LOG = logging.getLogger("toprope.store")


Beating: TypeAlias = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""What calls a hold's beat again and again while a context lasts, and lets no call outlive it."""


@contextlib.contextmanager
def in_a_thread(beat: Callable[[], None], *, every_s: float = BEAT_S) -> Iterator[None]:
    """Call ``beat`` in a thread."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every_s):
            beat()

    thread = threading.Thread(target=run, name="hold", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def holding(
    store: ObjectStore,
    state: JobState,
    seq: int,
    *,
    say: Callable[[str], None] = _LOG.warning,
    beating: Beating = in_a_thread,
) -> Iterator[JobState]:
    """Hold a READY while the context lasts; gives the log as it is since the hold is there.

    If the READY is retired in that log, choose another one. A reader that may not write works without a hold, which is
    told to ``say``: then what it reads may be deleted under it.

    Raises:
        LogCorruptError: the log is damaged.
        UnavailableError: the store did not answer.
    """
    hold = _Hold(store, state.job, seq)
    try:
        hold.begin()
    except CkptError as error:
        say(f"reading without a hold on READY {seq}, so that `ckpt gc` may delete it meanwhile: {error}")
        beating = _never
    try:
        with beating(hold.renew):
            yield read_on(store, state)
    finally:
        hold.drop()


@contextlib.contextmanager
def holding_choice(
    store: ObjectStore,
    state: JobState,
    choose: Callable[[JobState], int],
    *,
    say: Callable[[str], None] = _LOG.warning,
    beating: Beating = in_a_thread,
) -> Iterator[JobState]:
    """Hold the READY that ``choose`` returns while the context lasts; gives the log, of which it would choose it still.

    Raises:
        CkptError: as ``choose`` and ``holding``.
    """
    while True:
        seq = choose(state)
        with holding(store, state, seq, say=say, beating=beating) as after:
            if choose(after) == seq:
                yield after
                return
        state = after


def _never(_beat: Callable[[], None]) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class _Hold:
    def __init__(self, store: ObjectStore, job: str, seq: int) -> None:
        self._store = store
        self._job = job
        self._seq = seq
        self._id = secrets.token_hex(8)
        self._beat = 0
        self._written: deque[Key] = deque()

    def begin(self) -> None:
        """Write the first beat, or, if no answer comes, the one after it: either makes the hold."""
        try:
            self.beat()
        except UnavailableError:
            self.beat()

    def beat(self) -> None:
        """Write the next beat, and delete the one before the last."""
        key = hold_key(self._job, seq=self._seq, hold_id=self._id, beat=self._beat)
        self._beat += 1
        self._written.append(key)
        with contextlib.suppress(AlreadyExistsError):  # our own, whose answer was lost on the way
            self._store.create(key, b"")
        while len(self._written) > _BEATS_KEPT:
            self._store.delete([self._written[0]])
            self._written.popleft()

    def renew(self) -> None:
        """Beat; what fails is tried again at the next beat."""
        try:
            self.beat()
        except CkptError as error:
            _LOG.warning("the hold on READY %d was not renewed: %s", self._seq, error)

    def drop(self) -> None:
        """Give the READY free; what can't be deleted is taken for left behind later."""
        with contextlib.suppress(CkptError):
            self._store.delete(tuple(self._written))


class HoldWatch:
    """Tells holds that beat from those left behind, by a clock of its own that only goes on.

    A listing takes time, and may be asked for more than once: a beat that it shows may be as late as its end, and where
    it shows no later one there was none at its beginning. Only what lies between the two counts as silence.
    """

    def __init__(self, *, ttl_s: float = TTL_S) -> None:
        self._ttl_s = ttl_s
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, store: ObjectStore, job: str, *, now_s: Callable[[], float]) -> tuple[Key, ...]:
        """List the holds, delete those left behind, and return the others."""
        asked_s = now_s()
        keys = tuple(store.list(holds_prefix(job)))
        stale = self.stale(job, keys, asked_s=asked_s, listed_s=now_s())
        store.delete(stale)
        return tuple(key for key in keys if key not in stale)

    def stale(self, job: str, keys: tuple[Key, ...], *, asked_s: float, listed_s: float) -> tuple[Key, ...]:
        """Return the keys of holds that have not beaten for the whole of the time, by a listing that lasted so long."""
        newest: dict[str, int] = {}
        for key in keys:
            if (hold := parse_hold(job, key)) is not None:
                newest[hold[1]] = max(hold[2], newest.get(hold[1], 0))
        seen = {}
        for hold_id, beat in newest.items():
            before = self._seen.get(hold_id)
            seen[hold_id] = before if before is not None and before[0] == beat else (beat, listed_s)
        self._seen = seen
        silent = {hold_id for hold_id, (_, since_s) in seen.items() if asked_s - since_s >= self._ttl_s}
        return tuple(key for key in keys if (hold := parse_hold(job, key)) is not None and hold[1] in silent)
