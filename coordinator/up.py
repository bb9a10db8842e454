"""``ckpt up``: all that one machine needs, as child processes that are started again when they die.

It knows command lines only: it starts a broker, coordinators and a sidecar as a user would, on ports that stay the
same, so that those who live find again the one who died. Of two coordinators one stands by. A child that ended because
it was used wrongly is not started again: its last line says why, and everything stops. So it does if a child that has
never served is refused by the store: one that is only away it waits for, for a minute.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from toprope.coordinator.adapters.broker import free_port
from toprope.coordinator.config import check_cadence
from toprope.coordinator.leader import ask_leader
from toprope.coordinator.serving import write_ready_file
from toprope.coordinator.wire import Cadence
from toprope.store.errors import CkptError, NoStoreError, UnavailableError, UsageError
from toprope.store.names import checked_id
from toprope.store.objects.opening import absolute_root

_BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 10.0
_POLL_S = 0.1
_STOP_S = 8.0
_READY_S = 60.0
_LEADER_S = 1.0
_GIVE_UP_STATUSES = frozenset({1, 2, 64})
_REFUSED = ("there is no such bucket", "refuses access")
"""What a ``NoStoreError`` says, which has the status of all that can't be reached."""

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 4096


class ChildError(CkptError):
    """A child ended for a reason that starting it again can't mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything of one job on this machine lies."""

    job: str
    node: str
    store: str
    directory: Path
    memory_dir: Path

    @property
    def logs(self) -> Path:
        """Return the directory of the children's logs."""
        return self.directory / "logs"

    @property
    def socket(self) -> Path:
        """Return the socket that trainers use."""
        return self.memory_dir / "sidecar.sock"

    @property
    def address_file(self) -> Path:
        """Return the file that says where the services are, for ``ckpt status``."""
        return self.directory / "up.json"


def layout(*, job: str, node: str, store: str, directory: Path, memory_dir: Path | None) -> Layout:
    """Return where things lie, after a check of the names.

    Raises:
        UsageError: a name is not usable.
    """
    checked_id(job, what="job")
    checked_id(node, what="node")
    memory = memory_dir or Path(f"/dev/shm/toprope-{os.getuid()}") / job  # noqa: S108 - the tmpfs that slots are for
    return Layout(
        job=job,
        node=node,
        store=absolute_root(store),
        directory=directory.absolute() / job,
        memory_dir=memory.absolute(),
    )


def commands(
    where: Layout, cadence: Cadence, *, ports: Mapping[str, int], codec: str = "auto", told: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Return the command line of each child, in the order in which they are started.

    ``codec``: what the sidecar packs uploads with. ``told``: what the coordinators are told besides.
    """
    ckpt = [sys.executable, "-m", "toprope"]
    names = _coordinators(ports)
    broker = f"127.0.0.1:{ports['broker']}"
    how = ["--codec", codec, "--grace", "0"]
    common = ["--job", where.job, "--store", where.store, "--broker", broker]
    every = ["--every", cadence.every, "--local-every", cadence.local_every, "--object-every", cadence.object_every]
    directories = ["--memory-dir", where.memory_dir, "--local-dir", where.directory / "local"]
    urls = ",".join(_url(ports, name) for name in names)
    node = ["--node", where.node, "--coordinator", urls, "--socket", where.socket]
    ready = {
        name: ["--listen", f"127.0.0.1:{ports[name]}", "--ready-file", ready_file(where, name)]
        for name in (*names, "sidecar")
    }
    return {
        "broker": [sys.executable, "-m", "toprope.coordinator.adapters.broker", broker],
        **{name: [*ckpt, "coordinator", *common, *told, *map(str, (*every, *ready[name]))] for name in names},
        "sidecar": [*ckpt, "sidecar", *common, *how, *map(str, (*node, *directories, *ready["sidecar"]))],
    }


def _coordinators(ports: Mapping[str, int]) -> list[str]:
    return [name for name in ports if name.startswith("coordinator")]


def _url(ports: Mapping[str, int], name: str) -> str:
    return f"http://127.0.0.1:{ports[name]}"


def ready_file(where: Layout, name: str) -> Path:
    """Return the file that a child writes once it serves."""
    return where.directory / f"{name}.ready"


@dataclass(slots=True, kw_only=True)
class Child:
    """One supervised process."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    failures: int = 0
    start_at_s: float = 0.0
    log_begin: int = 0
    """Where in its log the words of this process begin."""

    def start(self, now_s: float) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            self.log_begin = log.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(  # noqa: S603 - our own command line
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        self.started_s = now_s

    def last_line(self) -> str:
        """Return the last line of its log, empty if this process has said nothing."""
        with self.log.open("rb") as log:
            log.seek(max(self.log_begin, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL if that does not do."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Keeps children running until ``stopping``."""

    children: list[Child]
    stopping: bool = False
    all_served: bool = False
    """All have served by now: a store that refuses one of them later has taken it before."""

    def watch(self, now_s: float) -> None:
        """Start what is not running and due.

        Raises:
            ChildError: a child ended for a reason that starting it again can't mend.
        """
        for child in self.children:
            process = child.process
            if process is not None and process.poll() is not None:
                self._bury(child, process.returncode, now_s)
            if child.process is None and now_s >= child.start_at_s:
                child.start(now_s)

    def _bury(self, child: Child, status: int, now_s: float) -> None:
        last = child.last_line()
        child.process = None
        refused = status == NoStoreError.exit_status and any(words in last for words in _REFUSED)
        for_good = status in _GIVE_UP_STATUSES or (refused and not self.all_served)
        if for_good and last.startswith("ckpt: "):
            error = ChildError(f"the {child.name} stopped for good: {last.removeprefix('ckpt: ')}")
            error.exit_status = status  # type: ignore[misc] # the status of the child is the status of all
            raise error
        child.failures = 0 if now_s - child.started_s >= _STEADY_S else child.failures + 1
        delay_s = _BACK_OFF_S[min(child.failures, len(_BACK_OFF_S) - 1)]
        child.start_at_s = now_s + delay_s
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        why = f": {last.removeprefix('ckpt: ')}" if last and status > 0 else ""
        tell(f"the {child.name} {how}{why}; starting it again in {delay_s:g} s (log: {child.log})")

    def stop(self) -> None:
        """End all children, last started first."""
        for child in reversed(self.children):
            child.stop()


def up(
    where: Layout,
    cadence: Cadence,
    *,
    announce: Path | None,
    coordinators: int = 2,
    codec: str = "auto",
    told: Sequence[str] = (),
) -> None:
    """Run everything until SIGTERM or SIGINT; of several coordinators all but one stand by.

    Raises:
        UsageError: it runs already, or something can't be written.
        ChildError: a child can't be kept running.
    """
    check_cadence(cadence)
    _make_directories(where)
    with _locked(where.memory_dir, option="--memory-dir"), _locked(where.directory, option="--dir"):
        more = [f"coordinator-{number}" for number in range(2, coordinators + 1)]
        ports = {name: free_port("127.0.0.1") for name in ("broker", "coordinator", *more, "sidecar")}
        for name in ports:
            ready_file(where, name).unlink(missing_ok=True)
        lines = commands(where, cadence, ports=ports, codec=codec, told=told)
        children = [Child(name=name, command=line, log=where.logs / f"{name}.log") for name, line in lines.items()]
        supervisor = Supervisor(children=children)

        def stop(_number: int, _frame: FrameType | None) -> None:
            supervisor.stopping = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            _supervise(supervisor, where, ports=ports, announce=announce)
        finally:
            supervisor.stop()
            where.address_file.unlink(missing_ok=True)
        tell("all stopped")


def _supervise(supervisor: Supervisor, where: Layout, *, ports: Mapping[str, int], announce: Path | None) -> None:
    began_s = time.monotonic()
    while not supervisor.stopping:
        now_s = time.monotonic()
        supervisor.watch(now_s)
        if not supervisor.all_served and all(ready_file(where, name).exists() for name in ports if name != "broker"):
            _announce(supervisor, where, ports=ports, announce=announce)
            supervisor.all_served = True
        if not supervisor.all_served and now_s - began_s > _READY_S:
            raise not_serving(supervisor.children, where.logs)
        time.sleep(_POLL_S)


def not_serving(children: Sequence[Child], logs: Path) -> ChildError:
    """Return the error that nobody serves yet, with what a coordinator said last: it may wait for the store."""
    last = next((child.last_line() for child in children if child.name.startswith("coordinator")), "")
    why = f" (the coordinator says: {last.removeprefix('ckpt: ')})" if last else ""
    return ChildError(f"coordinators and sidecar do not serve after {_READY_S:.0f} s{why}; see {logs}")


def _announce(supervisor: Supervisor, where: Layout, *, ports: Mapping[str, int], announce: Path | None) -> None:
    urls = [_url(ports, name) for name in _coordinators(ports)]
    leader = _leading(urls)
    content = {
        "job": where.job,
        "url": leader,
        "urls": urls,
        "broker": f"127.0.0.1:{ports['broker']}",
        "socket": str(where.socket),
        "pid": os.getpid(),
        "pids": {child.name: child.process.pid for child in supervisor.children if child.process is not None},
    }
    for path in (where.address_file, *([announce] if announce is not None else [])):
        write_ready_file(path, content)
    tell(
        f"job {where.job}: broker, coordinators ({len(urls)}) and sidecar of {where.node} are up; logs in {where.logs}"
    )
    print(f"export CKPT_SOCKET={where.socket}", flush=True)  # noqa: T201 - what a shell is to evaluate
    tell(f"next: start your trainer with that variable set; `ckpt status --coordinator {leader}` says what is safe")


def _leading(urls: Sequence[str]) -> str:
    """Return which of these coordinators leads, as far as they say at once; any of them knows it later."""
    try:
        return ask_leader(urls, "/v1/status", token="", timeout_s=_LEADER_S).url
    except UnavailableError:
        return urls[0]


def _make_directories(where: Layout) -> None:
    for directory in (where.logs, where.memory_dir):
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UsageError(f"directory {directory} can't be made: {error.strerror}") from error


@contextmanager
def _locked(directory: Path, *, option: str) -> Iterator[None]:
    """Hold a directory before anything starts: a second coordinator would fence off that of a running job."""
    with (directory / "up.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise UsageError(
                f"another `ckpt up` (pid {lock.read().strip()}) runs already in {directory}: use that one, "
                f"stop it first, or give this one its own {option}"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def tell(text: str) -> None:
    """Say something to the person who runs this."""
    print(f"ckpt up: {text}", file=sys.stderr, flush=True)  # noqa: T201 - this is the command line


def running_urls(job: str, directory: Path) -> tuple[str, ...]:
    """Return the urls of the coordinators that ``ckpt up`` runs for a job.

    Raises:
        UsageError: none is known in this directory.
    """
    path = directory / checked_id(job, what="job") / "up.json"
    try:
        return tuple(str(url) for url in json.loads(path.read_bytes())["urls"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"no `ckpt up` for job {job} runs in {directory}: give --coordinator URL, or its --dir"
        ) from error
