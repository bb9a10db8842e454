"""The world as a sidecar reaches it: a few small ports, each call of which may fail or be the last one.

``run(config, wrap=...)`` passes each port through ``wrap`` by its name here, so that a test can stand before and after
every call with no code of its own in the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from toprope.coordinator.settings import Wrap
from toprope.coordinator.wire import Desired, Inventory, OpenAnswer, OpenRequest
from toprope.sidecar.parts import Parts
from toprope.store.objects.protocol import ObjectStore
from toprope.trainer_hooks.link.slot import Page


class PagesPort(Protocol):
    """Control pages of slots and spares. Calls block for microseconds."""

    def read(self, path: Path) -> Page:
        """Return the newest whole page.

        Raises:
            OSError: it can't be read.
        """

    def write(self, path: Path, page: Page) -> None:
        """Write the page.

        Raises:
            OSError: it can't be written.
        """


class SyncError(OSError):
    """The medium may have lost what was written before: the file is not to be trusted."""


class DiskPort(Protocol):
    """Files of the local tier. Calls block."""

    def write(self, path: Path, body: memoryview) -> None:
        """Write a new file and sync it.

        Raises:
            SyncError: the sync failed.
            OSError: it can't be written.
        """

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable.

        Raises:
            SyncError: the sync failed.
        """

    def remove(self, path: Path) -> None:
        """Delete a file; one that is not there is no error."""


class PeerError(Exception):
    """A peer did not give what was asked for: not reached, too slow, not there, or not the right bytes."""


class PeersPort(Protocol):
    """Other sidecars."""

    async def watch(self, url: str, *, after: int) -> Inventory:
        """Return the inventory at ``url`` as soon as it is not version ``after``, or as it is after a while.

        Raises:
            PeerError: it can't be had.
        """

    def receive(self, url: str, into: memoryview, *, begin: int | None = None, paced: bool = False) -> None:
        """Receive exactly as many bytes as there is room for: all there are, or those from ``begin`` on. Blocks.

        ``paced``: no faster than this node may receive copies for others.

        Raises:
            PeerError: they can't be had.
        """

    def parts(self, url: str, *, of_bytes: int) -> Parts:
        """Return what the image of so many bytes at ``url`` consists of, once the peer has hashed it. Blocks.

        Raises:
            PeerError: it can't be had.
        """

    async def acknowledge(self, url: str, *, digest: str) -> None:
        """Tell an owner which digest its copy has here.

        Raises:
            PeerError: it did not take it.
        """


class CoordinatorPort(Protocol):
    """The coordinator, by HTTP."""

    async def put_inventory(self, inventory: Inventory) -> Desired:
        """Tell it what this node holds.

        Raises:
            CoordinatorError: none answered.
        """

    async def get_desired(self, *, newer_than: Desired | None) -> Desired:
        """Return its document, as soon as it is newer than one that is known or a while has passed.

        Raises:
            CoordinatorError: none answered.
        """

    async def open_attempt(self, request: OpenRequest) -> OpenAnswer:
        """Ask for an attempt.

        Raises:
            CoordinatorError: none answered.
        """


class CoordinatorError(Exception):
    """No coordinator answered; the message lists what was tried."""


class BrokerPort(Protocol):
    """The broker connection in use, if there is one."""

    async def publish_inventory(self, inventory: Inventory) -> bool:
        """Publish the document; say whether the broker has acknowledged it."""
        ...

    def connected(self) -> bool:
        """Say whether there is a connection right now."""
        ...


@dataclass(slots=True, kw_only=True)
class Ports:
    """All ports of a sidecar."""

    pages: PagesPort
    disk: DiskPort
    objects: ObjectStore
    peers: PeersPort
    coordinator: CoordinatorPort
    broker: BrokerPort

    def wrapped(self, wrap: Wrap) -> Ports:
        """Return the ports, each passed through ``wrap``."""
        return Ports(
            pages=wrap("pages", self.pages),
            disk=wrap("disk", self.disk),
            objects=wrap("objects", self.objects),
            peers=wrap("peers", self.peers),
            coordinator=wrap("coordinator", self.coordinator),
            broker=wrap("broker", self.broker),
        )


def said(error: BaseException) -> str:
    """Return what an error says of itself, or its kind when it says nothing, as a timeout does."""
    return str(error) or type(error).__name__
