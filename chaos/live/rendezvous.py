"""A rendezvous store in a process of its own, so that the loss of any one agent does not take it along."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main() -> None:
    """Serve a TCPStore on a free loopback port, written to the ready file named by the one argument, until SIGTERM."""
    ready = Path(sys.argv[1])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    temporary = ready.with_suffix(".tmp")
    temporary.write_text(json.dumps({"port": store.port, "pid": os.getpid()}))
    temporary.rename(ready)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
