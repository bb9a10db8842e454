"""The coordinator by HTTP: what is said when no broker carries it, and the one request."""

from __future__ import annotations

import http
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from toprope.coordinator.serving import limited_body
from toprope.coordinator.wire import (
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
REQUEST_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 60.0
WATCH_S = 10.0


class HttpCoordinator:
    """Tries the coordinator that the newest document names, then those that were configured."""

    def __init__(
        self, session: aiohttp.ClientSession, *, urls: tuple[str, ...], token: str, current: Callable[[], str]
    ) -> None:
        self._session = session
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._current = current

    async def put_inventory(self, inventory: Inventory) -> Desired:
        """Tell it what this node holds."""
        path = f"/v1/nodes/{inventory.node}/inventory"
        body = await self._ask("PUT", path, body=encode(inventory), timeout_s=REQUEST_TIMEOUT_S)
        return _decoded(body, Desired)

    async def get_desired(self, *, newer_than: Desired | None) -> Desired:
        """Return its document, as soon as it is newer than one that is known or a while has passed."""
        path, timeout_s = "/v1/desired", REQUEST_TIMEOUT_S
        if newer_than is not None:
            path += f"?after={newer_than.term}.{newer_than.version}&wait_s={WATCH_S:g}"
            timeout_s += WATCH_S
        return _decoded(await self._ask("GET", path, body=None, timeout_s=timeout_s), Desired)

    async def open_attempt(self, request: OpenRequest) -> OpenAnswer:
        """Ask for an attempt."""
        body = await self._ask("POST", "/v1/attempts", body=encode(request), timeout_s=OPEN_TIMEOUT_S)
        return _decoded(body, OpenAnswer)

    async def _ask(self, method: str, path: str, *, body: bytes | None, timeout_s: float) -> bytes:
        failures: list[str] = []
        urls = list(dict.fromkeys(url for url in (self._current().rstrip("/"), *self._urls) if url))
        for url in urls:
            try:
                return await self._request(method, url + path, body=body, timeout_s=timeout_s)
            except CoordinatorError as error:
                failures.append(str(error))
        raise CoordinatorError("; ".join(failures) or "no coordinator is known: give --coordinator")

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
            raise CoordinatorError(f"{urlsplit(url).netloc} answered {response.status}: {text}")
        return answer


_D = TypeVar("_D", Desired, OpenAnswer)


def _decoded(body: bytes, kind: type[_D]) -> _D:
    try:
        return decode(body, kind, limit=MAX_DESIRED_BYTES)
    except DocumentError as error:
        raise CoordinatorError(str(error)) from error
