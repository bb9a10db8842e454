"""What ``ckpt status`` is told."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.reigns import Reign, copy_of, shown, training

from toprope.coordinator.events import Heard
from toprope.coordinator.overview import RankLine
from toprope.coordinator.wire import Skip, Tier


def alarms_of(reign: Reign) -> list[str]:
    """Return the alarms about READY."""
    told = shown(reign.core, broker="connected", now_s=reign.now_s).alarms
    return [alarm for alarm in told if alarm.startswith("READY")]


def train_to(reign: Reign, step: int) -> None:
    """Let each rank tell of this step."""
    for node in reign.nodes.values():
        node.ranks = {rank: msgspec.structs.replace(state, step=step) for rank, state in node.ranks.items()}
    reign.hear()


def test_ranks_that_run_ahead_of_ready_by_more_than_two_intervals_are_an_alarm() -> None:
    reign = training()
    train_to(reign, 16)
    assert alarms_of(reign) == []
    train_to(reign, 18)
    assert alarms_of(reign) == ["READY is 18 steps behind the ranks: is the object store full or away?"]


def test_what_costs_a_node_a_tier_is_an_alarm_with_its_name() -> None:
    reign = training()
    node = reign.nodes["a"]
    inventory = msgspec.structs.replace(node.say(), troubles=("the local tier fails: full",))
    reign.do(Heard(inventory=inventory, live=True, now_s=reign.now_s))
    told = shown(reign.core, broker="connected", now_s=reign.now_s).alarms
    assert "node a: the local tier fails: full" in told
    reign.hear("a")
    assert not [alarm for alarm in shown(reign.core, now_s=0.0).alarms if "local tier" in alarm]


def test_the_cadence_that_slow_copies_could_keep_up_with_is_named_until_they_keep_up() -> None:
    reign = training()

    def told() -> list[str]:
        alarms = shown(reign.core, broker="connected", now_s=reign.now_s).alarms
        return [alarm for alarm in alarms if alarm.startswith("copies are slower")]

    reign.hold(2, tiers=("memory",))
    reign.wait(6)
    train_to(reign, 9)
    assert told() == []
    reign.hold(2, tiers=("peer",))
    assert told() == [
        "copies are slower than the cadence: 7 steps were done while one was copied; --every 8 would keep up"
    ]
    reign.hold(10, tiers=("memory", "peer"))
    assert told() == []


def test_the_alarm_ends_when_a_newer_step_is_ready() -> None:
    reign = training()
    train_to(reign, 24)
    assert alarms_of(reign) != []
    reign.hold(24, tiers=("object",))
    reign.read_back()
    assert reign.ready_steps == [24]
    assert alarms_of(reign) == []


def test_of_each_rank_it_says_how_far_it_is_and_which_step_of_it_is_still_where() -> None:
    reign = training()
    train_to(reign, 9)
    for step in (4, 2):  # in any order
        reign.hold(step, tiers=("memory", "peer", "local"))
    reign.hold(8, tiers=("object",))

    def told() -> list[RankLine]:
        return list(shown(reign.core, now_s=reign.now_s).ranks)

    a = RankLine(rank=0, node="a", alive=True, lock_held=True, step=9, memory=4, peer=4, local=4, object=8)
    b = replace(a, rank=1, node="b")
    assert told() == [a, b]
    reign.nodes["a"].copies = [copy for copy in reign.nodes["a"].copies if copy.tier != "object"]
    reign.hear("a")
    assert told() == [a, b], "what was stored once is stored, whoever lists it"
    reign.lose("b")
    assert told() == [replace(a, peer=0), replace(b, alive=False, lock_held=False, memory=0, local=0)]


def test_of_the_newest_steps_that_were_skipped_it_says_by_which_ranks_and_why() -> None:
    reign = training()
    attempt = reign.core.log_view.state.attempt
    assert attempt is not None
    missing = {4: range(1), 5: range(2), 6: range(1, 2), 7: range(10)}
    reign.nodes["b"].skipped = [
        Skip(attempt_uid=attempt.uid, step=step, rank=rank, reason="no free slot")
        for step in missing
        for rank in missing[step]
    ]
    reign.nodes["a"].skipped = [Skip(attempt_uid="0" * 32, step=8, rank=0, reason="of another attempt")]
    reign.hear()
    told = [one for one in shown(reign.core, now_s=reign.now_s).alarms if "not saved" in one]
    assert told == [
        "step 5 was not saved by ranks 0, 1: no free slot",
        "step 6 was not saved by rank 1: no free slot",
        "step 7 was not saved by ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: no free slot",
    ]


@pytest.mark.parametrize("tier", ["memory", "peer", "local", "object"])
def test_a_step_that_was_skipped_is_told_of_until_its_rank_has_saved_that_one_or_a_later_one(tier: Tier) -> None:
    reign = training()
    attempt = reign.core.log_view.state.attempt
    assert attempt is not None
    reign.nodes["a"].skipped = [Skip(attempt_uid=attempt.uid, step=step, rank=0, reason="too late") for step in (3, 5)]
    reign.nodes["b"].skipped = [Skip(attempt_uid=attempt.uid, step=5, rank=1, reason="state has grown")]

    def told() -> list[str]:
        reign.hear()
        return [one for one in shown(reign.core, now_s=reign.now_s).alarms if "not saved" in one]

    both = "step 5 was not saved by ranks 0, 1: state has grown, too late"
    assert told() == ["step 3 was not saved by rank 0: too late", both]
    reign.nodes["a"].copies = [copy_of(attempt.uid, 4, 0, tier)]
    assert told() == [both]
    reign.nodes["a"].copies = [copy_of(attempt.uid, 5, 0, tier)]
    assert told() == ["step 5 was not saved by rank 1: state has grown"]
    reign.nodes["a"].copies += [copy_of(attempt.uid, 8, 1, tier)]
    assert told() == []


def test_a_rank_whose_process_has_ended_holds_no_slot_of_its_node_which_lives_on() -> None:
    reign = training()
    reign.nodes["b"].ranks[1] = replace(reign.nodes["b"].ranks[1], lock_held=False)
    reign.hear()
    assert [(one.alive, one.lock_held) for one in shown(reign.core, now_s=reign.now_s).ranks] == [
        (True, True),
        (True, False),
    ]
