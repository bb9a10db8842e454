"""A process that has imported what its children need, and forks them from there: a start costs milliseconds.

``python -m toprope.chaos.live.forkserver [MODULE…]`` imports the modules, then reads one JSON line for each order,
``{"target": "MODULE:FUNCTION", "arguments": […], "env": {…}, "log": PATH}``; the child calls the function with the
arguments. It answers ``{"pid": N}``, and when a child ends ``{"pid": N, "status": S}``, negative for a signal. It ends
when its input does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import sys
import traceback
from typing import Any

from toprope.trainer_hooks.torchrun.parent import die_with_parent


def main() -> None:
    """Serve until standard input ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    _answer({"ready": os.getpid()})
    orders = os.fdopen(0, "rb", buffering=0, closefd=False)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake_read:
                    os.read(wake_read, 4096)
                    _tell_ended()
                elif not _serve(orders.readline()):
                    return


def _serve(line: bytes) -> bool:
    if not line:
        return False
    order = json.loads(line)
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(order, parent=me)
    _answer({"pid": pid})
    return True


def _become(order: dict[str, Any], *, parent: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(parent)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(order["env"])
    status = 1
    try:
        module, function = order["target"].split(":")
        getattr(importlib.import_module(module), function)(order["arguments"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tell_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _answer({"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _answer(answer: dict[str, int]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
