"""A body that is shorter, longer or cut off is an error, and the least of the room counts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.support.core_driver import UID, Driver, shard

from toprope.coordinator.wire import Cadence
from toprope.sidecar import events as on
from toprope.sidecar.adapters.peers import HttpPeers
from toprope.sidecar.budget import Room, why_too_little
from toprope.sidecar.pace import Pace
from toprope.sidecar.ports import PeerError

BODY = bytes(range(200))


@contextmanager
def answering(*answers: bytes, asked: list[bytes] | None = None) -> Iterator[str]:
    """Yield the url of a server that gives each connection one of these answers and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    request = connection.recv(65536)
                    connection.sendall(answer)
                if asked is not None:
                    asked.append(request)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1/copies/x?tier=memory"
        thread.join()


def head(length: int, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode()


PARTIAL = "206 Partial Content"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((head(200) + BODY,), ""),
        ((head(199) + BODY[:199],), "has 199 bytes; expected 200"),
        ((head(201) + BODY + b"x",), "has 201 bytes; expected 200"),
        ((b"HTTP/1.1 200 OK\r\n\r\n" + BODY,), "has None bytes; expected 200"),
        ((head(200) + BODY[:150], head(50, PARTIAL)), "the connection ended after 150 of 200 bytes"),
        ((head(200) + BODY[:150], head(49, PARTIAL) + BODY[150:199]), "has 49 bytes; expected 50"),
        ((head(4, "404 Not Found") + b"gone",), "answered 404: gone"),
    ],
)
async def test_only_a_whole_body_of_the_right_length_is_received(answers: tuple[bytes, ...], said: str) -> None:
    into = memoryview(bytearray(200))
    async with aiohttp.ClientSession() as session:
        peers = HttpPeers(session, node="a", token="", stall_timeout_s=5.0)
        with answering(*answers) as url:
            if said:
                with pytest.raises(PeerError, match=said):
                    receive(peers, url, into)
            else:
                receive(peers, url, into)
                assert bytes(into) == BODY


async def test_a_connection_that_breaks_is_taken_up_where_it_broke_as_long_as_each_brings_more() -> None:
    into, asked = memoryview(bytearray(200)), list[bytes]()
    pieces = head(200) + BODY[:150], head(50, PARTIAL) + BODY[150:180], head(20, PARTIAL) + BODY[180:]
    async with aiohttp.ClientSession() as session:
        peers = HttpPeers(session, node="a", token="", stall_timeout_s=5.0)
        with answering(*pieces, asked=asked) as url:
            receive(peers, url, into)
    assert bytes(into) == BODY
    assert [b"bytes=150-199" in request for request in asked] == [False, True, False]
    assert b"bytes=180-199" in asked[2]


def test_all_that_take_share_one_pace() -> None:
    waited: list[float] = []
    pace = Pace(100.0, clock=lambda: 10.0, sleep=waited.append)
    for count in (50, 100, 25):
        pace.take(count)
    assert waited == [0.5, 1.5, 1.75]


async def test_only_what_is_paced_waits() -> None:
    async with aiohttp.ClientSession() as session:
        taken: list[float] = []
        pace = Pace(1000.0, clock=lambda: 0.0, sleep=taken.append)
        peers = HttpPeers(session, node="a", token="", stall_timeout_s=5.0, pace=pace)
        for paced, waits in ((False, []), (True, [0.2])):
            with answering(head(200) + BODY) as url:
                receive(peers, url, memoryview(bytearray(200)), paced=paced)
            assert taken == waits


def receive(peers: HttpPeers, url: str, into: memoryview, *, paced: bool = False) -> None:
    """Receive in a thread, as the sidecar does."""
    caught: list[PeerError] = []

    def work() -> None:
        try:
            peers.receive(url, into, paced=paced)
        except PeerError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


@pytest.mark.parametrize(
    ("least", "advice"),
    [
        ("directory_free", "Give a --memory-dir"),
        ("cgroup_free", "Raise the memory limit"),
        ("machine_free", "Run fewer ranks"),
    ],
)
def test_the_least_of_directory_cgroup_and_machine_counts_and_what_to_do_is_said(least: str, advice: str) -> None:
    room = {"directory_free": 1 << 40, "cgroup_free": 1 << 40, "machine_free": 1 << 40, least: 100}
    text = why_too_little(Room(directory=Path("/m"), directory_total=1 << 40, **room), 101, what="it")
    assert text is not None
    assert text.startswith("it: 101 bytes of memory needed, 100 bytes ")
    assert advice in text
    assert why_too_little(Room(directory=Path("/m"), directory_total=1 << 40, **room), 100, what="it") is None


def test_a_kept_step_stays_on_the_local_disk_however_many_come_after_it() -> None:
    driver = Driver()
    driver.train()
    driver.want(cadence=Cadence(from_step=0, every=1, local_every=1, object_every=100))
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=None))
    driver.keep(1)
    for step in (2, 3, 4):
        driver.on(on.LocalStored(shard=shard(step), path=f"/l/{step}", slot=None))
    assert driver.copies("local") == [1, 3, 4]
    driver.keep(4, uid=UID)
    assert driver.copies("local") == [3, 4]
