"""A coordinator process through its terms: it follows, claims, leads, and follows again once another was elected.

``Terms`` is the ``Service`` of the HTTP adapter: what only a leader can answer is answered by its reign, and one that
follows says who leads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from typing import assert_never

from prometheus_client import CollectorRegistry

from toprope.coordinator.config import Config
from toprope.coordinator.election import JITTER, Election, patience_after
from toprope.coordinator.log import Log
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.overview import Overview, Slices
from toprope.coordinator.performer import Coordinator, ended
from toprope.coordinator.ports import Document, Ports
from toprope.coordinator.serving import NotLeadingError
from toprope.coordinator.wire import Desired, Health, Inventory, OpenAnswer, OpenRequest, Role
from toprope.store.errors import CkptError, FencedError, UnavailableError
from toprope.store.keep.changes import ChangeAnswer, ChangeRequest
from toprope.store.log.fold import JobState
from toprope.store.log.records import Base

_LOG = logging.getLogger("toprope.coordinator")
_LOOK_EVERY_S = 1.0
_STANDBYS_MAX = 16
FOLLOWER_TOPICS = ("coordinator/presence",)


class Terms:
    """One coordinator process."""

    def __init__(self, config: Config, *, base: Base | None = None, wall_s: Callable[[], int] | None = None) -> None:
        """``wall_s`` as in ``Coordinator``."""
        self.config = config
        self.metrics = Metrics()
        self.reign: Coordinator | None = None
        self._role: Role = "follower"
        self._base = base
        self._wall_s = wall_s
        self._election: Election | None = None
        self._log: Log | None = None
        self._patience_s = config.patience_s
        self._unread = ""
        self._announced = False

    async def run(self, ports: Ports, *, url: str, stop: asyncio.Event, on_serving: Callable[[], None]) -> None:
        """Follow and lead until ``stop``; ``on_serving`` is called once this one leads, or knows that another does.

        Raises:
            CkptError: the log is not what it should be.
        """
        self._ports, self._url, self._stop, self._on_serving = ports, url, stop, on_serving
        writer_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        log = Log(ports.store, self.config.job, writer_id=writer_id, url=url)
        while not stop.is_set() and not await self._looked(log):
            await self._wait()
        self._log = log
        while not stop.is_set() and await self._follow(log):
            await self._lead(log)

    async def _looked(self, log: Log) -> bool:
        """Read the log for the first time; say whether that could be done."""
        try:
            await log.look()
        except UnavailableError as error:
            self._say_unread(error)
            return False
        return True

    # --- following -------------------------------------------------------------------------------------------------

    async def _follow(self, log: Log) -> bool:
        """Follow until elected; return False when told to end."""
        patience_s = self._patience_s * (1.0 + JITTER * int(secrets.token_hex(2), 16) / 0xFFFF)
        log.follow()
        election = Election(url=self._url, patience_s=patience_s, state=log.state, heard_s=_now_s())
        self._election = election
        async with asyncio.TaskGroup() as tasks:
            broker = self._ports.connect(FOLLOWER_TOPICS, deliver=self._delivered, connected=lambda: None)
            loops = set() if broker is None else {tasks.create_task(broker.run())}
            try:
                while not self._stop.is_set():
                    if await self._is_elected(election, log):
                        return True
                    await self._wait()
                return False
            finally:
                await ended(loops)

    async def _is_elected(self, election: Election, log: Log) -> bool:
        reason = await self._reason(election, log)
        if not reason:
            self._announce()
            return False
        _LOG.info("job %s: claims a term: %s", self.config.job, reason)
        self._role = "claiming"
        try:
            elected = await log.elect(election.claim, job_uid=secrets.token_hex(16))
        except UnavailableError as error:
            self._note_unread(error, election)
            elected = False
        if not elected:
            self._role = "follower"
        return elected

    async def _reason(self, election: Election, log: Log) -> str:
        """Look at the log and at the leader; return why to claim a term."""
        try:
            election.read(await log.look(), now_s=_now_s())
        except UnavailableError as error:
            self._note_unread(error, election)
            return ""
        self._unread = ""
        if election.asks:
            answer = await self._ports.coordinators.health(election.state.url, standby=self._url)
            match answer:
                case Health():
                    election.answered(answer, now_s=_now_s())
                case "refused":
                    election.refused(now_s=_now_s())
                case "silent":
                    election.silent()
                case _:
                    assert_never(answer)
        return election.reason(now_s=_now_s())

    def _note_unread(self, error: UnavailableError, election: Election) -> None:
        election.unread(now_s=_now_s())
        self._say_unread(error)

    def _say_unread(self, error: UnavailableError) -> None:
        if not self._unread:
            _LOG.error("the job log can't be read: %s", error)
        self._unread = str(error)

    def _delivered(self, document: Document) -> None:
        if isinstance(document, Health) and self._election is not None:
            self._election.answered(document, now_s=_now_s())

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_LOOK_EVERY_S):
                await self._stop.wait()
        except TimeoutError:
            pass

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._on_serving()

    # --- leading ---------------------------------------------------------------------------------------------------

    async def _lead(self, log: Log) -> None:
        """Lead until told to end, or another was elected."""
        began_s, self._role = _now_s(), "leader"
        self.reign = Coordinator(self.config, metrics=self.metrics, base=self._base, wall_s=self._wall_s)
        try:
            await self.reign.reign(self._ports, log, url=self._url, stop=self._stop, on_serving=self._announce)
        except* UnavailableError as group:
            _LOG.error("leads no more, and follows until the log can be read: %s", _first(group))
        except* FencedError as group:
            _LOG.warning("leads no more, and stands by: %s", _first(group))
            self._patience_s = patience_after(
                self._patience_s, reigned_s=_now_s() - began_s, at_first_s=self.config.patience_s
            )
        finally:
            self._role, self.reign = "follower", None

    # --- what the HTTP server asks ---------------------------------------------------------------------------------

    @property
    def registry(self) -> CollectorRegistry:
        """Return the metrics, as they are now."""
        self.metrics.leading.set(self.reign is not None)
        self.metrics.show(job=self.reign is not None and self.reign.gauge())
        return self.metrics.registry

    def health(self, *, standby: str = "") -> Health:
        """Return what this coordinator says of itself; ``standby`` is the url of one that stands by and asks."""
        if self.reign is not None and self.reign.core is not None:
            if standby and (standby in self.reign.standbys or len(self.reign.standbys) < _STANDBYS_MAX):
                self.reign.standbys[standby] = _now_s()
            return self.reign.health(url=self._url)
        state = self._state
        return Health(
            job=state.job,
            job_uid=state.job_uid,
            role=self._role,
            url=self._url,
            term=state.term,
            leader=state.url,
            log_s=0.0,
        )

    @property
    def _state(self) -> JobState:
        return JobState(job=self.config.job) if self._log is None else self._log.state

    def _leading(self) -> Coordinator:
        if self.reign is None:
            leader = self._state.url
            raise NotLeadingError("" if leader == self._url else leader)
        return self.reign

    def heard(self, inventory: Inventory) -> None:
        """Take in an inventory whose sender is there."""
        self._leading().heard(inventory)

    def desired(self, *, node: str = "") -> Desired | None:
        """Return how the job is wanted to be: all of it, or what a node needs."""
        return self._leading().desired(node=node)

    async def desired_after(self, term: int, version: int) -> None:
        """Return once there is a Desired newer than (term, version)."""
        await self._leading().desired_after(term, version)

    async def change(self, asked: ChangeRequest) -> ChangeAnswer:
        """Append a change of the job that a person asks for."""
        return await self._leading().change(asked)

    def declare_dead(self, node: str) -> None:
        """Take in that a person says that a node is dead."""
        self._leading().declare_dead(node)

    async def open(self, request: OpenRequest) -> OpenAnswer:
        """Return the attempt for a launch, or why there is none."""
        return await self._leading().open(request)

    def status(self) -> Slices[Overview] | None:
        """Work out what is safe where by now; None while the log is still being read."""
        return self._leading().status()


def _first(group: BaseExceptionGroup[CkptError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _now_s() -> float:
    return asyncio.get_running_loop().time()
