"""A checkpoint that is asked for while it is being stored: none before it is READY, and the one before it meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from toprope.__main__ import main as ckpt
from toprope.chaos.live.ask import get_inventory
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import Forked, ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until

JOB = "slow"
EVERY = 2
MIB = 256
DELAY_S = 5.0
NOTHING_TO_RESTORE = 3


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def ready_step(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.ready_step


def stored_step(cluster: Cluster) -> int:
    inventory = get_inventory(cluster.nodes["a"].url)
    return max((copy.step for copy in inventory.copies if copy.tier == "object"), default=0) if inventory else 0


def restored(cluster: Cluster, to: Path, *step: str) -> int:
    """Restore into ``to``; return the exit status."""
    return ckpt(["restore", str(cluster.store), "--to", str(to), "--job", JOB, *step])


def step_of(directory: Path) -> int:
    return int(json.loads((directory / "manifest.json").read_text())["step"])


def assert_whole(directory: Path, step: int) -> None:
    """Each byte of the model's ballast counts the steps."""
    (file,) = directory.glob("*.safetensors")
    (ballast,) = (tensor for name, tensor in load_file(file).items() if name.endswith("ballast.bytes"))
    assert ballast.numel() == MIB << 20
    assert bool((ballast == step % 256).all())


@pytest.mark.fault("B07")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_whose_commit_is_delayed_is_not_restored_by_half_and_the_newest_is_the_one_before(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, capsys: pytest.CaptureFixture[str]
) -> None:
    cadences = Cadences(every=EVERY, local_every=EVERY, object_every=EVERY)
    with running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster:
        words = ["--job", JOB, "--out", str(tmp_path / "out"), "--steps", "100000", "--step-delay", "2"]
        trainer = Forked(
            "trainer",
            fork_server,
            "tests.support.counting_trainer:main",
            [*words, "--ballast-mib", str(MIB)],
            log=cluster.log("trainer"),
            env={"CKPT_SOCKET": str(cluster.nodes["a"].socket)},
        )
        alive = [trainer]
        try:
            wait_until(lambda: ready_step(cluster) > 0, what="a READY", timeout_s=100, alive=alive)
            assert cluster.coordinator is not None
            with frozen(cluster.coordinator.pid):
                until_s = time.monotonic() + DELAY_S
                assert restored(cluster, tmp_path / "before") == 0
                before = step_of(tmp_path / "before")
                wait_until(lambda: stored_step(cluster) > before, what="a later step", timeout_s=100, alive=alive)
                later = stored_step(cluster)
                for wait_s in (0.0, max(0.0, until_s - time.monotonic())):
                    time.sleep(wait_s)
                    capsys.readouterr()
                    assert restored(cluster, tmp_path / "none", "--step", str(later)) == NOTHING_TO_RESTORE
                    assert "what is newer is not READY yet" in capsys.readouterr().err
                    assert not (tmp_path / "none").exists()
                assert restored(cluster, tmp_path / "meanwhile") == 0
                assert_whole(tmp_path / "meanwhile", before)
            wait_until(lambda: ready_step(cluster) >= later, what="one as new is READY", timeout_s=100, alive=alive)
        finally:
            trainer.kill()
        assert restored(cluster, tmp_path / "after") == 0
        assert step_of(tmp_path / "after") >= later
        assert_whole(tmp_path / "after", step_of(tmp_path / "after"))
