"""``make kills`` sums up what came of each kill, and hides none that went wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace
from tests.chaos.test_judging import SCENARIO, evidence
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
        judge(evidence(injections=(replace(good.injections[0], fired=False, witness="it had ended"),))),
        judge(evidence(scenario=replace(SCENARIO, attacks=("told",)), told=())),
    )
    kept = [scenarios.Kept(commit="x", seconds=1.0, verdict=verdict) for verdict in runs]
    kept.append(scenarios.Kept(commit="x", seconds=1.0, failed="the broker does not listen"))
    early = judge(evidence(injections=()), stopped="sidecar of node a ended before it was ready")
    kept.append(scenarios.Kept(commit="x", seconds=1.0, verdict=early))
    known = [replace(kills.summed_up(seed, one), commit="abc") for seed, one in enumerate(kept, start=1)]
    page = kills.page(known)
    assert (
        "2 of 7 kills were survived. READY checkpoints lost or damaged in 1 of them, wrong bytes in 1, hung: 1." in page
    )
    assert "10 READY checkpoints were read back" in page, "none where one was damaged or nothing was judged"
    assert "| abc | 2 to 2 | broker | 1 | 1 | 2 |" in page
    assert "| abc | 1 to 7 | rank 1 | 5 | 1 | 6 |" in page
    assert "- seed 3, rank 1: verified" in page
    assert "- seed 5, rank 1: no rank has written a line for 150 s" in page
    assert "- seed 6, rank 1 (not hit): training goes on, rank 1 was not hit: it had ended" in page
    assert "- seed 7, rank 1: told was not judged" in page
    assert "- seed 8 failed before anything was killed: the broker does not listen" in page
    assert "- seed 9 failed before anything was killed: sidecar of node a ended before it was ready" in page
    assert kills.to_run(range(1, 11), known) == [8, 9, 10], "what killed nothing is run again"


def test_of_a_seed_that_was_run_again_counts_what_came_last(tmp_path: Path) -> None:
    state = tmp_path / "kills.jsonl"
    assert kills.recorded(state) == []
    failed = kills.Killed(seed=1, commit="abc", seconds=1.0, failed="the broker does not listen")
    good = replace(failed, failed="", good=True)
    other = replace(good, seed=2)
    state.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (failed, other, good)))
    assert sorted(kills.recorded(state), key=lambda one: one.seed) == [good, other]
