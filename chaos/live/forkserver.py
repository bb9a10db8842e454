"""A process that has imported torch and the example, and forks ranks from there: a start costs milliseconds.

It reads one JSON line for each order, ``{"arguments": […], "env": {…}, "log": PATH}``, and answers ``{"pid": N}``; when
a rank ends it writes ``{"pid": N, "status": S}``, negative for a signal. It ends when its input does.
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
from pathlib import Path
from typing import Any

WARM = ("torch.distributed", "torch.nn.parallel")


def main() -> None:
    """Serve until standard input ends. The one argument is the directory of the example."""
    sys.path.insert(0, sys.argv[1])
    train = importlib.import_module("train")
    for name in WARM:
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
                elif not _serve(train, orders.readline()):
                    return


def _serve(train: Any, line: bytes) -> bool:  # noqa: ANN401 - the example's module
    if not line:
        return False
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        _become_rank(train, order)
    _answer({"pid": pid})
    return True


def _become_rank(train: Any, order: dict[str, Any]) -> None:  # noqa: ANN401 - the example's module
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(order["env"])
    status = 1
    try:
        train.main(order["arguments"])
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
    os.write(sys.__stdout__.fileno() if sys.__stdout__ is not None else 1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    main()
