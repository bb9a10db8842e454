"""What a sidecar serves by HTTP: its inventory, its copies, acknowledgements, health and metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from toprope.coordinator.serving import authorised, whole_body
from toprope.coordinator.wire import TIERS, Adoptions, Inventory, Provisional, encode
from toprope.sidecar import metrics
from toprope.sidecar.parts import parts_of
from toprope.sidecar.values import LEAST_PEER_BYTES_PER_S, Way
from toprope.store.errors import CorruptObjectError, UsageError
from toprope.store.names import checked_id

MAX_BODY_BYTES = 64 * 1024
MAX_WAIT_S = 60.0
LISTED_AT_ONCE = 2
LISTED_KEPT = 16
_CHUNK_BYTES = 1 << 20
_COPY = r"/v1/copies/{attempt_uid:[0-9a-f]{1,64}}/{step:\d{1,15}}/{rank:\d{1,9}}"
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What the server asks of the runtime about copies."""

    locate: Callable[[str, int, int], list[tuple[Way, int]]]
    view: Callable[[Path], Awaitable[memoryview]]
    began: Callable[[int, str, int, int], None]
    ended: Callable[[int], None]
    acked: Callable[[str, str, int, int, str], None]


class SidecarHttp:
    """The routes."""

    def __init__(
        self,
        copies: Copies,
        *,
        inventory_after: Callable[[int, float], Awaitable[Inventory | None]],
        token: str,
        stall_timeout_s: float,
        use_deadline_s: float,
        adopted: Callable[[], tuple[Provisional, ...]],
    ) -> None:
        self._copies = copies
        self._inventory_after = inventory_after
        self._adopted = adopted
        self._token = token
        self._stall_timeout_s = stall_timeout_s
        self._use_deadline_s = use_deadline_s
        self._serves = itertools.count(1)
        self._listed: OrderedDict[tuple[str, int, int, str], bytes] = OrderedDict()
        self._listing = asyncio.Semaphore(LISTED_AT_ONCE)
        self._turns: WeakValueDictionary[tuple[str, int, int, str], asyncio.Lock] = WeakValueDictionary()

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[authorised(self._token), whole_body])
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/v1/inventory", self._inventory)
        application.router.add_get("/v1/adopted", self._adoptions)
        application.router.add_get(_COPY, self._copy)
        application.router.add_get(f"{_COPY}/parts", self._parts)
        application.router.add_post(f"{_COPY}/ack", self._ack)
        return application

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _inventory(self, request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "0"))
            wait_s = min(MAX_WAIT_S, max(0.0, float(request.query.get("wait_s", "0"))))
        except ValueError as error:
            raise web.HTTPBadRequest(text="after is a version and wait_s a number of seconds\n") from error
        inventory = await self._inventory_after(after, wait_s)
        if inventory is None:
            raise web.HTTPServiceUnavailable(text="not told yet which job this is: no coordinator has answered\n")
        return web.Response(body=encode(inventory), content_type="application/json")

    async def _adoptions(self, _request: web.Request) -> web.Response:
        """Tell a coordinator that has taken over what was opened without the log."""
        return web.Response(body=encode(Adoptions(attempts=self._adopted())), content_type="application/json")

    async def _copy(self, request: web.Request) -> web.StreamResponse:
        async with self._served(request) as image:
            return await self._stream(request, image)

    async def _parts(self, request: web.Request) -> web.Response:
        """Tell what an image consists of, with all digests; some of it can then be asked for by its range.

        They are taken once for each image, few at a time, however many ask.
        """
        async with self._served(request) as image:
            of_image = (*_place(request), request.query.get("tier", ""))
            async with self._turns.setdefault(of_image, asyncio.Lock()):
                body = self._listed.get(of_image)
                if body is None:
                    body = self._listed[of_image] = await self._list(image, name=request.path)
        if len(self._listed) > LISTED_KEPT:
            self._listed.popitem(last=False)
        return web.Response(body=body, content_type="application/json")

    async def _list(self, image: memoryview, *, name: str) -> bytes:
        async with self._listing:
            try:
                return msgspec.json.encode(await asyncio.to_thread(parts_of, image, name=name))
            except CorruptObjectError as error:
                raise web.HTTPNotFound(text=f"{error}\n") from error

    @asynccontextmanager
    async def _served(self, request: web.Request) -> AsyncIterator[memoryview]:
        """Yield the copy that is asked for, which is in use until then."""
        attempt_uid, step, rank = _place(request)
        tier = request.query.get("tier", "")
        if tier and tier not in TIERS:
            raise web.HTTPBadRequest(text=f"tier is one of {', '.join(TIERS)}\n")
        found = [(way, size) for way, size in self._copies.locate(attempt_uid, step, rank) if tier in {"", way.tier}]
        if not found:
            raise web.HTTPNotFound(text=f"no verified copy of step {step} of rank {rank} here\n")
        way, size = found[0]
        serve = next(self._serves)
        self._copies.began(serve, attempt_uid, step, rank)
        try:
            view = await self._copies.view(Path(way.path))
            yield view[:size]
        except FileNotFoundError as error:
            raise web.HTTPNotFound(text="the copy is gone\n") from error
        finally:
            self._copies.ended(serve)

    async def _stream(self, request: web.Request, image: memoryview) -> web.StreamResponse:
        """Send an image, or a range of it; who stalls or is too slow loses the connection, not the trainer a slot."""
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        if "Range" in request.headers:
            size, (begin, end) = len(image), _range(request, len(image))
            image = image[begin:end]
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        response.content_length = len(image)
        try:
            async with asyncio.timeout(self._use_deadline_s + len(image) / LEAST_PEER_BYTES_PER_S):
                await response.prepare(request)
                for start in range(0, len(image), _CHUNK_BYTES):
                    async with asyncio.timeout(self._stall_timeout_s):
                        await response.write(image[start : start + _CHUNK_BYTES])
                await response.write_eof()
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        else:
            metrics.SERVED_BYTES.inc(len(image))
        return response

    async def _ack(self, request: web.Request) -> web.Response:
        attempt_uid, step, rank = _place(request)
        try:
            body = json.loads(await request.text())
            holder, digest = body["holder"], body["digest"]
            good = _HEX.fullmatch(digest) is not None and bool(checked_id(holder, what="node"))
        except (ValueError, KeyError, TypeError, UsageError) as error:
            raise web.HTTPBadRequest(text="give {holder, digest}\n") from error
        if not good:
            raise web.HTTPBadRequest(text="digest is 32 hex digits\n")
        self._copies.acked(holder, attempt_uid, step, rank, digest)
        return web.Response(status=204)


def _range(request: web.Request, size: int) -> tuple[int, int]:
    try:
        begin, end, _ = request.http_range.indices(size)
    except ValueError:
        begin = end = 0
    if begin >= end:
        raise web.HTTPRequestRangeNotSatisfiable(text=f"give a range within {size} bytes\n")
    return begin, end


def _place(request: web.Request) -> tuple[str, int, int]:
    return request.match_info["attempt_uid"], int(request.match_info["step"]), int(request.match_info["rank"])
