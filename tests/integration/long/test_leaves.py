"""What is odd about a leaf - no elements, no dimensions, more than 2 GiB - on the way through every tier."""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp.test_utils import TestServer
from tests.support.tiny_trainer import METADATA

from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.live.s3_server import running_s3
from toprope.sidecar.adapters.files import Disk
from toprope.sidecar.adapters.http import Copies, SidecarHttp
from toprope.sidecar.adapters.peers import HttpPeers
from toprope.sidecar.values import Way
from toprope.store.names import Key
from toprope.store.objects.opening import open_store
from toprope.trainer_hooks.image.inplace import overwrite
from toprope.trainer_hooks.image.shard import Image, MappedFile, plan_image, write_image

JOB = "leaves"
STEPS = 60
MIB = 1 << 20
LARGE = 2**31 + 4096
pytestmark = [pytest.mark.long, pytest.mark.slow]


def _lines(out: Path, rank: int) -> list[dict[str, Any]]:
    path = out / f"rank-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _steps_of(cluster: Cluster) -> tuple[int, int]:
    desired = cluster.desired()
    return (0, 0) if desired is None else (desired.protected_step, desired.ready_step)


@pytest.mark.fault("B20")
@pytest.mark.timeout(300)
def test_scalars_empty_tensors_and_a_rank_without_any_come_back_from_a_peer_and_from_a_bucket(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    with running_s3(tmp_path / "s3") as server:
        server.make_bucket("odd")
        cadences = Cadences(every=2, local_every=4, object_every=4)
        root = server.root("odd", "x")
        with Cluster(directory=tmp_path, job=JOB, cadences=cadences, launch=services, root=root) as cluster:
            cluster.start_broker()
            cluster.start_coordinator(env=server.environment)
            for node in "ab":
                cluster.start_sidecar(node, env=server.environment)
            ranks = World(
                server=fork_server,
                directory=tmp_path / "ranks",
                arguments=("--job", JOB, "--steps", str(STEPS)),
                world=2,
                cluster=cluster,
                placement=lambda rank: "ab"[rank],
                target="tests.support.odd_trainer:main",
            )
            ranks.start()
            try:
                wait_until(lambda: _steps_of(cluster)[0] > 0, what="a protected step", timeout_s=60)
                _lose(ranks, cluster, "a", env=server.environment)
                begun = _steps_of(cluster)[1]
                wait_until(lambda: len(_starts(ranks.out)) == 2, what="the second start", timeout_s=60)
                wait_until(lambda: _steps_of(cluster)[1] > begun, what="a READY checkpoint", timeout_s=60)
                _lose(ranks, cluster, "ab", env=server.environment)
                ranks.finish()
            finally:
                ranks.stop()
    _, second, third = _starts(ranks.out)
    assert "peer" in second["tiers"]
    assert third["tiers"] == ["object"]
    for rank in range(2):
        digests = {line["step"]: line["digest"] for line in _lines(ranks.out, rank) if "step" in line}
        starts = [line for line in _lines(ranks.out, rank) if "restored" in line]
        assert [start["restored"] > 0 for start in starts] == [False, True, True]
        # The steps since a restored one were trained again, with other numbers; those up to it were not.
        assert all(start["digest"] in _said(ranks.out, rank, start["restored"]) for start in starts[1:])
        assert sorted(digests) == list(range(1, STEPS + 1))


def _said(out: Path, rank: int, step: int) -> list[str]:
    return [line["digest"] for line in _lines(out, rank) if line.get("step") == step]


def _starts(out: Path) -> list[dict[str, Any]]:
    return [line for line in _lines(out, 0) if "restored" in line]


def _lose(ranks: World, cluster: Cluster, nodes: str, *, env: Any) -> None:  # noqa: ANN401 - a mapping of text
    """Kill these nodes with their ranks, and start all ranks again on new ones of the same names."""
    for rank, node in enumerate("ab"):
        if node in nodes:
            ranks.kill(rank)
            cluster.kill_node(node)
    ranks.stop()
    for node in nodes:
        cluster.start_sidecar(node, env=env)
    ranks.start()


def _sha(pieces: Iterator[bytes | memoryview]) -> str:
    hashed = hashlib.sha256()
    for piece in pieces:
        hashed.update(piece)
    return hashed.hexdigest()


def _viewed(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def _of_view(view: memoryview) -> Iterator[memoryview]:
    return (view[at : at + 64 * MIB] for at in range(0, len(view), 64 * MIB))


def _of_store(read: Callable[[int, int], bytes], size: int) -> Iterator[bytes]:
    return (read(at, min(64 * MIB, size - at)) for at in range(0, size, 64 * MIB))


@contextmanager
def _mapped(path: Path, *, size: int) -> Iterator[memoryview]:
    with path.open("r+b" if path.exists() else "w+b") as file:
        if path.stat().st_size < size:
            os.posix_fallocate(file.fileno(), 0, size)
        yield memoryview(mmap.mmap(file.fileno(), size))  # gone with the last view of it


def _serving(path: Path, view: memoryview) -> SidecarHttp:
    async def viewed(_: Path) -> memoryview:
        return view

    async def no_inventory(_after: int, _wait_s: float) -> None:
        return None

    copies = Copies(
        locate=lambda *_: [(Way(kind="here", tier="memory", path=str(path)), len(view))],
        view=viewed,
        began=lambda *_: None,
        ended=lambda _: None,
        acked=lambda *_: None,
    )
    return SidecarHttp(
        copies, inventory_after=no_inventory, adopted=tuple, token="", stall_timeout_s=60.0, use_deadline_s=600.0
    )


async def _pulled(path: Path, view: memoryview, into: memoryview) -> None:
    async with TestServer(_serving(path, view).application()) as server, aiohttp.ClientSession() as session:
        peers = HttpPeers(session, node="b", token="", stall_timeout_s=60.0)
        url = str(server.make_url("/v1/copies/1a/3/0?tier=memory"))
        await asyncio.to_thread(peers.receive, url, into)


@pytest.mark.fault("B21")
@pytest.mark.timeout(900)
def test_a_tensor_of_over_2_gib_is_whole_at_each_hop(
    tmp_path: Path,
    memory_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    tensor = (torch.arange(LARGE // 8) * 0x9E3779B97F4A7C15 | 1).view(torch.uint8)  # no two words alike, none zero
    plan = plan_image({"x": tensor}, METADATA)
    size = plan.image_bytes(2)
    begin = 8 + plan.header_bytes
    slot = memory_dir / "slot"
    with _mapped(slot, size=size):
        pass
    assert write_image(MappedFile(slot), plan, {"x": tensor}, b"{}", METADATA) == size
    expected = _sha(_of_view(_viewed(tensor)))
    del tensor
    with _mapped(slot, size=size) as image, _mapped(memory_dir / "copy", size=size) as copy:
        assert _sha(_of_view(image[begin : begin + LARGE])) == expected
        assert any(image[begin + LARGE - 4096 : begin + LARGE])
        whole = _sha(_of_view(image))
        asyncio.run(_pulled(slot, image, copy))
        assert _sha(_of_view(copy)) == whole
    slot.unlink()
    with _mapped(memory_dir / "copy", size=size) as copy:
        Disk().write(tmp_path / "local", copy)
        with _mapped(tmp_path / "local", size=size) as local:
            assert (tmp_path / "local").stat().st_size == size
            assert _sha(_of_view(local)) == whole
    (memory_dir / "copy").unlink()
    with _mapped(tmp_path / "local", size=size) as local, running_s3(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("large")
        for root in (server.root("large", "x"), str(tmp_path / "store")):
            store, key = open_store(root, write=True), Key("leaves/shards/a1/s000000003/x")
            store.create(key, local)
            assert store.size(key) == size
            found = _of_store(lambda at, length: store.read(key, start=at, length=length), size)  # noqa: B023 - used here
            assert _sha(found) == whole, root
    restored = Image(tmp_path / "local", size)
    live = torch.zeros(LARGE, dtype=torch.uint8)
    overwrite(live, restored.tensor("x"))
    assert _sha(_of_view(_viewed(live))) == expected
    assert bool(live[-4096:].any())
    record_property("bytes of the tensor at each hop", LARGE)
