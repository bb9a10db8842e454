"""Blows to a simulated world in the middle of a phase. Each returns a witness: what can be seen of it at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from toprope.chaos.sim.broker import NAME as BROKER
from toprope.chaos.sim.cells import Scene
from toprope.chaos.sim.loop import Process
from toprope.chaos.sim.store import Fault as StoreFault
from toprope.chaos.sim.world import Node, World
from toprope.store.errors import CkptError
from toprope.store.log.chain import read_log
from toprope.store.names import Key, log_key

_OUTAGE_S = 8.0
_BROWNOUT_S = 2.5
"""Shorter than from one due step to the next: one that is newer would be uploaded in place of the one that failed."""
_PAUSE_S = 90.0


# Processes and machines


def _kill(process: Process) -> str:
    process.kill()
    return f"{process.name} is dead: {not process.alive}"


def kill_trainer(scene: Scene) -> str:
    """Kill the trainer whose shard it is."""
    launch = scene.world.launch
    assert launch is not None
    return _kill(launch.ranks[scene.rank].process)


def kill_sidecar(scene: Scene) -> str:
    """Kill the sidecar of the node."""
    return _kill_sidecar_of(scene.node)


def kill_owners_sidecar(scene: Scene) -> str:
    """Kill the sidecar of the node whose shard it is."""
    return _kill_sidecar_of(scene.owner)


def _kill_sidecar_of(node: Node) -> str:
    assert node.sidecar is not None
    return _kill(node.sidecar.process)


def cut_power(scene: Scene) -> str:
    """Cut the power of the node."""
    return _cut_power_of(scene.world, scene.node)


def cut_owners_power(scene: Scene) -> str:
    """Cut the power of the node whose shard it is."""
    return _cut_power_of(scene.world, scene.owner)


def cut_others_power(scene: Scene) -> str:
    """Cut the power of the other node."""
    return _cut_power_of(scene.world, _other(scene))


def _other(scene: Scene) -> Node:
    return next(node for node in scene.world.nodes if node is not scene.node)


def _cut_power_of(world: World, node: Node) -> str:
    before = node.memory.boot_id
    world.cut_power(node)
    return f"boot id of {node.name}: {before[:8]}, then {node.memory.boot_id[:8]}"


def kill_coordinators(scene: Scene) -> str:
    """Kill all coordinators."""
    return "; ".join(_kill(host.process) for host in scene.world.hosts)


def second_coordinator(scene: Scene) -> str:
    """Start another coordinator."""
    scene.world.add_coordinator()
    scene.for_s = _OUTAGE_S
    return f"{scene.world.hosts[-1].name} was started beside {scene.world.hosts[0].name}"


def _pause(scene: Scene, process: Process, for_s: float) -> str:
    process.pause()
    scene.for_s = for_s
    scene.undo.append(lambda: process.resume() if process.held is not None else None)
    return f"{process.name} is stopped: {process.held is not None}"


def pause_coordinators(scene: Scene) -> str:
    """Stop all coordinators for 90 s."""
    return "; ".join(_pause(scene, host.process, _PAUSE_S) for host in scene.world.hosts)


def in_the_middle_of_a_write(blow: Callable[[Scene], str]) -> Callable[[Scene], str]:
    """Let a blow come between two calls of the disk, after the file is written and before it has its name."""

    def strike(scene: Scene) -> str:
        disk, before = scene.node.disk, scene.node.disk.on_death
        disk.dies_in = 2
        told = scene.later = []

        def dies() -> None:
            disk.on_death = before
            told.append(blow(scene))

        disk.on_death = dies
        return "between two calls of the disk"

    return strike


# Network, broker


def _cut(scene: Scene, links: list[tuple[str, str]]) -> str:
    both = [*links, *((target, source) for source, target in links)]
    scene.world.net.cuts.update(both)
    scene.for_s = _OUTAGE_S
    scene.undo.append(lambda: scene.world.net.cuts.difference_update(both))
    return f"cut both ways: {', '.join(f'{source} - {target}' for source, target in links)}"


def cut_off(scene: Scene) -> str:
    """Cut the node off from all else."""
    world, me = scene.world, scene.node.name
    places = [*(node.name for node in world.nodes if node.name != me), *(h.name for h in world.hosts), BROKER, "store"]
    return _cut(scene, [(me, place) for place in places])


def cut_off_for_long(scene: Scene) -> str:
    """Cut the node off for so long that another takes its place."""
    told = cut_off(scene)
    scene.for_s = 4 * _OUTAGE_S
    return told


def cut_from_the_other(scene: Scene) -> str:
    """Cut the link to the other node."""
    return _cut(scene, [(scene.node.name, _other(scene).name)])


def cut_off_the_store(scene: Scene) -> str:
    """Cut the coordinators off from the store."""
    return _cut(scene, [(host.name, "store") for host in scene.world.hosts])


def broker_down(scene: Scene) -> str:
    """End all sessions of the broker, and let nobody reach it."""
    world = scene.world
    world.broker.restart()
    who = [*(node.name for node in world.nodes), *(host.name for host in world.hosts)]
    sessions = sum(client.session for client in world.broker.clients)
    return f"{_cut(scene, [(name, BROKER) for name in who])}; {sessions} sessions are left"


# Disk


def disk_says(trouble: str) -> Callable[[Scene], str]:
    """Let each write to the disk of the node fail in this way for some seconds."""

    def strike(scene: Scene) -> str:
        disk = scene.node.disk
        disk.trouble = trouble
        scene.for_s = _OUTAGE_S
        scene.undo.append(lambda: setattr(disk, "trouble", ""))
        try:
            disk.write(Path("/local/probe"), memoryview(b"probe"))
        except OSError as error:
            return f"a write meets {error!r}"
        finally:
            disk.names.pop("probe", None)
        return "a write succeeds"

    return strike


def slow_disk(scene: Scene) -> str:
    """Let each write to the disk of the node take long."""
    disk = scene.node.disk
    disk.slow_s, scene.for_s = _OUTAGE_S, _OUTAGE_S
    scene.undo.append(lambda: setattr(disk, "slow_s", 0.0))
    return f"a write takes {disk.slow_s:g} s longer"


# Bytes


def another_sequence(scene: Scene) -> str:
    """Let somebody else have written to the slot: its control page has another sequence."""
    found = [
        f
        for (rank, _), f in scene.node.memory.slots.items()
        if rank == scene.rank and f.page.step == scene.mark.about[1]
    ]
    file = found[0]
    before = file.page
    file.page = replace(before, seq=before.seq + 1)
    return f"the page of the slot said seq {before.seq}, then {file.page.seq}"


def flip_local(scene: Scene) -> str:
    """Change a bit of the file that was just written, and let the disk be scanned."""
    disk = scene.node.disk
    name = next(n for n in sorted(disk.names) if n.endswith(".safetensors") and f"-s{scene.mark.about[1]}-" in n)
    before = disk.names[name].data
    disk.flip(name)
    scene.world.oracle.on_flip()
    changed = sum(a != b for a, b in zip(before, disk.names[name].data, strict=True))
    return f"{changed} byte of {name} changed; {kill_sidecar(scene)}, so that the disk is scanned"


def flip_received(scene: Scene) -> str:
    """Change a bit of the first half of what is being received."""
    memory = scene.node.memory
    files = [f for (rank, _), f in memory.spares.items() if rank == scene.rank and any(f.data)]
    staged = memory.staged.get((scene.mark.about[0], scene.rank))
    file = staged if staged is not None else max(files, key=lambda f: -f.page.step)
    before = file.data[9]
    file.data[9] ^= 1
    return f"byte 9 of what came was {before}, then {file.data[9]}"


def damage_log(scene: Scene) -> str:
    """Change a byte of the newest record: whoever reads the log stops there and says so. Then put it back."""
    store, job = scene.world.store, scene.world.job
    key = log_key(job, scene.world.oracle.state.n - 1)
    before = store.objects[key]
    at = before.index(b'"nonce"') + 10
    store.objects[key] = before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :]
    try:
        read_log(store, job)
    except CkptError as error:
        scene.loud = str(error)
    store.objects[key] = before
    return f"byte {at} of {key} was changed; a reader says: {scene.loud or 'nothing'}"


def damage_index(scene: Scene) -> str:
    """Change a byte of an index that is needed for some seconds."""
    store = scene.world.store
    state = scene.world.oracle.state
    assert state.head is not None
    key = max(
        key
        for key in store.objects
        if key.endswith(".index.json") and f"/s{state.readies[state.head].step:09d}/" in key
    )
    before = store.objects[key]
    store.objects[key] = before[:-9] + bytes([before[-9] ^ 1]) + before[-8:]
    scene.for_s = _OUTAGE_S
    scene.undo.append(lambda: store.objects.__setitem__(key, before))
    return f"byte {len(before) - 9} of {key} was changed"


# Store


def store_says(kind: StoreFault) -> Callable[[Scene], str]:
    """Let each call of the store meet this for some seconds."""

    def strike(scene: Scene) -> str:
        store = scene.world.store

        told = scene.later = []

        def drawn(who: str, key: str) -> StoreFault | None:
            if not told:
                told.append(f"the first is of {who}, {key}")
            return kind

        store._drawn = drawn  # type: ignore[method-assign]  # noqa: SLF001 - the store of one history
        scene.for_s = _BROWNOUT_S
        scene.undo.append(lambda: store.__dict__.pop("_drawn", None))
        return f"calls of the store meet: {kind}"

    return strike


def stored_wrong(scene: Scene) -> str:
    """Let the next shard be written with a byte changed, and called written."""
    store, create = scene.world.store, scene.world.store.create

    def creating(key: Key, body: bytes | memoryview) -> None:
        if key.endswith(".safetensors"):
            store.create = create  # type: ignore[method-assign]  # the store of one history
            store.corrupt.add(key)
            body = bytes(body[:-1]) + bytes([body[-1] ^ 1])
        create(key, body)

    store.create = creating  # type: ignore[method-assign]  # the store of one history
    return "the last byte of the next shard is changed by the store"


def slow_store(scene: Scene) -> str:
    """Let all blocking calls take long."""
    loop = scene.world.loop
    loop.slow, scene.for_s = 60.0, _OUTAGE_S
    scene.undo.append(lambda: setattr(loop, "slow", 1.0))
    return f"calls of store and disk take {loop.slow:g} times as long"


# Slowness, memory, clocks


def stop_sidecar(scene: Scene) -> str:
    """Stop the sidecar of the node for some seconds."""
    assert scene.node.sidecar is not None
    return _pause(scene, scene.node.sidecar.process, _OUTAGE_S)


def stop_sidecar_for_long(scene: Scene) -> str:
    """Stop it for so long that another node takes its place."""
    told = stop_sidecar(scene)
    scene.for_s = 4 * _OUTAGE_S
    return told


def stop_owners_sidecar(scene: Scene) -> str:
    """Stop the sidecar of the node whose shard it is."""
    assert scene.owner.sidecar is not None
    return _pause(scene, scene.owner.sidecar.process, _OUTAGE_S)


def stop_other(scene: Scene) -> str:
    """Stop the sidecar of the other node."""
    other = _other(scene)
    assert other.sidecar is not None
    return _pause(scene, other.sidecar.process, _OUTAGE_S)


def stop_trainer(scene: Scene) -> str:
    """Stop the trainer whose shard it is."""
    launch = scene.world.launch
    assert launch is not None
    return _pause(scene, launch.ranks[scene.rank].process, 3.0)


def no_room(scene: Scene) -> str:
    """Let the next slots be refused, and new ones be asked for."""
    node = scene.node
    node.no_room, scene.for_s = True, _OUTAGE_S
    scene.undo.append(lambda: setattr(node, "no_room", False))
    return f"{cut_power(scene)}; slots are refused there"


def clock_jumps(scene: Scene) -> str:
    """Let the coordinators' wall clocks, the only ones that any program reads, jump by thirty years."""
    jumped_s = 10**9
    for host in scene.world.hosts:
        host._real._wall_s = lambda: jumped_s  # noqa: SLF001 - a clock of one history
    return f"the wall clock of {', '.join(host.name for host in scene.world.hosts)} says {jumped_s}"


# Where a restore comes by


def lose_node(world: World) -> None:
    """Let the second machine be replaced: its shard is fetched from the first one's memory."""
    node = world.nodes[1]
    world.cut_power(node)
    node.disk = node._new_disk()  # noqa: SLF001 - as a machine that is replaced has


def lose_memory(world: World) -> None:
    """Let all nodes lose their memory: what is restored lies on their disks."""
    _lose(world, with_disks=False)


def lose_machines(world: World) -> None:
    """Let all machines be replaced: what is restored lies in the object store."""
    _lose(world, with_disks=True)


def _lose(world: World, *, with_disks: bool) -> None:
    for node in world.nodes:
        disk = node.disk
        world.cut_power(node)
        node.disk = node._new_disk() if with_disks else disk  # noqa: SLF001 - as a machine that is replaced has
