"""Other sidecars by HTTP: documents on the loop, bulk bytes by a blocking socket that reads into their final place."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import aiohttp
import msgspec

from toprope.coordinator.serving import limited_body
from toprope.coordinator.wire import MAX_INVENTORY_BYTES, DocumentError, Inventory, decode
from toprope.sidecar.parts import MAX_PARTS_BYTES, Parts, decoded
from toprope.sidecar.ports import PeerError, said

WATCH_S = 10.0
_READ_BYTES = 4 * 1024 * 1024
_LEAST_HASHED_BYTES_PER_S = 500_000_000


class HttpPeers:
    """Speaks to other sidecars, with the job's token if there is one."""

    def __init__(self, session: aiohttp.ClientSession, *, node: str, token: str, stall_timeout_s: float) -> None:
        self._session = session
        self._node = node
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._stall_timeout_s = stall_timeout_s

    async def watch(self, url: str, *, after: int) -> Inventory:
        """Return the inventory as soon as it is not version ``after``, or as it is after a while."""
        query = {"after": str(after), "wait_s": str(WATCH_S)}
        timeout = aiohttp.ClientTimeout(total=WATCH_S + self._stall_timeout_s, connect=self._stall_timeout_s)
        try:
            async with self._session.get(
                f"{url}/v1/inventory", params=query, headers=self._headers, timeout=timeout
            ) as response:
                if response.status != http.HTTPStatus.OK:
                    raise PeerError(f"{url} answered {response.status}")
                body = await limited_body(response, limit=MAX_INVENTORY_BYTES)
            return decode(body, Inventory, limit=MAX_INVENTORY_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError, DocumentError) as error:
            raise PeerError(f"{url}: {said(error)}") from error

    def receive(self, url: str, into: memoryview, *, begin: int | None = None) -> None:
        """Receive exactly as many bytes as there is room for: all there are, or those from ``begin`` on."""
        some = {} if begin is None else {"Range": f"bytes={begin}-{begin + len(into) - 1}"}
        with self._answer(url, some) as response:
            if response.length != len(into):
                raise PeerError(f"{urlsplit(url).netloc} has {response.length} bytes; expected {len(into)}")
            _fill(response, into)

    def parts(self, url: str, *, of_bytes: int) -> Parts:
        """Return what the image of so many bytes at ``url`` consists of: a peer hashes all of it before it answers."""
        parts = urlsplit(url)
        hashing_s = of_bytes / _LEAST_HASHED_BYTES_PER_S
        of_image = f"{parts.scheme}://{parts.netloc}{parts.path}/parts?{parts.query}"
        with self._answer(of_image, {}, patience_s=hashing_s) as response:
            body = response.read(MAX_PARTS_BYTES + 1)
        try:
            if len(body) > MAX_PARTS_BYTES:
                raise PeerError(f"{parts.netloc} lists parts in more than {MAX_PARTS_BYTES} bytes")
            return decoded(body)
        except msgspec.MsgspecError as error:
            raise PeerError(f"{parts.netloc} lists parts that can't be read: {error}") from error

    @contextmanager
    def _answer(self, url: str, some: dict[str, str], *, patience_s: float = 0.0) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to GET: of all, or of as much as the header ``some`` asks for.

        It may take so much longer to begin than it may stall.
        """
        parts = urlsplit(url)
        expected = http.HTTPStatus.PARTIAL_CONTENT if some else http.HTTPStatus.OK
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=self._stall_timeout_s)
        try:
            connection.request("GET", f"{parts.path}?{parts.query}", headers=self._headers | some)
            connection.sock.settimeout(self._stall_timeout_s + patience_s)
            with connection.getresponse() as response:  # one that ends with its connection holds the socket itself
                if response.status != expected:
                    text = response.read(500).decode("utf-8", "replace")
                    raise PeerError(f"{parts.netloc} answered {response.status}: {text}")
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{parts.netloc}: {said(error)}") from error
        finally:
            connection.close()

    async def acknowledge(self, url: str, *, digest: str) -> None:
        """Tell an owner which digest its copy has here."""
        timeout = aiohttp.ClientTimeout(total=self._stall_timeout_s)
        try:
            async with self._session.post(
                url, json={"holder": self._node, "digest": digest}, headers=self._headers, timeout=timeout
            ) as response:
                if response.status != http.HTTPStatus.NO_CONTENT:
                    raise PeerError(f"{url} answered {response.status}")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise PeerError(f"{url}: {said(error)}") from error


def _fill(response: http.client.HTTPResponse, into: memoryview) -> None:
    at = 0
    while at < len(into):
        count = response.readinto(into[at : at + _READ_BYTES])
        if count == 0:
            raise PeerError(f"the connection ended after {at} of {len(into)} bytes")
        at += count
