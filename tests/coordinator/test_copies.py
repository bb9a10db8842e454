"""More copies than one of each snapshot, and none: what is called protected then, and what is kept."""

from __future__ import annotations

from dataclasses import replace

from tests.support.reigns import Reign, copy_of

from toprope.coordinator.overview import overview
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
    told = [overview(training_with(copies, "c").core, broker="none", now_s=0.0) for copies in (0, 1, 2, 3)]
    assert [(view.copies, view.survives) for view in told] == [(0, 0), (1, 1), (2, 2), (3, 2)]
