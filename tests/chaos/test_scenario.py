"""Scenarios are read strictly: what can't be meant is refused with its place, and nothing is guessed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from toprope.chaos.faults.kinds import KINDS, check
from toprope.chaos.hits import ends_trainers
from toprope.chaos.phases import PHASES
from toprope.chaos.promises import PROMISES
from toprope.chaos.scenario import load, parse, shipped
from toprope.store.errors import UsageError

GOOD = """
name = "mine"
label = "chaos"
about = "A node dies."
attacks = ["bit-identical"]
[[fault]]
do = "kill"
target = "node b"
at_step = [10, 12]
"""


@pytest.mark.parametrize("name", shipped())
def test_each_shipped_scenario_can_be_run_and_names_the_promise_that_it_attacks(name: str) -> None:
    scenario = load(name).scenario
    check(scenario)
    assert (scenario.name, scenario.label) == (name, "chaos")
    assert set(scenario.attacks) <= set(PROMISES)
    assert scenario.about.endswith(".")


def test_every_promise_is_attacked_by_a_shipped_scenario() -> None:
    attacked = {promise for name in shipped() for promise in load(name).scenario.attacks}
    assert attacked == set(PROMISES)


def test_every_kind_of_fault_is_used_by_a_shipped_scenario() -> None:
    used = {fault.do for name in shipped() for fault in load(name).scenario.fault}
    assert used - {"any"} == set(KINDS)


def test_a_step_of_two_is_drawn_from_the_seed() -> None:
    (fault,) = parse(GOOD, what="mine").fault
    drawn = [fault.drawn(random.Random(seed)).at_step for seed in range(30)]
    assert set(drawn) == {10, 11, 12}
    assert drawn == [fault.drawn(random.Random(seed)).at_step for seed in range(30)]


def test_a_time_of_two_and_a_fault_of_several_are_drawn_from_the_seed() -> None:
    any_of = 'do = "any"\nhow.among = "kill rank 0; pause sidecar a"'
    (fault,) = parse(
        GOOD.replace('do = "kill"', any_of).replace("at_step = [10, 12]", "at_s = [0.5, 2]"), what="mine"
    ).fault
    assert fault.trigger == "at 0.5 to 2 s"
    drawn = [fault.drawn(random.Random(seed)) for seed in range(30)]
    assert drawn == [fault.drawn(random.Random(seed)) for seed in range(30)]
    assert {(one.do, one.target, *one.how) for one in drawn} == {("kill", "rank 0"), ("pause", "sidecar a")}
    times = [one.at_s for one in drawn if isinstance(one.at_s, float)]
    assert len(set(times)) == 30
    assert all(0.5 <= at_s <= 2 for at_s in times)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name =", "name = 3\nx =", "Expected `str`, got `int` - at `$.name`"),
        ('about = "A node dies."', "", "missing required field `about`"),
        ('do = "kill"', 'do = "kill"\nwhom = "b"', "unknown field `whom` - at `$.fault[0]`"),
        ('["bit-identical"]', '["bit-perfect"]', "no promise is called 'bit-perfect'; there are: bit-identical"),
        ("at_step = [10, 12]", "", "say once when it comes"),
        ("at_step = [10, 12]", "at_step = 3\nat_s = 2.0", "say once when it comes"),
        ("at_step = [10, 12]", "at_step = 41", "at_step 41 to 41 is not within the 40 steps"),
        ("at_step = [10, 12]", "at_step = [12, 10]", "at_step 12 to 10 is not within"),
        ("at_step = [10, 12]", "at_s = [3, 2]", "at_s 3 to 2: give seconds from 0 on"),
        ("at_step = [10, 12]", "at_s = -1", "at_s -1 to -1: give seconds from 0 on"),
        ("at_step = [10, 12]", 'during = "object upload"', "during and of go together"),
        ("[[fault]]", "[[fault]", "not TOML"),
        ('name = "mine"', 'name = "../mine"', "'../mine'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as refused:
        parse(GOOD.replace(old, new, 1), what="mine.toml")
    assert str(refused.value).startswith("mine.toml: ")
    assert says in str(refused.value)


def test_a_fault_and_a_phase_that_there_are_not_are_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="no fault is called 'explode'; there are: kill"):
        check(parse(GOOD.replace('"kill"', '"explode"'), what="mine"))
    with pytest.raises(UsageError, match="during 'lunch': no phase is called so; there are: shm copy"):
        check(parse(GOOD.replace("at_step = [10, 12]", 'during = "lunch"\nof = "sidecar a"'), what="mine"))
    with pytest.raises(UsageError, match="it is a sidecar that is in this phase"):
        check(parse(GOOD.replace("at_step = [10, 12]", 'during = "object upload"\nof = "rank 0"'), what="mine"))


def test_a_scenario_is_found_by_name_or_by_file_and_its_script_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert load(str(file)).directory == tmp_path
    assert load("kill-node").scenario.name == "kill-node"
    with pytest.raises(UsageError, match="no scenario is called 'kill-nobody'; give one of all-services-down"):
        load("kill-nobody")
    with pytest.raises(UsageError, match="no such file"):
        load(str(tmp_path / "other.toml"))


def test_only_what_ends_ranks_may_start_the_world_again() -> None:
    assert ends_trainers("kill", "node b")
    assert ends_trainers("segfault", "rank 0")
    assert not ends_trainers("kill", "sidecar a")
    assert not ends_trainers("pause", "rank 0")


def test_every_phase_is_of_one_kind_of_process() -> None:
    assert {kind for kind, _ in PHASES.values()} == {"rank", "sidecar", "coordinator"}
