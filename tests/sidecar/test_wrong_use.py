"""Wrong use of ``ckpt sidecar``: one line, exit status 64, nothing changed; and what strangers are told."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node

from toprope.trainer_hooks.link import wire


def failure(node: Node, *more: str) -> str:
    """Start a sidecar that must end with status 64; return its one line."""
    node.begin(*more)
    assert node.process is not None
    node.log.touch()
    status = wait_for_end(node)
    lines = [line for line in node.log.read_text().splitlines() if not line.startswith("20")]
    assert (status, len(lines)) == (64, 1), node.log.read_text()
    return lines[0]


def wait_for_end(node: Node) -> int:
    assert node.process is not None
    while (status := node.process.status()) is None:
        node.pause()
    node.process = None
    return status


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--job", "../up"), "job '../up' is not usable"),
        (("--node", "A b"), "node 'A b' is not usable"),
        (("--socket", "/tmp/" + "x" * 110), "the system allows 107"),
        (("--listen", "0.0.0.0:0"), "give --token-file as well"),
        (("--listen", "nowhere"), "--listen 'nowhere' is not usable: give HOST:PORT"),
        (("--coordinator", "localhost:1"), "is not a URL"),
        (("--domain", "rack"), "give key=value"),
        (("--stall-timeout", "40"), "give more than the 40 seconds of --stall-timeout"),
        (("--memory-dir", "/proc/nope"), "--memory-dir /proc/nope can't be written"),
        (("--local-dir", "/proc/nope"), "--local-dir"),
        (("--store", "/proc/nope"), "store /proc/nope can't be made"),
        (("--state-size", str(1 << 50)), "of memory needed"),
        (("--memory", str(1 << 60)), "--memory 1152921504606846976: "),
        (("--state-size", "1000", "--memory", "100"), "5000 bytes of memory needed; --memory allows 100"),
        (("--token-file", "/dev/null"), "holds 0 characters"),
        (("--ready-file", "/nowhere/ready"), "--ready-file /nowhere/ready: its directory does not exist"),
    ],
)
def test_wrong_settings_get_one_line_and_status_64(nodes: MakeNode, more: tuple[str, ...], text: str) -> None:
    node = nodes()
    assert text in failure(node, *more)
    assert not node.memory.exists(), "who is refused leaves no directory in memory"


def test_a_port_in_use_gets_one_line(nodes: MakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = nodes()
        assert f"can't listen on 127.0.0.1:{port}: it is in use" in failure(node, "--listen", f"127.0.0.1:{port}")
        assert not node.memory.exists()


def test_a_second_sidecar_of_the_same_memory_is_refused_and_the_first_serves_on(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    first, second = nodes("a"), nodes("a")
    first.start()
    second.log = first.log.with_name("second.log")
    assert f"another sidecar of job job serves {first.memory / 'job'}: stop it first" in failure(second)
    with ScriptedTrainer(first.socket) as trainer:
        assert trainer.welcome.node == "a"


def test_a_second_run_on_the_disk_of_a_living_one_is_refused_by_name_and_not_once_that_is_gone(nodes: MakeNode) -> None:
    first, second = nodes("a"), nodes("b")
    first.start()
    said = failure(second, "--local-dir", str(first.local))
    assert f"another sidecar of job job serves {first.local / 'job'}: stop it first" in said
    assert "its own --local-dir; another run needs a name of its own" in said
    assert not second.memory.exists(), "who is refused leaves no directory in memory"
    first.kill()
    second.start("--local-dir", str(first.local))


def test_the_socket_is_private_and_a_stale_file_of_it_does_not_matter(nodes: MakeNode) -> None:
    node = nodes()
    node.start()
    node.kill()
    assert node.socket.is_socket()
    node.start()
    assert node.socket.stat().st_mode & 0o777 == 0o600
    with ScriptedTrainer(node.socket):
        pass


def test_another_users_process_is_not_heard_whatever_the_socket_lets_in(nodes: MakeNode) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    node = nodes()
    hello = wire.encode(wire.Hello(job="job", launch_id="aa", rank=0, world=1, pid=1))
    with tempfile.TemporaryDirectory() as open_to_all:
        path = Path(open_to_all, "a.sock")
        path.parent.chmod(0o755)
        node.start("--socket", str(path))
        path.chmod(0o666)
        assert answer_to(OTHER_UID, path, hello) == b"", "it is hung up on without a word"
        assert "another user's process" in node.log.read_text()
        assert answer_to(0, path, hello) != b""


OTHER_UID = 65534


def answer_to(uid: int, path: Path, frame: bytes) -> bytes:
    """Return the first bytes that a process of this user is sent for its frame."""
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10.0)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setresuid(uid, uid, uid)
                stranger.connect(str(path))
                with contextlib.suppress(ConnectionError):  # so a connection may end on which something was sent
                    stranger.sendall(frame)
                    os.write(writing, stranger.recv(100))
                status = 0
            finally:
                os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        answer = said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return answer


def test_garbage_on_the_socket_ends_that_connection_only(nodes: MakeNode) -> None:
    node = nodes()
    node.start()
    for garbage in (struct.pack("<I", 1 << 30), struct.pack("<I", 2) + b"{]", wire.encode(wire.Bye())):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(10.0)
            stranger.connect(str(node.socket))
            stranger.sendall(garbage)
            while stranger.recv(4096):
                pass
    with ScriptedTrainer(node.socket):
        pass


def ask(node: Node, method: str, path: str, body: bytes | None = None, *, token: str = "") -> int:
    """Return the status of an answer."""
    parts = urlsplit(node.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=10)
    connection.request(method, path, body=body, headers={"Authorization": f"Bearer {token}"} if token else {})
    status = connection.getresponse().status
    connection.close()
    return status


def test_http_serves_nothing_but_its_routes(nodes: MakeNode) -> None:
    node = nodes()
    node.start()
    uid = "1a" * 16
    assert ask(node, "GET", "/healthz") == 200
    assert ask(node, "GET", "/metrics") == 200
    assert ask(node, "GET", f"/v1/copies/{uid}/1/0") == 404
    assert ask(node, "GET", f"/v1/copies/{uid}/1/0?tier=attic") == 400
    assert ask(node, "GET", "/v1/copies/..%2f..%2fetc/1/passwd") == 404
    assert ask(node, "GET", "/v1/inventory?after=x") == 400
    assert ask(node, "POST", f"/v1/copies/{uid}/1/0/ack", b'{"holder":"b","digest":"z"}') == 400
    assert ask(node, "POST", f"/v1/copies/{uid}/1/0/ack", b'{"holder":"../b","digest":"' + b"0" * 32 + b'"}') == 400
    assert ask(node, "POST", f"/v1/copies/{uid}/1/0/ack", b"x" * (1 << 20)) == 413


def test_with_a_token_only_health_is_told_without_it(nodes: MakeNode, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s" * 32)
    node = nodes()
    node.start("--token-file", str(token))
    assert ask(node, "GET", "/healthz") == 200
    assert ask(node, "GET", "/v1/inventory", token="w" * 32) == 401
    assert ask(node, "GET", "/metrics") == 401
    assert ask(node, "GET", "/metrics", token="s" * 32) == 200
    assert "s" * 32 not in node.log.read_text()


def test_a_sidecar_that_the_coordinator_refuses_ends_with_one_line(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start()
    inventory = stub.wait("a", lambda _: True, what="inventory")
    stub.change(refused={inventory.incarnation: "another life of it is heard"})
    assert wait_for_end(node) == 1
    assert "ckpt: the coordinator refuses this sidecar of node a: another life of it is heard" in node.log.read_text()
