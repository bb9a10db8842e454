"""What ``ckpt launch`` and ``ckpt rendezvous`` do with their words."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from toprope.__main__ import main
from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.torchrun import cli, strikes
from toprope.trainer_hooks.torchrun.settings import ENVIRONMENT

Started = list[list[str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The words that torchrun was started with; it starts nothing."""
    found: Started = []
    monkeypatch.setattr(torch.distributed.run, "main", found.append)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(cli, "_MEETS_S", 0.3)
    return found


@pytest.fixture
def meeting() -> Iterator[str]:
    """Where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def keeper(*python: str, frozen: float = 10.0, ends: str = "") -> list[str]:
    module = "toprope.trainer_hooks.torchrun.worker"
    return ["--no-python", sys.executable, "-m", module, str(os.getpid()), str(frozen), ends, "", "", "--", *python]


def test_one_node_is_run_as_it_was_said_and_its_ranks_are_kept(started: Started) -> None:
    words = ["--nproc-per-node=2", "--max-restarts=3", "train.py", "--rdzv-conf", "of the script"]
    assert main(["launch", "--", "torchrun", *words]) == 0
    own = ["--rdzv-backend=toprope", "--rdzv-endpoint=localhost:0"]
    assert started == [[*words[:2], *own, *keeper(sys.executable, "-u"), *words[2:]]]
    assert ENVIRONMENT == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DCP_USE_PREFIX_STORE": "1"}
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT


def test_several_nodes_meet_where_they_are_told(started: Started, meeting: str, tmp_path: Path) -> None:
    launch = ["launch", "--rendezvous", meeting, "--frozen-after", "4", "--ends", str(tmp_path / "ends"), "--"]
    assert main([*launch, "torchrun", "--nnodes=1:2", "--rdzv-id=job", "-m", "package.train", "-x"]) == 0
    (words,) = started
    kept = keeper(sys.executable, "-u", "-m", frozen=4.0, ends=str(tmp_path / "ends"))
    assert words[:2] == ["--nnodes=1:2", "--rdzv-id=job"]
    assert words[2:4] == ["--rdzv-backend=toprope", f"--rdzv-endpoint={meeting}"]
    assert words[5:] == [*kept, "package.train", "-x"]


def test_a_node_that_is_to_leave_hears_of_failures_from_its_keepers(started: Started, meeting: str) -> None:
    launch = ["launch", "--rendezvous", meeting, "--leave-after", "3", "--"]
    assert main([*launch, "torchrun", "--nnodes=1:2", "--rdzv-id=job", "train.py"]) == 0
    (words,) = started
    (conf,) = (word for word in words if word.startswith("--rdzv-conf="))
    assert "leave_after=3," in conf
    read = int(conf.rpartition("told_by=")[2])
    write = int(words[words.index("--") - 1])
    strikes.tell(os.getpid(), write)
    assert os.read(read, 8) == b"f"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(("status", "how"), [(64, "with status 64"), (-9, "by SIGKILL")])
def test_that_ranks_have_failed_is_one_line_with_the_first_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, how: str
) -> None:
    first = ProcessFailure(local_rank=1, pid=7, exitcode=status, error_file="none")
    later = ProcessFailure(local_rank=0, pid=8, exitcode=1, error_file="none")
    first.timestamp, later.timestamp = 1, 2
    failed = ChildFailedError("train.py", {0: later, 1: first})

    def fails(_words: list[str]) -> None:
        raise failed

    monkeypatch.setattr(torch.distributed.run, "main", fails)
    assert main(["launch", "--", "torchrun", "train.py"]) == 1
    said = f"ckpt launch: train.py has failed: rank 1 was the first to end, {how}; see above\n"
    assert capsys.readouterr().err == said
    for option, value in (("--redirects", "3"), ("--local-ranks-filter", "0")):
        with pytest.raises(ChildFailedError, match="Root Cause"):  # where else should it be said?
            main(["launch", "--", "torchrun", option, value, "train.py"])


def test_a_place_where_nobody_listens_is_said_with_what_to_start(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["torchrun", "--nnodes=2", "--rdzv-id=job", "a.py"]
        assert main(["launch", "--rendezvous", place, "--", *words]) == 4
    assert f"start `ckpt rendezvous --listen {place}`" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "--", "python", "train.py"], "is not torchrun"),
        (["launch", "--", "torchrun", "--nnodes=2", "a.py"], "give --rendezvous HOST:PORT"),
        (["launch", "--frozen-after", "0", "--", "torchrun", "a.py"], "more than 0"),
        (["launch", "--leave-after", "-1", "--", "torchrun", "a.py"], "give how often"),
        (["launch", "--leave-after", "2", "--", "torchrun", "a.py"], "nobody is left to go on without it"),
        (["launch", "--frozen-after", "soon", "--", "torchrun", "a.py"], "invalid float value"),
        (["launch", "--", "torchrun", "--run-path", "a.py"], "--run-path"),
        (["launch", "--warm", "torch", "--", "torchrun", "--no-python", "a.sh"], "--warm and another program"),
        (["launch", "--warm", "torch,nothere", "--", "torchrun", "a.py"], "no module 'nothere'"),
        (["launch", "--rendezvous", "x", "--", "torchrun", "--nnodes=2", "--rdzv-id=j", "a.py"], "not HOST:PORT"),
        (["rendezvous", "--listen", "29400"], "not HOST:PORT"),
        (["rendezvous", "--listen", "127.0.0.1:99999"], "not HOST:PORT"),
    ],
)
def test_wrong_words_get_one_line_and_status_64(
    words: list[str], said: str, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 64
    assert said in capsys.readouterr().err
    assert started == []


def test_a_place_that_is_taken_is_said(meeting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rendezvous", "--listen", meeting]) == 64
    assert f"--listen {meeting}: Address already in use" in capsys.readouterr().err


def test_without_torch_it_is_said_where_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name}", name="torch")

    monkeypatch.setattr("toprope.trainer_hooks.torchrun.cli.importlib.import_module", none)
    with pytest.raises(UsageError, match="'torch' is not installed: run this in the trainer's environment"):
        cli.rendezvous([])
    assert capsys.readouterr().out == ""
