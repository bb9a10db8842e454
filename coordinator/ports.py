"""What a coordinator's runtime asks of the world, as small protocols; ``adapters`` has the real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from toprope.coordinator.extracts import Extracts
from toprope.coordinator.index_checks import Expected
from toprope.coordinator.settings import Wrap
from toprope.coordinator.wire import Desired, Health, Inventory, Presence, Provisional
from toprope.store.checkpoint.manifest import Index, Shard
from toprope.store.keep.gc import GcPlan
from toprope.store.keep.holds import HoldWatch
from toprope.store.log.fold import JobState
from toprope.store.log.records import Base
from toprope.store.names import Key


class StorePort(Protocol):
    """The object store, off the event loop. The names of its methods say what is written."""

    async def create_record(self, key: Key, body: bytes) -> None:
        """Create a record of the log; raises as ``ObjectStore.create``."""

    async def create_facts(self, key: Key, body: bytes) -> None:
        """Create what a record names by its hash; it is fine if it exists."""

    async def create_manifest(self, key: Key, body: bytes) -> None:
        """Create a manifest; it is fine if it exists."""

    async def read(self, key: Key, *, uncached: bool = False) -> bytes:
        """Return an object; raises as ``ObjectStore.read``."""

    async def sees_probe(self, nonce: str) -> bool:
        """Return whether a probe is in this store; raises as ``probing.sees_probe``."""

    async def read_indexes(self, expected: Sequence[Expected]) -> list[Index | None]:
        """Return indexes as the medium has them; None: one of which no more need be known.

        Raises:
            StoreError: one is not there, or not as expected.
            UnavailableError: the store did not answer.
        """

    async def shards(self, state: JobState, seq: int) -> tuple[Shard, ...]:
        """Return the shards of a READY checkpoint by rank, each file of them there and as long as it should be.

        Raises:
            StoreError: one is not, or a manifest or index is not what it should be.
            UnavailableError: the store did not answer.
        """

    async def base_shards(self, base: Base) -> tuple[Shard, ...]:
        """Return the shards of a job's base, which is of another job; raises as ``basing.base_shards``."""

    async def indexes(self, state: JobState, seq: int) -> tuple[Index, ...]:
        """Return the indexes of a READY checkpoint by rank.

        Raises:
            StoreError: a manifest or index is not what it should be.
            UnavailableError: the store did not answer.
        """

    async def newest_snap(self, job: str) -> JobState:
        """Return the newest fold of the log that is kept, or that of no records; raises as ``snap.newest_snap``."""

    async def put_snap(self, state: JobState) -> None:
        """Keep a fold of the log; it is fine if it exists."""

    async def gone(self, state: JobState) -> tuple[int, ...]:
        """Return the READYs that were removed from the store by hand; raises as ``gone.gone``."""

    async def collect_garbage(self, state: JobState, watch: HoldWatch, *, now_s: Callable[[], float]) -> GcPlan:
        """Delete what the log has condemned, but for what readers hold by ``watch``; return what that was.

        Raises:
            StoreError: what is kept can't be read, so nothing was deleted.
            UnavailableError: the store did not answer.
        """

    async def digest_uncached(self, key: Key) -> str:
        """Return the digest of an object as the medium has it; raises as ``ObjectStore.read``."""


class NodesPort(Protocol):
    """The sidecars, by HTTP."""

    async def inventory(self, url: str) -> Inventory | None:
        """Return what a sidecar holds now; None when it does not say so in time."""

    async def adopted(self, url: str) -> tuple[Provisional, ...] | None:
        """Return the attempts that a node has adopted without the log; None when it does not say so in time."""


class CoordinatorsPort(Protocol):
    """The other coordinators of the job, by HTTP."""

    async def health(self, url: str, *, standby: str) -> Health | Literal["refused", "silent"]:
        """Return what a coordinator says of itself, and let it know who stands by.

        ``refused``: nobody serves there; ``silent``: it does not answer in time, or not as one does.
        """


Document: TypeAlias = Inventory | Presence | Desired | Health
"""What comes by the broker."""


class BrokerPort(Protocol):
    """One connection to the message broker, while ``run`` runs."""

    @property
    def is_connected(self) -> bool:
        """Say whether there is a connection right now."""

    async def run(self) -> None:
        """Stay connected until cancelled."""

    async def publish(self, newest: Callable[[], Extracts]) -> None:
        """Publish the retained documents; when this returns the broker has them, or there is no connection.

        They are as ``newest`` had them when it was called or later.
        """

    async def beat(self, health: Health) -> None:
        """Publish the leader's presence, which is not retained, if there is a connection."""


class Connect(Protocol):
    """Makes a connection to the broker for one role of a coordinator."""

    def __call__(
        self, topics: Sequence[str], *, deliver: Callable[[Document], None], connected: Callable[[], None]
    ) -> BrokerPort | None:
        """Return a connection that brings these topics of the job; None: no broker was configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """All ports of a coordinator."""

    store: StorePort
    nodes: NodesPort
    coordinators: CoordinatorsPort
    connect: Connect


def wrapped(ports: Ports, wrap: Wrap) -> Ports:
    """Return the ports with each one replaced by what ``wrap`` makes of it."""

    def connect(
        topics: Sequence[str], *, deliver: Callable[[Document], None], connected: Callable[[], None]
    ) -> BrokerPort | None:
        broker = ports.connect(topics, deliver=deliver, connected=connected)
        return None if broker is None else wrap("broker", broker)

    return Ports(
        store=wrap("store", ports.store),
        nodes=wrap("nodes", ports.nodes),
        coordinators=wrap("coordinators", ports.coordinators),
        connect=connect,
    )
