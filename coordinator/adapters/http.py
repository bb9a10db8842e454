"""The coordinator's HTTP server: documents without a broker, requests for attempts, status, metrics."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from toprope.coordinator.serving import AUTHORISED, authorised, led_elsewhere, whole_body
from toprope.coordinator.settings import Address
from toprope.coordinator.wire import (
    MAX_INVENTORY_BYTES,
    MAX_OPEN_BYTES,
    Desired,
    DocumentError,
    Health,
    Inventory,
    OpenAnswer,
    OpenRequest,
    decode,
    encode,
)
from toprope.store.errors import CkptError, UnavailableError, UsageError
from toprope.store.keep.changes import ChangeAnswer, ChangeRequest, OtherStoreError
from toprope.store.keep.changes import decode as decode_change
from toprope.store.names import checked_id

_WAIT_S_MAX = 30.0
_URL_CHARS_MAX = 200


class Service(Protocol):
    """What the server serves. All but ``registry`` and ``health`` raise ``NotLeadingError`` in one that stands by."""

    @property
    def registry(self) -> CollectorRegistry:
        """Return the metrics, as they are now."""

    def health(self, *, standby: str = "") -> Health:
        """Return what this coordinator says of itself; ``standby`` is the url of one that stands by and asks."""

    def heard(self, inventory: Inventory) -> None:
        """Take in an inventory whose sender is there."""

    def desired(self, *, node: str = "") -> Desired | None:
        """Return how the job is wanted to be, all of it or what a node needs; None: not known yet."""

    async def desired_after(self, term: int, version: int) -> None:
        """Return once there is a Desired newer than (term, version)."""

    async def change(self, asked: ChangeRequest) -> ChangeAnswer:
        """Append a change of the job that a person asks for.

        Raises:
            OtherStoreError: it is asked of another store; the message is which one is served here.
            UsageError: it may not be made.
            CkptError: it could not be made.
        """

    def declare_dead(self, node: str) -> None:
        """Take in that a person says that a node is dead.

        Raises:
            UsageError: there is no such node.
            UnavailableError: it can't be taken in now.
        """

    async def open(self, request: OpenRequest) -> OpenAnswer:
        """Return the attempt for a launch, or why there is none."""

    def status(self) -> Generator[None, None, msgspec.Struct] | None:
        """Work out what is safe where by now, in slices between which all else goes on; None: not known yet."""


def application(service: Service, *, token: str) -> web.Application:
    """Return the routes, which all but ``/healthz`` ask for the token if there is one."""
    app = web.Application(client_max_size=MAX_OPEN_BYTES, middlewares=[authorised(token), whole_body, led_elsewhere])
    routes = _Routes(service)
    app.add_routes(
        [
            web.put("/v1/nodes/{node}/inventory", routes.put_inventory),
            web.post("/v1/attempts", routes.post_attempt),
            web.post("/v1/changes", routes.post_change),
            web.put("/v1/nodes/{node}/dead", routes.put_dead),
            web.get("/v1/desired", routes.get_desired),
            web.get("/v1/status", routes.get_status),
            web.get("/healthz", routes.get_health),
            web.get("/metrics", routes.get_metrics),
        ]
    )
    return app


@asynccontextmanager
async def served(app: web.Application, listen: Address) -> AsyncIterator[str]:
    """Serve while the context lasts; gives the url.

    Raises:
        UsageError: the address can't be listened on.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port)
        try:
            await site.start()
        except OSError as error:
            why = "it is in use" if error.errno == errno.EADDRINUSE else str(error)
            raise UsageError(f"can't listen on {listen}: {why}; give another --listen, or port 0 for any") from error
        yield f"http://{Address(host=listen.host, port=runner.addresses[0][1])}"
    finally:
        await runner.cleanup()


class Page:
    """A page that takes long to work out, of thousands of ranks say: in slices, so that no decision waits for it.

    It is worked out once at a time, for all who have asked before that was begun.
    """

    def __init__(self) -> None:
        self._working = asyncio.Lock()
        self._asked = self._answered = 0
        self._body = b""

    async def read(self, begin: Callable[[], Generator[None, None, msgspec.Struct]]) -> bytes:
        """Return what ``begin`` works out, which is called now or later, and may raise."""
        self._asked += 1
        asked = self._asked
        async with self._working:
            if self._answered < asked:
                slices, all_asked = begin(), self._asked
                self._body = msgspec.json.encode(await _worked_out(slices))
                self._answered = all_asked
            return self._body


async def _worked_out(slices: Generator[None, None, msgspec.Struct]) -> msgspec.Struct:
    while True:
        try:
            next(slices)
        except StopIteration as done:
            result: msgspec.Struct = done.value
            return result
        await asyncio.sleep(0)


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._page = Page()

    async def put_inventory(self, request: web.Request) -> web.Response:
        try:
            inventory = decode(await request.read(), Inventory, limit=MAX_INVENTORY_BYTES)
            checked_id(inventory.node, what="node")
        except (DocumentError, UsageError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        if inventory.node != request.match_info["node"]:
            raise web.HTTPBadRequest(text="the inventory names another node than its url\n")
        self._service.heard(inventory)
        return self._desired(node=inventory.node)

    async def post_attempt(self, request: web.Request) -> web.Response:
        try:
            wanted = decode(await request.read(), OpenRequest, limit=MAX_OPEN_BYTES)
        except DocumentError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        return _json(encode(await self._service.open(wanted)))

    async def post_change(self, request: web.Request) -> web.Response:
        try:
            answer = await self._service.change(decode_change(await request.read()))
        except OtherStoreError as error:
            raise web.HTTPMisdirectedRequest(text=f"{error}\n") from error
        except UsageError as error:
            raise web.HTTPConflict(text=f"{error}\n") from error
        except CkptError as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
        return _json(encode(answer))

    async def put_dead(self, request: web.Request) -> web.Response:
        try:
            node = checked_id(request.match_info["node"], what="node")
        except UsageError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        try:
            self._service.declare_dead(node)
        except UsageError as error:
            raise web.HTTPNotFound(text=f"{error}\n") from error
        except UnavailableError as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
        return web.Response(status=204)

    async def get_desired(self, request: web.Request) -> web.Response:
        """Answer the Desired: with ``after`` (``term.version``) and ``wait_s``, once it is newer or time is up.

        With ``node``: what that node needs.
        """
        after, wait_s = request.query.get("after", ""), request.query.get("wait_s", "0")
        if after:
            try:
                term, version = (int(number) for number in after.split("."))
                limit_s = min(max(float(wait_s), 0.0), _WAIT_S_MAX)
            except ValueError as error:
                raise web.HTTPBadRequest(text="after is TERM.VERSION, wait_s a number\n") from error
            try:
                async with asyncio.timeout(limit_s):
                    await self._service.desired_after(term, version)
            except TimeoutError:
                pass
        return self._desired(node=request.query.get("node", ""))

    def _desired(self, *, node: str) -> web.Response:
        desired = self._service.desired(node=node)
        if desired is None:
            raise web.HTTPServiceUnavailable(text="not known yet: waiting to hear the nodes\n")
        return _json(encode(desired))

    async def get_status(self, _request: web.Request) -> web.Response:
        return _json(await self._page.read(self._status))

    def _status(self) -> Generator[None, None, msgspec.Struct]:
        status = self._service.status()
        if status is None:
            raise web.HTTPServiceUnavailable(text="not known yet: reading the log\n")
        return status

    async def get_health(self, request: web.Request) -> web.Response:
        standby = request.query.get("standby", "")
        if not request[AUTHORISED] or len(standby) > _URL_CHARS_MAX:
            standby = ""
        return _json(encode(self._service.health(standby=standby)))

    async def get_metrics(self, _request: web.Request) -> web.Response:
        body = generate_latest(self._service.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
