"""What a life left in memory, and the next one of another size, or of another rank: it fits, and nothing is lost."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.coordinator_stub import CoordinatorStub, restore_shard
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node

from toprope.coordinator.wire import Copy
from toprope.sidecar.memory import used_bytes

MIB = 1 << 20
STATE = 256 * 1024
LIMIT, HELD, NEXT = 256 * MIB, 80 * MIB, 64 * MIB
_HEADER_BYTES = 8192
_IMAGES: dict[tuple[str, int], bytes] = {}


def image_of(copy: Copy) -> bytes:
    """Return the bytes that were saved."""
    return _IMAGES[copy.attempt_uid, copy.step]


def restored(node: Node, stub: CoordinatorStub, copy: Copy, *, number: int, launch_id: str) -> ScriptedTrainer:
    """Return a trainer of a new launch that was given this copy from memory."""
    trainer = ScriptedTrainer(node.socket, launch_id=launch_id)
    view = stub.attempt(
        number,
        launch_id,
        {0: node.name},
        source="held",
        source_attempt_uid=copy.attempt_uid,
        from_step=copy.step,
        restore=(restore_shard(copy),),
    )
    (shard,) = trainer.join(number, view.uid).shards
    assert shard.tier == "memory"
    assert Path(shard.path).read_bytes()[: shard.bytes] == image_of(copy)
    trainer.apply(stub)
    return trainer


def saved(trainer: ScriptedTrainer, stub: CoordinatorStub, step: int) -> Copy:
    """Take a snapshot and return its copy in memory."""
    while (grant := trainer.grant()).bytes < len(trainer.image(step)):
        continue  # it was lent for the size before
    trainer.seal(grant, step, trainer.write(grant, step))
    _IMAGES[trainer.attempt_uid, step] = trainer.image(step)
    copy = stub.wait_copy("a", "memory", step)
    assert copy.bytes == len(trainer.image(step)), "nothing is cut off"
    return copy


@pytest.mark.fault("B92")
@pytest.mark.slow
@pytest.mark.long
def test_a_state_that_was_doubled_grown_or_halved_keeps_the_step_before_until_a_newer_one_is_kept(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    node = nodes()
    node.start()
    assert not list((node.memory / "job").rglob("slot-*")), "the first start finds none"
    with ScriptedTrainer(node.socket) as trainer:
        trainer.payload = STATE
        trainer.begin(stub)
        trainer.announce()
        kept = saved(trainer, stub, 1)
        stub.keep(kept.attempt_uid, 1)
        trainer.payload = 3 * STATE  # as an optimizer that has its moments after the first update
        trainer.announce()
        grown = saved(trainer, stub, 2)
        assert_bytes(node, kept)
        assert_bytes(node, grown)
        stub.keep(grown.attempt_uid, 2)
    newest = grown
    for number, (launch_id, payload) in enumerate([("bb", 6 * STATE), ("cc", 3 * STATE)], start=2):
        # what is new is not kept yet when all are killed and start again, from the step before the change
        with restored(node, stub, newest, number=2 * number, launch_id=launch_id) as trainer:
            trainer.payload = payload
            trainer.announce()
            assert_bytes(node, saved(trainer, stub, 2 * number))
        node.kill()
        node.start()
        with restored(node, stub, newest, number=2 * number + 1, launch_id=2 * launch_id) as trainer:
            trainer.payload = payload
            trainer.announce()
            assert_bytes(node, newest)
            changed = saved(trainer, stub, 2 * number + 1)
            assert_bytes(node, changed)
            assert_bytes(node, newest)
            stub.keep(changed.attempt_uid, changed.step)
            newest = changed


def assert_bytes(node: Node, copy: Copy) -> None:
    """The sidecar serves a copy from its memory as it was taken."""
    url = f"{node.url}/v1/copies/{copy.attempt_uid}/{copy.step}/{copy.rank}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.read() == image_of(copy)


@contextmanager
def greatest_use(directory: Path) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the most bytes that were seen in a directory."""
    seen, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            try:
                seen.append(used_bytes(directory))
            except FileNotFoundError:  # removed between two looks
                continue
            seen[:] = [max(seen)]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: max(seen)
    finally:
        ended.set()
        thread.join()


def gauges(node: Node) -> dict[str, float]:
    """Return what the sidecar tells of its memory."""
    name = "toprope_memory_"
    with urllib.request.urlopen(f"{node.url}/metrics", timeout=20) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith(name)]
    return {word.removeprefix(name): float(value) for word, value in lines}


@pytest.mark.fault("B95")
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1], ids=["of the same rank", "of a rank that has moved away"])
def test_what_the_last_life_left_makes_room_and_the_limit_is_never_passed(
    nodes: MakeNode, stub: CoordinatorStub, rank: int
) -> None:
    node, memory = nodes(), f"--memory={LIMIT}"
    node.start(memory)
    with ScriptedTrainer(node.socket, world=2) as trainer:
        trainer.payload = HELD - _HEADER_BYTES
        trainer.begin(stub, nodes={0: "a", 1: "b"})
        trainer.announce()
        saved(trainer, stub, 4)
        stub.wait_copy("a", "object", 4)
        saved(trainer, stub, 5)
        saved(trainer, stub, 6)
    node.kill()
    assert used_bytes(node.memory) > 3 * (HELD - 2 * _HEADER_BYTES)
    with greatest_use(node.memory) as greatest:
        node.start(memory)
        with ScriptedTrainer(node.socket, rank=rank, world=2, launch_id="bb") as trainer:
            trainer.payload = NEXT
            trainer.begin(stub, number=2, nodes={rank: "a", 1 - rank: "b"})
            trainer.announce()
            trainer.snapshot(7)
            assert stub.wait_copy("a", "memory", 7, rank=rank).bytes == len(trainer.image(7))
            assert gauges(node) == {"bytes": used_bytes(node.memory), "room_bytes": LIMIT}
        assert greatest() <= LIMIT
