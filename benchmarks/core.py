"""What the pieces of a coordinator cost in a job of thousands of nodes, in processor time, with nothing else running.

The real core decides on the real documents of a fleet that says what its sidecars would say. Broker, sockets and disk
are left out: ``benchmarks/scale.py`` has them.

    python benchmarks/core.py [--nodes 2048] [--ranks-per-node 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from toprope.chaos.live.fleet_node import LAUNCH, Node
from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.core import Core, Settings
from toprope.coordinator.events import Heard
from toprope.coordinator.extracts import Extracts
from toprope.coordinator.intents import OpenAttempt, basis_of, make_attempt, make_spec
from toprope.coordinator.log import Log
from toprope.coordinator.log_view import LogView
from toprope.coordinator.moment import Moment, moment
from toprope.coordinator.overview import overview
from toprope.coordinator.reading import Reader
from toprope.coordinator.wire import (
    MAX_INVENTORY_BYTES,
    Cadence,
    Desired,
    Inventory,
    RankVerdict,
    Tier,
    decode,
    encode,
)
from toprope.store.checkpoint import manifest
from toprope.store.log.records import AttemptFacts, Elected, Member
from toprope.store.names import facts_key
from toprope.store.objects.opening import open_store

JOB = "core"
STEPS = (10, 20, 30)
_T = TypeVar("_T")


class Bench:
    """A core and its fleet; ``ms`` is what each piece took."""

    def __init__(self, log_view: LogView, nodes: list[Node]) -> None:
        cadence = Cadence(from_step=0, every=10, local_every=20, object_every=80)
        self.core = Core(Settings(job=JOB, url="http://c", cadence=cadence), log_view, now_s=0.0)
        self.nodes = nodes
        self.ms: dict[str, float] = {}

    def timed(self, what: str, work: Callable[[], _T], *, each: int = 1) -> _T:
        """Return what the work returned, and note what it took for each of so many."""
        began_s = time.process_time()
        result = work()
        self.ms[what] = (time.process_time() - began_s) * 1e3 / each
        return result

    def told(self) -> Desired:
        """Return how the job is wanted to be."""
        assert self.core.desired is not None
        return self.core.desired

    def hear(self, what: str, now_s: float) -> None:
        """Let each node say what it has, and the core decide on it."""
        bodies = []
        for node in self.nodes:
            node.version += 1
            bodies.append(encode(node.inventory()))
        said = self.timed(
            "read an inventory",
            lambda: [decode(body, Inventory, limit=MAX_INVENTORY_BYTES) for body in bodies],
            each=len(bodies),
        )
        self.timed(
            f"take in an inventory: {what}",
            lambda: [self.core.take(Heard(inventory=one, live=False, now_s=now_s)) for one in said],
            each=len(said),
        )
        self.timed(f"decide, all ranks have told: {what}", lambda: self.core.steer(now_s))
        extracts = Extracts(self.told())
        for node in self.nodes:
            node.desired = extracts.of(node.name)

    def hold(self, step: int, tier: Tier, *, store: Path) -> None:
        """Let each rank have a copy of a step in a tier."""
        holders = {place.owner: place.holder for place in self.told().placement}
        by_name = {node.name: node for node in self.nodes}
        for node in self.nodes:
            for rank in node.ranks:
                copy = node.stored(step, rank, store=store) if tier == "object" else node.copy(step, rank, tier)
                (by_name[holders[node.name]] if tier == "peer" else node).hold(copy)

    def look(self, now_s: float) -> Moment:
        """Return what is known now."""
        return moment(self.core, broker="connected", now_s=now_s)

    def show(self, known: Moment) -> None:
        """Work out the status, and note how long the longest slice of it took, for which a decision may wait."""
        slices, longest_s, began_s = overview(known), 0.0, time.process_time()
        while True:
            slice_began_s = time.process_time()
            try:
                next(slices)
            except StopIteration as done:
                msgspec.json.encode(done.value)
                break
            finally:
                longest_s = max(longest_s, time.process_time() - slice_began_s)
        self.ms["status: all slices"] = (time.process_time() - began_s) * 1e3
        self.ms["status: the longest slice"] = longest_s * 1e3

    def verdict(self, ok: RankVerdict) -> None:
        """Let all ranks have come so far."""
        for node in self.nodes:
            for rank in node.ranks:
                node.stand(rank, 0, ok)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures as JSON too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="toprope-core-") as directory:
        figures = measure(options.nodes, options.ranks_per_node, Path(directory))
    for what, value in figures.items():
        print(f"{what:56} {value:12.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(count: int, ranks: int, directory: Path) -> dict[str, float]:
    """Return what each piece took, in milliseconds, and how long the documents are."""
    nodes = [
        Node(
            job=JOB,
            world=count * ranks,
            name=f"n{number:05d}",
            url=f"http://n{number:05d}",
            ranks=range(number * ranks, (number + 1) * ranks),
            domain={"rack": f"r{number // 16}"},
            client=0,
        )
        for number in range(count)
    ]
    world = tuple(Member(rank=rank, node=one.name, boot_id=one.identity) for one in nodes for rank in one.ranks)
    bench = Bench(asyncio.run(_opened(directory, world)), nodes)
    bench.hear("that they are there", 1.0)
    uid = bench.told().attempt
    assert uid is not None
    bench.verdict(RankVerdict(attempt_uid=uid.uid, phase="staged", ok=True))
    bench.hear("staged", 2.0)
    bench.verdict(RankVerdict(attempt_uid=uid.uid, phase="applied", ok=True))
    bench.hear("applied", 3.0)
    for step in STEPS:
        for tier in ("memory", "peer", "local"):
            bench.hold(step, tier, store=directory)
            bench.hear(f"{tier} copies", float(step))
    assert bench.told().protected_step == STEPS[-1]
    bench.hold(STEPS[-1], "object", store=directory)
    bench.hear("receipts", 40.0)
    bench.timed("decide, nothing is new", lambda: bench.core.steer(40.0))
    whole = bench.told()
    assert len(whole.read_backs) == len(world)
    extracts = bench.timed("cut the document", lambda: Extracts(whole))
    bodies = bench.timed("write an extract", lambda: [encode(extracts.of(one.name)) for one in nodes], each=count)
    body = bench.timed("write the whole document", lambda: encode(whole))
    bench.show(bench.timed("status: the moment", lambda: bench.look(41.0)))
    sizes = {
        "bytes of an inventory": float(len(encode(nodes[0].inventory()))),
        "bytes of an extract": sum(map(len, bodies)) / count,
        "bytes of the whole document": float(len(body)),
        "MiB of memory, fleet and core": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return {f"{what}, ms": value for what, value in bench.ms.items()} | sizes


async def _opened(directory: Path, world: tuple[Member, ...]) -> LogView:
    """Return the view of a log in which an attempt of this world has been opened."""
    store = ThreadedStore(open_store(str(directory), write=True))
    log = Log(store, JOB, writer_id="benchmark")
    await log.look()
    await log.elect(lambda _: Elected(), job_uid="0b" * 16)
    intent = OpenAttempt(
        basis=basis_of(log.state),
        uid="aa" * 16,
        launch_id=LAUNCH,
        round=0,
        ready=None,
        held=None,
        from_step=0,
        struck=(),
        facts=AttemptFacts(world=world, held_digests=(), versions={}),
        spec={},
        why="a benchmark",
    )
    bodies = [b"{}", manifest.encode(intent.facts)]
    spec_sha256, facts_sha256 = (manifest.sha256(body) for body in bodies)
    for body in bodies:
        await store.create_facts(facts_key(JOB, manifest.sha256(body)), body)
    await log.append(lambda state: make_spec(state, spec_sha256=spec_sha256))
    await log.append(lambda state: make_attempt(state, intent, spec_sha256=spec_sha256, facts_sha256=facts_sha256))
    return await Reader(store, JOB).log_view(log.state, None)


if __name__ == "__main__":
    main()
