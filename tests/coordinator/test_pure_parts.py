"""The small decisions on their own: placement, spec, cadence and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprope.coordinator import spec
from toprope.coordinator.config import check_cadence
from toprope.coordinator.placement import Site, apart, place
from toprope.coordinator.serving import read_token
from toprope.coordinator.settings import Address, parse_address
from toprope.coordinator.wire import Cadence
from toprope.store.errors import UsageError


def site(name: str, *, ranks: int = 1, **domain: str) -> Site:
    labels = tuple(sorted(domain.items())) or (("node", name),)
    return Site(node=name, url=f"http://{name}", domain=labels, ranks=ranks)


def test_two_nodes_hold_for_each_other() -> None:
    assert place([site("a"), site("b")], before={}).holders == {"a": "b", "b": "a"}


def test_a_node_alone_has_no_holder_and_the_plan_says_why() -> None:
    plan = place([site("a")], before={})
    assert plan.holders == {}
    assert "no other living node" in plan.unmet["a"]


def test_a_holder_in_another_rack_is_preferred_to_one_with_less_to_hold() -> None:
    sites = [site("a", rack="r1"), site("b", rack="r1"), site("c", rack="r2")]
    assert place(sites, before={}).holders == {"a": "c", "b": "c", "c": "a"}


def test_a_node_without_ranks_holds_but_needs_no_holder() -> None:
    plan = place([site("a"), site("spare", ranks=0)], before={})
    assert plan.holders == {"a": "spare"}


sites_strategy = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 4), st.sampled_from(["r1", "r2", "r3"])),
    unique_by=lambda one: one[0],
    max_size=8,
).map(lambda ones: [site(name, ranks=ranks, rack=rack) for name, ranks, rack in ones])


@given(sites_strategy, st.randoms())
def test_a_placement_depends_on_no_order_never_on_oneself_and_is_stable(sites: list[Site], random: object) -> None:
    plan = place(sites, before={})
    assert place(sites[::-1], before={}) == plan
    again = place(sites, before=plan.holders)
    assert {o: h for o, h in again.holders.items() if o not in again.unmet} == {
        o: h for o, h in plan.holders.items() if o not in plan.unmet
    }
    domains = {one.node: one.domain for one in sites}
    for owner in (one for one in sites if one.ranks):
        holder = plan.holders.get(owner.node)
        assert holder != owner.node
        possible = any(apart(owner.domain, other.domain) for other in sites if other is not owner)
        assert (owner.node in plan.unmet) == (not possible)
        if possible:
            assert holder is not None
            assert apart(owner.domain, domains[holder])


@given(st.integers(2, 8))
def test_equal_nodes_have_equal_loads(count: int) -> None:
    plan = place([site(f"n{number}") for number in range(count)], before={})
    assert sorted(plan.holders.values()) == sorted(plan.holders)


def test_a_spec_is_known_by_its_content_and_not_by_the_order_of_its_keys() -> None:
    assert spec.name({"a": 1, "b": [2]}) == spec.name({"b": [2], "a": 1})
    assert spec.name({"a": 1}) != spec.name({"a": 2})


def test_the_difference_of_two_specs_names_each_changed_leaf_and_is_not_too_long() -> None:
    old = {"model": {"w": {"dtype": "float32", "shape": [4]}, "gone": 1}, "same": 1}
    new = {"model": {"w": {"dtype": "bfloat16", "shape": [4]}}, "same": 1, "more": True}
    assert spec.diff(old, new) == '- model.gone: 1; ~ model.w.dtype: "float32" -> "bfloat16"; + more: true'
    many = spec.diff({}, {f"k{number:03}": number for number in range(100)})
    assert many.count(";") == 12
    assert many.endswith("and 88 more")


@pytest.mark.parametrize("every", [(0, 1, 1), (10, 15, 30), (10, 10, 30), (10, 20, 10), (10, 5, 5), (4, 12, 24)])
def test_a_cadence_that_does_not_nest_is_refused(every: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError):
        check_cadence(Cadence(from_step=0, every=every[0], local_every=every[1], object_every=every[2]))


def test_a_cadence_of_powers_of_two_is_fine() -> None:
    check_cadence(Cadence(from_step=0, every=3, local_every=3, object_every=24))


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text, what="--listen")


@pytest.mark.parametrize(("text", "host"), [("127.0.0.1:80", "127.0.0.1"), ("[::1]:80", "::1")])
def test_an_address_is_a_host_and_a_port(text: str, host: str) -> None:
    assert parse_address(text, what="--listen") == Address(host=host, port=80)
    assert str(parse_address(text, what="--listen")) == text


def test_a_token_file_that_is_missing_or_holds_no_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        read_token(tmp_path / "none")
    (tmp_path / "weak").write_text("secret\n")
    with pytest.raises(UsageError, match="at least 16"):
        read_token(tmp_path / "weak")
    (tmp_path / "good").write_text("a secret of some length\n")
    assert read_token(tmp_path / "good") == "a secret of some length"
