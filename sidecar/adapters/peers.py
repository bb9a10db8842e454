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
from toprope.sidecar.pace import Pace
from toprope.sidecar.parts import MAX_PARTS_BYTES, Parts, decoded
from toprope.sidecar.ports import PeerError, said

WATCH_S = 10.0
RESUMES = 8
_READ_BYTES = 4 * 1024 * 1024
_PACED_BYTES = 256 * 1024
_LEAST_HASHED_BYTES_PER_S = 500_000_000


class _StalledError(PeerError):
    """A peer has sent nothing for as long as it may."""


class HttpPeers:
    """Speaks to other sidecars, with the job's token if there is one."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        node: str,
        token: str,
        stall_timeout_s: float,
        pace: Pace | None = None,
    ) -> None:
        self._session = session
        self._node = node
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._stall_timeout_s = stall_timeout_s
        self._pace = pace

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

    def receive(self, url: str, into: memoryview, *, begin: int | None = None, paced: bool = False) -> None:
        """Receive exactly as many bytes as there is room for: all there are, or those from ``begin`` on.

        A connection that breaks is taken up again where it broke, as long as each has brought more. A peer that stalls
        is given up: it has been waited for, and another one may have the same.
        """
        filling = _Filling(into, self._pace if paced else None)
        for left in reversed(range(RESUMES + 1)):
            at = filling.at
            try:
                self._receive(url, filling, begin=begin if at == 0 else (begin or 0) + at)
            except PeerError as error:
                if isinstance(error, _StalledError) or filling.at == at or left == 0:
                    raise
            else:
                return

    def _receive(self, url: str, filling: _Filling, *, begin: int | None) -> None:
        missing = len(filling.into) - filling.at
        some = {} if begin is None else {"Range": f"bytes={begin}-{begin + missing - 1}"}
        with self._answer(url, some) as response:
            if response.length != missing:
                raise PeerError(f"{urlsplit(url).netloc} has {response.length} bytes; expected {missing}")
            filling.fill(response)

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
        except TimeoutError as error:
            raise _StalledError(f"{parts.netloc}: {said(error)}") from error
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


class _Filling:
    """Bytes that are being received: ``at`` of them are here."""

    def __init__(self, into: memoryview, pace: Pace | None) -> None:
        self.into = into
        self.at = 0
        self._pace = pace

    def fill(self, response: http.client.HTTPResponse) -> None:
        most = _READ_BYTES if self._pace is None else _PACED_BYTES
        while self.at < len(self.into):
            count = response.readinto(self.into[self.at : self.at + most])
            if count == 0:
                raise PeerError(f"the connection ended after {self.at} of {len(self.into)} bytes")
            self.at += count
            if self._pace is not None:
                self._pace.take(count)
