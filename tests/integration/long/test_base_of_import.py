"""A trainer that starts from the weights of an import, through real services."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tests.integration.test_base import cluster_of
from tests.support.tiny_trainer import assert_same_tensor, tiny

from toprope.__main__ import main
from toprope.chaos.live.forking import ForkedServices
from toprope.trainer_hooks.checkpointer import Checkpointer

pytestmark = pytest.mark.long


def test_a_trainer_starts_at_step_1_with_the_weights_of_an_import_and_saves_its_own(
    tmp_path: Path, services: ForkedServices
) -> None:
    source, there, root = tiny(5), tiny(1), tmp_path / "root"
    for _ in range(3):
        source.step()
    weights = source.model.state_dict()
    save_file(weights, tmp_path / "theirs.safetensors")
    root.mkdir()
    assert main(["import", str(root), str(tmp_path / "theirs.safetensors"), "--job", "theirs", "--step", "7"]) == 0
    with cluster_of("tuned", tmp_path, root, services, "--base", "theirs@7", "--base-take", "weights") as cluster:
        socket = cluster.nodes["a"].socket
        checkpointer = Checkpointer(job="tuned", socket=socket, **there.named())
        assert checkpointer.restore() == 0
        assert {shard.tier for shard in checkpointer.sources} == {"object"}
        for name, tensor in there.model.state_dict().items():
            assert_same_tensor(tensor, weights[name])
        for step in range(1, 9):
            there.step()
            checkpointer.end_step(step)
            time.sleep(0.1)
        assert checkpointer.close(wait_for="ready", timeout_s=30.0)
    assert main(["verify", f"{root}/tuned@8"]) == 0
