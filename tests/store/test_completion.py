"""Completion: the words, options and choices of ``ckpt``, with no program loaded for the first word."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toprope.__main__ import PROGRAMS, main


def offered(capsys: pytest.CaptureFixture[str], at: int, *words: str) -> list[str]:
    assert main(["--complete", str(at), *words]) == 0
    return [line.partition("\t")[0] for line in capsys.readouterr().out.splitlines() if line]


def test_the_first_word_is_completed_from_all_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert offered(capsys, 1, "") == sorted(PROGRAMS)
    assert offered(capsys, 1, "ver") == ["verify"]
    assert offered(capsys, 1, "--v") == ["--version"]
    assert offered(capsys, 1) == sorted(PROGRAMS)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["verify", "--s"], ["--sample", "--seed", "--step"]),
        (["copy", "a", "b", "--j"], ["--job", "--json"]),
        (["export", "root", "dir", "--to", ""], ["dcp", "safetensors", "torch"]),
        (["export", "root", "dir", "--to", "s"], ["safetensors"]),
        (["ls", "--j"], ["--job", "--json"]),
        (["chaos", "s"], ["sim", "soak", "survive"]),
        (["ls", ""], []),
        (["nonsense", "--"], []),
    ],
)
def test_what_follows_a_word_is_completed_from_its_program(
    capsys: pytest.CaptureFixture[str], words: list[str], wanted: list[str]
) -> None:
    assert offered(capsys, len(words), *words) == wanted


def test_no_program_is_loaded_to_complete_the_first_word() -> None:
    program = """
import json, sys
from toprope.__main__ import main
main(["--complete", "1", "v"])
print(json.dumps(sorted({"typer", "msgspec", "rich", "botocore"} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


_BASH = """
PATH="$1:$PATH"; . "$1/script"
COMP_WORDS=(ckpt verify --sam); COMP_CWORD=2; _ckpt; echo "${COMPREPLY[*]}"
COMP_WORDS=(ckpt ver); COMP_CWORD=1; _ckpt; echo "${COMPREPLY[*]}"
complete -p ckpt
"""
_ZSH = """
compdef() { print "compdef $*" }; _describe() { print -l -- ${(P)2} }; _files() { print files }
PATH="$1:$PATH"; source "$1/script"
words=(ckpt verify --sam); CURRENT=3; _ckpt
words=(ckpt ver); CURRENT=2; _ckpt
words=(ckpt verify /tm); CURRENT=3; _ckpt
"""
_FISH = """
set PATH $argv[1] $PATH; source $argv[1]/script
complete --do-complete "ckpt verify --sam"; complete --do-complete "ckpt ver"
"""
SAMPLE, VERIFY = "Read only so many tensors of each checkpoint", "read everything back and check every digest"
ASKED = {
    "bash": (["bash", "-c", _BASH, "bash"], ["--sample", "verify", "complete -o default -F _ckpt ckpt"]),
    "zsh": (
        ["zsh", "-f", "-c", _ZSH, "zsh"],
        ["compdef _ckpt ckpt", f"--sample:{SAMPLE}", f"verify:{VERIFY}", "files"],
    ),
    "fish": (["fish", "--no-config", "-c", _FISH], [f"--sample\t{SAMPLE}", f"verify\t{VERIFY}"]),
}
"""What asks a shell that has run our script for what may follow, and what it answers, at least."""


@pytest.mark.parametrize("shell", ASKED)
def test_a_shell_completes_with_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--show-completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "ckpt").write_text(f'#!/bin/sh\nexec {sys.executable} -m toprope "$@"\n')
    (tmp_path / "ckpt").chmod(0o755)
    command, answers = ASKED[shell]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    told = done.stdout.splitlines()
    assert len(told) == len(answers)
    assert all(line.startswith(answer) for line, answer in zip(told, answers, strict=True)), told


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".local/share/bash-completion/completions/ckpt"),
        ("zsh", ".zfunc/_ckpt"),
        ("fish", ".config/fish/completions/ckpt.fish"),
    ],
)
def test_the_script_is_installed_where_the_shell_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, place: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert main(["--install-completion"]) == 0
    assert str(tmp_path / place) in capsys.readouterr().out
    assert main(["--show-completion", shell]) == 0
    assert (tmp_path / place).read_text() == capsys.readouterr().out


def test_another_shell_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", "tcsh"]) == 64
    assert "bash, zsh, fish" in capsys.readouterr().err
