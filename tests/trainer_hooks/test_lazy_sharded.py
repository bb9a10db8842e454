"""What FSDP shards may be copied lazily: it gathers into other memory than that of the shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.source import ROOT

from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.ranks import World

pytestmark = pytest.mark.long

Found = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Found]]:
    directory = tmp_path_factory.mktemp("lazy")
    with ForkServer("tests.support.lazy_rank", path=[ROOT]) as server:
        arguments, target = (str(directory),), "tests.support.lazy_rank:main"
        ranks = World(server=server, directory=directory, arguments=arguments, world=2, target=target)
        ranks.start()
        try:
            ranks.finish(timeout_s=100)
        finally:
            ranks.stop()
        yield [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("moment", ["forward", "backward", "fence"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat", "fsdp2"])
def test_shards_that_are_copied_while_fsdp_has_gathered_them_are_exact(
    found: list[Found], kind: str, moment: str
) -> None:
    for rank in found:
        one = rank[kind][moment]
        assert one["later"] > 0
        assert one["held"]
        assert one["sealed"] == [moment]
        assert one["trouble"] == ""
        assert one["same"]
        assert moment == "fence" or one["gathered"] > 0, "FSDP had not gathered anything"
