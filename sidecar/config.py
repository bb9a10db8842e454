"""What a sidecar is told at its start, parsed and checked once."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from toprope.store.errors import UsageError
from toprope.store.names import checked_id

MAX_SOCKET_PATH_BYTES = 107
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_ANY = {"0.0.0.0", "::"}  # noqa: S104 - they are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


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
    token: str | None = None
    ready_file: Path | None = None
    stall_timeout_s: float = 5.0
    use_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        """Check what can be checked without a look at the machine.

        Raises:
            UsageError: a setting is wrong; the message says which and what to give.
        """
        checked_id(self.job, what="job")
        checked_id(self.node, what="node")
        _check_socket(self.socket)
        _check_listen(self.listen, token=self.token)
        for url in self.coordinators:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"coordinator {url!r} is not a URL: give http://HOST:PORT")
        for key, value in self.domain.items():
            if _LABEL.fullmatch(key) is None or _LABEL.fullmatch(value) is None:
                raise UsageError(f"domain {key}={value} is not usable: give labels such as rack=r1")

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


def _check_listen(listen: Address, *, token: str | None) -> None:
    if listen.host not in _LOOPBACK and token is None:
        raise UsageError(f"--listen {listen.host} is reachable by others: give --token-file as well")
    if listen.host in _ANY:
        raise UsageError(f"--listen {listen} names no host: give the address at which other nodes reach this one")


def parse_address(text: str, *, what: str) -> Address:
    """Return HOST:PORT as an address.

    Raises:
        UsageError: it is not of that form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004 - the highest port
        raise UsageError(f"{what} {text!r} is not usable: give HOST:PORT")
    return Address(host=host.strip("[]"), port=int(port))


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


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        UsageError: it can't be read, or holds too little to be a secret.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file {path} can't be read: {error}") from error
    if len(token) < 16:  # noqa: PLR2004 - shorter than 16 characters is guessable
        raise UsageError(f"token file {path} holds {len(token)} characters; give at least 16 random ones")
    return token
