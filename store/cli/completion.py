"""Completion in shells: what may follow what was typed, and the few lines that make a shell ask for it.

A shell runs ``ckpt --complete N WORD...``: the number of the word at the cursor (the first after ``ckpt`` is 1), and
the words. Each line of the answer is a word and, after a tab, what it means; none means that the shell offers files.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from toprope.store.errors import CkptError, UsageError

_BASH = """\
_ckpt() {
    local IFS=$'\\n'
    COMPREPLY=($(ckpt --complete "$COMP_CWORD" "${COMP_WORDS[@]:1}" 2>/dev/null | cut -f 1))
}
complete -o default -F _ckpt ckpt
"""
_ZSH = """\
#compdef ckpt
_ckpt() {
    local -a found
    found=("${(@f)$(ckpt --complete $((CURRENT - 1)) "${(@)words[2,-1]}" 2>/dev/null)}")
    found=("${(@)found//:/\\\\:}")
    found=("${(@)found/$'\\t'/:}")
    if [[ -n $found ]]; then _describe ckpt found; else _files; fi
}
if [ "$funcstack[1]" = "_ckpt" ]; then _ckpt "$@"; else compdef _ckpt ckpt; fi
"""
_FISH = """\
complete --command ckpt --arguments \
'(ckpt --complete (count (commandline -opc)) (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(shell: str) -> str:
    """Return what a shell must run to complete the words of ``ckpt``.

    Raises:
        UsageError: it is none of bash, zsh and fish.
    """
    found = SCRIPTS.get(shell)
    if found is None:
        raise UsageError(f"completion is for {', '.join(SCRIPTS)}, not for {shell!r}: give one of them")
    return found


def install(shell: str, environment: Mapping[str, str]) -> tuple[Path, str]:
    """Write the script to where the shell looks for it; return the place, and what is left to be done.

    Raises:
        UsageError: there is no such shell, or no HOME.
        CkptError: it can't be written.
    """
    body = script(shell)
    home = environment.get("HOME", "")
    if not home:
        raise UsageError("HOME is not set, so it is not known where completion goes; use --show-completion")
    data = Path(environment.get("XDG_DATA_HOME") or f"{home}/.local/share")
    config = Path(environment.get("XDG_CONFIG_HOME") or f"{home}/.config")
    place, then = {
        "bash": (data / "bash-completion/completions/ckpt", "open a new shell (the package bash-completion loads it)"),
        "zsh": (
            Path(home, ".zfunc/_ckpt"),
            "have `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc, and open a new shell",
        ),
        "fish": (config / "fish/completions/ckpt.fish", "open a new shell"),
    }[shell]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(body)
    except OSError as error:
        raise CkptError(f"{place}: can't be written: {os.strerror(error.errno or 0)}") from error
    return place, then


def candidates(at: int, words: Sequence[str], purposes: Mapping[str, str], modules: Mapping[str, str]) -> Iterator[str]:
    """Yield what may stand at word ``at``, with what it means, as far as ``words`` go.

    ``purposes`` has the first words of ``ckpt``, ``modules`` the module of each, which is imported when it is needed.
    """
    begun = words[at - 1] if at <= len(words) else ""
    if at <= 1:
        found = dict(purposes)
    elif words[0] in modules:
        found = dict(_of_program(modules[words[0]], words[: at - 1]))
    else:
        found = {}
    for word, meaning in sorted(found.items()):
        if word.startswith(begun) and (begun.startswith("-") or not word.startswith("-")):
            yield f"{word}\t{meaning}"


def _of_program(module: str, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the words, options and choices that may follow these."""
    command: Any = importlib.import_module("typer").main.get_command(importlib.import_module(module).app)
    for number, word in enumerate(words):
        commands = getattr(command, "commands", {})
        if word in commands:
            command = commands[word]
        elif number > 0:
            break
    options = {name: one for one in command.params for name in one.opts if name.startswith("-")}
    described = getattr(options.get(words[-1]), "type_descriptor", None)
    if described is not None and get_origin(described.annotation) is Literal:
        yield from ((str(one), "") for one in get_args(described.annotation))
        return
    yield from ((name, _first_line(one.help)) for name, one in getattr(command, "commands", {}).items())
    yield from ((name, _first_line(getattr(one, "help", ""))) for name, one in options.items())
    yield "--help", "Say what it does and takes."


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
