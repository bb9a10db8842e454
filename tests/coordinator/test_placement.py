"""Who holds copies of whose snapshots, and what that survives: every set of losses is tried."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprope.coordinator.placement import Holders, Plan, Site, place


def site(name: str, *, ranks: int = 1, **domain: str) -> Site:
    labels = tuple(sorted(domain.items())) or (("node", name),)
    return Site(node=name, url=f"http://{name}", domain=labels, ranks=ranks)


def placed(*sites: Site, before: Holders | None = None, copies: int = 1) -> Plan:
    return place(sites, before=before or {}, copies=copies)


def racks(*names: str, zones: int = 1) -> list[Site]:
    """Return nodes, each in a rack of its own, the racks spread over the zones."""
    return [site(name, rack=f"r{name}", zone=f"z{number % zones}") for number, name in enumerate(names)]


def loads(plan: Plan) -> Counter[str]:
    return Counter(holder for holders in plan.holders.values() for holder in holders)


def moved(before: Plan, after: Plan) -> list[tuple[str, str]]:
    """Return who has become whose holder."""
    return [(o, h) for o, holders in after.holders.items() for h in holders if h not in before.holders.get(o, ())]


def test_two_nodes_hold_for_each_other() -> None:
    assert placed(site("a"), site("b")).holders == {"a": ("b",), "b": ("a",)}


def test_without_copies_nobody_holds_anything_and_nothing_is_missing() -> None:
    plan = placed(site("a"), site("b"), copies=0)
    assert (plan.holders, plan.unmet, plan.copies, plan.survives) == ({}, {}, 0, 0)


def test_a_node_alone_has_no_holder_and_the_plan_says_why() -> None:
    plan = placed(site("a"))
    assert plan.holders == {}
    assert "no other living node" in plan.unmet["a"]


def test_two_copies_in_two_domains_can_not_be_met_and_the_plan_says_what_it_takes() -> None:
    plan = placed(site("a"), site("b"), copies=2)
    assert (plan.holders, plan.copies) == ({"a": ("b",), "b": ("a",)}, 1)
    assert plan.unmet["a"] == ("2 copies in failure domains of their own need 3 domains, and the living nodes are in 2")


def test_a_holder_in_another_rack_is_preferred_to_one_with_less_to_hold() -> None:
    plan = placed(site("a", rack="r1"), site("b", rack="r1"), site("c", rack="r2"))
    assert plan.holders == {"a": ("c",), "b": ("c",), "c": ("a",)}


def test_a_holder_in_another_zone_is_preferred_to_one_in_another_rack() -> None:
    plan = placed(*racks(*"abcd", zones=2), copies=1)
    zone = {one.node: dict(one.domain)["zone"] for one in racks(*"abcd", zones=2)}
    assert all(zone[owner] != zone[holder] for owner, (holder,) in plan.holders.items())
    assert sorted(loads(plan).values()) == [1, 1, 1, 1]


def test_a_node_without_ranks_holds_but_needs_no_holder() -> None:
    assert placed(site("a"), site("spare", ranks=0)).holders == {"a": ("spare",)}


def test_when_a_node_goes_only_what_it_held_moves_and_when_one_comes_only_what_is_too_much_elsewhere() -> None:
    four = placed(*racks(*"abcd"), copies=2)
    three = placed(*racks(*"abc"), before=four.holders, copies=2)
    assert {owner for owner, _ in moved(four, three)} <= {o for o, holders in four.holders.items() if "d" in holders}
    again = placed(*racks(*"abcd"), before=three.holders, copies=2)
    assert loads(again) == Counter(dict.fromkeys("abcd", 2))
    new_owner, takeovers = [(o, h) for o, h in moved(three, again) if o == "d"], 2
    assert len(moved(three, again)) == len(new_owner) + takeovers


sites_strategy = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.integers(0, 4),
        st.sampled_from(["r1", "r2", "r3", "r4"]),
        st.sampled_from("xy"),
    ),
    unique_by=lambda one: one[0],
    max_size=8,
).map(lambda ones: [site(name, ranks=ranks, rack=rack, power=power) for name, ranks, rack, power in ones])


@given(sites_strategy, sites_strategy, st.integers(0, 3))
def test_a_placement_depends_on_no_order_is_stable_and_as_wide_as_it_can_be(
    sites: list[Site], earlier: list[Site], copies: int
) -> None:
    before = place(earlier, before={}, copies=copies).holders
    plan = place(sites, before=before, copies=copies)
    assert place(sites[::-1], before=before, copies=copies) == plan
    assert place(sites, before=plan.holders, copies=copies) == plan
    domains = {one.node: one.domain for one in sites}
    for owner in (one for one in sites if one.ranks):
        holders = plan.holders.get(owner.node, ())
        assert len({owner.node, *holders}) == 1 + len(holders) == 1 + min(copies, len(sites) - 1)
        apart = len({domains[node] for node in (owner.node, *holders)}) - 1
        possible = min(copies, len(set(domains.values())) - 1)
        assert apart == possible
        assert (owner.node in plan.unmet) == (possible < copies)


@given(st.integers(2, 8), st.integers(1, 3))
def test_equal_nodes_have_equal_loads(count: int, copies: int) -> None:
    plan = placed(*(site(f"n{number}") for number in range(count)), copies=copies)
    assert set(loads(plan).values()) == {min(copies, count - 1)}


def survives(plan: Plan, sites: list[Site], owner: str, lost: tuple[tuple[str, str], ...]) -> bool:
    """Say whether a copy of an owner's snapshots is left when all that has one of these labels is lost."""
    gone = {one.node for one in sites if one.labels & set(lost)}
    return bool({owner, *plan.holders.get(owner, ())} - gone)


WORLDS = [
    [site(name) for name in "abcd"],
    racks(*"abcdef", zones=2),
    racks(*"abcdef", zones=3),
    [site(name, rack=f"r{number // 2}", power=f"p{number % 2}") for number, name in enumerate("abcdef")],
    [site(name, zone=f"z{number // 3}") for number, name in enumerate("abcdef")],
]


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
@pytest.mark.parametrize("sites", WORLDS)
def test_every_set_of_losses_that_a_placement_claims_to_survive_is_survived(sites: list[Site], copies: int) -> None:
    for alive in (sites, sites[1:], sites[:3], sites[::2]):
        plan = place(alive, before={}, copies=copies)
        labels = sorted({label for one in alive for label in one.labels})
        for owner, lost in plan.weakest.items():
            assert not survives(plan, alive, owner, lost), "it is lost with what is called its weakest"
            for size in range(len(lost)):
                assert all(survives(plan, alive, owner, some) for some in combinations(labels, size))
        assert plan.survives == min(len(lost) for lost in plan.weakest.values()) - 1


def test_nodes_that_each_fail_alone_survive_as_many_losses_as_there_are_copies() -> None:
    for copies in range(4):
        assert placed(*(site(name) for name in "abcde"), copies=copies).survives == copies


def test_who_has_no_room_for_an_owner_holds_nothing_of_it_and_may_hold_for_others() -> None:
    def sites(*full: str) -> list[Site]:
        return [replace(one, no_room_for=frozenset(full if one.node == "b" else ())) for one in racks(*"abc")]

    before = placed(*sites())
    assert before.holders == {"a": ("b",), "b": ("c",), "c": ("a",)}
    plan = placed(*sites("a"), before=before.holders)
    assert plan.unmet == {}
    assert all(plan.holders[owner] and plan.holders[owner] != (owner,) for owner in "abc")
    assert plan.holders["a"] == ("c",)
    assert placed(*sites("a"), before=plan.holders).holders == plan.holders, "nothing goes to and fro"


def test_an_owner_whose_copies_fit_nowhere_has_none_and_the_plan_names_who_is_full() -> None:
    full = [replace(one, no_room_for=frozenset({"a"})) for one in (site("b"), site("c"))]
    plan = placed(site("a"), *full)
    assert "a" not in plan.holders
    assert plan.unmet["a"] == "its copies don't fit into the memory of b, c, and no other node can hold them"
    assert plan.copies == 0
