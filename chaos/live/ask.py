"""Questions to running services, by HTTP on loopback; no answer is an answer."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from toprope.coordinator.wire import MAX_DESIRED_BYTES, MAX_INVENTORY_BYTES, Desired, Inventory, decode

_TIMEOUT_S = 2.0


def get(url: str, path: str, *, token: str = "") -> bytes | None:
    """Return the body of a 200 answer, or None when the service is away or says otherwise."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if answer.status == http.HTTPStatus.OK else None


def get_desired(coordinator_url: str, *, token: str = "") -> Desired | None:
    """Return the coordinator's desired state."""
    body = get(coordinator_url, "/v1/desired", token=token)
    return None if body is None else decode(body, Desired, limit=MAX_DESIRED_BYTES)


def get_inventory(sidecar_url: str) -> Inventory | None:
    """Return a sidecar's inventory."""
    body = get(sidecar_url, "/v1/inventory")
    return None if body is None else decode(body, Inventory, limit=MAX_INVENTORY_BYTES)
