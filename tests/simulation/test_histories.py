"""Simulated histories: no promise broken, all troubles met, the same story each time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from toprope.__main__ import main
from toprope.chaos.sim import search
from toprope.chaos.sim.history import Outcome, run
from toprope.chaos.sim.mutants import MUTANTS
from toprope.chaos.sim.options import OUTAGE, PAIR, RANGES, READERS, SMALL, STANDBYS, Options, Trouble, draw
from toprope.chaos.sim.shrink import Story, shrunk

_DIGESTS = "from toprope.chaos.sim.history import run; print([run(seed).digest for seed in (3, 5, 8)])"

_MARKED: dict[str, Any] = {
    **STANDBYS,
    "some_of": (),
    "faults": ("marked outage", "marked outage", "kill rank"),
    "store_fault": 0.0,
}
SELDOM: dict[str, tuple[int, dict[str, Any]]] = {
    "METRIC came before an attempt opened without the log": (1, _MARKED),
    "PIN came before an attempt opened without the log": (1, _MARKED),
    "a coordinator learned what was opened without the log": (13, OUTAGE),
    "a hold was left behind": (
        2,
        {**READERS, "faults": ("reader",), "chaos_s": 30.0, "between_s": 0.7, "step_s": 0.5},
    ),
    "a read-back found damage": (
        21,
        {**PAIR, "faults": ("kill rank",), "store_fault": 0.1, "chaos_s": 30.0, "between_s": 6.0, "step_s": 1.5},
    ),
    "a reader refused wrong bytes": (0, RANGES),
    "a slow node adopted an attempt while two coordinators stood by": (
        0,
        {**STANDBYS, "some_of": (), "store_fault": 0.0},
    ),
    "a source was struck off": (
        19,
        {**SMALL, "faults": ("flip", "flip", "flip", "kill rank"), "store_fault": 0.2, "copies": 0, "between_s": 0.7},
    ),
    "an attempt opened without the log was fenced off": (
        2,
        {
            **OUTAGE,
            "some_of": (),
            "faults": ("lone outage", "lone outage", "kill rank"),
            "store_fault": 0.0,
            "retain": "",
        },
    ),
    "an attempt opened without the log was rolled back": (
        1,
        {**_MARKED, "faults": ("store outage", "go back", "go back", "kill rank")},
    ),
    "the store went away while a record was appended": (51, OUTAGE),
    "wrong bytes of the store were asked for once more": (0, RANGES),
}
"""A seed for each, and what is narrowed, so that it happens."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_histories_break_no_promise_and_meet_all_troubles(
    record_property: Callable[[str, object], None],
) -> None:
    found = search.run(range(1000), jobs=2)
    record_property(
        "histories", f"{found.histories} in {found.wall_s:.0f} s, {found.virtual_s / 3600:.1f} virtual hours"
    )
    assert found.broken == [], "\n".join(str(outcome) for outcome in found.broken)
    assert [what for what in found.never() if what not in search.SELDOM] == []


@pytest.mark.parametrize("what", search.SELDOM)
def test_what_a_search_seldom_meets_breaks_no_promise_either(what: str) -> None:
    seed, narrow = SELDOM[what]
    outcome = run(seed, draw(random.Random(seed), **narrow))
    assert outcome.counts[what] > 0, "look for another seed"
    assert outcome.invariant == "", outcome


def test_a_scan_refuses_a_local_file_that_was_damaged() -> None:
    world = next(one for one in MUTANTS if one.name == "scan")
    outcome = run(world.seed, world.options(world.seed))
    assert outcome.counts["a scan refused a local file"] > 0
    assert outcome.invariant == "", outcome


@pytest.mark.slow
def test_a_seed_gives_the_same_history_whatever_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_broken_promise_is_made_small_and_told_with_options_and_story_and_can_be_replayed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mutant = next(one for one in MUTANTS if one.name == "gc-shared")
    assert main(["chaos", "sim", "--seeds", "1", "--seed", str(mutant.seed), "--mutant", mutant.name]) == 1
    told = capsys.readouterr().out
    for wanted in (f"seed {mutant.seed}: I8: ", "options: nodes=1", "VIOLATION I8", "again: ckpt chaos sim --replay"):
        assert wanted in told
    text = told.partition("--replay '")[2].partition("'")[0]
    story = msgspec.json.decode(text, type=Story)
    assert len(story.options.script) < len(mutant.options(mutant.seed).script)
    assert main(["chaos", "sim", "--replay", text]) == 1
    again = capsys.readouterr().out
    assert again.splitlines()[0] == told.splitlines()[0]


def test_a_history_is_made_small_as_long_as_the_same_promise_breaks() -> None:
    good = run(0)
    script = tuple(Trouble(at_s=float(at), what="kill rank", seed=at) for at in range(8))
    options = msgspec.structs.replace(good.options, nodes=3, drop=0.1, script=script)

    def again(smaller: Options) -> Outcome:
        there = {trouble.seed for trouble in smaller.script}
        return replace(good, options=smaller, invariant="I10" if {2, 5} <= there and smaller.nodes > 1 else "I1")

    small = shrunk(again(options), again).options
    assert [trouble.seed for trouble in small.script] == [2, 5]
    assert (small.nodes, small.drop, small.faults) == (2, 0.0, ("kill rank",))


@pytest.mark.parametrize("text", ["nothing", "{}", '{"seed": 1}'])
def test_what_is_no_story_is_wrong_use(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "sim", "--replay", text]) == 64
    assert "--replay" in capsys.readouterr().err


@pytest.mark.parametrize("seeds", ["0", "5:5", "9:3", "-1", "a", "1:b", ":4"])
def test_what_is_no_range_of_seeds_is_wrong_use(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "sim", f"--seeds={seeds}"]) == 64
    assert "--seeds" in capsys.readouterr().err


def test_a_good_search_ends_with_status_0_and_says_what_it_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "sim", "--seeds", "0:2"]) == 0
    told = capsys.readouterr().out
    assert "2 histories" in told
    assert "no promise was broken" in told


def test_an_unknown_mutant_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "sim", "--mutant", "nothing"]) == 64
    assert "fence" in capsys.readouterr().err
