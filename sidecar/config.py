"""What a sidecar is told at its start, parsed and checked once."""

from __future__ import annotations

import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from toprope.coordinator.settings import Address, check_listen
from toprope.sidecar.packing import CODECS, Codec
from toprope.sidecar.values import RESTORE_PATIENCE_S
from toprope.store.errors import UsageError
from toprope.store.names import checked_id

MAX_SOCKET_PATH_BYTES = 107
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """The settings of one sidecar."""

    job: str
    node: str
    coordinators: tuple[str, ...]
    broker: Address | None
    memory_dir: Path
    local_dir: Path
    store: str
    socket: Path
    listen: Address
    domain: dict[str, str]
    memory_bytes: int | None = None
    state_size: int | None = None
    ranks: int = 1
    copies: int = 1
    token: str = ""
    ready_file: Path | None = None
    grace_s: float = 0.0
    """How long it goes on serving when told to end, for what is not safe yet."""
    stall_timeout_s: float = 5.0
    """How long a transfer between nodes may stand still."""
    use_deadline_s: float = 30.0
    """How long a peer may use a copy, beside what its size takes."""
    restore_patience_s: float = RESTORE_PATIENCE_S
    """How long the sources of a restore are tried again."""
    codec: Codec = "auto"
    peer_bytes_per_s: float | None = None
    """How fast copies are received from other nodes at most."""
    scrub_bytes_per_s: float = 50e6
    nice: int = 5
    cpus: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check what can be checked without a look at the machine.

        Raises:
            UsageError: a setting is wrong; the message says which and what to give.
        """
        checked_id(self.job, what="job")
        checked_id(self.node, what="node")
        _check_socket(self.socket)
        check_listen(self.listen, what="--listen", token=self.token)
        self._check_times()
        if self.codec not in CODECS:
            raise UsageError(f"--codec {self.codec}: give one of {', '.join(CODECS)}")
        for url in self.coordinators:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"coordinator {url!r} is not a URL: give http://HOST:PORT")
        for key, value in self.domain.items():
            if _LABEL.fullmatch(key) is None or _LABEL.fullmatch(value) is None:
                raise UsageError(f"domain {key}={value} is not usable: give labels such as rack=r1")

    def _check_times(self) -> None:
        """Check that each time limit leaves those within it the time to take effect."""
        limits = (
            ("--stall-timeout", self.stall_timeout_s, "a transfer that stands still is given up for another source"),
            ("--use-deadline", self.use_deadline_s, "a peer that is slow is given up"),
            ("--restore-patience", self.restore_patience_s, "what can't be had is told to all ranks"),
        )
        before, shorter = "0", 0.0
        for name, limit_s, what in limits:
            if not shorter < limit_s < math.inf:
                raise UsageError(f"{name} {limit_s:g} is not usable: give more than {before}, or {what} too early")
            before, shorter = f"the {limit_s:g} seconds of {name}", limit_s
        if self.restore_patience_s > RESTORE_PATIENCE_S:
            raise UsageError(
                f"--restore-patience {self.restore_patience_s:g} is not usable: give at most {RESTORE_PATIENCE_S:g} "
                "seconds, or ranks give up before they can be told what was tried"
            )

    @property
    def job_memory(self) -> Path:
        """Return the directory of this job's memory files."""
        return self.memory_dir / self.job

    @property
    def job_local(self) -> Path:
        """Return the directory of this job's local tier."""
        return self.local_dir / self.job


def _check_socket(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"socket path {path} has {length} bytes; the system allows {MAX_SOCKET_PATH_BYTES}. "
            "Give a shorter one with --socket"
        )


def parse_domain(labels: list[str], *, node: str) -> dict[str, str]:
    """Return ``k=v`` labels as a dict; without any, the node is its own failure domain.

    Raises:
        UsageError: a label is not of that form.
    """
    pairs = [label.partition("=") for label in labels]
    for label, (_, equals, _) in zip(labels, pairs, strict=True):
        if not equals:
            raise UsageError(f"domain {label!r} is not usable: give key=value, such as rack=r1")
    return {key: value for key, _, value in pairs} or {"node": node}


def default_node() -> str:
    """Return this host's name as a node id."""
    return socket.gethostname().lower()
