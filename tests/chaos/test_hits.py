"""What a fault hits, word by word: an excuse too many and the judge is blind, one too few and it cries wolf."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from toprope.chaos import hits
from toprope.chaos.faults.kinds import KINDS
from toprope.chaos.hits import costs_protection, costs_slots, ends_trainers, spoils_numbers
from toprope.chaos.verdict import Injection

FIRED = Injection(fault="kill", target="sidecar a", trigger="after step 10", fired=True, witness="pid 1 ended with -9")
HOLD_RANKS = ("rank 1", "agent b", "node a", "all")
HOLD_NONE = ("sidecar a", "coordinator", "broker", "store", "services", "link a b", "world")
HARMLESS = ("flip", "tear", "ckpt", "twice", "spike")
ENDING = ("kill", "segfault", "terminate", "oom", "fill", "power")
SPOILING = ("nan", "spike", "weight")


def failing(witness: str) -> Injection:
    return replace(FIRED, fault="fail", witness=witness)


def test_each_word_is_one_that_a_scenario_may_say() -> None:
    assert {*ENDING} == hits._ENDS_TRAINERS <= {*KINDS}
    assert {*HARMLESS} == hits._COST_NO_SLOTS <= {*KINDS}
    assert {*SPOILING} == hits._SPOIL_NUMBERS <= {*KINDS}


@pytest.mark.parametrize("target", [*HOLD_RANKS, *HOLD_NONE])
@pytest.mark.parametrize("fault", KINDS)
def test_a_world_is_started_again_by_what_ends_processes_among_which_are_ranks(fault: str, target: str) -> None:
    assert ends_trainers(fault, target) == (fault in ENDING and target in HOLD_RANKS)


@pytest.mark.parametrize("fault", KINDS)
def test_a_service_that_is_hit_may_cost_slots_unless_nothing_of_it_is_slower(fault: str) -> None:
    assert costs_slots(replace(FIRED, fault=fault)) == (fault not in HARMLESS)
    assert not costs_slots(replace(FIRED, fault=fault, fired=False))


@pytest.mark.parametrize(
    ("target", "costs"),
    [("rank 1", False), ("agent b", False), *dict.fromkeys(("node a", "all", *HOLD_NONE), True).items()],
)
def test_a_rank_that_is_hit_is_no_reason_to_have_no_slot(target: str, costs: bool) -> None:  # noqa: FBT001 - a table
    assert costs_slots(replace(FIRED, target=target)) == costs


@pytest.mark.parametrize("target", ["sidecar a", "coordinator", "broker", "services", "all"])
def test_who_makes_or_knows_of_copies_in_memory_may_cost_protection_and_not_by_harmless_faults(target: str) -> None:
    assert costs_protection(replace(FIRED, target=target))
    assert not costs_protection(replace(FIRED, target=target, fired=False))
    assert not any(costs_protection(replace(FIRED, target=target, fault=fault)) for fault in HARMLESS)


@pytest.mark.parametrize("target", ["rank 1", "agent b", "node a", "store", "world", "link a b"])
def test_nobody_else_is_a_reason_to_lose_what_is_in_memory(target: str) -> None:
    assert not costs_protection(replace(FIRED, target=target))


@pytest.mark.parametrize(
    "port", ["pages.read", "peers.fetch", "coordinator.report", "broker.publish", "nodes.inventory"]
)
def test_a_call_that_fails_on_the_way_of_copies_may_cost_protection(port: str) -> None:
    assert costs_protection(failing(f"sidecar:{port} fail, 3 times"))


@pytest.mark.parametrize("port", ["objects.create", "disk.write", "store.read", "memory.pages.read"])
def test_a_call_to_disk_or_object_store_that_fails_costs_no_protection(port: str) -> None:
    assert not costs_protection(failing(f"sidecar:{port} fail, 3 times"))


@pytest.mark.parametrize("fault", KINDS)
def test_numbers_are_spoilt_by_those_faults_alone_that_change_them_and_happened(fault: str) -> None:
    assert spoils_numbers(replace(FIRED, fault=fault, target="rank 1")) == (fault in SPOILING)
    assert not spoils_numbers(replace(FIRED, fault=fault, target="rank 1", fired=False))
