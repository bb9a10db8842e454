"""Two nodes in network namespaces, with a link that loses packets; the long tests have the other kinds of links."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.netns_job import (
    assert_as_if_nothing_had_happened,
    assert_no_false_commit,
    begin,
    finish,
    net_job,
)
from tests.support.training import Reference

from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.netns import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.skipif(bool(why_not()), reason=why_not())]


def test_a_lossy_link_costs_time_and_nothing_else(
    tmp_path: Path, fork_server: ForkServer, reference: Reference
) -> None:
    with net_job(tmp_path, fork_server, steps=20) as job:
        begin(job, to=6)
        node = job.network.nodes["b"]
        node.lose(10)
        finish(job)
        assert node.dropped() > 0
        assert job.ranks.starts == 1, "no rank was lost"
        assert_as_if_nothing_had_happened(job, reference)
        assert_no_false_commit(job)
