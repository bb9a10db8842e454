"""What both services do alike: the token, the ready file, who may ask, how much is read, a core's door, memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hmac
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from toprope.coordinator.wire import LEADER_HEADER, DocumentError, Inventory
from toprope.store.errors import UsageError

TOKEN_CHARS_MIN = 16
BODY_S = 10.0
"""How long a request may take to arrive: all of them are small documents."""
_PIECE_BYTES = 1 << 16
LARGE_BYTES = 1 << 20
"""From this size on a buffer has pages of its own. A frame that is packed or unpacked has up to 16 MiB."""
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_E = TypeVar("_E")
_F = TypeVar("_F")
AUTHORISED = web.RequestKey("authorised", bool)
"""Whether a request showed the token, if there is one."""


def read_token(path: Path | None) -> str:
    """Return the secret in a file, empty when there is none.

    Raises:
        UsageError: the file can't be read, or holds too little to be a secret.
    """
    if path is None:
        return ""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file {path} can't be read: {error}") from error
    if len(token) < TOKEN_CHARS_MIN:
        raise UsageError(
            f"token file {path} holds {len(token)} characters: put a secret of at least {TOKEN_CHARS_MIN} into it"
        )
    return token


def check_ready_file(path: Path | None) -> None:
    """Check that the ready file, if one is wanted, can be put where it is to be.

    Raises:
        UsageError: its directory does not exist.
    """
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"--ready-file {path}: its directory does not exist")


def write_ready_file(path: Path, content: Mapping[str, object]) -> None:
    """Write a line of JSON of which nobody ever sees a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(path)


def authorised(token: str) -> Middleware:
    """Return the middleware that asks for the token, if there is one, on all but ``/healthz``."""
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        request[AUTHORISED] = not token or hmac.compare_digest(given, wanted)
        if not request[AUTHORISED] and request.path != "/healthz":
            raise web.HTTPUnauthorized(text="the token is missing or not the job's: check --token-file\n")
        return await handler(request)

    return check


@web.middleware
async def whole_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read what is sent before anything is done with it; 408 for who takes longer than ``BODY_S``."""
    if request.can_read_body:
        try:
            async with asyncio.timeout(BODY_S):
                await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the body was not here within {BODY_S:g} s\n") from error
    return await handler(request)


class NotLeadingError(Exception):
    """This coordinator stands by. ``leader`` is the url of the one that leads, empty when it knows none."""

    def __init__(self, leader: str) -> None:
        super().__init__(f"this coordinator stands by; the leader is at {leader or 'an address that it does not know'}")
        self.leader = leader


@web.middleware
async def led_elsewhere(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 409 with the leader's url to whoever asks one that stands by."""
    try:
        return await handler(request)
    except NotLeadingError as error:
        raise web.HTTPConflict(text=f"{error}\n", headers={LEADER_HEADER: error.leader}) from error


async def limited_body(response: aiohttp.ClientResponse, *, limit: int) -> bytes:
    """Return the whole body of an answer, however many pieces it comes in.

    Raises:
        DocumentError: it is longer than ``limit``.
    """
    body = bytearray()
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        body += piece
        if len(body) > limit:
            raise DocumentError(f"an answer of more than {limit} bytes")
    return bytes(body)


class NoBroker:
    """Stands in where no broker was configured: documents go by HTTP alone."""

    async def publish_inventory(self, inventory: Inventory) -> bool:  # noqa: ARG002 - the port's signature
        """Publish nothing."""
        return False

    def connected(self) -> bool:
        """Say that there is none."""
        return False


def told(handle: Callable[[_E], tuple[_F, ...]], event: _E, *, tasks: asyncio.TaskGroup) -> tuple[_F, ...]:
    """Tell a core of an event, and return what it wants done.

    A core that fails ends the process, whoever told it: it fails in a task of the group, for a connection's or a
    request's own task would only log it, and go on with what is left.
    """
    try:
        return handle(event)
    except Exception as error:
        tasks.create_task(_raised(error))
        raise


async def _raised(error: Exception) -> None:
    raise error


def give_back_large_buffers() -> None:
    """Have the pages of a large buffer go back to the machine when it is freed, in this process from now on.

    Left alone, glibc takes the largest buffer that was ever freed for the size of a common one, and keeps some such
    buffers in the heap of each thread that has had one: a sidecar then grows by the frames that it has packed. And all
    threads share one heap, before the first of them is there: each that had its own would keep what it needed at most,
    and few allocate at a time here, one at a time holds the interpreter. Another C library than glibc is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def settle() -> None:
    """Take all objects that are there for lasting ones, once a process has started and is to serve.

    Left alone, Python looks for old garbage only once there is a quarter as much of it as there is of all else: here as
    of all that was imported, some MiB. Of what lasts from now on nothing is looked at, so a look costs little.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # by what this one leaves it is measured when the next is due
