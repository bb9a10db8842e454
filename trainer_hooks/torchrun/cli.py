"""``ckpt launch`` and ``ckpt rendezvous``: for an environment that has torch and of this package only the hook."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.torchrun import settings, strikes, warm

EXIT_FAILED, EXIT_AWAY = 1, 4
_MODULE = "toprope.trainer_hooks.torchrun.worker"
_MEETING = "toprope.trainer_hooks.torchrun.meeting"
_FAILURES = "torch.distributed.elastic.multiprocessing.errors"
_NOT_REDIRECTED = "0"
_FROZEN_S = 10.0
_MEETS_S = 60.0
_POLL_S = 0.2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` says more)")


def launch_parser() -> argparse.ArgumentParser:
    """Return the parser of ``ckpt launch``."""
    parser = _Parser(
        prog="ckpt launch",
        usage="ckpt launch [OPTIONS] -- torchrun TORCHRUN_OPTIONS SCRIPT [ARGUMENTS]",
        description="Run torchrun so that it restarts reliably: with safe settings, a rendezvous that no agent takes "
        "along, and ranks that end with their agent, are killed when they stand still, and say why they ended.",
    )
    parser.add_argument("--rendezvous", default="", metavar="HOST:PORT", help="where `ckpt rendezvous` serves")
    parser.add_argument(
        "--frozen-after",
        type=float,
        default=_FROZEN_S,
        metavar="S",
        help="seconds after which a rank that stands still is killed (default: %(default)g)",
    )
    parser.add_argument(
        "--ends", default="", metavar="FILE", help="append how and why each rank ended, a JSON line each"
    )
    parser.add_argument(
        "--warm",
        default="",
        metavar="MODULES",
        help="modules, as torch,transformers, that one process of each node imports once: ranks are forked from it",
    )
    parser.add_argument(
        "--leave-after",
        type=int,
        default=0,
        metavar="N",
        help="leave the job when a rank of this node was the first to fail N times within an hour (default: never)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- torchrun ...", help="as without ckpt launch")
    return parser


def rendezvous_parser() -> argparse.ArgumentParser:
    """Return the parser of ``ckpt rendezvous``."""
    parser = _Parser(
        prog="ckpt rendezvous",
        description="Serve the store that torchrun's agents meet at, apart from any of them, until SIGTERM. It trusts "
        "whoever reaches it, as torchrun's own does: listen where only the job's nodes are.",
    )
    parser.add_argument("--listen", default="127.0.0.1:29400", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="where to write port and pid once it serves")
    return parser


def launch(words: Sequence[str]) -> int:
    """Run torchrun in this process, made safe; what else it raises goes on to the caller, as from torchrun itself.

    That ranks failed is a line here: the keepers have told of each, after its own last words.

    Raises:
        UsageError: it can't be made safe; the message says what to give.
    """
    args = launch_parser().parse_args(words)
    if args.frozen_after <= 0:
        raise UsageError("--frozen-after: give more than 0 seconds")
    if args.leave_after < 0:
        raise UsageError("--leave-after: give how often, or 0 for never")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    theirs = settings.without_program(command)
    os.environ.update(settings.ENVIRONMENT)
    run = _torch("torch.distributed.run")
    given = run.get_args_parser().parse_args(theirs)
    if given.run_path:
        raise UsageError("--run-path: ckpt launch starts scripts and modules; give one")
    asked = settings.Asked(
        nodes=given.nnodes,
        backend=given.rdzv_backend,
        endpoint=given.rdzv_endpoint,
        run_id=given.rdzv_id,
        configuration=given.rdzv_conf,
        standalone=given.standalone,
        port=given.master_port,
    )
    ours, pipe = _asked_to_leave(args.leave_after)
    safe = settings.safe_words(asked, rendezvous=args.rendezvous, ours=ours)
    place = args.rendezvous if asked.alone else given.rdzv_endpoint or args.rendezvous
    if place and not _answers(place, what="--rdzv-endpoint" if place == given.rdzv_endpoint else "--rendezvous"):
        return _fail(place)
    meeting, failures = _torch(_MEETING), _torch(_FAILURES)
    meeting.register()
    tail = [given.training_script, *given.training_script_args]
    head = theirs[: len(theirs) - len(tail)]
    try:
        run.main(settings.in_care(head, program=_program(args, given, pipe), tail=tail, safe=safe))
    except meeting.NodeLeavesError as error:
        sys.stderr.write(f"ckpt launch: {error}\n")
        return EXIT_FAILED
    except failures.ChildFailedError as error:
        if given.redirects != _NOT_REDIRECTED or given.local_ranks_filter:
            raise  # what the ranks said went into files, or nowhere, and the end of it is in the error
        return _told(error, given.training_script)
    return 0


def _told(error: Any, script: str) -> int:  # noqa: ANN401 - of torch, which is loaded late
    """Say which rank ended first, and how; return the status to end with."""
    rank, failure = error.get_first_failure()
    how = f"with status {failure.exitcode}" if failure.exitcode >= 0 else f"by {failure.signal_name()}"
    sys.stderr.write(f"ckpt launch: {script} has failed: rank {rank} was the first to end, {how}; see above\n")
    return EXIT_FAILED


def _program(args: argparse.Namespace, given: argparse.Namespace, pipe: str) -> list[str]:
    """Return what torchrun runs before the script: the keeper of a rank, and what that starts."""
    name = _warmed(args.warm, given) if args.warm else ""
    me, frozen_s, ends = str(os.getpid()), str(args.frozen_after), _absolute(args.ends)
    keeper = [sys.executable, "-m", _MODULE, me, frozen_s, ends, name, pipe, "--"]
    if given.no_python:
        return keeper
    return [*keeper, os.environ.get("PYTHON_EXEC", sys.executable), "-u", *(["-m"] if given.module else [])]


def _asked_to_leave(after: int) -> tuple[Mapping[str, str], str]:
    """Return what the rendezvous is told of when to leave, and the pipe that keepers are told to write to."""
    if not after:
        return {}, ""
    read, write = strikes.open_pipe()
    return {"leave_after": str(after), "told_by": str(read)}, str(write)


def _warmed(modules: str, given: argparse.Namespace) -> str:
    """Start the process that ranks are forked from; return the name of its socket.

    Raises:
        UsageError: ranks are no Python of ours, or a module is not there.
    """
    if given.no_python or os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        raise UsageError("--warm and another program than this Python: ranks can't be forked from it; leave out --warm")
    names = [name.strip() for name in modules.split(",") if name.strip()]
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise UsageError(f"--warm {modules}: there is no module {name!r}")
    listening, name = warm.listen()
    env = dict(os.environ)
    if str(given.nproc_per_node) != "1":
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it for the ranks
    file = listening.fileno()
    command = [sys.executable, "-u", "-m", warm.__name__, str(os.getpid()), str(file), *names]
    subprocess.Popen(command, pass_fds=[file], env=env, start_new_session=True, stdin=subprocess.DEVNULL)  # noqa: S603 - our own; it dies with this process
    listening.close()
    return name


def rendezvous(words: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UsageError: it can't listen there.
    """
    args = rendezvous_parser().parse_args(words)
    distributed = _torch("torch.distributed")
    host, port = _address(args.listen, what="--listen")
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise UsageError(f"--listen {args.listen}: {os.strerror(error.errno or 0)}; give another address") from error
    port = listening.getsockname()[1]
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the store makes threads, which inherit it
    taken = listening.detach()
    store = distributed.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=taken)
    sys.stderr.write(f"ckpt rendezvous: serves at {host}:{port}\n")
    if args.ready_file is not None:
        _write_ready(args.ready_file, port)
    signal.sigwait(ends)
    del store
    return 0


def _torch(module: str) -> Any:  # noqa: ANN401 - a module
    """Import it now: it takes seconds, and reads the environment.

    Raises:
        UsageError: there is no torch.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name!r} is not installed: run this in the trainer's environment") from error


def _write_ready(path: Path, port: int) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"port": port, "pid": os.getpid()}))
    temporary.rename(path)


def _answers(endpoint: str, *, what: str) -> bool:
    """Wait until something listens there, at the address that ``what`` gave; say whether it does."""
    address = _address(endpoint, what=what)
    deadline_s = time.monotonic() + _MEETS_S
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(address, timeout=5.0).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            return True
    return False


def _address(text: str, *, what: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004 - the greatest port
        raise UsageError(f"{what} {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""  # noqa: PTH100 - an empty one stays empty


def _fail(endpoint: str) -> int:
    sys.stderr.write(
        f"ckpt launch: nothing has listened at {endpoint} for {_MEETS_S:.0f} s: "
        f"start `ckpt rendezvous --listen {endpoint}` on that machine\n"
    )
    return EXIT_AWAY
