"""The sidecars, by HTTP."""

from __future__ import annotations

import aiohttp

from toprope.coordinator.serving import limited_body
from toprope.coordinator.wire import MAX_INVENTORY_BYTES, DocumentError, Inventory, decode


class HttpNodes:
    """A ``NodesPort`` that asks ``GET /v1/inventory``."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def inventory(self, url: str) -> Inventory | None:
        """Return what the sidecar at this url holds now; None when it does not say so in time."""
        try:
            async with self._session.get(f"{url}/v1/inventory") as answer:
                if answer.status != 200:  # noqa: PLR2004 - HTTP's ok
                    return None
                body = await limited_body(answer, limit=MAX_INVENTORY_BYTES)
                return decode(body, Inventory, limit=MAX_INVENTORY_BYTES)
        except (aiohttp.ClientError, TimeoutError, DocumentError, ValueError, OSError):
            return None


def session(*, token: str, timeout_s: float) -> aiohttp.ClientSession:
    """Return a session that gives up after ``timeout_s`` and shows ``token`` if there is one."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
