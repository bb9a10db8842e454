"""The coordinators by HTTP: what is said when no broker carries it, and the one request.

One of them leads. The others answer 409 and where the leader is; one that is frozen or cut off does not answer at all.
"""

from __future__ import annotations

import http
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from toprope.coordinator.serving import limited_body
from toprope.coordinator.wire import (
    LEADER_HEADER,
    MAX_DESIRED_BYTES,
    Desired,
    DocumentError,
    Inventory,
    OpenAnswer,
    OpenRequest,
    decode,
    encode,
)
from toprope.sidecar.ports import CoordinatorError, said

CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 4.0
OPEN_TIMEOUT_S = 60.0
WATCH_S = 10.0


class _NotLeadingError(CoordinatorError):
    """A coordinator that stands by answered; it says that the leader is at ``leader``, if it knows."""

    def __init__(self, text: str, *, leader: str) -> None:
        super().__init__(text)
        self.leader = leader


class HttpCoordinator:
    """Tries the coordinator that the newest document names, then those that were configured, and where they point.

    Those that did not answer when last asked come last.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        node: str,
        urls: tuple[str, ...],
        token: str,
        current: Callable[[], str],
    ) -> None:
        self._session = session
        self._node = node
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._current = current
        self._silent: set[str] = set()

    async def put_inventory(self, inventory: Inventory) -> Desired:
        """Tell it what this node holds."""
        path = f"/v1/nodes/{inventory.node}/inventory"
        body = await self._ask("PUT", path, body=encode(inventory), timeout_s=REQUEST_TIMEOUT_S)
        return _decoded(body, Desired)

    async def get_desired(self, *, newer_than: Desired | None) -> Desired:
        """Return its document, as soon as it is newer than one that is known or a while has passed."""
        path, timeout_s = f"/v1/desired?node={self._node}", REQUEST_TIMEOUT_S
        if newer_than is not None:
            path += f"&after={newer_than.term}.{newer_than.version}&wait_s={WATCH_S:g}"
            timeout_s += WATCH_S
        return _decoded(await self._ask("GET", path, body=None, timeout_s=timeout_s), Desired)

    async def open_attempt(self, request: OpenRequest) -> OpenAnswer:
        """Ask for an attempt, which takes long to decide: so a coordinator is first asked whether it lives."""
        body = await self._ask("POST", "/v1/attempts", body=encode(request), timeout_s=OPEN_TIMEOUT_S, lives=True)
        return _decoded(body, OpenAnswer)

    async def _ask(self, method: str, path: str, *, body: bytes | None, timeout_s: float, lives: bool = False) -> bytes:
        known = [url for url in (self._current().rstrip("/"), *self._urls) if url]
        urls = sorted(dict.fromkeys(known), key=lambda url: url in self._silent)
        failures: dict[str, str] = {}
        while urls:
            url = urls.pop(0)
            try:
                if lives:
                    await self._request("GET", f"{url}/healthz", body=None, timeout_s=REQUEST_TIMEOUT_S)
                answer = await self._request(method, url + path, body=body, timeout_s=timeout_s)
            except _NotLeadingError as error:
                failures[url] = str(error)
                if error.leader and error.leader not in failures:
                    urls = list(dict.fromkeys([error.leader, *urls]))
            except CoordinatorError as error:
                failures[url] = str(error)
                self._silent.add(url)
            else:
                self._silent.discard(url)
                return answer
        raise CoordinatorError("; ".join(failures.values()) or "no coordinator is known: give --coordinator")

    async def _request(self, method: str, url: str, *, body: bytes | None, timeout_s: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            async with self._session.request(method, url, data=body, headers=headers, timeout=timeout) as response:
                answer = await limited_body(response, limit=MAX_DESIRED_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError, DocumentError) as error:
            raise CoordinatorError(f"{url}: {said(error)}") from error
        if response.status != http.HTTPStatus.OK:
            text = answer[:200].decode("utf-8", "replace").strip()
            text = f"{urlsplit(url).netloc} answered {response.status}: {text}"
            if response.status == http.HTTPStatus.CONFLICT:
                raise _NotLeadingError(text, leader=_url(response.headers.get(LEADER_HEADER, "")))
            raise CoordinatorError(text)
        return answer


def _url(said: str) -> str:
    """Return a url that a coordinator gave, or nothing if it is none."""
    parts = urlsplit(said)
    return said.rstrip("/") if parts.scheme == "http" and parts.hostname else ""


_D = TypeVar("_D", Desired, OpenAnswer)


def _decoded(body: bytes, kind: type[_D]) -> _D:
    try:
        return decode(body, kind, limit=MAX_DESIRED_BYTES)
    except DocumentError as error:
        raise CoordinatorError(str(error)) from error
