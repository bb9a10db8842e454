"""Namespaces as nodes: what cuts, loses and slows a link does so, is undone, and nothing of it is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from toprope.chaos.live.netns import NetNode, Network, why_not
from toprope.chaos.live.processes import Process, wait_until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
ECHO = """
import socketserver, sys
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile: self.wfile.write(line)
socketserver.ThreadingTCPServer((sys.argv[1], 7), Answer).serve_forever()
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NetNode]:
    """A node that gives back what it is sent."""
    with Network() as network:
        made = network.add("a")
        command = [*made.inside, sys.executable, "-c", ECHO, made.address]
        process = Process("echo", command, log=tmp_path / "log", env={"PATH": f"{os.environ['PATH']}:/usr/sbin"})
        try:
            wait_until(lambda: answers(made), what="it answers", timeout_s=20, alive=[process])
            yield made
        finally:
            process.kill()


def answers(node: NetNode, *, timeout_s: float = 1.0, body: bytes = b"hello\n") -> bool:
    try:
        with socket.create_connection((node.address, 7), timeout=timeout_s) as connection:
            connection.sendall(body)
            with connection.makefile("rb") as stream:
                return stream.readline() == body
    except OSError:
        return False


def test_links_are_cut_and_healed_each_way(node: NetNode) -> None:
    for cut in (node.cut, lambda: node.cut_way("in"), lambda: node.cut_way("out")):
        cut()
        assert not answers(node, timeout_s=0.3)
        node.heal()
        wait_until(lambda: answers(node), what="it answers again", timeout_s=10)


def test_a_link_loses_and_slows(node: NetNode) -> None:
    node.lose(30)
    for _ in range(10):
        answers(node, timeout_s=0.3)
    assert node.dropped() > 0
    node.heal()
    assert node.dropped() == 0
    body = b"x" * 60_000 + b"\n"
    began_s = time.monotonic()
    assert answers(node, timeout_s=10.0, body=body)
    quick_s = time.monotonic() - began_s
    node.slow(400)
    began_s = time.monotonic()
    assert answers(node, timeout_s=10.0, body=body)
    assert time.monotonic() - began_s > max(0.7, 2 * quick_s), "480 kbit at 400 kbit/s"


def test_what_a_killed_maker_left_is_swept_and_what_a_living_one_has_is_not() -> None:
    code = "import os, signal\nfrom toprope.chaos.live.netns import Network\n"
    code += "Network().add('a')\nos.kill(os.getpid(), signal.SIGKILL)"
    dead = subprocess.Popen([sys.executable, "-c", code])
    assert dead.wait(30) == -9
    assert left_by(dead.pid), "it was killed before it could clean up"
    with Network() as network:
        network.add("a")
        assert left_by(dead.pid) == []
        assert len(left_by(os.getpid())) == 3
        with pytest.raises(Exception, match="exists"):
            Network()
        assert len(left_by(os.getpid())) == 3
    assert left_by(os.getpid()) == []


def left_by(pid: int) -> list[str]:
    links = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith((f"tb{pid}", f"tv{pid}"))]
    return links + [path.name for path in Path("/run/netns").glob(f"toprope-{pid}-*")]
