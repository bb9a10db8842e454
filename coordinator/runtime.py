"""Starts a coordinator and ends it: the parts first, then the reign."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeVar

from toprope.coordinator.adapters.broker import embedded
from toprope.coordinator.adapters.bulk import BulkReader
from toprope.coordinator.adapters.http import application, served
from toprope.coordinator.adapters.mqtt import Mqtt
from toprope.coordinator.adapters.nodes import HttpCoordinators, HttpNodes, session
from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.basing import pinned_base
from toprope.coordinator.config import Config
from toprope.coordinator.ports import Document, Ports, wrapped
from toprope.coordinator.serving import give_back_large_buffers, settle, write_ready_file
from toprope.coordinator.settings import Address, Wrap, unwrapped
from toprope.coordinator.terms import Terms
from toprope.store.errors import CkptError, NoStoreError, UnavailableError
from toprope.store.log.records import Base
from toprope.store.objects.opening import open_store, sweep_uploads
from toprope.store.objects.protocol import ObjectStore

STORE_THREADS = 32
"""A store answers many requests at once, and each waits for its answer in a thread."""
THREAD_TURN_S = 0.0002
"""So long a thread of the store may keep the loop waiting: by the usual 5 ms many at once hold up what is heard."""
_OPEN_AGAIN_S = 2.0
_SAY_AGAIN_S = 30.0
_LOG = logging.getLogger("toprope.coordinator")
T = TypeVar("T")


async def run(config: Config, wrap: Wrap = unwrapped) -> None:
    """Run a coordinator until SIGTERM or SIGINT.

    Raises:
        CkptError: it can't start, or the log or what it names is not what it should be.
    """
    give_back_large_buffers()
    sys.setswitchinterval(THREAD_TURN_S)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as stack:
            await _run(config, wrap, stack, stop)
    except BaseExceptionGroup as group:
        raise _cause(group) from group


async def _run(config: Config, wrap: Wrap, stack: AsyncExitStack, stop: asyncio.Event) -> None:
    threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store")
    asyncio.get_running_loop().set_default_executor(threads)
    store = await _opened(config.store, stop)
    if store is None:
        return
    await _sweep(config)
    base = await _base(config, store, stop)
    if stop.is_set():
        return
    bulk = BulkReader(config.store)
    stack.callback(bulk.close)
    terms = Terms(config, base=base)
    broker = config.broker
    if config.embedded_broker is not None:
        child = embedded(config.embedded_broker)
        broker = await asyncio.to_thread(child.__enter__)
        stack.push(child)
    url = await stack.enter_async_context(served(application(terms, token=config.token), config.listen))
    client = await stack.enter_async_context(session(token=config.token, timeout_s=config.probe_timeout_s))

    def connect(
        topics: Sequence[str], *, deliver: Callable[[Document], None], connected: Callable[[], None]
    ) -> Mqtt | None:
        if broker is None:
            return None
        return Mqtt(broker, job=config.job, topics=topics, deliver=deliver, connected=connected)

    ports = Ports(
        store=ThreadedStore(store, bulk=bulk),
        nodes=HttpNodes(client),
        coordinators=HttpCoordinators(client),
        connect=connect,
    )
    settle()
    await terms.run(
        wrapped(ports, wrap), url=url, stop=stop, on_serving=lambda: announce_ready(config, url=url, broker=broker)
    )


async def _opened(root: str, stop: asyncio.Event) -> ObjectStore | None:
    """Return the store as soon as it answers; None when told to end before; raises as ``_once_it_answers``."""
    return await _once_it_answers(lambda: open_store(root, write=True), stop)


async def _base(config: Config, store: ObjectStore, stop: asyncio.Event) -> Base | None:
    """Return what a new job is to start from, pinned there; None when there is none, or when told to end before.

    Raises as ``pinned_base`` and ``_once_it_answers``.
    """
    if not config.base:
        return None
    return await _once_it_answers(
        lambda: pinned_base(
            store,
            config.job,
            at=config.base,
            take=config.base_take,
            token=config.token,
            into=lambda: open_store(config.store, write=True, patient=False),
            say=_LOG.info,
        ),
        stop,
    )


async def _once_it_answers(ask: Callable[[], T], stop: asyncio.Event) -> T | None:
    """Return what a store answers, as soon as it does; None when told to end before.

    After an outage all start at once.

    Raises:
        CkptError: it is wrong for good.
    """
    said_s = -_SAY_AGAIN_S
    while not stop.is_set():
        try:
            return await asyncio.to_thread(ask)
        except NoStoreError:
            raise
        except UnavailableError as error:
            now_s = asyncio.get_running_loop().time()
            if now_s - said_s >= _SAY_AGAIN_S:
                said_s = now_s
                _LOG.error("waits for the object store, and serves nobody before: %s", error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OPEN_AGAIN_S):
                await stop.wait()
    return None


async def _sweep(config: Config) -> None:
    """Abort what uploads of this job died unfinished long ago; that it can't be done stops nobody."""
    try:
        swept = await asyncio.to_thread(sweep_uploads, config.store, config.job)
    except CkptError as error:
        _LOG.warning("unfinished uploads were not swept: %s", error)
    else:
        if swept:
            _LOG.info("swept %d unfinished uploads: %s", len(swept), ", ".join(swept[:10]))


def announce_ready(config: Config, *, url: str, broker: Address | None) -> None:
    """Say where the coordinator serves: in the log, and in the ready file if one is wanted."""
    where = f"ready url={url}" + (f" broker={broker}" if broker is not None else "")
    _LOG.info(where)
    if config.ready_file is None:
        return
    more = {"broker": str(broker)} if broker is not None else {}
    write_ready_file(config.ready_file, {"url": url, "pid": os.getpid(), **more})


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of ours in a group, else the group."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            error = _cause(error)  # noqa: PLW2901 - the cause stands for its group
        if isinstance(error, CkptError):
            return error
    return group
