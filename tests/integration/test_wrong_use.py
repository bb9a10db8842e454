"""Wrong use gets one clear line and exit status 64, and changes nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.stores import small_store

from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import Forked, ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.store.objects.directory import DirectoryStore

EXIT_USAGE = 64


def ckpt(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toprope", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def one_line_of(done: subprocess.CompletedProcess[str], *, saying: str) -> None:
    assert done.returncode == EXIT_USAGE, done.stderr
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("20")]  # what a service has logged
    assert saying in line


def files_under(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@contextmanager
def a_taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def sidecar_words(directory: Path, memory: Path, **changed: str) -> list[str]:
    options = {
        "job": "wrong",
        "node": "a",
        "coordinator": "http://127.0.0.1:9",
        "broker": "127.0.0.1:9",
        "memory-dir": str(memory),
        "local-dir": str(directory / "local"),
        "store": str(directory / "store"),
        "socket": str(memory / "s.sock"),
    }
    options |= {name.replace("_", "-"): value for name, value in changed.items()}
    return ["sidecar", *(word for name, value in options.items() for word in (f"--{name}", value))]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "local").mkdir()
    (tmp_path / "store").mkdir()
    return tmp_path


@pytest.mark.parametrize("word", ["show", "verify", "restore"])
def test_an_unknown_job_is_named(word: str, home: Path) -> None:
    small_store(DirectoryStore(home / "store"), name="somebody")
    before = files_under(home)
    extra = ["--to", str(home / "out")] if word == "restore" else []

    done = ckpt(word, str(home / "store"), "--job", "nobody", *extra)

    one_line_of(done, saying="nobody")
    assert files_under(home) == before


@pytest.mark.parametrize("name", ["Gpt", "../gpt", "", "a" * 65, "a..b", "a/b"])
def test_an_odd_job_name_is_refused_by_each_service(name: str, home: Path, memory_dir: Path) -> None:
    one_line_of(ckpt("coordinator", "--job", name, "--store", str(home / "store")), saying="job")
    one_line_of(ckpt(*sidecar_words(home, memory_dir, job=name)), saying="job")

    assert files_under(home) == {}
    assert files_under(memory_dir) == {}


@pytest.mark.parametrize("option", ["memory_dir", "local_dir"])
def test_an_unwritable_directory_is_named(option: str, home: Path, memory_dir: Path) -> None:
    bad = "/proc/nothing/there"

    one_line_of(ckpt(*sidecar_words(home, memory_dir, **{option: bad})), saying=bad)


def test_an_unwritable_store_is_named(home: Path) -> None:
    one_line_of(ckpt("coordinator", "--job", "wrong", "--store", "/proc/nothing"), saying="/proc/nothing")


def test_too_little_memory_says_what_is_needed_and_what_there_is(home: Path, memory_dir: Path) -> None:
    done = ckpt(*sidecar_words(home, memory_dir, state_size=str(1 << 50), ranks="2"))

    one_line_of(done, saying="needed")
    assert not list(memory_dir.rglob("*.data"))


def test_a_port_in_use_is_named(home: Path, memory_dir: Path) -> None:
    with a_taken_port() as port:
        listen = f"127.0.0.1:{port}"
        one_line_of(
            ckpt("coordinator", "--job", "wrong", "--store", str(home / "store"), "--listen", listen), saying=str(port)
        )
        one_line_of(ckpt(*sidecar_words(home, memory_dir, listen=listen)), saying=str(port))


def ready_step(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.ready_step


@pytest.mark.slow
def test_a_trainer_with_another_spec_is_shown_the_difference_and_changes_nothing(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    arguments = ("--job", "spec", "--size", "tiny", "--steps", "8")
    cadences = Cadences(every=4, local_every=4, object_every=4)
    with running_cluster(tmp_path, job="spec", nodes=("a",), cadences=cadences, launch=services) as cluster:
        first = World(server=fork_server, directory=tmp_path / "r", arguments=arguments, world=1, cluster=cluster)
        first.start()
        first.finish()
        wait_until(lambda: ready_step(cluster) == 8, what="step 8 is READY", timeout_s=30)
        before = files_under(cluster.store / "spec" / "log")

        other = ("--job", "spec", "--size", "small", "--steps", "8", "--out", str(tmp_path / "other"))
        env = {"RANK": "0", "WORLD_SIZE": "1", "CKPT_SOCKET": str(cluster.nodes["a"].socket)}
        log = tmp_path / "other.log"
        trainer = Forked("other", fork_server, "train:main", other, log=log, env=env)

        assert fork_server.wait(trainer.pid, timeout_s=60) == EXIT_USAGE
        line = log.read_text().splitlines()[-1]
        assert "spec" in line
        assert "model.params.blocks.0.qkv.weight[1]: [96, 32] -> [288, 96]" in line
        assert files_under(cluster.store / "spec" / "log") == before
