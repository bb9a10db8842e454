"""``ckpt`` where to look up ``broker.slow`` takes twenty seconds and then fails: a name server that hangs.

``slow_names.py WORDS``
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

from toprope.__main__ import main

NAME = "broker.slow"
LOOKUP_S = 20.0


def hang(real: Any) -> Any:  # noqa: ANN401 - a system call of many shapes
    def getaddrinfo(host: Any, *args: Any, **more: Any) -> Any:  # noqa: ANN401 - as it is
        if host == NAME:
            time.sleep(LOOKUP_S)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real(host, *args, **more)

    return getaddrinfo


if __name__ == "__main__":
    socket.getaddrinfo = hang(socket.getaddrinfo)
    sys.exit(main(sys.argv[1:]))
