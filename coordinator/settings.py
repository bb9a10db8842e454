"""What both services are told at their start: addresses, who may reach them, who stands around their ports. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from toprope.store.errors import UsageError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_ANY = frozenset({"0.0.0.0", "::"})  # noqa: S104 - they are refused
_PORT_MAX = 65535
_P = TypeVar("_P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str, *, what: str) -> Address:
    """Return the address in ``HOST:PORT``.

    Raises:
        UsageError: it is not one.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > _PORT_MAX:
        raise UsageError(f"{what} {text!r} is not usable: give HOST:PORT with a port of 0 to {_PORT_MAX}")
    return Address(host=host.strip("[]"), port=int(port))


def check_reach(listen: Address, *, what: str, token: str) -> None:
    """Check that a service which others can reach asks them for a token.

    Raises:
        UsageError: it would not.
    """
    if listen.host not in LOOPBACK and not token:
        raise UsageError(
            f"{what} {listen} can be reached from other machines: give --token-file as well, or listen on 127.0.0.1"
        )


def check_listen(listen: Address, *, what: str, token: str) -> None:
    """Check an address that is told to others: it names a host, and whoever reaches it is asked for a token.

    Raises:
        UsageError: it does not.
    """
    check_reach(listen, what=what, token=token)
    if listen.host in _ANY:
        raise UsageError(f"{what} {listen} names no host: give the address at which other machines reach this one")


class Wrap(Protocol):
    """Given a port's name and a port, returns what to use in its place. For those who break things."""

    def __call__(self, name: str, port: _P, /) -> _P:
        """Return the port, or one that does more around each call of it."""
        ...


def unwrapped(name: str, port: _P, /) -> _P:
    """Return the port as it is: what ``Wrap`` is when nothing is to be broken."""
    assert name
    return port
