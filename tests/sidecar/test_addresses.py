"""A host with two addresses, of which one is slow; and a peer that is asked before it has what is wanted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node

from toprope.chaos.live.detour import detour
from toprope.chaos.live.processes import free_port, wait_until
from toprope.coordinator.wire import RestoreShard, Source
from toprope.store.digest import digest

MIB = 1 << 20
FAST, SLOW = "127.0.0.2", "127.0.0.1"


def says(node: Node, text: str) -> bool:
    return text in node.log.read_text()


@pytest.mark.fault("B114")
@pytest.mark.slow
def test_who_recovers_asks_at_the_configured_address_and_waits_for_a_step_that_is_not_there_yet(
    nodes: MakeNode, stub: CoordinatorStub, tmp_path: Path
) -> None:
    owner, other, port = nodes("a"), nodes("b"), free_port()
    (tmp_path / "token").write_text("0123456789abcdef")
    token = ("--token-file", str(tmp_path / "token"))
    with detour(tmp_path / "slow", target=f"{FAST}:{port}", host=SLOW, port=port) as way:
        way.tell(f"throttle {MIB}")
        owner.start("--listen", f"{FAST}:{port}", *token)
        other.start(*token)
        assert owner.url == f"http://{FAST}:{port}"
        assert says(owner, f"ready url={owner.url}")
        with ScriptedTrainer(owner.socket) as before, ScriptedTrainer(other.socket, launch_id="bb") as trainer:
            before.payload = 16 * MIB
            before.begin(stub)
            before.announce()
            assert stub.inventories["a"].url == owner.url
            before.snapshot(1)
            stub.wait_copy("a", "memory", 1)
            grant, body = before.grant(), before.image(2)
            size = before.write(grant, 2)
            source = Source(tier="memory", node="a", url=owner.url)
            wanted = RestoreShard(rank=0, bytes=len(body), digest=digest(body), sources=(source,))
            view = stub.attempt(
                2,
                "bb",
                {0: "b"},
                source="held",
                source_attempt_uid=before.attempt_uid,
                from_step=2,
                restore=(wanted,),
            )
            with ThreadPoolExecutor(1) as pool:
                staged = pool.submit(trainer.join, 2, view.uid)
                wait_until(
                    lambda: says(other, "no verified copy of step 2 of rank 0 here"), what="it asks", timeout_s=20
                )
                assert not staged.done(), "it waits for the step, and takes no other"
                before.seal(grant, 2, size)
                stub.wait_copy("a", "memory", 2)
                began_s = time.monotonic()
                (shard,) = staged.result(timeout=20).shards
                took_s = time.monotonic() - began_s
            assert (shard.tier, shard.node) == ("memory", "a")
            assert Path(shard.path).read_bytes()[: shard.bytes] == body
            assert took_s < 8.0, "16 MiB over the slow address take 16 s"
