"""A process that has torch loaded and becomes a rank by a fork: a start costs milliseconds, not the seconds of imports.

``python -u -m toprope.trainer_hooks.torchrun.warm PARENT SOCKET_FD MODULE...`` imports the modules, once for all ranks
of a node and all their restarts, and then forks one child for each order. An order comes over a connection: the
command, the environment, the directory and three open files. The answer is a line with the child's process id and, once
it has ended, one with its status. A child dies with the connection, and with this process, which dies with its parent.

A fork copies one thread, so nothing is forked while there is another; and what is read at import can't be changed
afterwards. In both cases the answer is a reason, and the rank is started the cold way.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from toprope.trainer_hooks.torchrun.parent import die_with_parent

MAX_ORDER_BYTES = 8 * 1024 * 1024
READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHON", "ATEN_", "TORCH_LOGS", "TORCH_CPP_")
"""Variables whose names begin so have had their say once the modules are imported."""
_ORDER_S = 10.0
_LENGTH = struct.Struct("!I")
_PEER = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a child is to become: ``command`` is ``PYTHON -u [-m] SCRIPT ARGUMENTS``."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    directory: str

    def encoded(self) -> bytes:
        """Return it as it is sent, its length first."""
        body = json.dumps({"command": self.command, "env": dict(self.env), "directory": self.directory}).encode()
        return _LENGTH.pack(len(body)) + body


class WarmChild:
    """A rank that was forked for us, as ``subprocess.Popen`` would show it. SIGIO comes when it has ended."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        import fcntl  # noqa: PLC0415 - the keeper of a cold rank needs none

        self.pid = pid
        self._connection = connection
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)
        self._status: int | None = None
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)

    def poll(self) -> int | None:
        """Return its status once it has ended; if nobody can tell it, that of one that was killed."""
        if self._status is None:
            with contextlib.suppress(BlockingIOError):
                answer = _line(self._connection)
                self._status = int(answer) if answer else -signal.SIGKILL
        return self._status

    def send_signal(self, number: int) -> None:
        """Signal it, if it still is."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class ColdError(Exception):
    """There is no warm process, or it can't become this rank; the message says why."""


def forked(name: str, order: Order) -> WarmChild:
    """Have the warm process at the abstract socket ``name`` become a rank, with our open files 0 to 2.

    Raises:
        ColdError: it can't.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
        body = order.encoded()
        sent = socket.send_fds(connection, [body], [0, 1, 2])
        if rest := body[sent:]:  # even nothing can't be sent to who has answered already
            connection.sendall(rest)
        answer = _line(connection)
    except OSError as error:
        connection.close()
        raise ColdError(f"the warm process does not answer ({error.strerror})") from error
    if not answer.isdecimal():
        connection.close()
        raise ColdError(answer or "the warm process ended")
    return WarmChild(connection, int(answer))


def _line(connection: socket.socket) -> str:
    """Return the next line, which is short and comes at once."""
    line = b""
    while not line.endswith(b"\n"):
        letter = connection.recv(1)
        if not letter:
            return ""
        line += letter
    return line.decode().strip()


# --- the warm process ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Server:
    """The warm process: its children by process id, each with the connection of whoever ordered it."""

    listening: socket.socket
    children: dict[int, socket.socket] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def serve(self) -> Order:
        """Fork a child for each order, for ever; return, in a child, what it is to become."""
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)  # noqa: FBT003 - as sockets have it
        signal.set_wakeup_fd(wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector, wake_read, wake_write:
            selector.register(self.listening, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake_read:
                        wake_read.recv(4096)
                        self._tell_ended(selector)
                    elif key.fileobj is not self.listening:
                        self._kill_orphan(key.data)
                        selector.unregister(key.fileobj)
                    elif (order := self._take(selector)) is not None:
                        signal.set_wakeup_fd(-1)
                        return order

    def _take(self, selector: selectors.BaseSelector) -> Order | None:
        """Take in an order, and fork; return it in the child."""
        connection, _ = self.listening.accept()
        try:
            order, files = _read_order(connection)
        except (OSError, ValueError, KeyError) as error:
            sys.stderr.write(f"ckpt launch: an order for a rank was refused: {error}\n")
            connection.close()
            return None
        pid, why = self._fork(order)
        if not why and pid == 0:
            self._become(order, files, parent=connection)
            return order
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):
            connection.sendall(f"{why or pid}\n".encode())
        if why:
            connection.close()
        else:
            self.children[pid] = connection
            selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def _fork(self, order: Order) -> tuple[int, str]:
        """Return what a fork does, or 0 and why there was none."""
        if why := self._why_cold(order):
            return 0, why
        try:
            return os.fork(), ""
        except OSError as error:
            return 0, f"the warm process can't fork ({error.strerror})"

    def _why_cold(self, order: Order) -> str:
        """Return why a fork would not do as a start does."""
        if (threads := len([*Path("/proc/self/task").iterdir()])) > 1:
            return f"{threads} threads run once the modules are imported: set OMP_NUM_THREADS=1, or import fewer"
        for name in sorted({*order.env, *self.env}):
            if name.startswith(READ_AT_IMPORT) and order.env.get(name) != self.env.get(name):
                return f"{name} is {order.env.get(name)!r} for the rank, and was {self.env.get(name)!r} at the import"
        return ""

    def _become(self, order: Order, files: Sequence[int], *, parent: socket.socket) -> None:
        """Make this child what a process that was just started would be, but for what is imported."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for connection in (parent, self.listening, *self.children.values()):
            connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(order.env)
        os.chdir(order.directory)

    def _tell_ended(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                connection = self.children.pop(pid, None)
                if connection is None:  # an imported module started it
                    continue
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                connection.close()

    def _kill_orphan(self, pid: int) -> None:
        if pid in self.children:
            os.kill(pid, signal.SIGKILL)


def _read_order(connection: socket.socket) -> tuple[Order, list[int]]:
    """Return an order and its open files; whoever is not of our user is refused."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():
        raise PermissionError(f"user {user} orders a rank")
    connection.settimeout(_ORDER_S)
    body, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
    if len(body) < _LENGTH.size:
        raise ConnectionResetError("the order ended early")
    (length,) = _LENGTH.unpack(body)
    if length > MAX_ORDER_BYTES or len(files) != 3:  # noqa: PLR2004 - input, output, errors
        raise ValueError(f"an order of {length} bytes with {len(files)} files")
    body = b"".join(_pieces(connection, length))
    connection.settimeout(None)
    said = json.loads(body)
    return Order(command=tuple(said["command"]), env=said["env"], directory=said["directory"]), files


def _pieces(connection: socket.socket, length: int) -> Iterator[bytes]:
    while length:
        piece = connection.recv(min(length, 65536))
        if not piece:
            raise ConnectionResetError("the order ended early")
        length -= len(piece)
        yield piece


def run(command: Sequence[str]) -> None:
    """Run ``PYTHON -u [-m] SCRIPT ARGUMENTS`` in this process as Python would: the last thing that it does."""
    _, _, *words = command
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()  # noqa: PTH109 - what Python puts there
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    path = words[0]
    sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120 - as above
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the trainer


def main(words: Sequence[str]) -> None:
    """Import, serve, and in a child become what was ordered."""
    parent, file, *modules = words
    die_with_parent(int(parent))
    me = os.getpid()
    listening = socket.socket(fileno=int(file))
    began_s = time.monotonic()
    for name in modules:
        importlib.import_module(name)
    sys.stderr.write(f"ckpt launch: {', '.join(modules)} loaded for all ranks in {time.monotonic() - began_s:.1f} s\n")
    order = _Server(listening).serve()
    die_with_parent(me)
    run(order.command)


def listen() -> tuple[socket.socket, str]:
    """Return a socket that listens, and its name: an abstract one, which leaves nothing behind."""
    name = f"ckpt-warm-{os.getpid()}-{os.urandom(8).hex()}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")
    listening.listen(64)
    return listening, name


if __name__ == "__main__":
    main(sys.argv[1:])
