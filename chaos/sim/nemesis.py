"""What befalls the world during the chaos, one trouble after another; and the healing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from toprope.chaos.sim import people
from toprope.chaos.sim.broker import NAME as BROKER
from toprope.chaos.sim.loop import Process
from toprope.chaos.sim.store import EVERYBODY
from toprope.chaos.sim.world import Node, World
from toprope.trainer_hooks.link.slot import SlotState

AMBUSHES = ("copy", "hash", "facts", "shards", "manifests", "manifests", "log", "log")
"""Where one may be stopped: in the middle of a copy into a slot, or of hashing; when an object of a kind is written."""


async def rage(world: World) -> None:
    """Let this history's troubles happen until its time is up."""
    options, began_s = world.options, world.loop.time()
    world.store.fault = options.store_fault
    for trouble in options.script:
        await asyncio.sleep(max(0.0, began_s + trouble.at_s - world.loop.time()))
        world.trace.note("nemesis", trouble.what)
        world.trace.sometimes(f"fault: {trouble.what}")
        _strike(world, trouble.what, random.Random(trouble.seed))
    await asyncio.sleep(max(0.0, began_s + options.chaos_s - world.loop.time()))


def heal(world: World) -> None:
    """End all troubles."""
    world.trace.note("nemesis", "heals")
    world.net.calm, world.ambush = True, ""
    world.net.cuts.clear()
    world.net.lags_s.clear()
    world.store.fault = 0.0
    world.store.away.clear()
    world.store.goes_at = lambda _record: False
    for node in world.nodes:
        node.away_until_s = 0.0
        node.disk.trouble, node.disk.dies_in, node.disk.slow_s, node.no_room = "", 0, 0.0, False
    for process in _paused(world):
        process.resume()


def _paused(world: World) -> list[Process]:
    ranks = world.launch.ranks if world.launch is not None else []
    cars = [node.sidecar for node in world.nodes if node.sidecar is not None]
    several = (ranks, cars, world.hosts, world.readers)
    everyone = [one.process for some in several for one in some]
    return [process for process in everyone if process.held is not None]


def _strike(world: World, what: str, rng: random.Random) -> None:
    match what:
        case "kill rank":
            if world.launch is not None:
                rng.choice(world.launch.ranks).process.kill()
        case "zombie":
            _zombie(world, rng)
        case "reader":
            _read(world, rng)
        case "change":
            _change(world, rng)
        case "go back":
            _go_back(world, rng)
        case "ambush":
            world.ambush = rng.choice(AMBUSHES)
        case _:
            _strike_machines(world, what, rng)


def _strike_machines(world: World, what: str, rng: random.Random) -> None:  # noqa: C901, PLR0912, PLR0915 - one line per kind of trouble
    node = rng.choice(world.nodes)
    match what:
        case "kill sidecar":
            if node.sidecar is not None:
                node.sidecar.process.kill()
        case "pause sidecar":
            if node.sidecar is not None:
                _pause(world, node.sidecar.process, rng.uniform(1.0, 12.0))
        case "power cut":
            if rng.random() < 0.5:  # noqa: PLR2004 - either
                world.cut_power(node)
            else:
                node.disk.dies_in = rng.randint(1, 8)
        case "replace machine":
            world.cut_power(node, replaced=True)
        case "kill coordinator":
            for host in world.hosts:
                host.process.kill()
        case "pause coordinator":
            for host in world.hosts:
                _pause(world, host.process, rng.uniform(2.0, 15.0))
        case "two coordinators":
            world.add_coordinator(deaf=True)
        case "cut link":
            _cut(world, node, rng)
        case "broker restart":
            world.broker.restart()
        case "store brownout":
            world.store.fault = rng.choice((0.0, 0.1, 0.5, 1.0))
        case "store outage":
            _take_store_away(world, rng, from_whom=EVERYBODY)
        case "lone outage":
            _take_store_from_leader(world, rng, meanwhile=_change)
        case "marked outage":
            _take_store_from_leader(world, rng, meanwhile=_mark)
        case "slow node":
            _slow_down(world, node, rng)
        case "late outage":
            _let_store_go(world, rng)
        case "node away":
            _take_away(world, node, rng)
        case "disk trouble":
            node.disk.trouble = rng.choice(("", "full", "sync"))
            node.no_room = rng.random() < 0.3  # noqa: PLR2004 - now and then
        case "flip":
            for _ in range(3):
                _flip(world, node, rng)
        case _:
            raise AssertionError(what)


def _take_store_from_leader(
    world: World, rng: random.Random, *, meanwhile: Callable[[World, random.Random], None]
) -> None:
    """Let the store not answer the coordinator that leads, while people who reach it change the job."""
    alone = sorted(world.hosts, key=lambda host: not host.leads)
    _take_store_away(world, rng, from_whom=alone[0].name if alone else EVERYBODY)
    if alone:
        for _ in range(rng.randint(0, 3)):
            world.loop.outside(rng.uniform(0.0, 12.0), meanwhile, world, random.Random(rng.getrandbits(32)))


def _slow_down(world: World, node: Node, rng: random.Random) -> None:
    """Let the disk of a node be slow for a while, and all that goes from it and to it."""
    node.disk.slow_s, world.net.lags_s[node.name] = rng.uniform(0.0, 3.0), rng.uniform(0.1, 2.0)

    def hurry() -> None:
        node.disk.slow_s = 0.0
        world.net.lags_s.pop(node.name, None)

    world.loop.outside(rng.uniform(3.0, 15.0), hurry)


def _let_store_go(world: World, rng: random.Random) -> None:
    """Let the store answer nobody once it has taken the next record of a kind, which it applies much later."""
    kind = rng.choice((b"RETIRE", b"RETIRE", b"ATTEMPT", b"TAINT", b"READY"))

    def goes_at(record: bytes) -> bool:
        goes = b'"kind":"' + kind + b'"' in record
        if goes:
            world.store.goes_at = lambda _record: False
            world.trace.sometimes("the store went away while a record was appended")
            _take_store_away(world, rng, from_whom=EVERYBODY)
        return goes

    world.store.goes_at = goes_at


def _take_away(world: World, node: Node, rng: random.Random) -> None:
    """Cut the power of a node that stays off for a while; an operator may see it and declare it dead."""
    node.away_until_s = world.loop.time() + rng.uniform(6.0, 20.0)
    world.cut_power(node)
    if rng.random() < 0.8:  # noqa: PLR2004 - most often
        operator = people.Operator(world, world.next_number(), node)
        world.loop.outside(rng.uniform(0.5, 6.0), operator.start)


def _take_store_away(world: World, rng: random.Random, *, from_whom: str) -> None:
    """Let the store answer nobody for a while, or not one coordinator; ranks are killed meanwhile."""
    for_s = rng.uniform(3.0, 12.0)
    world.store.away.add(from_whom)
    world.loop.outside(for_s, world.store.away.discard, from_whom)
    for _ in range(rng.randint(0, 2)):
        if world.launch is not None:
            world.loop.outside(rng.uniform(0.0, for_s), rng.choice(world.launch.ranks).process.kill)


def _pause(world: World, process: Process, for_s: float) -> None:
    if process.held is None and process.alive:
        process.pause()
        world.loop.outside(for_s, lambda: process.resume() if process.held is not None else None)


def _read(world: World, rng: random.Random) -> None:
    """Let a reader begin, which may be stopped for so long that its hold is taken for left behind."""
    reader = people.Reader(world, world.next_number())
    reader.start()
    world.readers.append(reader)
    if rng.random() < 0.3:  # noqa: PLR2004 - now and then
        world.loop.outside(rng.uniform(0.1, 3.0), _pause, world, reader.process, rng.uniform(2.0, 15.0))


def _change(world: World, rng: random.Random) -> None:
    """Let a person change the job; who goes back ends the launch too."""
    makes = rng.choice((people.pin, people.retire, people.taint, None))
    if makes is None:
        _go_back(world, rng)
    else:
        people.Command(world, world.next_number(), makes).start()


def _go_back(world: World, rng: random.Random) -> None:
    """Let a person go back to the newest READY or the one before it, and end the launch."""
    people.Rollback(world, world.next_number(), but=rng.randint(0, 1)).start()
    if world.launch is not None:
        world.loop.outside(rng.uniform(3.0, 9.0), rng.choice(world.launch.ranks).process.kill)


def _mark(world: World, rng: random.Random) -> None:
    """Let a person pin a checkpoint, or say what one is worth."""
    people.Command(world, world.next_number(), rng.choice((people.pin, people.measure))).start()


def _zombie(world: World, rng: random.Random) -> None:
    """Freeze a rank, kill another: the launcher goes on without the frozen one, which wakes later and dies later."""
    launch = world.launch
    if launch is None or len(launch.ranks) < 2:  # noqa: PLR2004 - one to freeze and one to kill
        return
    frozen, killed = rng.sample(launch.ranks, 2)
    if not frozen.process.alive:
        return
    wakes_s = rng.uniform(0.5, 10.0)
    _pause(world, frozen.process, wakes_s)
    world.loop.outside(wakes_s + rng.uniform(0.05, 3.0), frozen.process.kill)
    killed.process.kill()


def _cut(world: World, node: Node, rng: random.Random) -> None:
    places = [*(n.name for n in world.nodes if n is not node), *(h.name for h in world.hosts), BROKER, "store"]
    links = [(node.name, rng.choice(places))]
    if rng.random() < 0.3:  # noqa: PLR2004 - now and then the whole node
        links = [(node.name, place) for place in places]
    if rng.random() < 0.5:  # noqa: PLR2004 - either
        links = [(target, source) for source, target in links]
    if rng.random() < 0.5:  # noqa: PLR2004 - one-way or both
        links += [(target, source) for source, target in links]
    world.net.cuts.update(links)
    world.trace.note("nemesis", f"cuts {links}")
    world.loop.outside(rng.uniform(1.0, 12.0), world.net.cuts.difference_update, links)


def _flip(world: World, node: Node, rng: random.Random) -> None:
    """Change a bit of a copy that has been verified, but of none being applied: nobody could see it before or then."""
    if world.launch is not None and any(rank.restoring and rank.process.alive for rank in world.launch.ranks):
        return
    files = [file for file in node.memory.files() if file.page.state is SlotState.HASHED]
    world.oracle.on_flip()
    names = sorted(name for name in node.disk.names if name.endswith(".safetensors"))
    if names and rng.random() < 0.3:  # noqa: PLR2004 - now and then
        node.disk.flip(rng.choice(names))
    elif files:
        file = rng.choice(files)
        file.data[rng.randrange(file.page.bytes)] ^= 1
        file.flipped = True
