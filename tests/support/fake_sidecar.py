"""A sidecar and a coordinator in one thread: real frames on a real Unix socket, real slot files, no hashing service.

It remembers each sealed image as bytes, so that a test can restore from it, and lends slots again at once unless
``lend_again`` is off.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import xxhash

from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotPaths, SlotState, read_page, slot_paths, write_page

JOB_UID = "0b" * 16
NODE = "n1"
BOOT_ID = "b0" * 16


@dataclass(slots=True)
class Peer:
    """One connection of a trainer."""

    connection: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    hello: wire.Hello | None = None


@dataclass(slots=True)
class Round:
    """An attempt that the fake has opened, and the verdicts on it."""

    attempt: wire.Attempt
    world: int
    ok: dict[str, set[int]] = field(default_factory=dict)
    failed: str = ""
    misfit: bool = False


class FakeSidecar:
    """Serves trainers until it is killed; ``with`` it."""

    def __init__(self, directory: Path, *, every: int = 1, slots: int = 3) -> None:
        self.directory = directory
        self.socket_path = directory / "s.sock"
        self.every = every
        self.slot_count = slots
        self.lend = True
        """Whether slots are lent as soon as SIZE is heard; else by ``lend_slots``."""
        self.lend_again = True
        self.refuse_open: Callable[[wire.Open], wire.Error | None] = lambda _: None
        self.spoil_staged: Callable[[Round], str] = lambda _: ""
        self.images: dict[tuple[int, int], bytes] = {}
        self.worlds: dict[int, int] = {}
        """By how many ranks each step was saved."""
        self.heard: list[wire.FromHook] = []
        self.rounds: list[Round] = []
        self.states: list[tuple[int, SlotState]] = []
        self._struck: set[int] = set()
        self._seq = 0
        self._sizes: dict[int, int] = {}
        self._lent: dict[tuple[int, int], int] = {}
        self._peers: list[Peer] = []
        self._mutex = threading.RLock()
        self._news = threading.Condition(self._mutex)
        self._stop = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Listen; after ``kill``, as a restarted sidecar that has kept its slots."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        self._stop = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket_path))
        self._listener.listen()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Go away without a word."""
        if self._thread is None:
            return
        self._stop = True
        os.write(self._wake_write, b"\0")
        self._thread.join()
        self._thread = None
        with self._mutex:
            for peer in self._peers:
                peer.connection.close()
            self._peers.clear()
            self._lent.clear()
        self._listener.close()
        self.socket_path.unlink(missing_ok=True)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def wait(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until something that the fake learns makes the condition true."""
        with self._news:
            assert self._news.wait_for(condition, timeout_s), f"not within {timeout_s} s; heard {self.heard[-5:]}"

    def kinds(self, kind: type[wire.FromHook]) -> list[wire.FromHook]:
        """Return the frames of one kind that were heard."""
        with self._mutex:
            return [frame for frame in self.heard if isinstance(frame, kind)]

    def wait_image(self, step: int, rank: int = 0) -> bytes:
        """Return the image of a step once it was sealed."""
        self.wait(lambda: (step, rank) in self.images)
        return self.images[step, rank]

    def wait_lent(self, count: int, rank: int = 0) -> None:
        """Wait until that many slots are lent to a rank."""
        self.wait(lambda: sum(1 for owner, _ in self._lent if owner == rank) >= count)

    def lend_slots(self) -> None:
        """Lend slots to all trainers, now that each has said its size."""
        self.wait(lambda: bool(self._peers) and all(self._rank(peer) in self._sizes for peer in self._peers))
        with self._mutex:
            self.lend = True
            for peer in self._peers:
                self._make_slots(peer, self._sizes[self._rank(peer)])

    def say_desired(
        self, *, attempt: int, uid: str, schedule: wire.Schedule, protected: int = 0, ready: int = 0, extra: int = 0
    ) -> None:
        """Send DESIRED to everyone."""
        frame = wire.Desired(
            attempt=attempt,
            attempt_uid=uid,
            schedule=schedule,
            protected_step=protected,
            ready_step=ready,
            extra_step=extra,
        )
        with self._mutex:
            for peer in self._peers:
                self._send(peer, frame)

    def slot(self, rank: int, number: int) -> SlotPaths:
        """Return the files of a slot."""
        return slot_paths(self.directory / f"rank-{rank}", number)

    # The thread.

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while not self._stop:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        connection, _address = self._listener.accept()
                        peer = Peer(connection)
                        with self._mutex:
                            self._peers.append(peer)
                        selector.register(connection, selectors.EVENT_READ, peer)
                    elif isinstance(key.data, Peer):
                        self._read(selector, key.data)

    def _read(self, selector: selectors.BaseSelector, peer: Peer) -> None:
        try:
            received = peer.connection.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        if not received:
            selector.unregister(peer.connection)
            with self._mutex:
                peer.connection.close()
                self._peers.remove(peer)
            return
        peer.buffer += received
        while len(peer.buffer) >= 4:
            end = 4 + struct.unpack("<I", peer.buffer[:4])[0]
            if len(peer.buffer) < end:
                return
            frame = wire.decode(bytes(peer.buffer[4:end]))
            del peer.buffer[:end]
            with self._news:
                self._answer(peer, frame)  # type: ignore[arg-type]
                self._news.notify_all()

    def _send(self, peer: Peer, frame: wire.FromSidecar) -> None:
        with contextlib.suppress(OSError):  # the trainer has gone
            peer.connection.sendall(wire.encode(frame))

    def _answer(self, peer: Peer, frame: wire.FromHook) -> None:
        self.heard.append(frame)
        match frame:
            case wire.Hello():
                peer.hello = frame
                self._send(peer, wire.Welcome(node=NODE, boot_id=BOOT_ID))
            case wire.Open():
                self._open(peer, frame)
            case wire.Join():
                self._stage(peer, frame)
            case wire.Verdict():
                self._verdict(self._rank(peer), frame)
            case wire.Size():
                self._sizes[self._rank(peer)] = frame.bytes
                if self.lend:
                    self._make_slots(peer, frame.bytes)
            case wire.Sealed():
                self._take(peer, frame)
            case _:
                pass

    def _rank(self, peer: Peer) -> int:
        assert peer.hello is not None
        return peer.hello.rank

    def _open(self, peer: Peer, frame: wire.Open) -> None:
        refusal = self.refuse_open(frame)
        if refusal is not None:
            self._send(peer, refusal)
            return
        for known in self.rounds:
            if (known.attempt.launch_id, known.attempt.round) == (frame.launch_id, frame.round):
                self._send(peer, known.attempt)
                return
        if self.rounds and self.rounds[-1].failed:
            self._struck.add(self.rounds[-1].attempt.from_step)
        step = self._newest()
        attempt = wire.Attempt(
            job_uid=JOB_UID,
            number=len(self.rounds) + 1,
            uid=os.urandom(16).hex(),
            launch_id=frame.launch_id,
            round=frame.round,
            source="held" if step else "fresh",
            source_world=self.worlds[step] if step else 0,
            from_step=step,
            schedule=wire.Schedule(from_step=step, every=self.every),
            why="test",
        )
        self.rounds.append(Round(attempt, len(frame.world)))
        self._send(peer, attempt)

    def _newest(self) -> int:
        steps = {step for step, _ in self.images} - self._struck
        whole = [step for step in steps if all((step, rank) in self.images for rank in range(self.worlds[step]))]
        return max(whole, default=0)

    def _round(self, uid: str) -> Round:
        return next(known for known in self.rounds if known.attempt.uid == uid)

    def _stage(self, peer: Peer, join: wire.Join) -> None:
        uid = join.attempt_uid
        known = self._round(uid)
        known.failed = known.failed or self.spoil_staged(known)
        if known.failed:
            self._send(peer, wire.Go(attempt_uid=uid, phase="staged", ok=False, reason=known.failed))
            return
        shards = []
        step = known.attempt.from_step
        for rank in [want.rank for want in join.wants if want.rank < known.attempt.source_world]:
            image = self.images[step, rank]
            path = self.directory / f"staged-{uid}-{rank}"
            if not path.exists():  # another rank may be reading it
                path.write_bytes(image)
            shards.append(
                wire.StagedShard(
                    rank=rank,
                    path=str(path),
                    bytes=len(image),
                    digest=xxhash.xxh3_128(image).hexdigest(),
                    tier="memory",
                    node=NODE,
                )
            )
        self._send(peer, wire.Staged(attempt_uid=uid, ask=join.ask, shards=tuple(shards)))

    def _verdict(self, rank: int, frame: wire.Verdict) -> None:
        known = self._round(frame.attempt_uid)
        if not frame.ok:
            known.failed, known.misfit = frame.reason, frame.misfit
            self._tell(wire.Go(attempt_uid=frame.attempt_uid, phase=frame.phase, ok=False, reason=frame.reason))
            return
        said = known.ok.setdefault(frame.phase, set())
        said.add(rank)
        if len(said) == known.world:
            self._tell(wire.Go(attempt_uid=frame.attempt_uid, phase=frame.phase, ok=True))

    def _tell(self, frame: wire.FromSidecar) -> None:
        for peer in self._peers:
            self._send(peer, frame)

    def _make_slots(self, peer: Peer, size: int) -> None:
        rank = self._rank(peer)
        for number in range(self.slot_count):
            paths = self.slot(rank, number)
            paths.data.parent.mkdir(parents=True, exist_ok=True)
            paths.lock.touch(mode=0o600)
            descriptor = os.open(paths.data, os.O_RDWR | os.O_CREAT, 0o600)
            os.posix_fallocate(descriptor, 0, size)
            os.close(descriptor)
            if read_page(paths.page).state is SlotState.EMPTY if paths.page.exists() else True:
                self._grant(peer, number)

    def _grant(self, peer: Peer, number: int) -> None:
        rank = self._rank(peer)
        self._seq += 1
        self._lent[rank, number] = self._seq
        paths = self.slot(rank, number)
        write_page(paths.page, Page(seq=self._seq, rank=rank))
        self._send(
            peer,
            wire.Slot(
                slot=number,
                seq=self._seq,
                path=str(paths.data),
                page_path=str(paths.page),
                lock_path=str(paths.lock),
                bytes=self._sizes[rank],
            ),
        )

    def _take(self, peer: Peer, frame: wire.Sealed) -> None:
        rank = self._rank(peer)
        paths = self.slot(rank, frame.slot)
        page = read_page(paths.page) if paths.page.exists() else Page()
        self.states.append((frame.step, page.state))
        if (page.seq, page.state) != (frame.seq, SlotState.SEALED):
            return
        with paths.data.open("rb") as file:
            image = file.read(frame.bytes)
        write_page(paths.page, replace(page, state=SlotState.HASHED, digest=xxhash.xxh3_128(image).hexdigest()))
        self.images[frame.step, rank] = image
        self.worlds[frame.step] = page.world
        self._lent.pop((rank, frame.slot), None)
        if self.lend_again:
            write_page(paths.page, replace(page, state=SlotState.EMPTY))
            self._grant(peer, frame.slot)

    def erase(self) -> None:
        """Remove all files, as the loss of the node would."""
        shutil.rmtree(self.directory)
