"""What a coordinator is told at its start, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toprope.coordinator.wire import Cadence
from toprope.store.errors import UsageError
from toprope.store.names import checked_id

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
TOKEN_CHARS_MIN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address(text: str, *, what: str) -> Address:
    """Return the address in ``HOST:PORT``.

    Raises:
        UsageError: it is not one.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004 - the largest port
        raise UsageError(f"{what} {text!r} is not HOST:PORT with a port of 0 to 65535")
    return Address(host=host.strip("[]"), port=int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A coordinator's configuration. ``broker`` None: the documents go by HTTP alone.

    ``embedded_broker``: the address at which to run a broker of its own.
    """

    job: str
    store: str
    listen: Address
    broker: Address | None
    embedded_broker: Address | None
    cadence: Cadence
    token: str
    ready_file: Path | None
    verdict_deadline_s: float = 300.0
    heartbeat_s: float = 2.0
    tick_s: float = 0.5
    probe_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        """Check what can be checked without touching anything.

        Raises:
            UsageError: a name, an address or the cadence is not usable.
        """
        checked_id(self.job, what="job")
        check_cadence(self.cadence)
        if self.broker is not None and self.embedded_broker is not None:
            raise UsageError("give --broker or --embedded-broker, not both")
        for where, what in ((self.listen, "--listen"), (self.embedded_broker, "--broker-listen")):
            if where is not None and where.host not in LOOPBACK and not self.token:
                raise UsageError(
                    f"{what} {where} can be reached from other machines: give --token-file with a secret, "
                    "or listen on 127.0.0.1"
                )


def check_cadence(cadence: Cadence) -> None:
    """Check that the tiers' intervals nest.

    Raises:
        UsageError: one is below 1, or not a power of two times the one before it.
    """
    before = cadence.every
    if before < 1:
        raise UsageError(f"--every {before} is not usable: give a number of steps of at least 1")
    for name, every in (("--local-every", cadence.local_every), ("--object-every", cadence.object_every)):
        times, rest = divmod(every, before)
        if rest or times < 1 or times & (times - 1):
            raise UsageError(
                f"{name} {every} is not {before} times a power of two (1, 2, 4, ...), as it must be to nest"
            )
        before = every


def read_token(path: Path | None) -> str:
    """Return the secret in a file, empty when there is none.

    Raises:
        UsageError: the file can't be read, or holds too little to be a secret.
    """
    if path is None:
        return ""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token file {path} can't be read: {error}") from error
    if len(token) < TOKEN_CHARS_MIN:
        raise UsageError(
            f"token file {path} holds {len(token)} characters: put a secret of at least {TOKEN_CHARS_MIN} into it"
        )
    return token
