"""The trainer's end of the socket: what its listener can't take is said, and it connects anew."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.channel import Channel

WELCOME = wire.Welcome(node="a", boot_id="b")


class Puzzled:
    """A listener that fails at the first frame, in a way that nobody foresaw."""

    def __init__(self) -> None:
        self.frames: queue.Queue[wire.FromSidecar] = queue.Queue()
        self.reasons: list[str] = []
        self._puzzled = True

    def greeting(self) -> Sequence[wire.FromHook]:
        """Say nothing."""
        return []

    def heard(self, frame: wire.FromSidecar) -> None:
        """Fail once."""
        if self._puzzled:
            self._puzzled = False
            raise LookupError
        self.frames.put(frame)

    def lost(self, reason: str) -> None:
        """Keep the reason."""
        self.reasons.append(reason)


def test_an_error_that_nobody_foresaw_is_told_of_and_the_next_connection_works(
    tmp_path: Path, thread_errors: queue.SimpleQueue[type[BaseException]]
) -> None:
    listener, path, others = Puzzled(), tmp_path / "socket", set(threading.enumerate())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()
        server.settimeout(20)
        channel = Channel(path, listener)
        channel.start()
        first, _ = server.accept()
        first.sendall(wire.encode(WELCOME))
        second, _ = server.accept()
        second.sendall(wire.encode(WELCOME))
        assert listener.frames.get(timeout=20) == WELCOME
        channel.close(timeout_s=20)
        for connection in (first, second):
            connection.close()
    assert (thread_errors.get(timeout=20), len(listener.reasons)) == (LookupError, 1)
    assert "not foreseen" in listener.reasons[0]
    assert [thread.name for thread in threading.enumerate() if thread not in others] == []
