"""What the proxy does to connections, each way by itself."""

from __future__ import annotations

import contextlib
import random
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from toprope.chaos.live.detour import Detour, detour
from toprope.chaos.live.muddle import Muddle
from toprope.chaos.live.proxy import Mode, tell

SHORT_S = 0.15
LONG_S = 10.0


class Answers(socketserver.ThreadingTCPServer):
    """Answers each line with ``>line``."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.received: list[bytes] = []


class Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Answers)
        with contextlib.suppress(OSError):
            for line in self.rfile:
                self.server.received.append(line)
                self.wfile.write(b">" + line)


@dataclass(frozen=True, slots=True)
class Link:
    """A server that answers, and a proxy before it."""

    server: Answers
    proxy: Detour

    def tell(self, mode: str) -> None:
        self.proxy.tell(mode)

    def done(self) -> list[str]:
        return self.proxy.done()

    def connect(self, *, timeout_s: float = LONG_S) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.proxy.port), timeout=timeout_s)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    with Answers() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            with detour(tmp_path_factory.mktemp("proxy"), target=str(server.server_address[1])) as proxy:
                yield Link(server, proxy)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def link(started: Link) -> Link:
    """A link that carries all, and has done nothing yet."""
    started.tell("delay 0")  # the proxy notes only what is new to it
    started.tell("pass")
    started.proxy.log.write_text("")
    started.server.received.clear()
    return started


def asked(connection: socket.socket, line: bytes) -> bytes:
    connection.sendall(line)
    return connection.makefile("rb").readline()


def test_bytes_pass_both_ways(link: Link) -> None:
    with link.connect() as connection:
        assert asked(connection, b"a\n") == b">a\n"
    assert link.done() == []


def test_a_cut_resets_what_is_open_and_what_comes(link: Link) -> None:
    with link.connect() as connection:
        assert asked(connection, b"a\n") == b">a\n"
        link.tell("cut")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with pytest.raises(ConnectionResetError), link.connect() as connection:
        connection.recv(1)
    link.tell("pass")
    with link.connect() as connection:
        assert asked(connection, b"c\n") == b">c\n"
    assert link.server.received == [b"a\n", b"c\n"]
    assert link.done().count("reset a connection") >= 2


@pytest.mark.parametrize(("way", "arrives"), [("up", []), ("down", [b"a\n"])])
def test_a_way_can_be_cut_alone(way: str, arrives: list[bytes], link: Link) -> None:
    link.tell(f"half-open {way}")
    with link.connect(timeout_s=SHORT_S) as connection, pytest.raises(TimeoutError):
        asked(connection, b"a\n")
    assert link.server.received == arrives


def test_half_open_hides_even_that_the_other_side_has_ended(link: Link) -> None:
    link.tell("half-open")
    with link.connect(timeout_s=SHORT_S) as connection:
        connection.shutdown(socket.SHUT_WR)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        link.tell("pass")
        connection.settimeout(LONG_S)
        assert connection.recv(1) == b""


def test_a_stall_keeps_what_comes_after_until_it_ends(link: Link) -> None:
    link.tell("stall 3 up")
    with link.connect(timeout_s=SHORT_S) as connection:
        assert asked(connection, b"a\nb\n") == b">a\n"
        with pytest.raises(TimeoutError):
            connection.recv(1)
        link.tell("pass")
        connection.settimeout(LONG_S)
        assert connection.recv(3) == b">b\n"


def test_a_delay_is_one_of_time_and_not_of_bandwidth(link: Link) -> None:
    link.tell("delay 0.1 down")
    with link.connect() as connection, connection.makefile("rb") as answers:
        began_s = time.monotonic()
        for _ in range(10):
            connection.sendall(b"a\n")
            time.sleep(0.01)
        assert [answers.readline() for _ in range(10)] == [b">a\n"] * 10
        assert 0.1 <= time.monotonic() - began_s < 0.8, "ten delays one after another would be 1 s"
    assert "delay of 3 bytes down" in link.done()


def test_a_throttle_holds_to_its_rate(link: Link) -> None:
    link.tell("throttle 100000 up")
    with link.connect() as connection:
        began_s = time.monotonic()
        asked(connection, b"a" * 20_000 + b"\n")
        assert time.monotonic() - began_s >= 0.2


def test_a_reply_ends_after_so_many_bytes(link: Link) -> None:
    link.tell("truncate 3")
    with link.connect() as connection, connection.makefile("rb") as answers:
        connection.sendall(b"abcdef\n")
        assert answers.read(3) == b">ab"
        with pytest.raises(ConnectionResetError):
            answers.read(1)


def test_a_lost_reply_is_one_to_a_request_that_has_arrived(link: Link) -> None:
    link.tell("lost")
    with link.connect() as connection, pytest.raises(ConnectionResetError):
        asked(connection, b"a\n")
    assert link.server.received == [b"a\n"]


@pytest.mark.parametrize(("mode", "answer"), [("slowdown", b"503 Slow Down"), ("expired", b"403 Forbidden")])
def test_a_request_is_refused_as_s3_refuses_it(mode: str, answer: bytes, link: Link) -> None:
    link.tell(mode)
    with link.connect() as connection:
        connection.sendall(b"PUT /b/k HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        said = connection.makefile("rb").read()
    assert said.startswith(b"HTTP/1.1 " + answer)
    assert {"slowdown": b"<Code>SlowDown<", "expired": b"<Code>ExpiredToken<"}[mode] in said
    assert link.server.received == []


def test_a_request_arrives_after_its_sender_was_cut_off(link: Link) -> None:
    link.tell(f"late {SHORT_S}")
    head, body = b"PUT /b/k HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 6\r\n\r\n", b"abcde\n"
    with link.connect() as connection:
        connection.sendall(head)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        assert link.server.received == [], "its sender was told nothing, and nothing has come of it yet"
    deadline_s = time.monotonic() + LONG_S
    while not any(line.startswith("brought") for line in link.done()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert b"".join(link.server.received) == head + body


@pytest.mark.parametrize("text", ["", "gone", "delay x", "delay 1 sideways", "delay 1 2 up"])
def test_a_mode_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        tell(tmp_path / "mode", text)
    assert not (tmp_path / "mode").exists()


def test_a_mode_names_kind_amount_and_way() -> None:
    assert Mode.parsed("half-open 0 up") == Mode("half-open", 0.0, "up")
    assert Mode.parsed("cut") == Mode("cut", 0.0, None)


def packet(kind: int, text: bytes) -> bytes:
    assert len(text) < 128 * 128
    length = bytes([len(text)]) if len(text) < 128 else bytes([len(text) % 128 | 0x80, len(text) // 128])
    return bytes([kind << 4]) + length + text


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_messages_are_repeated_swapped_and_lost_and_other_packets_are_not(cut: int) -> None:
    messages = [packet(3, b"%03d" % number + b"." * number) for number in range(400)]
    pings = [packet(12, b"")] * 20
    data = b"".join(messages) + b"".join(pings)
    muddle = Muddle(random.Random(7))
    out = b"".join(muddle.take(data[at : at + cut]) for at in range(0, len(data), cut))
    assert out.endswith(b"".join(pings)) or out.count(packet(12, b"")) >= 20
    kept = [one for one in messages if one in out]
    assert 5 <= muddle.lost == len(messages) - len(kept) <= 40
    assert muddle.swapped > 20
    assert sum(len(one) for one in kept) * 2 + sum(map(len, pings)) == len(out)
    in_order = sorted(kept, key=out.index)
    assert in_order != kept, "some are swapped"
