"""``ckpt``: from its first word to the program that does it, which alone is imported.

Exit statuses: 0 done; 1 failed; 2 what the store holds is wrong; 3 nothing there to verify; 4 the store can't be
reached; 64 wrong use, nothing changed; 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from toprope import __version__

EXIT_USAGE = 64
EXIT_INTERRUPTED = 130
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class Program(NamedTuple):
    """A first word of ``ckpt``: the module whose ``app`` does it, and what it is for.

    ``function``: the module has that in place of an ``app``, and a parser beside it; it needs only what a trainer has.
    No dataclass: to load what makes one takes half of the time until ``main``, and until then Ctrl-C is a traceback.
    """

    module: str
    purpose: str
    function: str = ""


GROUPS: dict[str, dict[str, Program]] = {
    "Look at a store and get checkpoints out of it (no service needed)": {
        "ls": Program(module="toprope.store.cli.checkpoints", purpose="list jobs and their READY checkpoints"),
        "show": Program(
            module="toprope.store.cli.checkpoints", purpose="show a job: its log, a manifest, tensors, files"
        ),
        "verify": Program(module="toprope.store.cli.verify", purpose="read everything back and check every digest"),
        "restore": Program(
            module="toprope.store.cli.checkpoints", purpose="write a checkpoint's shards to a new directory"
        ),
        "export": Program(
            module="toprope.store.cli.export", purpose="write whole tensors as safetensors, DCP or torch.save"
        ),
        "import": Program(module="toprope.store.cli.importing", purpose="make a job of a checkpoint that others wrote"),
        "copy": Program(module="toprope.store.cli.copy", purpose="bring a job or a checkpoint into another store"),
        "diff": Program(module="toprope.store.cli.diff", purpose="say which tensors of two checkpoints differ"),
        "log": Program(module="toprope.store.cli.log", purpose="print the job log, a record a line"),
        "du": Program(module="toprope.store.cli.usage", purpose="say what a store weighs, and what nothing names"),
    },
    "Keep, distrust and delete": {
        "pin": Program(module="toprope.coordinator.cli_changes", purpose="keep a checkpoint, whatever the policy says"),
        "unpin": Program(module="toprope.coordinator.cli_changes", purpose="lift a pin"),
        "metric": Program(
            module="toprope.coordinator.cli_changes", purpose="say what a checkpoint is worth, to keep the best"
        ),
        "taint": Program(module="toprope.coordinator.cli_changes", purpose="say that steps are not to be trusted"),
        "rollback": Program(module="toprope.coordinator.cli_changes", purpose="go back to an earlier checkpoint"),
        "gc": Program(module="toprope.coordinator.cli_changes", purpose="retire what is not kept, delete what is left"),
        "job": Program(
            module="toprope.coordinator.cli_changes", purpose="set retention, accept another spec, delete a job"
        ),
    },
    "Run a job's services": {
        "up": Program(module="toprope.coordinator.cli", purpose="start all that one machine needs"),
        "status": Program(module="toprope.coordinator.cli", purpose="say what is safe where"),
        "declare-dead": Program(module="toprope.coordinator.cli_declare", purpose="say that a node is off"),
        "coordinator": Program(module="toprope.coordinator.cli", purpose="run the coordinator of a job"),
        "sidecar": Program(module="toprope.sidecar.cli", purpose="run the sidecar of a node"),
    },
    "Run the trainer (needs torch, no extra)": {
        "launch": Program(
            module="toprope.trainer_hooks.torchrun.cli",
            purpose="run torchrun so that it restarts reliably",
            function="launch",
        ),
        "rendezvous": Program(
            module="toprope.trainer_hooks.torchrun.cli",
            purpose="serve what torchrun's agents meet at, apart from them",
            function="rendezvous",
        ),
    },
    "See it work": {
        "demo": Program(module="toprope.chaos.cli", purpose="train, kill a node, go on, and compare bit for bit"),
        "chaos": Program(module="toprope.chaos.cli", purpose="break things on purpose, real or simulated, and judge"),
    },
}
_OPTIONS = {
    "--help": "say what the words are",
    "--version": "print the version",
    "--show-completion": "print what a shell must run to complete these words",
    "--install-completion": "write that to where the shell looks for it",
}
_COMPLETION = {"--complete", "--show-completion", "--install-completion"}
PROGRAMS = {word: program for group in GROUPS.values() for word, program in group.items()}


def main(arguments: Sequence[str] | None = None, *, passed: object = None) -> int:
    """Run ``ckpt`` with these arguments and return its exit status.

    A service takes what is ``passed`` to it as the ``wrap`` of its ports: a door for those who break things.
    """
    word, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    return _to_its_end(lambda: _answered(word, rest, passed=passed))


def _answered(word: str, rest: list[str], *, passed: object) -> int:
    if word in {"--help", "-h", "help"}:
        return _answer(help_text())
    if word == "--version":
        return _answer(f"ckpt {__version__}")
    program = PROGRAMS.get(word)
    if program is None:
        return _without_program(word, rest)
    return _run_plain(program, rest) if program.function else _run(word, program, rest, passed=passed)


def _to_its_end(work: Callable[[], int]) -> int:
    """Do it, and say in one line what ended it from outside: a person, or a stdout that takes no more."""
    try:
        status = work()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", status=EXIT_INTERRUPTED)
    except BrokenPipeError:
        _leave_stdout()
        return 1
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _leave_stdout()
        return _fail(f"what it says can't be written: {error.strerror}", status=1)
    return status


def _leave_stdout() -> None:
    """Write nothing more there: else the interpreter tries once more at its end, and complains."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(text: str) -> int:
    print(text)  # noqa: T201 - this is the command line
    return 0


def _without_program(word: str, rest: list[str]) -> int:
    """Answer a shell that completes what is typed, print or install what makes a shell ask, or say that it is wrong."""
    if word not in _COMPLETION:
        return _fail(f"{word!r} is not a command; `ckpt --help` lists them", status=EXIT_USAGE)
    completion = importlib.import_module("toprope.store.cli.completion")
    errors = importlib.import_module("toprope.store.errors")
    shell = rest[0] if rest else os.path.basename(os.environ.get("SHELL", ""))  # noqa: PTH119 - pathlib is slow to load
    try:
        if word == "--complete":
            modules = {name: program.module for name, program in PROGRAMS.items() if not program.function}
            purposes = {name: program.purpose for name, program in PROGRAMS.items()} | _OPTIONS
            at = int(rest[0]) if rest and rest[0].isdecimal() else 1
            print("\n".join(completion.candidates(at, rest[1:], purposes, modules)))  # noqa: T201 - for the shell
        elif word == "--show-completion":
            print(completion.script(shell), end="")  # noqa: T201 - this is the command line
        else:
            place, then = completion.install(shell, os.environ)
            print(f"wrote {place}; now {then}")  # noqa: T201 - this is the command line
    except errors.CkptError as error:
        return _fail(str(error), status=error.exit_status)
    return 0


def help_text() -> str:
    """Return what ``ckpt --help`` prints."""
    lines = ["Usage: ckpt COMMAND [ARGUMENTS]", "", "Fault tolerance and checkpoints for distributed PyTorch training."]
    for title, programs in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {word:<12} {program.purpose}" for word, program in programs.items()]
    lines += ["", "`ckpt COMMAND --help` says more. `ckpt --version` prints the version."]
    lines += [
        "`ckpt --install-completion [bash|zsh|fish]` teaches your shell these words, --show-completion prints how."
    ]
    return "\n".join(lines)


def _run_plain(program: Program, rest: list[str]) -> int:
    errors = importlib.import_module("toprope.trainer_hooks.errors")
    try:
        status: int = getattr(importlib.import_module(program.module), program.function)(rest)
    except errors.HookError as error:
        return _fail(str(error), status=error.exit_status)
    return status


def _run(word: str, program: Program, rest: list[str], *, passed: object) -> int:
    try:
        app = importlib.import_module(program.module).app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "toprope":
            raise
        return _fail(f"`ckpt {word}` needs the package {error.name!r}: install toprope[service]", status=EXIT_USAGE)
    return _invoke(app, word, rest, passed=passed)


def _invoke(
    app: Any,  # noqa: ANN401 - typer must not be imported to name its type
    word: str,
    rest: list[str],
    *,
    passed: object,
) -> int:
    """Run a typer app, whose own errors become one line and status 64, and ours one line and their status."""
    typer = importlib.import_module("typer")
    errors = importlib.import_module("toprope.store.errors")
    usage_error = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    command = typer.main.get_command(app)
    is_group = hasattr(command, "commands")
    try:
        status = command.main(
            args=[word, *rest] if is_group else rest,
            prog_name="ckpt" if is_group else f"ckpt {word}",
            standalone_mode=False,
            obj=passed,
        )
    except usage_error as error:
        return _fail(f"{_one_line(error.format_message())} (`ckpt {word} --help` says more)", status=EXIT_USAGE)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except errors.CkptError as error:
        return _fail(str(error), status=error.exit_status)
    if status == EXIT_INTERRUPTED:  # which is what typer makes of Ctrl-C, without a word
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fail(text: str, *, status: int) -> int:
    print(f"ckpt: {text}", file=sys.stderr)  # noqa: T201 - this is the command line
    return status


if __name__ == "__main__":
    sys.exit(main())
