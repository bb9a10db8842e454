"""A trainer without torch: speaks the real frames, locks and fills real slots with valid images, step by step.

It lives in the test's process, whose record locks a sidecar in another process sees; ``die`` drops them, as the kernel
does for a process that is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from tests.support.coordinator_stub import JOB_UID, CoordinatorStub

from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotState, write_page

PATIENCE_S = 20.0
_BLOCK_BYTES = 1_000_003
F = TypeVar("F", bound=wire.FromSidecar)


def image(  # noqa: PLR0913 - what an image says of itself
    *, attempt: int, attempt_uid: str, step: int, rank: int, world: int, payload: int, job_uid: str, frozen: bytes = b""
) -> bytes:
    """Return a valid shard image whose bytes depend on all of these; ``frozen`` is a tensor of its own if it is any."""
    seed = f"{attempt_uid}/{step}/{rank}".encode()
    block = hashlib.shake_128(seed).digest(min(payload, _BLOCK_BYTES))  # to make more takes long, and stops all threads
    data = (block * -(-payload // max(1, len(block))))[:payload]
    document = json.dumps({"step": f"{step:09d}"}).encode()
    header: dict[str, dict[str, object]] = {
        "__metadata__": {
            "format": "1",
            "job_uid": job_uid,
            "attempt": str(attempt),
            "attempt_uid": attempt_uid,
            "step": str(step),
            "rank": str(rank),
            "world": str(world),
            "document": "__document__",
        },
        "model.weight": {"dtype": "F32", "shape": [payload // 4], "data_offsets": [0, payload]},
    }
    at = payload
    for name, tensor in (("model.frozen", frozen), ("__document__", document)):
        if tensor:
            header[name] = {"dtype": "U8", "shape": [len(tensor)], "data_offsets": [at, at + len(tensor)]}
            at += len(tensor)
    head = json.dumps(header).encode()
    head = head.ljust((len(head) + 1023) // 1024 * 1024)
    return struct.pack("<Q", len(head)) + head + data + frozen + document


class ScriptedTrainer:
    """One rank. Each method does one thing that a hook does."""

    def __init__(self, path: Path, *, rank: int = 0, world: int = 1, launch_id: str = "aa") -> None:
        self.path, self.rank, self.world, self.launch_id = path, rank, world, launch_id
        self.attempt, self.attempt_uid = 0, ""
        self.payload, self.job_uid = 4096, JOB_UID
        self.socket = socket.socket(socket.AF_UNIX)
        self.locks: dict[str, int] = {}
        self.granted: list[wire.Slot] = []
        self.frames: list[wire.Frame] = []
        self.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def connect(self) -> None:
        """Connect and say hello."""
        self.granted.clear()
        self.socket.close()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(self.path))
        hello = wire.Hello(job="job", launch_id=self.launch_id, rank=self.rank, world=self.world, pid=os.getpid())
        self.send(hello)
        self.welcome = self.expect(wire.Welcome)

    def send(self, frame: wire.FromHook) -> None:
        """Send a frame."""
        self.socket.sendall(wire.encode(frame))

    def receive(self) -> wire.Frame:
        """Return the next frame; slots that are granted are put aside as well."""
        body = self._exactly(wire.body_length(self._exactly(4)))
        frame = wire.decode(body)
        self.frames.append(frame)
        if isinstance(frame, wire.Slot):
            self.granted.append(frame)
        return frame

    def _exactly(self, length: int) -> bytes:
        body = b""
        while len(body) < length:
            more = self.socket.recv(length - len(body))
            if not more:
                raise ConnectionResetError("the sidecar closed the connection")
            body += more
        return body

    def expect(self, kind: type[F], good: Callable[[F], bool] = lambda _: True) -> F:
        """Return the next frame of a kind that is as wanted; pass over others."""
        while True:
            frame = self.receive()
            if isinstance(frame, kind) and good(frame):
                return frame

    def join(self, number: int, uid: str, *wants: wire.Want, ask: int = 1) -> wire.Staged:
        """Join an attempt, with the wish for its own shard if there are no others; return what was staged."""
        self.attempt, self.attempt_uid = number, uid
        whole = wire.Want(rank=self.rank, tensors=(wire.ALL,))
        self.send(wire.Join(attempt_uid=uid, ask=ask, wants=wants or (whole,)))
        return self.expect(wire.Staged, lambda staged: staged.ask == ask)

    def begin(self, stub: CoordinatorStub, number: int = 1, nodes: dict[int, str] | None = None) -> None:
        """Go through a fresh start of an attempt of which this is the only rank that a test follows."""
        view = stub.attempt(number, self.launch_id, nodes or {self.rank: "a"})
        self.join(number, view.uid)
        self.apply(stub)

    def apply(self, stub: CoordinatorStub) -> None:
        """Say ok to both phases, and let the stub say that all ranks do."""
        for phase in ("staged", "applied"):
            self.send(wire.Verdict(attempt_uid=self.attempt_uid, phase=phase, ok=True))
            stub.phase(phase)
            assert self.expect(wire.Go, lambda go, phase=phase: go.phase == phase).ok  # type: ignore[misc]

    def announce(self) -> None:
        """Tell the size, as at the first end_step."""
        self.send(wire.Size(bytes=len(self.image(0))))

    def image(self, step: int) -> bytes:
        """Return the image of this rank after a step."""
        return image(
            attempt=self.attempt,
            attempt_uid=self.attempt_uid,
            step=step,
            rank=self.rank,
            world=self.world,
            payload=self.payload,
            job_uid=self.job_uid,
        )

    def grant(self) -> wire.Slot:
        """Return a slot that was granted, and lock it if this process has not done so."""
        while not self.granted:
            self.receive()
        grant = self.granted.pop(0)
        if grant.lock_path not in self.locks:
            descriptor = os.open(grant.lock_path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locks[grant.lock_path] = descriptor
        return grant

    def write(self, grant: wire.Slot, step: int) -> int:
        """Begin a snapshot: the page says WRITING, the bytes are copied."""
        body = self.image(step)
        self.page(grant, step, SlotState.WRITING)
        with Path(grant.path).open("r+b") as file:
            file.write(body)
        return len(body)

    def page(self, grant: wire.Slot, step: int, state: SlotState, size: int = 0) -> None:
        """Write the control page."""
        page = Page(
            state=state,
            seq=grant.seq,
            launch_id=self.launch_id,
            rank=self.rank,
            world=self.world,
            attempt=self.attempt,
            attempt_uid=self.attempt_uid,
            step=step,
            bytes=size,
        )
        write_page(Path(grant.page_path), page)

    def seal(self, grant: wire.Slot, step: int, size: int) -> None:
        """End a snapshot: page and frame say SEALED."""
        self.page(grant, step, SlotState.SEALED, size)
        self.tell_sealed(grant, step, size)

    def tell_sealed(self, grant: wire.Slot, step: int, size: int) -> None:
        """Send SEALED."""
        self.send(wire.Sealed(slot=grant.slot, seq=grant.seq, attempt_uid=self.attempt_uid, step=step, bytes=size))

    def snapshot(self, step: int) -> wire.Slot:
        """Take a whole snapshot."""
        grant = self.grant()
        self.seal(grant, step, self.write(grant, step))
        return grant

    def die(self) -> None:
        """Lose connection and locks, as a killed process does."""
        self.socket.close()
        for descriptor in self.locks.values():
            os.close(descriptor)
        self.locks.clear()
