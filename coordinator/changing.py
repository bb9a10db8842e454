"""How a command changes a job: by its coordinator, or elected for the moment where none answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import msgspec

from toprope.coordinator.leader import NobodyThereError, ask_leader
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.keep.changes import (
    NO_CHANGE,
    Change,
    ChangeAnswer,
    ChangeRequest,
    OtherStoreError,
    append_in_passing,
    checked,
)
from toprope.store.log.chain import read_on
from toprope.store.log.fold import JobState
from toprope.store.names import PROBES
from toprope.store.objects.probing import forget_probe, leave_probe
from toprope.store.objects.protocol import ObjectStore

ASK_NOBODY = "none"
"""In place of a url: no coordinator is asked."""

_OTHER_VERSION = "; the coordinator is of another version: restart it with this one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changer:
    """Appends changes to the logs of a store, which ``root`` is. ``say`` is told who did.

    ``coordinator_url`` is that of the coordinator, which then must answer; without it the one is asked that the log
    names, if it answers; with ``ASK_NOBODY`` none is.
    """

    store: ObjectStore
    root: str
    coordinator_url: str
    token: str
    say: Callable[[str], None]

    def append(self, state: JobState, change: Change, *, purpose: str) -> JobState:
        """Append a change unless things are so already; return the log after it.

        Raises:
            OtherStoreError: the coordinator serves another store.
            UsageError: the change may not be made, and nothing was.
            CkptError: it could not be made.
        """
        if checked(state, change) is None:
            return state
        if self._asked(state, change):
            return read_on(self.store, state)
        why = "is asked" if self.coordinator_url else "answers"
        self.say(f"no coordinator of job {state.job} {why}: `ckpt {purpose}` appends to the log itself")
        after, _ = append_in_passing(self.store, state.job, partial(_checked, change), purpose=purpose)
        return after

    def _asked(self, state: JobState, change: Change) -> bool:
        """Ask the coordinator; say whether there is one."""
        url = self.coordinator_url or state.url
        if url in {"", ASK_NOBODY}:
            return False
        try:
            self._ask(url, state, change)
        except NobodyThereError:
            if self.coordinator_url:
                raise
            return False
        return True

    def _ask(self, url: str, state: JobState, change: Change) -> None:
        """Ask the coordinator at a url, which sees by a probe whether it serves this store."""
        try:
            probe = leave_probe(self.store)
        except UnavailableError as error:
            raise UnavailableError(
                f"a probe could not be written to {self.root}, so the coordinator at {url} can't see that it serves "
                f"this store, and nothing was asked of it ({error}). Run it where {self.root} can be written, as the "
                f"coordinator's user, or let this user write {PROBES} there"
            ) from error
        try:
            ask(url, ChangeRequest(job_uid=state.job_uid, probe=probe, change=change), token=self.token)
        except OtherStoreError as error:
            raise OtherStoreError(
                f"{error}, not {self.root}, which may be a copy of it: nothing was changed. To change {self.root} "
                "alone, give --coordinator none; to change that coordinator's job, give the store that it serves"
            ) from error
        finally:
            forget_probe(self.store, probe)


def _checked(change: Change, state: JobState) -> Change | None:
    return checked(state, change)


def ask(url: str, request: ChangeRequest, *, token: str) -> ChangeAnswer:
    """Ask a coordinator, or the leader that it names, to make a change.

    Raises:
        NobodyThereError: no coordinator is there, or only one that stands by.
        OtherStoreError: it serves another store than the one that has the probe.
        UsageError: it refuses, or wants its token.
        UnavailableError: it took the request and did not say what came of it, or it could not make the change.
    """
    body = msgspec.json.encode(request)
    try:
        answer = ask_leader([url], "/v1/changes", method="POST", body=body, token=token)
    except NobodyThereError:
        raise
    except UnavailableError as error:
        raise UnavailableError(f"{error}: whether it made the change `ckpt log` says") from error
    match answer.status:
        case HTTPStatus.OK:
            return msgspec.json.decode(answer.body, type=ChangeAnswer)
        case HTTPStatus.MISDIRECTED_REQUEST:
            raise OtherStoreError(f"the coordinator at {answer.url} serves {answer.text}")
        case HTTPStatus.CONFLICT:
            raise UsageError(f"{answer.text}{_OTHER_VERSION if answer.text.startswith(NO_CHANGE) else ''}")
        case HTTPStatus.NOT_FOUND | HTTPStatus.METHOD_NOT_ALLOWED:
            raise NobodyThereError(f"what answers at {answer.url} is no coordinator of this version")
        case _:
            raise UnavailableError(
                f"the coordinator at {answer.url} did not make the change: {answer.text or answer.status}"
            )
