"""A copy that was bad from the moment it was stored is never counted: real images, of oddly laid out leaves."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from tests.sidecar.test_restore import flip, restart
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node
from tests.support.tiny_trainer import assert_same_tensor, snapshot_file
from torch import distributed, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from toprope.chaos.live.ask import get_inventory
from toprope.coordinator.wire import Placement, Source
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.restore.apply import apply, check

pytestmark = [pytest.mark.long, pytest.mark.slow]


class Odd(nn.Module):
    """A tensor of a subclass, one that is not contiguous, and a view with gaps; all hold numbers of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (1,))
        self.spread = nn.Parameter(distribute_tensor(torch.rand(8, 6), mesh, [Shard(0)]))
        self.turned = nn.Parameter(torch.rand(6, 8).t())
        self.gaps: torch.Tensor
        self.register_buffer("gaps", torch.rand(10, 10)[::2, 1:7:2])
        assert not self.turned.is_contiguous()
        assert not self.gaps.is_contiguous()

    def plain(self) -> dict[str, torch.Tensor]:
        assert isinstance(self.spread.data, DTensor)
        return {"spread": self.spread.data.to_local(), "turned": self.turned.detach(), "gaps": self.gaps}


class OddTrainer(ScriptedTrainer):
    """Saves, at step n, the model of seed n."""

    def image(self, step: int) -> bytes:
        snapshot = capture(Parts(model=Odd(step)), rank=0, world=1)
        metadata = {"job_uid": self.job_uid, "attempt": str(self.attempt), "attempt_uid": self.attempt_uid}
        metadata |= {"step": str(step), "rank": "0", "world": "1"}
        path = self.path.parent / f"image-{step}"
        snapshot_file(path, snapshot.tensors, snapshot.document, metadata, snapshot.pieces)
        body = path.read_bytes()
        path.unlink()
        return body


@pytest.fixture(autouse=True)
def _gloo() -> Iterator[None]:
    """A process group of this process alone, for tensors that know a mesh."""
    distributed.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@dataclass
class Way:
    """A way to a node. While ``flips``, a byte of each copy, or of each piece of one, is another when it arrives."""

    target: str
    flips: bool = True
    flipped: int = 0
    url: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def carried(self, path: str, body: bytes) -> bytes:
        if not (self.flips and path.startswith("/v1/copies/") and len(body) > 1000 and "parts" not in path):
            return body
        with self.changed:
            self.flipped += 1
            self.changed.notify_all()
        at = len(body) // 2
        return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]

    def wait_flipped(self, times: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.flipped >= times, 20), self.flipped


@contextmanager
def way_to(node: Node) -> Iterator[Way]:
    """Yield a way that flips a byte behind the framing: lengths and headers are right."""
    way = Way(target=urlsplit(node.url).netloc)

    class Handler(BaseHTTPRequestHandler):
        def do_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            connection = http.client.HTTPConnection(way.target, timeout=30)
            try:
                connection.request(self.command, self.path, body=body, headers=headers)
                answer = connection.getresponse()
                told = way.carried(self.path, answer.read())
            except OSError:
                self.close_connection = True
                return
            finally:
                connection.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in {"content-length", "transfer-encoding", "connection", "date", "server"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_POST = do_PUT = do_request  # noqa: N815 - the library's names

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        way.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield way
        finally:
            server.shutdown()
            thread.join()


def peer_steps(node: Node) -> list[int]:
    """Return the steps of which a node says that it holds another's copy."""
    inventory = get_inventory(node.url)
    assert inventory is not None
    return [copy.step for copy in inventory.copies if copy.tier == "peer"]


def assert_recovered(nodes: MakeNode, stub: CoordinatorStub, holder: Node, *, step: int, tmp_path: Path) -> None:
    """A fresh node gets the copy of a holder whose owner is gone; it is the state of that step, leaf for leaf."""
    copy = stub.wait_copy("b", "peer", step)
    fresh = nodes("c")
    fresh.start()
    with restart(fresh, stub, copy, Source(tier="peer", node="b", url=holder.url)) as trainer:
        (shard,) = trainer.join(2, f"{2:032x}").shards
        assert (shard.tier, shard.node) == ("peer", "b")
        (tmp_path / "image").write_bytes(Path(shard.path).read_bytes()[: shard.bytes])
    found, expected = Odd(99), Odd(step)
    image = Image(tmp_path / "image", shard.bytes)
    apply(check(Parts(model=found), {0: image}, rank=0, world=1))
    for name, tensor in expected.plain().items():
        assert_same_tensor(found.plain()[name], tensor)


@pytest.mark.fault("B78")
def test_a_copy_flipped_on_the_way_is_not_held_until_a_good_one_has_come(
    nodes: MakeNode, stub: CoordinatorStub, tmp_path: Path
) -> None:
    owner, holder = nodes("a"), nodes("b")
    owner.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    with way_to(owner) as way, OddTrainer(owner.socket) as trainer:
        stub.change(placement=(Placement(owner="a", holder="b", url=way.url),))
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(1)
        digest = stub.wait_copy("a", "memory", 1).digest
        way.wait_flipped(2)
        assert peer_steps(holder) == [], "it is asked for again, and counted by nobody"
        assert digest not in [copy.digest for copy in stub.inventories["b"].copies]
        way.flips = False
        assert stub.wait_copy("b", "peer", 1).digest == digest
        owner.kill()
    assert_recovered(nodes, stub, holder, step=1, tmp_path=tmp_path)


@pytest.mark.fault("B78")
def test_a_copy_whose_source_was_flipped_after_it_was_hashed_is_never_held_and_the_next_one_is(
    nodes: MakeNode, stub: CoordinatorStub, tmp_path: Path
) -> None:
    owner, holder = nodes("a"), nodes("b")
    owner.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    with OddTrainer(owner.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        grant = trainer.snapshot(1)
        stub.wait_copy("a", "memory", 1)
        flip(Path(grant.path), len(trainer.image(1)) // 2)
        stub.place(("a", "b"))
        inventory = stub.wait("a", lambda i: any(s.step == 1 for s in i.skipped), what="skip of the damaged step")
        assert not [copy for copy in inventory.copies if copy.step == 1 and copy.tier == "memory"]
        assert peer_steps(holder) == []
        trainer.snapshot(3)
        stub.wait_copy("b", "peer", 3)
        assert peer_steps(holder) == [3]
        owner.kill()
    assert_recovered(nodes, stub, holder, step=3, tmp_path=tmp_path)
