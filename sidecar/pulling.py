"""Receiving a peer copy into a spare file, and believing only what was stored. Blocks."""

from __future__ import annotations

from toprope.sidecar.effects import Pull
from toprope.sidecar.memory import DroppedError, Memory
from toprope.sidecar.ports import PeerError, Ports
from toprope.store.digest import digest


class WrongBytesError(Exception):
    """What was stored has another digest than the owner gave: ``found``."""

    def __init__(self, text: str, *, found: str) -> None:
        super().__init__(text)
        self.found = found


def pull(memory: Memory, ports: Ports, request: Pull) -> None:
    """Receive a shard into its spare, hash what was stored, and write the spare's page.

    Until then the page speaks of what the spare held before; after a crash its digest will not fit.

    Raises:
        PeerError: the bytes can't be had.
        WrongBytesError: they are not those of the shard; the spare is empty.
        NoRoomError: there is no room for the spare.
    """
    shard = request.shard
    paths = memory.spare(shard.rank, request.spare)
    view = memory.fit(paths.data, shard.bytes)
    url = f"{request.url}/v1/copies/{shard.attempt_uid}/{shard.step}/{shard.rank}?tier=memory"
    ports.peers.receive(url, view)
    found = digest(view)
    if found != shard.digest:
        raise WrongBytesError(f"{request.url}: what came has digest {found}; expected {shard.digest}", found=found)
    try:
        memory.check_header(view, shard)
    except DroppedError as error:
        raise PeerError(f"{request.url}: {error}") from error
    ports.pages.write(paths.page, shard.page())
