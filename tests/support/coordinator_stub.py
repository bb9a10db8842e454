"""A coordinator that says what a test tells it to say, over real HTTP, and remembers what it was told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from toprope.coordinator.wire import (
    MAX_INVENTORY_BYTES,
    AttemptView,
    Cadence,
    Copy,
    Desired,
    Inventory,
    Kept,
    Member,
    OpenAnswer,
    OpenRequest,
    Placement,
    RestoreShard,
    Source,
    decode,
    encode,
)

JOB_UID = "0b" * 16
PATIENCE_S = 20.0


class CoordinatorStub:
    """Holds the document; ``change`` makes a new version of it."""

    def __init__(self) -> None:
        self.desired = Desired(
            job="job",
            job_uid=JOB_UID,
            term=1,
            version=1,
            url="",
            cadence=Cadence(from_step=0, every=1, local_every=2, object_every=4),
        )
        self.inventories: dict[str, Inventory] = {}
        self.opens: list[OpenRequest] = []
        self._heard = threading.Condition()
        self.url = ""
        self.closed = False
        self.away = False
        """Answer nothing but 503."""

    def change(self, **changes: object) -> Desired:
        """Change some fields and raise the version."""
        with self._heard:
            version = self.desired.version + 1
            self.desired = msgspec.structs.replace(self.desired, **changes, version=version)
            self._heard.notify_all()
        return self.desired

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._heard:
            self.closed = True
            self._heard.notify_all()

    def changed(self, after: int) -> bool:
        """Wait a little for a version after this one."""
        with self._heard:
            return self._heard.wait_for(lambda: self.closed or self.desired.version > after, 1.0)

    def attempt(
        self, number: int, launch_id: str, nodes: dict[int, str], *, phase: str = "opened", **changes: object
    ) -> AttemptView:
        """Open an attempt with these ranks on these nodes; ``restore`` and source come in ``changes``."""
        values: dict[str, Any] = {"source": "fresh", "source_attempt_uid": "", "from_step": 0, "restore": ()} | changes
        view = AttemptView(
            number=number,
            uid=f"{number:032x}",
            launch_id=launch_id,
            round=0,
            world=tuple(Member(rank=rank, node=nodes[rank], boot_id="00") for rank in sorted(nodes)),
            phase=phase,  # type: ignore[arg-type]
            **values,
        )
        self.change(attempt=view)
        return view

    def phase(self, phase: str, reason: str = "") -> None:
        """Move the attempt on."""
        assert self.desired.attempt is not None
        self.change(attempt=msgspec.structs.replace(self.desired.attempt, phase=phase, reason=reason))

    def place(self, *pairs: tuple[str, str]) -> None:
        """Let each (owner, holder) pair copy, from where the owner says that it serves."""
        self.change(
            placement=tuple(
                Placement(owner=owner, holder=holder, url=self.inventories[owner].url) for owner, holder in pairs
            )
        )

    def keep(self, attempt_uid: str, step: int) -> None:
        """Keep one step."""
        self.change(keep=(Kept(attempt_uid=attempt_uid, step=step),))

    def hear(self, inventory: Inventory) -> None:
        """Take in an inventory."""
        with self._heard:
            self.inventories[inventory.node] = inventory
            self._heard.notify_all()

    def wait(self, node: str, good: Callable[[Inventory], bool], *, what: str) -> Inventory:
        """Return the inventory of a node once it is as wanted."""

        def heard() -> bool:
            return node in self.inventories and good(self.inventories[node])

        with self._heard:
            assert self._heard.wait_for(heard, PATIENCE_S), f"no {what}: {self.inventories.get(node)}"
            return self.inventories[node]

    def wait_copy(self, node: str, tier: str, step: int, rank: int = 0) -> Copy:
        """Return a node's inventory line for a copy, once it is there."""

        def lines(inventory: Inventory) -> list[Copy]:
            return [c for c in inventory.copies if (c.tier, c.step, c.rank) == (tier, step, rank)]

        inventory = self.wait(node, lambda found: bool(lines(found)), what=f"{tier} copy of step {step}")
        return lines(inventory)[0]


def restore_shard(copy: Copy, *sources: Source) -> RestoreShard:
    """Return the line of a restore decision for a shard that has such a copy."""
    return RestoreShard(rank=copy.rank, bytes=copy.bytes, digest=copy.digest, sources=sources)


@contextmanager
def coordinator_stub() -> Iterator[CoordinatorStub]:
    """Serve a stub on a free port."""
    stub = CoordinatorStub()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(stub)) as server:
        server.daemon_threads = False  # each is waited for, and so each socket is closed
        stub.url = f"http://127.0.0.1:{server.server_port}"
        stub.change(url=stub.url)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield stub
        finally:
            stub.close()
            server.shutdown()
            thread.join()


def _handler(stub: CoordinatorStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(encode(stub.desired))

        def do_PUT(self) -> None:
            stub.hear(decode(self._body(), Inventory, limit=MAX_INVENTORY_BYTES))
            self._answer(encode(stub.desired))

        def do_POST(self) -> None:
            stub.opens.append(decode(self._body(), OpenRequest, limit=MAX_INVENTORY_BYTES))
            self._answer(encode(OpenAnswer(attempt=stub.desired.attempt, code="" if stub.desired.attempt else "busy")))

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def _answer(self, body: bytes) -> None:
            self.send_response(503 if stub.away else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return Handler
