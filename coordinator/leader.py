"""How a command asks the coordinator that leads, whichever one it knows of."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

from toprope.coordinator.wire import LEADER_HEADER
from toprope.store.errors import UnavailableError, UsageError

_TIMEOUT_S = 10.0


class NobodyThereError(UnavailableError):
    """No coordinator is there; nothing was asked of one."""


class StandsByError(NobodyThereError):
    """Coordinators are there, and none that leads; nothing was asked of one."""


class Answer(NamedTuple):
    """What the coordinator that leads answered. ``url``: where it is."""

    url: str
    status: int
    body: bytes

    @property
    def text(self) -> str:
        """Return the body for people."""
        return self.body.decode(errors="replace").strip()[:2000]


def ask_leader(
    urls: Sequence[str], path: str, *, method: str = "GET", body: bytes = b"", token: str, timeout_s: float = _TIMEOUT_S
) -> Answer:
    """Ask the first of these coordinators that leads, or that one of them says leads.

    What was sent by POST and not answered may have been done, so nobody else is asked then.

    Raises:
        NobodyThereError: no coordinator is there, or all stand by (``StandsByError``).
        UnavailableError: one took the request and did not answer.
        UsageError: one wants its token, or a url is none.
    """
    waiting, asked, failures, silent, stand_by = list(urls), set[str](), list[str](), False, False
    while waiting:
        url = waiting.pop(0)
        if url in asked:
            continue
        asked.add(url)
        try:
            answer, leader = _ask(url, path, method, body, token, timeout_s)
        except UnavailableError as error:
            there = not isinstance(error, NobodyThereError)
            if there and method == "POST":
                raise
            silent |= there
            failures.append(str(error))
            continue
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise UsageError(f"the coordinator at {url} wants its token: give --token-file")
        if answer.status != HTTPStatus.CONFLICT or leader is None:
            return answer
        stand_by = True
        failures.append(f"the coordinator at {url} stands by")
        waiting[:0] = [leader] if leader else []
    kind = UnavailableError if silent else StandsByError if stand_by else NobodyThereError
    raise kind("; ".join(failures))


def _ask(url: str, path: str, method: str, body: bytes, token: str, timeout_s: float) -> tuple[Answer, str | None]:
    """Return the answer of one coordinator, and if it stands by the url of the one that leads, empty if unknown."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise UsageError(f"--coordinator {url!r} is not a url such as http://127.0.0.1:7070")
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    try:
        connection.connect()
    except OSError as error:
        raise NobodyThereError(f"no coordinator answers at {url} ({error}); is it running?") from error
    try:
        connection.request(method, path, body or None, {"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return Answer(url, answer.status, answer.read()), answer.headers.get(LEADER_HEADER)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"the coordinator at {url} took the request and does not answer ({error})") from error
    finally:
        connection.close()
