"""What hook and sidecar know of each other, over as many connections as it takes.

Everything a new connection must know is said in its greeting (see ``wire``), so that a sidecar that was restarted
knows as much as the one before it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from toprope.trainer_hooks.errors import SidecarUnavailableError, UsageError
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.channel import Channel
from toprope.trainer_hooks.link.slots import LentSlots, SlotLockedError

logger = logging.getLogger("toprope")
MAX_HEARD = 32
"""How many answers are kept that nobody has waited for yet: each new connection says the newest again."""
MAX_SOCKET_PATH_BYTES = 107
_SILENT_S = 10.0
"""After so long a person is told what is waited for."""
_JOB = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_F = TypeVar("_F", wire.Attempt, wire.Staged, wire.Go)


def usable_job(job: str) -> str:
    """Return the name of a job.

    Raises:
        UsageError: it is not usable.
    """
    if _JOB.fullmatch(job) is None or ".." in job:
        raise UsageError(
            f"job {job!r} is not usable: give 1 to 64 of a-z 0-9 . _ - that begin with a letter or digit, without '..'"
        )
    return job


def socket_path(job: str, given: str | os.PathLike[str] | None) -> Path:
    """Return where the sidecar of a job is to be found: as given, as ``CKPT_SOCKET`` says, or at the usual place.

    ``CKPT_SOCKET`` says nothing when it is empty, as a shell or a container leaves what it has no value for.

    Raises:
        UsageError: the path is empty, or too long for a socket.
    """
    path = os.environ.get("CKPT_SOCKET") or f"/run/toprope/{job}/sidecar.sock" if given is None else os.fspath(given)
    if not path:
        raise UsageError("socket='' is no path: give that of the sidecar's socket, or leave it out")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise UsageError(f"socket {path!r} is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one")
    return Path(path)


class Session:
    """One process's standing with its sidecar."""

    def __init__(self, path: Path, hello: wire.Hello) -> None:
        self.slots = LentSlots()
        self.welcome: wire.Welcome | None = None
        self.desired: wire.Desired | None = None
        self.trouble = "not connected yet"
        self.superseded = ""
        self.on_desired: Callable[[], None] = lambda: None
        """Called on the background thread after each DESIRED."""
        self._path = path
        self._hello = hello
        self._open: wire.Open | None = None
        self._join: wire.Join | None = None
        self._verdict: wire.Verdict | None = None
        self._size: wire.Size | None = None
        self._ask: wire.Ask | None = None
        self._heard: deque[wire.Attempt | wire.Staged | wire.Go | wire.Error] = deque(maxlen=MAX_HEARD)
        self._news = threading.Condition()
        self._channel = Channel(path, self)

    def start(self) -> None:
        """Begin to connect."""
        self._channel.start()

    def close(self, *, timeout_s: float) -> None:
        """Say BYE and end the connection."""
        self._channel.send(wire.Bye())
        self._channel.close(timeout_s=timeout_s)

    @property
    def connected(self) -> bool:
        """Whether a sidecar has welcomed this process and has not gone since."""
        return self._channel.connected and self.welcome is not None

    # What the training thread says.

    def open(self, request: wire.Open) -> None:
        """Ask for an attempt.

        Raises:
            wire.WireError: the request is too large to be sent.
        """
        wire.encode(request)
        self._open = request
        self._channel.send(request)

    def join(self, join: wire.Join) -> None:
        """Say which attempt this rank is in, and what it wants of its source.

        Raises:
            wire.WireError: the list is too long to be sent.
        """
        wire.encode(join)
        self._open, self._verdict, self._ask, self.superseded = None, None, None, ""
        self._join = join
        self._channel.send(join)

    def verdict(self, verdict: wire.Verdict) -> None:
        """Say what came of a phase."""
        self._verdict = verdict
        self._channel.send(verdict)

    def size(self, image_bytes: int) -> None:
        """Say how large an image is."""
        self._size = wire.Size(bytes=image_bytes)
        self._channel.send(self._size)

    def sealed(self, sealed: wire.Sealed) -> None:
        """Say that a slot is sealed."""
        self.slots.note_sealed(sealed)
        self._channel.send(sealed)

    def skipped(self, skipped: wire.Skipped) -> None:
        """Say that a due step was skipped."""
        self._channel.send(skipped)

    def ask(self, ask: wire.Ask) -> None:
        """Ask that a step go to each tier. May be called by a signal's handler: it takes no lock."""
        self._ask = ask
        self._channel.send(ask)

    # What the training thread waits for, before it trains.

    def wait_welcome(self, timeout_s: float) -> wire.Welcome:
        """Return the sidecar's answer to HELLO.

        Raises:
            SidecarUnavailableError: none came in time, or this process is not wanted.
        """
        now_s = time.monotonic()
        end, say_at = now_s + timeout_s, now_s + _SILENT_S
        with self._news:
            while self.welcome is None:
                refusal, now_s = self._refusal(), time.monotonic()
                if refusal is not None:
                    raise SidecarUnavailableError(f"sidecar at {self._path} refuses this trainer: {refusal}")
                if now_s >= say_at:
                    say_at = float("inf")
                    logger.warning("no sidecar answers yet (%s); asking for %.0f s more", self.trouble, end - now_s)
                if not self._news.wait(max(0.0, min(end, say_at) - now_s)) and time.monotonic() >= end:
                    raise SidecarUnavailableError(
                        f"no sidecar answered within {timeout_s:g} s ({self.trouble}); start one with "
                        "'ckpt sidecar', or name its socket in CKPT_SOCKET"
                    )
            return self.welcome

    def _refusal(self) -> str | None:
        return next((f.text for f in self._heard if isinstance(f, wire.Error) and f.code == "refused"), None)

    def wait_for(self, kind: type[_F], *, uid: str, phase: str, timeout_s: float) -> _F | wire.Go | wire.Error | None:
        """Return the next frame of that kind, or the GO or ERROR that comes in its stead; None when time is up.

        ``uid`` is that of the attempt, or for ATTEMPT the launch id; ``phase`` counts for GO only.
        """
        end = time.monotonic() + timeout_s
        with self._news:
            while True:
                while self._heard:
                    frame = self._heard.popleft()
                    if wire.answers(frame, kind, uid=uid, phase=phase):
                        return frame  # type: ignore[return-value]
                if not self._news.wait(max(0.0, end - time.monotonic())):
                    return None

    # What the background thread does.

    def greeting(self) -> Sequence[wire.FromHook]:
        """Return what a new connection is told first."""
        said = (self._hello, self._open, self._join, self._verdict, self._size, *self.slots.unconfirmed(), self._ask)
        return [frame for frame in said if frame is not None]

    def heard(self, frame: wire.FromSidecar) -> None:
        """Take a frame."""
        match frame:
            case wire.Slot():
                self._lend(frame)
            case wire.Desired():
                self.desired = frame
                self.on_desired()
            case wire.Welcome():
                self.welcome = frame
            case wire.Error(code="superseded"):
                self.superseded = frame.text
                self._heard.append(frame)
            case _:
                self._heard.append(frame)
        with self._news:
            self._news.notify_all()

    def _lend(self, slot: wire.Slot) -> None:
        try:
            self.slots.lend(slot)
        except (SlotLockedError, OSError) as error:
            logger.warning("a slot that the sidecar lent can't be used: %s", error)

    def lost(self, reason: str) -> None:
        """Learn that there is no connection."""
        self.slots.forget()
        self.trouble = reason
        self.welcome = None
        with self._news:
            self._news.notify_all()
