"""The keeper of one rank, between torchrun's agent and the trainer. It loads no torch and takes about 10 MB.

``python -m toprope.trainer_hooks.torchrun.worker AGENT_PID FROZEN_S ENDS_FILE WARM PIPE -- COMMAND`` starts the
command, or has the warm process at the socket ``WARM`` become it (empty: there is none), and ends as it does. The
trainer dies with its keeper and the keeper with the agent, so that no orphan trains on. A trainer that stands still
(SIGSTOP, a frozen container) for ``FROZEN_S`` seconds is killed, and at once when it is told to end, which it could not
hear. Why it ended goes to standard error and, a JSON line each, into ENDS_FILE if one is named. That it failed is told
to the agent through its file ``PIPE`` (empty: it does not ask).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from toprope.trainer_hooks.torchrun.parent import die_with_parent

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_TOLD_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
_AWAITED = frozenset({*_PASSED_ON, signal.SIGCHLD, signal.SIGIO})
"""The last two say that the child may have ended, a cold one and a warm one."""
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a rank ended, and why: one line of the file of ends. ``status`` is negative for a signal."""

    rank: int
    host: str
    pid: int
    restart: int
    status: int
    seconds: float
    why: str

    def sentence(self) -> str:
        """Return it for people."""
        how = f"with status {self.status}" if self.status >= 0 else f"by {signal.Signals(-self.status).name}"
        place = f"rank {self.rank} on {self.host} (pid {self.pid}, restart {self.restart})"
        return f"ckpt launch: {place} ended {how} after {self.seconds:.0f} s: {self.why}"


class Child(Protocol):
    """A process that is kept."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Return its status once it has ended."""

    def send_signal(self, number: int, /) -> None:
        """Signal it."""

    def kill(self) -> None:
        """Kill it."""


def started(command: Sequence[str], *, warm: str = "") -> Child:
    """Start a command, by a fork of the warm process at the socket ``warm`` if there is one and it can."""
    if warm:
        from toprope.trainer_hooks.torchrun.warm import ColdError, Order, forked  # noqa: PLC0415 - needed here alone

        try:
            return forked(warm, Order(command=tuple(command), env=dict(os.environ), directory=os.getcwd()))  # noqa: PTH109 - a text
        except ColdError as error:
            _say(f"ckpt launch: this rank starts cold: {error}", status=0)
    me = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        die_with_parent(me)

    # a group of its own: torchrun signals the keeper's, and what is passed on is to arrive once
    return subprocess.Popen(command, process_group=0, preexec_fn=prepare)  # noqa: PLW1509, S603 - two system calls in a process without threads; the user's own command


class Keeper:
    """Passes signals on to one process, and knows why it ended."""

    def __init__(self, child: Child, *, frozen_s: float) -> None:
        """Keep it. The signals that are awaited must be blocked in this process."""
        self._child = child
        self._frozen_s = frozen_s
        self._began_s = time.monotonic()
        self._stands_since_s: float | None = None
        self._why = "by itself"
        self.told_to_end = False

    @property
    def pid(self) -> int:
        """The process id of the trainer."""
        return self._child.pid

    def run(self) -> int:
        """Return its status once it has ended."""
        while True:
            told = signal.sigtimedwait(_AWAITED, _LOOK_S)
            status = self._child.poll()
            if status is not None:
                return status
            if told is not None and told.si_signo in _PASSED_ON:
                self._child.send_signal(told.si_signo)
                if told.si_signo in _TOLD_TO_END:
                    self.told_to_end = True
                    self._why = f"it was told to end ({signal.Signals(told.si_signo).name})"
                    self._kill_if_frozen(now=True)
            self._kill_if_frozen(now=False)

    def end(self, status: int) -> End:
        """Return how and why it ended."""
        return End(
            rank=int(os.environ.get("RANK", "0")),
            host=os.uname().nodename,
            pid=self._child.pid,
            restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            status=status,
            seconds=round(time.monotonic() - self._began_s, 1),
            why=self._why,
        )

    def _kill_if_frozen(self, *, now: bool) -> None:
        now_s = time.monotonic()
        if not _stands_still(self._child.pid):
            self._stands_since_s = None
            return
        if self._stands_since_s is None:
            self._stands_since_s = now_s
        stood_s = now_s - self._stands_since_s
        if now or stood_s >= self._frozen_s:
            self._why += f"; it stood still for {stood_s:.0f} s and was killed"
            self._child.kill()


def _stands_still(pid: int) -> bool:
    """Say whether a process is stopped; one that a debugger holds is not meant."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def main(words: Sequence[str] | None = None) -> int:
    """Keep one rank; end as it ended."""
    agent, frozen_s, ends, warm, pipe, _, *command = sys.argv[1:] if words is None else words
    die_with_parent(int(agent))
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        keeper = Keeper(started(command, warm=warm), frozen_s=float(frozen_s))
    except OSError as error:
        return _say(f"ckpt launch: {command[0]}: {os.strerror(error.errno or 0)}", status=127)
    status = keeper.run()
    if pipe and status != 0 and not keeper.told_to_end:
        from toprope.trainer_hooks.torchrun.strikes import tell  # noqa: PLC0415 - needed here alone

        tell(int(agent), int(pipe))
    end = keeper.end(status)
    if status != 0:
        _say(end.sentence(), status=status)
    if ends:
        with Path(ends).open("a") as stream:
            stream.write(json.dumps(asdict(end)) + "\n")
    if status < 0:
        _die_by(-status)
    return status


def _die_by(number: int) -> None:
    """End by a signal, as the trainer did, without a second core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def _say(text: str, *, status: int) -> int:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
