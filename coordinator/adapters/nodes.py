"""The sidecars and the other coordinators, by HTTP."""

from __future__ import annotations

import asyncio
from typing import Literal, TypeVar

import aiohttp

from toprope.coordinator.serving import limited_body
from toprope.coordinator.wire import (
    MAX_DESIRED_BYTES,
    MAX_HEALTH_BYTES,
    MAX_INVENTORY_BYTES,
    Adoptions,
    DocumentError,
    Health,
    Inventory,
    Provisional,
    decode,
)

_D = TypeVar("_D", Inventory, Adoptions)

ASKED_AT_ONCE = 64
"""Of thousands the last would not have answered in time only because it had not been asked."""


class HttpNodes:
    """A ``NodesPort`` that asks ``GET /v1/inventory`` and ``GET /v1/adopted``."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._at_once = asyncio.Semaphore(ASKED_AT_ONCE)

    async def inventory(self, url: str) -> Inventory | None:
        """Return what the sidecar at this url holds now; None when it does not say so in time."""
        return await self._document(f"{url}/v1/inventory", Inventory, limit=MAX_INVENTORY_BYTES)

    async def adopted(self, url: str) -> tuple[Provisional, ...] | None:
        """Return the attempts that the node at this url has adopted; None when it does not say so in time."""
        said = await self._document(f"{url}/v1/adopted", Adoptions, limit=MAX_DESIRED_BYTES)
        return None if said is None else said.attempts

    async def _document(self, url: str, kind: type[_D], *, limit: int) -> _D | None:
        try:
            async with self._at_once, self._session.get(url) as answer:
                if answer.status != 200:  # noqa: PLR2004 - HTTP's ok
                    return None
                return decode(await limited_body(answer, limit=limit), kind, limit=limit)
        except (aiohttp.ClientError, TimeoutError, DocumentError, ValueError, OSError):
            return None


class HttpCoordinators:
    """A ``CoordinatorsPort`` that asks ``GET /healthz``."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def health(self, url: str, *, standby: str) -> Health | Literal["refused", "silent"]:
        """Return what the coordinator at this url says of itself, or how it does not."""
        try:
            async with self._session.get(f"{url}/healthz", params={"standby": standby}) as answer:
                body = await limited_body(answer, limit=MAX_HEALTH_BYTES)
                return decode(body, Health, limit=MAX_HEALTH_BYTES)
        except aiohttp.ClientConnectorError as error:
            return "refused" if isinstance(error.os_error, ConnectionRefusedError) else "silent"
        except (aiohttp.ClientError, TimeoutError, DocumentError, ValueError, OSError):
            return "silent"


def session(*, token: str, timeout_s: float) -> aiohttp.ClientSession:
    """Return a session that gives up after ``timeout_s`` and shows ``token`` if there is one."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
