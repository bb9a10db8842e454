"""The job log as one coordinator has it: what it has read, and one append after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import assert_never

from toprope.coordinator.ports import StorePort
from toprope.coordinator.provisional import hinders
from toprope.store.errors import FencedError
from toprope.store.log.chain import Appended, Call, Create, Read, Sleep, append_steps, drive
from toprope.store.log.fold import JobState
from toprope.store.log.records import Elected, Job, Record


class Log:
    """The job log as one writer has it: appends one at a time, and knows no record less than it has read."""

    def __init__(self, store: StorePort, job: str, *, writer_id: str, url: str = "") -> None:
        self.state = JobState(job=job)
        self.term = 0
        self._store = store
        self._writer_id = writer_id
        self._url = url
        self._one_at_a_time = asyncio.Lock()
        self._hindering = self._hinders_at = -1
        """Where the record would be that is being appended, and where the last one that was sent, if it hinders."""

    @property
    def is_unsure(self) -> bool:
        """Say whether a record of ours may be on its way that an attempt can't follow which is decided without it.

        A request may be applied long after it was given up. Only a record that was read in its place proves that it
        will not be: until then a log that can be read again is no answer.
        """
        return self.state.n <= self._hinders_at

    async def look(self) -> JobState:
        """Return the log as it is now, whoever leads; raises as ``append_steps``."""
        if self.state.n == 0:
            self.state = await self._store.newest_snap(self.state.job)
        done = await self.append(lambda _: None)
        return done.state

    async def elect(self, claim: Callable[[JobState], Elected | None], *, job_uid: str) -> bool:
        """Begin the term that ``claim`` claims, with an empty log the job too; say whether it was elected.

        Raises as ``append_steps``.
        """

        def make_job(state: JobState) -> Record | None:
            return Job(uid=job_uid, name=state.job) if state.n == 0 else None

        await self.append(make_job)
        done = await self.append(claim)
        if done.seq is None:
            return False
        self.term = done.state.term
        return True

    def follow(self) -> None:
        """Lead no more: another was elected."""
        self.term = 0

    async def append(self, make: Callable[[JobState], Record | None]) -> Appended:
        """Append what ``make`` decides on; raises as ``append_steps``.

        A command that was elected in passing, to append a record or two, is followed by a new term of ours, unless
        another coordinator was elected before it.
        """

        def make_or_return(state: JobState) -> Record | None:
            ours = state.passing and state.url == self._url
            record = Elected(url=self._url) if ours and 0 < self.term < state.term else make(state)
            self._hindering = state.n if record is not None and hinders(state, record) else -1
            return record

        async with self._one_at_a_time:
            while True:
                steps = append_steps(self.state, make_or_return, term=self.term, writer_id=self._writer_id)
                done = await drive(steps, self._call)
                self.state = done.state
                if not self.term or not isinstance(done.record, Elected):
                    return done
                self.term = done.state.term

    async def catch_up(self) -> None:
        """Read what others have appended.

        Raises:
            FencedError: a later term has been elected.
        """
        await self.append(lambda _: None)
        if self.state.term > self.term:
            raise FencedError(
                f"job {self.state.job}: term {self.state.term} of {self.state.writer_id} has been elected; "
                f"{self._writer_id} of term {self.term} stops"
            )

    async def _call(self, call: Call) -> bytes | None:
        match call:
            case Create():
                self._hinders_at = max(self._hinders_at, self._hindering)  # before it is sent: its answer may be lost
                await self._store.create_record(call.key, call.body)
                return None
            case Read():
                return await self._store.read(call.key, uncached=call.uncached)
            case Sleep():
                await asyncio.sleep(call.seconds)
                return None
            case _:
                assert_never(call)
