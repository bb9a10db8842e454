"""How a command changes a job: by its coordinator, or elected for the moment where none answers."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec

from toprope.coordinator.wire import LEADER_HEADER
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.keep.changes import Change, ChangeAnswer, ChangeRequest, append_in_passing, checked
from toprope.store.log.chain import read_on
from toprope.store.log.fold import JobState
from toprope.store.objects.protocol import ObjectStore

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Changer:
    """Appends changes to the logs of a store. ``say`` is told who did.

    ``coordinator_url`` is that of the coordinator, which then must answer; without it the one is asked that the log
    names, if it answers.
    """

    store: ObjectStore
    coordinator_url: str
    token: str
    say: Callable[[str], None]

    def append(self, state: JobState, change: Change, *, purpose: str) -> JobState:
        """Append a change unless things are so already; return the log after it.

        Raises:
            UsageError: the change may not be made, and nothing was.
            CkptError: it could not be made.
        """
        if checked(state, change) is None:
            return state
        if self._asked(state, change):
            return read_on(self.store, state)
        self.say(f"no coordinator of job {state.job} answers: `ckpt {purpose}` appends to the log itself")
        after, _ = append_in_passing(self.store, state.job, partial(_checked, change), purpose=purpose)
        return after

    def _asked(self, state: JobState, change: Change) -> bool:
        """Ask the coordinator; say whether there is one."""
        request = ChangeRequest(job_uid=state.job_uid, change=change)
        if self.coordinator_url:
            _ask_leader(self.coordinator_url, request, token=self.token)
            return True
        if not state.url:
            return False
        try:
            _ask_leader(state.url, request, token=self.token)
        except NobodyThereError:
            return False
        return True


def _checked(change: Change, state: JobState) -> Change | None:
    return checked(state, change)


class NobodyThereError(UnavailableError):
    """No coordinator answers at this url; nothing was asked of one."""


class StandsByError(NobodyThereError):
    """The coordinator at this url stands by; ``leader`` is where the one that leads is, as far as it knows."""

    def __init__(self, text: str, *, leader: str) -> None:
        super().__init__(text)
        self.leader = leader


def ask(url: str, request: ChangeRequest, *, token: str) -> ChangeAnswer:
    """Ask a coordinator to make a change.

    Raises:
        NobodyThereError: no coordinator is there, or one that stands by.
        UsageError: it refuses, or wants its token.
        UnavailableError: it took the request and did not say what came of it, or it could not make the change.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise UsageError(f"--coordinator {url!r} is not a url such as http://127.0.0.1:7070")
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=_TIMEOUT_S)
    try:
        status, body, leader = _posted(connection, url, msgspec.json.encode(request), token)
    finally:
        connection.close()
    text = body.decode(errors="replace").strip()[:2000]
    match status:
        case HTTPStatus.OK:
            return msgspec.json.decode(body, type=ChangeAnswer)
        case HTTPStatus.UNAUTHORIZED:
            raise UsageError(f"the coordinator at {url} wants its token: give --token-file")
        case HTTPStatus.CONFLICT if leader is not None:
            raise StandsByError(f"{url}: {text}", leader=leader)
        case HTTPStatus.CONFLICT:
            raise UsageError(text)
        case HTTPStatus.NOT_FOUND | HTTPStatus.METHOD_NOT_ALLOWED:
            raise NobodyThereError(f"what answers at {url} is no coordinator of this version")
        case _:
            raise UnavailableError(f"the coordinator at {url} did not make the change: {text or status}")


def _ask_leader(url: str, request: ChangeRequest, *, token: str) -> None:
    try:
        ask(url, request, token=token)
    except StandsByError as error:
        if not error.leader:
            raise
        ask(error.leader, request, token=token)


def _posted(connection: http.client.HTTPConnection, url: str, body: bytes, token: str) -> tuple[int, bytes, str | None]:
    try:
        connection.connect()
    except OSError as error:
        raise NobodyThereError(f"no coordinator answers at {url} ({error}); is it running?") from error
    try:
        connection.request("POST", "/v1/changes", body, {"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers.get(LEADER_HEADER)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(
            f"the coordinator at {url} does not say whether it made the change ({error}): look with `ckpt log`"
        ) from error
