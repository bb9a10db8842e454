"""Starts a sidecar and ends it: checks first, then the parts, then the tasks, each owned by one group."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from toprope.coordinator.serving import NoBroker, give_back_large_buffers, settle, write_ready_file
from toprope.coordinator.settings import Address, Wrap, unwrapped
from toprope.coordinator.wire import Presence
from toprope.sidecar import metrics
from toprope.sidecar.adapters.broker import MqttBroker
from toprope.sidecar.adapters.coordinator import HttpCoordinator
from toprope.sidecar.adapters.files import Disk, Pages
from toprope.sidecar.adapters.http import SidecarHttp
from toprope.sidecar.adapters.peers import HttpPeers
from toprope.sidecar.adoptions import AdoptionFiles
from toprope.sidecar.budget import measure, needed_bytes, why_too_little
from toprope.sidecar.config import SidecarConfig
from toprope.sidecar.core import Core
from toprope.sidecar.directories import lock_directory, make_directory, refuse_if_owned
from toprope.sidecar.local_tier import LocalTier
from toprope.sidecar.memory import Memory, boot_id, slot_files, spare_files, used_bytes
from toprope.sidecar.pace import Pace
from toprope.sidecar.performer import Parts, Sidecar
from toprope.sidecar.ports import Ports
from toprope.sidecar.values import Identity
from toprope.store.errors import CkptError, UnavailableError, UsageError
from toprope.store.objects.opening import open_store, untried_store
from toprope.store.objects.protocol import ObjectStore

log = logging.getLogger("toprope.sidecar")


class RefusedError(CkptError):
    """The coordinator does not want this sidecar: another life of the node is heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a sidecar stands on once the checks of its start are passed."""

    store: ObjectStore
    listening: socket.socket
    url: str
    boot_id: str
    incarnation: str


async def run(config: SidecarConfig, wrap: Wrap = unwrapped) -> None:
    """Serve one node until SIGINT, or until SIGTERM and all is safe elsewhere.

    Raises:
        UsageError: it can't be started like this.
        RefusedError: the coordinator does not want it.
    """
    give_back_large_buffers()
    refuse_if_owned(config.job_memory, option="--memory-dir")
    refuse_if_owned(config.job_local, option="--local-dir")
    check_admission(config)
    make_directory(config.job_local, what="--local-dir")
    with _bound(config) as listening:
        store = _opened(config.store)
        with _owned(config):
            host, port = listening.getsockname()[:2]
            ground = Ground(
                store=store,
                listening=listening,
                url=f"http://{Address(host=host, port=port)}",
                boot_id=boot_id(config.memory_dir),
                incarnation=os.urandom(16).hex(),
            )
            await _serve(config, ground, wrap)


def _opened(root: str) -> ObjectStore:
    """Return the object store; one that does not answer now costs its tier and not the others."""
    try:
        return open_store(root, write=True)
    except UnavailableError as error:
        log.warning("goes on without the object tier until the store answers: %s", error)
        return untried_store(root)


@contextmanager
def _owned(config: SidecarConfig) -> Iterator[None]:
    """Own this job's directories while the context lasts. After all other checks: who is refused leaves no memory."""
    with ExitStack() as locks:
        locks.callback(os.close, lock_directory(config.job_local, option="--local-dir"))
        make_directory(config.memory_dir, what="--memory-dir")
        make_directory(config.job_memory, what="--memory-dir")
        locks.callback(os.close, lock_directory(config.job_memory, option="--memory-dir"))
        yield


def check_admission(config: SidecarConfig) -> None:
    """Check that what was announced fits into memory, and say what it takes.

    Raises:
        UsageError: it does not fit; the message holds both numbers.
    """
    room = measure(config.job_memory)
    held = used_bytes(config.job_memory)
    if config.state_size is not None:
        needed = needed_bytes(state_size=config.state_size, ranks=config.ranks, copies=config.copies)
        each = f"{config.ranks} ranks x {config.state_size} bytes x (3 slots + 2 x {config.copies} peer copies)"
        log.info("memory: %s = %d bytes", each, needed)
        if config.memory_bytes is not None and needed > config.memory_bytes:
            allowed = f"--memory allows {config.memory_bytes}. Raise it, or give none"
            raise UsageError(f"{each}: {needed} bytes of memory needed; {allowed}")
        _refuse(why_too_little(room, needed - held, what=each))
    if config.memory_bytes is not None:
        _refuse(why_too_little(room, config.memory_bytes - held, what=f"--memory {config.memory_bytes}"))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise UsageError(reason)


@contextmanager
def _bound(config: SidecarConfig) -> Iterator[socket.socket]:
    address = config.listen
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address.host, address.port))
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise UsageError(f"can't listen on {address}: {reason}. Give another with --listen") from error
        yield listening


async def _serve(config: SidecarConfig, ground: Ground, wrap: Wrap) -> None:
    """Run all parts until told to stop; the first that fails ends the others."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        core = Core(me=_identity(config, ground))
        broker = _broker(config, ground, core)
        ports = _ports(config, ground, core, broker=broker, session=session).wrapped(wrap)
        sidecar = Sidecar(config, _parts(config, core, ports), tasks)
        await sidecar.adopt()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, sidecar.stop.set)
        loop.add_signal_handler(signal.SIGTERM, sidecar.drain)
        async with _http(config, ground, sidecar), sidecar.socket.serving():
            running = [tasks.create_task(work) for work in sidecar.endless()]
            if isinstance(broker, MqttBroker):
                running.append(tasks.create_task(broker.run(sidecar.documents.take_desired)))
            settle()
            _tell_ready(config, ground)
            await sidecar.stop.wait()
        await sidecar.end(running)
    sidecar.close()
    if sidecar.refusal is not None:
        raise RefusedError(f"the coordinator refuses this sidecar of node {config.node}: {sidecar.refusal}")


def _identity(config: SidecarConfig, ground: Ground) -> Identity:
    return Identity(
        job=config.job,
        node=config.node,
        boot_id=ground.boot_id,
        incarnation=ground.incarnation,
        url=ground.url,
        domain=config.domain,
        use_deadline_s=config.use_deadline_s,
        restore_patience_s=config.restore_patience_s,
        slot_path=lambda rank, number: str(slot_files(config.job_memory, rank, number).data),
        spare_path=lambda rank, number: str(spare_files(config.job_memory, rank, number).data),
    )


def _broker(config: SidecarConfig, ground: Ground, core: Core) -> MqttBroker | NoBroker:
    if config.broker is None:
        return NoBroker()
    presence = Presence(node=config.node, boot_id=ground.boot_id, incarnation=ground.incarnation, alive=True)
    return MqttBroker(config.broker, job=config.job, presence=presence, newest=lambda: core.published)


def _ports(
    config: SidecarConfig,
    ground: Ground,
    core: Core,
    *,
    broker: MqttBroker | NoBroker,
    session: aiohttp.ClientSession,
) -> Ports:
    coordinator = HttpCoordinator(
        session,
        node=config.node,
        urls=config.coordinators,
        token=config.token,
        current=core.coordinator_url,
    )
    peers = HttpPeers(
        session,
        node=config.node,
        token=config.token,
        stall_timeout_s=config.stall_timeout_s,
        pace=Pace(config.peer_bytes_per_s) if config.peer_bytes_per_s is not None else None,
    )
    return Ports(pages=Pages(), disk=Disk(), objects=ground.store, peers=peers, coordinator=coordinator, broker=broker)


def _parts(config: SidecarConfig, core: Core, ports: Ports) -> Parts:
    memory = Memory(config.job_memory, ports.pages, limit_bytes=config.memory_bytes, job_uid=core.job_uid)
    memory.make_directories()
    metrics.MEMORY_BYTES.set_function(lambda: used_bytes(memory.root))
    metrics.MEMORY_ROOM_BYTES.set_function(memory.room)
    local, adoptions = LocalTier(config.job_local, ports.disk), AdoptionFiles(config.job_local, ports.disk)
    return Parts(core=core, memory=memory, local=local, adoptions=adoptions, ports=ports)


@asynccontextmanager
async def _http(config: SidecarConfig, ground: Ground, sidecar: Sidecar) -> AsyncIterator[None]:
    server = SidecarHttp(
        sidecar.copies(),
        inventory_after=sidecar.documents.inventory_after,
        adopted=sidecar.adopted,
        token=config.token,
        stall_timeout_s=config.stall_timeout_s,
        use_deadline_s=config.use_deadline_s,
    )
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, ground.listening).start()
        yield
    finally:
        await runner.cleanup()


def _tell_ready(config: SidecarConfig, ground: Ground) -> None:
    log.info("ready url=%s", ground.url)
    if config.ready_file is not None:
        write_ready_file(config.ready_file, {"url": ground.url, "pid": os.getpid()})
