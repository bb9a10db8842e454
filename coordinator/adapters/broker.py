"""A broker for one machine, in a child process: ``python -m toprope.coordinator.adapters.broker HOST:PORT`` runs one.

It is iotcore's, with messages as long as our documents may be. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

from toprope.coordinator.settings import Address, parse_address
from toprope.coordinator.wire import MAX_DESIRED_BYTES
from toprope.store.errors import UsageError

_ENVELOPE_BYTES = 64 * 1024


@contextlib.contextmanager
def embedded(listen: Address) -> Iterator[Address]:
    """Run a broker while the context lasts; gives the address it listens on. Blocks until it does.

    Raises:
        UsageError: iotcore is not installed, or the address can't be listened on.
    """
    try:
        from iotcore import Broker  # noqa: PLC0415 - needed only where a broker is embedded
    except ModuleNotFoundError as error:
        raise UsageError("the embedded broker needs the package 'iotcore': install toprope[service]") from error
    chosen = listen if listen.port else Address(host=listen.host, port=free_port(listen.host))
    broker = Broker(port=chosen.port, listen=chosen.host, max_payload_size=MAX_DESIRED_BYTES + _ENVELOPE_BYTES)
    try:
        broker.start()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"the embedded broker can't listen on {chosen}: {error}") from error
    try:
        yield chosen
    finally:
        broker.stop()


def free_port(host: str) -> int:
    """Return a port that nobody listens on, and that nobody is given who asks for any, as long as this process lives.

    A socket that does not listen stays bound to it. That keeps out all but servers that set SO_REUSEADDR, as servers
    do; without it, one of the many connections of a busy machine could take the port before its server does.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    port = int(holder.getsockname()[1])
    holder.detach()  # it stays open until this process ends
    return port


def main() -> None:
    """Run a broker at the address given as the only argument, until told to end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), embedded(parse_address(sys.argv[1], what="address")):
        signal.pause()


if __name__ == "__main__":
    main()
