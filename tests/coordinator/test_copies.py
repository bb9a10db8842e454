"""More copies than one of each snapshot, and none: what is called protected then, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from tests.support.reigns import Reign, copy_of, shown

from toprope.coordinator.effects import ReadBackHere
from toprope.coordinator.events import Heard
from toprope.coordinator.wire import Kept


def uid(reign: Reign) -> str:
    assert reign.state.attempt is not None
    return reign.state.attempt.uid


def training_with(copies: int, *spares: str) -> Reign:
    """Return a reign over two ranks on nodes a and b that train, with so many copies wanted, and ``spares``."""
    reign = Reign()
    reign.settings = replace(reign.settings, copies=copies)
    reign = reign.successor()
    for name in ("a", "b", *spares):
        reign.node(name)
    reign.ask("a", "b")
    reign.verdict("staged")
    reign.verdict("applied")
    return reign


def give(reign: Reign, node: str, step: int, *ranks: int) -> None:
    """Let a node hold peer copies of these ranks."""
    reign.nodes[node].copies += [copy_of(uid(reign), step, rank, "peer") for rank in ranks]
    reign.hear(node)


def test_with_two_copies_a_step_is_protected_only_when_both_are_there_for_each_rank() -> None:
    reign = training_with(2, "c")
    assert {(place.owner, place.holder) for place in reign.desired.placement} == {
        *(("a", "b"), ("a", "c")),
        *(("b", "a"), ("b", "c")),
    }
    reign.hold(2, tiers=("memory", "peer"))
    assert reign.desired.protected_step == 0
    give(reign, "c", 2, 0)
    assert reign.desired.protected_step == 0
    give(reign, "c", 2, 1)
    assert reign.desired.protected_step == 2


def test_what_too_few_nodes_can_guard_is_kept_though_it_is_not_called_protected() -> None:
    reign = training_with(2)
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory",))
    assert reign.desired.protected_step == 0
    assert reign.desired.keep == (Kept(attempt_uid=uid(reign), step=2),)
    assert "2 copies in failure domains of their own need 3" in reign.core.placing.plan.unmet["a"]


def test_without_copies_a_step_in_each_nodes_own_memory_is_all_that_is_wanted() -> None:
    reign = training_with(0)
    assert reign.desired.placement == ()
    reign.hold(2, tiers=("memory",), ranks=(0,))
    assert reign.desired.protected_step == 0
    reign.hold(2, tiers=("memory",), ranks=(1,))
    assert (reign.desired.protected_step, reign.desired.keep) == (2, (Kept(attempt_uid=uid(reign), step=2),))
    assert reign.core.placing.plan.unmet == {}


def test_a_step_that_one_of_two_holders_has_passed_over_is_dropped() -> None:
    reign = training_with(2, "c")
    reign.hold(2, tiers=("memory", "peer"))
    give(reign, "c", 2, 0, 1)
    reign.hold(4, tiers=("memory", "peer"))
    reign.hold(6, tiers=("memory",))
    assert not reign.desired.dropped
    give(reign, "c", 6, 0)
    assert reign.desired.dropped == (Kept(attempt_uid=uid(reign), step=4),)


def test_status_says_how_many_losses_are_survived() -> None:
    told = [shown(training_with(copies, "c").core, now_s=0.0) for copies in (0, 1, 2, 3)]
    assert [(view.copies, view.survives) for view in told] == [(0, 0), (1, 1), (2, 2), (3, 2)]


# --- pulls that take longer than the time between snapshots


def slow() -> Reign:
    """Return a reign whose ranks hold steps 2 and 4, of which 2 is being pulled for six seconds."""
    reign = training_with(1)
    reign.hold(2, tiers=("memory",))
    reign.wait(3)
    reign.hold(4, tiers=("memory",))
    reign.wait(3)
    return reign


def test_a_step_that_takes_long_to_copy_is_gone_for_until_it_is_protected_whatever_comes_after_it() -> None:
    reign = slow()
    assert reign.desired.aim == 2
    reign.wait(10)
    assert reign.desired.aim == 2
    reign.hold(4, tiers=("peer",), ranks=(0,))
    assert (reign.desired.aim, reign.desired.dropped) == (2, ()), "who has gone on comes back for it"
    reign.hold(2, tiers=("peer",))
    assert (reign.desired.protected_step, reign.desired.aim) == (2, 4)


def test_what_is_copied_quickly_is_never_named() -> None:
    reign = training_with(1)
    for step in range(2, 20, 2):
        reign.hold(step, tiers=("memory",))
        reign.wait(4)
        reign.hold(step, tiers=("peer",))
        assert reign.desired.aim == 0


def test_a_step_that_a_rank_has_lost_is_gone_for_no_longer() -> None:
    reign = slow()
    node = reign.nodes["a"]
    node.copies = [copy for copy in node.copies if copy.step != 2]
    reign.hear("a")
    reign.wait(2)
    assert reign.desired.aim == 4


def test_a_copy_that_never_comes_is_not_waited_for_for_ever() -> None:
    reign = slow()
    reign.wait(61)
    assert reign.desired.aim == 4
    reign.wait(61)
    assert reign.desired.aim == 0


def test_a_node_that_says_it_has_no_room_gives_way_to_one_that_has_as_soon_as_it_says_so() -> None:
    reign = training_with(1, "c")

    def holders_of(owner: str) -> list[str]:
        return [place.holder for place in reign.desired.placement if place.owner == owner]

    before = holders_of("a")
    assert before == ["b"]
    inventory = msgspec.structs.replace(reign.nodes["b"].say(), no_room_for=("a",))
    reign.do(Heard(inventory=inventory, live=True, now_s=reign.now_s))
    assert holders_of("a") == ["c"]
    assert holders_of("b"), "it holds what it has room for, and is held"


def test_nodes_have_as_long_to_read_objects_back_as_these_are_large() -> None:
    reign = training_with(1)
    reign.held_back = {ReadBackHere}
    for node, rank in (("a", 0), ("b", 1)):
        large = msgspec.structs.replace(copy_of(uid(reign), 8, rank, "object"), stored_bytes=10**9)
        reign.nodes[node].copies.append(large)
    reign.hear()
    assert {task.node for task in reign.desired.read_backs} == {"a", "b"}, "each reads what the other has written"
    reign.wait(30 + 50 - 1)
    assert reign.kept_back == [], "two objects, two readers, 20 MB a second"
    reign.wait(2)
    assert len(reign.kept_back) == 2
    assert reign.desired.read_backs == ()
