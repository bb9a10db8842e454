"""Links that carry little: what is read slowly stays what it was, however many steps are saved meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import select
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import xxhash
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node

from toprope.chaos.live.detour import Detour, detour
from toprope.coordinator.wire import Copy, Placement
from toprope.trainer_hooks.link import wire

MIB = 1 << 20
CUT_OFF = (http.client.HTTPException, ConnectionError)
LONG = (pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300))


@contextlib.contextmanager
def way_to(node: Node, directory: Path, mode: str) -> Iterator[Detour]:
    """Yield a way to a node that carries what the mode says."""
    with detour(directory / f"way-to-{node.name}", target=str(urlsplit(node.url).port)) as way:
        way.tell(mode)
        yield way


def through(way: Detour) -> str:
    """Return the URL of what lies behind it."""
    return f"http://127.0.0.1:{way.port}"


def is_lent_a_slot(trainer: ScriptedTrainer) -> bool:
    """Say whether there is a slot to write into; wait a little for one."""
    while not trainer.granted and select.select([trainer.socket], [], [], 0.05)[0]:
        trainer.receive()
    return bool(trainer.granted)


def fetched(url: str, copy: Copy) -> bytes:
    """Return what a node serves as this copy.

    Raises:
        http.client.HTTPException: it ended before its end.
    """
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=60)
    try:
        connection.request("GET", f"/v1/copies/{copy.attempt_uid}/{copy.step}/{copy.rank}?tier={copy.tier}")
        with connection.getresponse() as response:
            assert response.status == 200, response.read()
            return response.read()
    finally:
        connection.close()


@pytest.mark.fault("B04")
@pytest.mark.parametrize(("mib", "mib_per_s"), [(4, 16), pytest.param(128, 4, marks=LONG)])
def test_what_a_slow_peer_holds_of_steps_saved_back_to_back_is_each_its_own(
    nodes: MakeNode,
    stub: CoordinatorStub,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    mib: int,
    mib_per_s: int,
) -> None:
    """Slots are used again while the peer still reads some; a step that finds none is skipped, and none is a blend."""
    owner, holder = nodes("a"), nodes("b")
    owner.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    mode = f"throttle {mib_per_s * MIB} down"
    with way_to(owner, tmp_path, mode) as way, ScriptedTrainer(owner.socket) as trainer:
        stub.change(placement=(Placement(owner="a", holder="b", url=through(way)),))
        trainer.payload = mib * MIB
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(1)
        stub.wait_copy("a", "memory", 1)
        skipped = []
        for step in range(2, 9):
            if is_lent_a_slot(trainer):
                trainer.snapshot(step)
            else:
                skipped.append(step)
                trainer.send(wire.Skipped(attempt_uid=trainer.attempt_uid, step=step, reason="no free slot"))
        held: dict[int, Copy] = {}
        while max(held, default=0) < max(set(range(1, 9)) - set(skipped)):
            held |= {copy.step: copy for copy in verified_on(stub, "b", beyond=max(held, default=0))}
            stub.keep(trainer.attempt_uid, max(held))
            for copy in stub.inventories["b"].copies:
                assert fetched(holder.url, copy) == trainer.image(copy.step), f"step {copy.step} is a blend"
        told = {skip.step for skip in stub.inventories["a"].skipped}
    assert set(skipped) <= told
    for step, copy in held.items():
        assert copy.digest == xxhash.xxh3_128(trainer.image(step)).hexdigest()
    record_property("steps held by the peer; skipped", f"{sorted(held)}; {skipped}")


def verified_on(stub: CoordinatorStub, node: str, *, beyond: int) -> tuple[Copy, ...]:
    """Return the copies that a node has of a peer's, once one of them is of a later step; that may take minutes."""
    for _ in range(10):
        with contextlib.suppress(AssertionError):  # it waits for 20 s
            return stub.wait(node, lambda found: any(c.step > beyond for c in found.copies), what="later copy").copies
    pytest.fail(f"no copy after step {beyond}: {stub.inventories[node]}")


def copied(stub: CoordinatorStub, step: int) -> Copy:
    """Return the peer's copy of a step, once it is there."""
    return max(verified_on(stub, "b", beyond=step - 1), key=lambda copy: copy.step)


@pytest.mark.fault("B08")
@pytest.mark.parametrize(
    ("mib", "mode"), [(4, f"stall {MIB} down"), pytest.param(256, f"throttle {8 * MIB} down", marks=LONG)]
)
def test_a_snapshot_that_is_fetched_slowly_is_what_it_was_while_five_more_are_taken(
    nodes: MakeNode, stub: CoordinatorStub, tmp_path: Path, mib: int, mode: str
) -> None:
    """From a peer's memory and from the owner's. What takes too long is cut off, and a newer step can be had."""
    owner, holder = nodes("a"), nodes("b")
    owner.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    stub.place(("a", "b"))
    with ScriptedTrainer(owner.socket) as trainer, ThreadPoolExecutor(2) as pool:
        trainer.payload = mib * MIB
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(1)
        copies = copied(stub, 1), stub.wait_copy("a", "memory", 1)
        with way_to(holder, tmp_path, mode) as of_holder, way_to(owner, tmp_path, mode) as of_owner:
            ways = (of_holder, of_owner)
            asked = [pool.submit(fetched, through(way), copy) for way, copy in zip(ways, copies, strict=True)]
            for step in range(2, 7):
                trainer.snapshot(step)
                copied(stub, step)
                stub.keep(trainer.attempt_uid, step)  # as the coordinator does with what is protected
            if mode.startswith("stall"):
                assert not any(one.done() for one in asked), "they were to be fetched meanwhile"
            for way in ways:
                way.tell("pass")
            for one in asked:
                with contextlib.nullcontext() if mode.startswith("stall") else contextlib.suppress(*CUT_OFF):
                    assert one.result() == trainer.image(1)
        newest = copied(stub, 6)
        assert fetched(holder.url, newest) == trainer.image(6)
