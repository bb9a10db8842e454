"""``make kills`` sums up what came of each kill, and hides none that went wrong."""

from __future__ import annotations

from msgspec.structs import replace
from tests.chaos.test_judging import evidence
from tests.support.source import load_program

from toprope.chaos.judging import judge

_, scenarios, kills = (load_program(f"scripts/{name}.py") for name in ("test_long", "scenarios", "kills"))


def test_each_run_counts_where_it_belongs() -> None:
    good = judge(evidence())
    runs = (
        good,
        replace(good, injections=(replace(good.injections[0], target="broker"),)),
        judge(evidence(damages=("shard 1: digest differs",))),
        judge(evidence(finals=())),
        judge(evidence(), stopped="no rank has written a line for 150 s"),
    )
    kept = [scenarios.Kept(commit="x", seconds=1.0, verdict=verdict) for verdict in runs]
    kept.append(scenarios.Kept(commit="x", seconds=1.0, failed="the broker does not listen"))
    known = [replace(kills.summed_up(seed, one), commit="abc") for seed, one in enumerate(kept, start=1)]
    page = kills.page(known)
    assert (
        "2 of 6 kills were survived. READY checkpoints lost or damaged in 1 of them, wrong bytes in 1, hung: 2." in page
    )
    assert "6 READY checkpoints were read back" in page, "none of those in which one was damaged, or nothing was judged"
    assert "| abc | 2 to 2 | broker | 1 | 1 | 2 |" in page
    assert "| abc | 1 to 5 | rank 1 | 4 | 1 | 4 |" in page
    assert "- seed 3, rank 1: verified" in page
    assert "- seed 5, rank 1: no rank has written a line for 150 s" in page
    assert "- seed 6, : the broker does not listen" in page
