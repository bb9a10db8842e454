"""What is held is counted as it is told, and comes to the same as a look at everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plain_safety import assess
from tests.support.reigns import JOB, copy_of

from toprope.coordinator.holdings import Holdings
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import TIERS, Copy, Inventory, Skip

UID, OTHER = "aa" * 16, "bb" * 16
WORLD = 3
NODES = ("a", "b", "c", "d")

copies = st.builds(
    lambda uid, step, rank, tier, odd, world: copy_of(
        uid, step, rank, tier, world=world, digest_is="0d" * 16 if odd else ""
    ),
    st.sampled_from([UID, UID, UID, OTHER]),
    st.integers(1, 4),
    st.integers(0, WORLD),
    st.sampled_from(TIERS),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([WORLD, WORLD, WORLD, WORLD + 1]),
)
skips = st.builds(
    lambda step, rank: Skip(attempt_uid=UID, step=step, rank=rank, reason="no free slot"),
    st.integers(1, 4),
    st.integers(0, WORLD - 1),
)
words = st.tuples(
    st.sampled_from(NODES),
    st.lists(copies, max_size=8),
    st.lists(skips, max_size=2),
    st.sampled_from(["", "r1", "r2"]),
    st.sampled_from([True, True, True, False]),
)


def node(name: str, held: list[Copy], skipped: list[Skip], rack: str, *, alive: bool) -> Node:
    inventory = Inventory(
        job=JOB,
        job_uid="0b" * 16,
        node=name,
        boot_id=name,
        incarnation=name,
        version=1,
        url=f"http://{name}",
        domain={"rack": rack} if rack else {},
        copies=tuple(held),
        skipped=tuple(skipped),
    )
    return Node(inventory=inventory, heard_s=0.0, alive=alive)


@settings(max_examples=60, deadline=None)
@given(
    told=st.lists(words, min_size=1, max_size=12),
    wanted=st.integers(0, 2),
    placed=st.integers(0, 2),
    aim=st.integers(0, 4),
)
def test_what_is_counted_word_by_word_is_what_a_look_at_everything_finds(
    told: list[tuple[str, list[Copy], list[Skip], str, bool]], wanted: int, placed: int, aim: int
) -> None:
    holdings = Holdings(UID, WORLD)
    there: dict[str, Node] = {}
    for name, held, skipped, rack, alive in told:
        there[name] = node(name, held, skipped, rack, alive=alive)
        holdings.see(there[name])
        living = [one for _, one in sorted(there.items()) if one.alive]
        found = holdings.assess(copies=wanted, placed=placed, aim=aim)
        assert found == assess(living, attempt_uid=UID, world=WORLD, copies=wanted, placed=placed, aim=aim)


def test_a_copy_that_a_node_no_longer_lists_is_not_counted_on() -> None:
    holdings = Holdings(UID, 2)
    memory = [copy_of(UID, 2, rank, "memory") for rank in (0, 1)]
    holdings.see(node("a", [memory[0], copy_of(UID, 2, 1, "peer")], [], "", alive=True))
    holdings.see(node("b", [memory[1], copy_of(UID, 2, 0, "peer")], [], "", alive=True))
    assert holdings.assess(copies=1, placed=1).protected_step == 2
    holdings.see(node("b", [memory[1]], [], "", alive=True))
    assert holdings.assess(copies=1, placed=1).protected_step == 0


def test_a_node_that_is_dead_holds_nothing_and_holds_it_again_when_it_is_back() -> None:
    holdings = Holdings(UID, 2)
    held = {
        "a": [copy_of(UID, 2, 0, "memory"), copy_of(UID, 2, 1, "peer")],
        "b": [copy_of(UID, 2, 1, "memory"), copy_of(UID, 2, 0, "peer")],
    }
    for alive, protected, at_hand in ((True, 2, 2), (False, 0, 2), (True, 2, 2)):
        holdings.see(node("a", held["a"], [], "", alive=True))
        holdings.see(node("b", held["b"], [], "", alive=alive))
        found = holdings.assess(copies=1, placed=1)
        assert (found.protected_step, found.at_hand_step) == (protected, at_hand)


def test_of_steps_that_nobody_lists_any_more_nothing_is_remembered() -> None:
    holdings = Holdings(UID, 2)
    for step in range(1, 1001):
        for name, own, other in (("a", 0, 1), ("b", 1, 0)):
            held = [copy_of(UID, step, own, "memory"), copy_of(UID, step, other, "peer")]
            holdings.see(node(name, held, [], "", alive=True))
    assert holdings.assess(copies=1, placed=1).protected_step == 1000
    remembered = [len(holdings._said), len(holdings._ranks_of), len(holdings._ranks), len(holdings._steps)]
    assert max(*remembered, len(holdings._newest_memory), len(holdings._newest_peer)) <= 2
