"""How the job is wanted to be: phases, placement, what is kept, read-backs, READY; and all of it after a restart."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reigns import FakeNode, Reign, copy_of, training, two_nodes

from toprope.coordinator.commits import UNANSWERED_MAX
from toprope.coordinator.effects import Commit, Probe, ReadBackHere
from toprope.coordinator.events import CommitFailed, Connected, Heard, Hinted, LogMoved, ReadHere, SeenDesired
from toprope.coordinator.roll import REFUSED_TOLD
from toprope.coordinator.wire import Desired, Inventory, Kept, Presence, ReadBack, ReadBackTask, Skip
from toprope.store.log.records import Taint


def phase(reign: Reign) -> str:
    assert reign.desired.attempt is not None
    return reign.desired.attempt.phase


def readers(reign: Reign) -> dict[int, str]:
    """Return who is to read back the object of which rank."""
    return {int(task.key.removesuffix("-0a")[-1]): task.node for task in reign.desired.read_backs}


def alive(reign: Reign) -> list[str]:
    return [node.name for node in reign.core.roll.alive()]


def uid(reign: Reign) -> str:
    assert reign.state.attempt is not None
    return reign.state.attempt.uid


# --- phases


def test_a_phase_is_reached_when_the_last_rank_has_said_so() -> None:
    reign = two_nodes()
    reign.ask("a", "b")
    reign.verdict("staged", ranks=(0,))
    assert phase(reign) == "opened"
    reign.verdict("staged", ranks=(1,))
    assert phase(reign) == "staged"
    reign.verdict("applied", ranks=(1,))
    assert phase(reign) == "staged"
    reign.verdict("applied", ranks=(0,))
    assert phase(reign) == "applied"


def test_one_rank_that_fails_fails_the_attempt_with_its_reason() -> None:
    reign = two_nodes()
    reign.ask("a", "b")
    reign.verdict("staged", ranks=(1,), ok=False, reason="no room")
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.phase == "failed"
    assert reign.desired.attempt.reason == "rank 1 on node b could not be staged: no room"


def test_a_failed_attempt_stays_failed() -> None:
    reign = two_nodes()
    reign.ask("a", "b")
    reign.verdict("staged", ranks=(1,), ok=False)
    reign.verdict("staged")
    assert phase(reign) == "failed"


def test_a_deadline_names_the_ranks_that_said_nothing() -> None:
    reign = two_nodes()
    reign.ask("a", "b", "a")
    reign.verdict("staged", ranks=(1,))
    reign.wait(299)
    assert phase(reign) == "opened"
    reign.wait(2)
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.phase == "failed"
    assert reign.desired.attempt.reason.endswith("no word from rank 0, 2")


def test_each_phase_has_its_own_deadline() -> None:
    reign = two_nodes()
    reign.ask("a", "b")
    reign.wait(200)
    reign.verdict("staged")
    reign.wait(200)
    assert phase(reign) == "staged"
    reign.wait(101)
    assert phase(reign) == "failed"


def test_ranks_that_train_need_no_verdict_after_a_restart_of_the_coordinator() -> None:
    reign = training()
    reign.hold(2)
    for node in reign.nodes.values():
        node.ranks = {rank: msgspec.structs.replace(state, step=3, verdict=None) for rank, state in node.ranks.items()}
    after = reign.successor()
    after.hear()
    assert phase(after) == "applied"
    after.wait(400)
    assert phase(after) == "applied"


# --- protection, keep, placement


def test_a_step_is_protected_when_every_shard_is_in_memory_and_on_a_peer() -> None:
    reign = training()
    reign.hold(2, tiers=("memory",))
    reign.hold(2, tiers=("peer",), ranks=(0,))
    assert reign.desired.protected_step == 0
    reign.hold(2, tiers=("peer",), ranks=(1,))
    assert reign.desired.protected_step == 2
    assert reign.desired.keep == (Kept(attempt_uid=uid(reign), step=2),)


def test_a_peer_copy_with_another_digest_protects_nothing() -> None:
    reign = training()
    reign.hold(2, tiers=("memory",))
    reign.hold(2, tiers=("peer",), ranks=(0,))
    reign.nodes["a"].copies.append(copy_of(uid(reign), 2, 1, "peer", digest_is="ff" * 16))
    reign.hear()
    assert reign.desired.protected_step == 0


def test_a_copy_of_another_attempt_protects_nothing() -> None:
    reign = training()
    reign.hold(2, tiers=("memory",))
    for rank, name in ((0, "b"), (1, "a")):
        reign.nodes[name].copies.append(copy_of("77" * 16, 2, rank, "peer"))
    reign.hear()
    assert reign.desired.protected_step == 0


def test_a_peer_in_the_same_failure_domain_protects_nothing_and_is_complained_of() -> None:
    reign = Reign()
    for name in ("a", "b"):
        reign.node(name, domain={"rack": "r1"})
    reign.ask("a", "b")
    reign.hold(2, tiers=("memory", "peer"))
    assert reign.desired.protected_step == 0
    assert {place.owner: place.holder for place in reign.desired.placement} == {"a": "b", "b": "a"}
    assert "rack=r1" in reign.core.placing.plan.unmet["a"]


def test_the_kept_step_moves_on_only_when_a_later_one_is_protected() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory",))
    assert [kept.step for kept in reign.desired.keep] == [2]
    reign.hold(4, tiers=("peer",))
    assert [kept.step for kept in reign.desired.keep] == [4]


def test_a_kept_step_that_lost_its_protection_is_not_let_go_for_an_older_one() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    node = reign.nodes["b"]
    node.copies = [copy for copy in node.copies if (copy.step, copy.tier) != (4, "peer")]
    reign.hear("b")
    assert reign.desired.protected_step == 2
    assert [kept.step for kept in reign.desired.keep] == [4]


def test_the_source_of_an_attempt_is_kept_until_a_later_step_is_protected() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    source = Kept(attempt_uid=uid(reign), step=2)
    reign.end_trainers()
    reign.ask("a", "b", launch_id="2b" * 16)
    reign.hold(4, tiers=("memory",))
    assert reign.desired.keep == (source,)
    reign.hold(4, tiers=("peer",))
    assert reign.desired.keep == (Kept(attempt_uid=uid(reign), step=4),)


def test_what_a_survivor_holds_stays_kept_when_the_other_node_is_gone() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.lose("b")
    assert reign.desired.keep == (Kept(attempt_uid=uid(reign), step=2),)
    reign.wait(30)
    assert reign.desired.keep == (Kept(attempt_uid=uid(reign), step=2),)


def test_a_job_on_one_node_keeps_its_newest_step_in_memory() -> None:
    reign = Reign()
    reign.node("a")
    reign.ask("a", "a")
    reign.hold(2)
    reign.hold(4)
    assert reign.desired.keep == (Kept(attempt_uid=uid(reign), step=4),)
    assert reign.desired.protected_step == 0
    assert reign.core.placing.plan.unmet["a"] == "there is no other living node to hold copies"


def test_a_coordinator_that_begins_lets_nothing_go_before_it_has_heard_the_nodes() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    after = reign.successor()
    assert after.published == []
    after.hear("a")
    assert after.published == []
    after.hear("b")
    assert after.desired.keep == reign.desired.keep
    assert after.desired.term == reign.desired.term + 1


def test_a_coordinator_that_can_hear_only_some_speaks_after_a_while_and_keeps_what_was_kept() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.nodes["b"].up = False
    after = reign.successor()
    after.do(SeenDesired(desired=reign.desired, now_s=after.now_s))
    after.wait(6)
    assert after.desired.keep == reign.desired.keep


def test_a_placement_that_is_still_good_is_not_changed_when_a_node_comes() -> None:
    reign = training()
    before = reign.desired.placement
    reign.node("aa")
    assert reign.desired.placement == before


def test_a_holder_that_is_gone_is_replaced() -> None:
    reign = training()
    reign.node("c")
    reign.lose("b")
    assert {place.owner: place.holder for place in reign.desired.placement} == {"a": "c"}


# --- nodes


def test_a_last_will_of_a_node_that_answers_changes_nothing() -> None:
    reign = training()
    before = reign.desired
    node = reign.nodes["b"]
    presence = Presence(node="b", boot_id=node.boot_id, incarnation=node.incarnation, alive=False)
    reign.do(Hinted(presence=presence, now_s=reign.now_s))
    assert reign.core.roll.nodes["b"].alive
    assert reign.desired == before


def test_a_last_will_that_comes_before_the_inventory_is_remembered() -> None:
    reign = two_nodes()
    gone = FakeNode(name="c", job_uid=reign.state.job_uid, up=False)
    presence = Presence(node="c", boot_id=gone.boot_id, incarnation=gone.incarnation, alive=False)
    reign.do(Hinted(presence=presence, now_s=reign.now_s))
    reign.do(Heard(inventory=gone.say(), live=False, now_s=reign.now_s))
    assert not reign.core.roll.nodes["c"].alive


def test_a_silent_node_is_asked_and_given_up_after_three_times() -> None:
    reign = training()
    reign.nodes["b"].up = False
    reign.wait(3)
    assert alive(reign) == ["a", "b"]
    reign.wait(2)
    assert alive(reign) == ["a"]
    assert any("node b" in said.text and "does not answer" in said.text for said in reign.said)


def test_a_node_that_answers_again_is_alive_again() -> None:
    reign = training()
    reign.nodes["b"].up = False
    reign.wait(6)
    reign.nodes["b"].up = True
    reign.wait(1)
    assert reign.core.roll.nodes["b"].alive


def test_a_second_living_sidecar_of_the_same_name_is_refused_and_the_first_stays() -> None:
    reign = training()
    second = FakeNode(name="b", job_uid=reign.state.job_uid, boot_id="bb" * 16, incarnation="b2" * 16)
    reign.do(Heard(inventory=second.say(), live=True, now_s=reign.now_s))
    assert list(reign.desired.refused) == [second.incarnation]
    assert "already served" in reign.desired.refused[second.incarnation]
    assert reign.core.roll.nodes["b"].inventory.boot_id == reign.nodes["b"].boot_id


def test_only_the_newest_refused_lives_are_told_of() -> None:
    reign = training()
    lives = [f"{number:032x}" for number in range(40)]
    for life in lives:
        second = FakeNode(name="b", job_uid=reign.state.job_uid, boot_id="bb" * 16, incarnation=life)
        reign.do(Heard(inventory=second.say(), live=True, now_s=reign.now_s))
    assert list(reign.desired.refused) == lives[-REFUSED_TOLD:]


def test_nothing_is_remembered_of_steps_that_can_not_become_ready_any_more() -> None:
    reign = training()
    for step in (8, 16, 24):
        reign.hold(step, tiers=("memory", "object"))
        reign.read_back()
        reign.hear()
    assert reign.ready_steps == [8, 16, 24]
    commits = reign.core.commits
    assert (commits.receipts, commits.found, commits.dead) == ({}, {}, {})


def test_a_replacement_of_a_node_that_is_gone_is_taken_and_the_dead_lifes_copies_are_dropped() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.nodes["b"].up = False
    second = FakeNode(name="b", job_uid=reign.state.job_uid, boot_id="bb" * 16, incarnation="b2" * 16)
    reign.do(Heard(inventory=second.say(), live=True, now_s=reign.now_s))
    assert reign.desired.refused == {}
    assert reign.core.roll.nodes["b"].inventory.boot_id == "bb" * 16
    assert reign.desired.protected_step == 0


def test_a_restarted_sidecar_with_the_same_memory_is_taken_at_once() -> None:
    reign = training()
    node = reign.nodes["b"]
    node.incarnation = "b2" * 16
    node.version = 0
    reign.held_back = {Probe}
    reign.hear("b")
    assert reign.core.roll.nodes["b"].inventory.incarnation == "b2" * 16
    assert reign.desired.refused == {}


def test_a_late_document_of_a_life_that_is_over_is_ignored() -> None:
    reign = training()
    old = reign.nodes["b"].say()
    reign.nodes["b"].incarnation = "b2" * 16
    reign.hear("b")
    reign.do(Heard(inventory=old, live=False, now_s=reign.now_s))
    assert reign.core.roll.nodes["b"].inventory.incarnation == "b2" * 16


def test_an_older_version_that_comes_late_changes_nothing() -> None:
    reign = training()
    old = reign.nodes["b"].say()
    reign.hold(2, tiers=("memory", "peer"))
    before = reign.desired
    reign.do(Heard(inventory=old, live=False, now_s=reign.now_s))
    reign.do(Heard(inventory=old, live=True, now_s=reign.now_s))
    assert reign.desired == before
    assert reign.desired.protected_step == 2


def test_news_of_the_log_that_come_late_change_nothing() -> None:
    reign = training()
    old = reign.core.log_view
    reign.hold(8, tiers=("object",))
    reign.read_back()
    reign.do(LogMoved(log_view=old, now_s=reign.now_s))
    assert reign.desired.ready_step == 8


def test_a_document_of_another_job_is_ignored_and_told() -> None:
    reign = two_nodes()
    foreign = FakeNode(name="c", job_uid="99" * 16)
    reign.do(Heard(inventory=foreign.say(), live=False, now_s=0.0))
    assert "c" not in reign.core.roll.nodes
    assert any("ignored" in said.text for said in reign.said)


# --- READY


def test_a_step_is_ready_when_every_rank_has_a_receipt_that_another_node_has_read_back() -> None:
    reign = training()
    reign.hold(8, tiers=("object",), ranks=(0,))
    assert reign.desired.read_backs == ()
    reign.hold(8, tiers=("object",), ranks=(1,))
    assert readers(reign) == {0: "b", 1: "a"}
    assert reign.ready_steps == []
    reign.read_back()
    assert reign.ready_steps == [8]
    assert reign.desired.ready_step == 8
    assert reign.desired.read_backs == ()


def test_a_node_does_not_vouch_for_its_own_objects() -> None:
    reign = training()
    reign.hold(8, tiers=("object",))
    for name in ("a", "b"):
        own = next(copy for copy in reign.nodes[name].copies if copy.tier == "object")
        reign.nodes[name].read_backs.append(ReadBack(key=own.key, digest=own.digest, ok=True))
    reign.hear()
    assert reign.ready_steps == []


def vouch(reign: Reign, task: ReadBackTask) -> None:
    """Let the node that is to read an object back find it right."""
    reign.nodes[task.node].read_backs.append(ReadBack(key=task.key, digest=task.digest, ok=True))
    reign.hear(task.node)


def test_nobody_is_told_anew_that_one_object_of_a_step_was_read_back() -> None:
    reign = training()
    reign.hold(8, tiers=("object",))
    first, second = tasks = reign.desired.read_backs
    before = reign.desired.version
    vouch(reign, first)
    assert (reign.desired.version, reign.desired.read_backs) == (before, tasks)
    vouch(reign, second)
    assert reign.ready_steps == [8]
    assert reign.desired.read_backs == ()


def test_what_was_read_back_is_asked_of_nobody_else_when_a_reader_is_gone() -> None:
    reign = training()
    reign.node("c")
    reign.hold(8, tiers=("object",))
    assert readers(reign) == {0: "b", 1: "c"}
    vouch(reign, reign.desired.read_backs[0])
    reign.lose("c")
    assert readers(reign) == {1: "a"}
    reign.read_back()
    assert reign.ready_steps == [8]


def test_the_coordinator_reads_back_itself_when_there_is_one_node_only() -> None:
    reign = Reign()
    reign.node("a")
    reign.ask("a", "a")
    reign.hold(8, tiers=("object",))
    assert reign.ready_steps == [8]


def test_the_coordinator_reads_back_itself_when_nobody_does_it_in_time() -> None:
    reign = training()
    reign.hold(8, tiers=("object",))
    reign.wait(31)
    assert reign.ready_steps == [8]


def test_an_object_that_does_not_read_back_keeps_its_step_from_becoming_ready() -> None:
    reign = training()
    reign.hold(8, tiers=("object",))
    reign.read_back(spoil=reign.desired.read_backs[0].key)
    assert reign.ready_steps == []
    assert any("can't become READY" in said.text for said in reign.said)
    reign.hold(16, tiers=("object",))
    reign.read_back()
    assert reign.ready_steps == [16]


def test_the_newest_complete_step_goes_first_and_older_ones_die() -> None:
    reign = training()
    reign.hold(8, tiers=("object",), ranks=(0,))
    reign.hold(16, tiers=("object",))
    reign.read_back()
    reign.hold(8, tiers=("object",), ranks=(1,))
    reign.read_back()
    assert reign.ready_steps == [16]


def test_a_step_that_is_being_read_back_is_finished_although_a_newer_one_is_complete() -> None:
    reign = training()
    reign.hold(8, tiers=("object",))
    tasks: tuple[ReadBackTask, ...] = reign.desired.read_backs
    reign.hold(16, tiers=("object",))
    assert reign.desired.read_backs == tasks
    reign.read_back()
    reign.read_back()
    assert reign.ready_steps == [8, 16]


def test_receipts_of_two_attempts_do_not_make_a_step() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(8, tiers=("object",), ranks=(0,))
    reign.end_trainers()
    reign.ask("a", "b", launch_id="2b" * 16)
    reign.hold(8, tiers=("object",), ranks=(1,))
    assert reign.desired.read_backs == ()
    assert reign.ready_steps == []


def test_a_tainted_step_never_becomes_ready() -> None:
    reign = training()
    reign.append_record(Taint(attempt=1, from_step=8, to_step=8, reason="loss spike"))
    reign.hold(8, tiers=("object",))
    reign.read_back()
    assert reign.ready_steps == []


def test_a_commit_that_failed_for_now_is_tried_again_and_one_that_failed_for_good_is_not() -> None:
    reign = training()
    reign.held_back = {Commit}
    reign.hold(8, tiers=("object",))
    reign.read_back()
    assert len(reign.kept_back) == 1
    failed = CommitFailed(attempt_uid=uid(reign), step=8, text="store away", final=False, now_s=reign.now_s)
    reign.do(failed)
    assert len(reign.kept_back) == 1
    reign.wait(3)
    assert len(reign.kept_back) == 2
    reign.do(replace(failed, text="bad index", final=True))
    reign.wait(10)
    assert len(reign.kept_back) == 2


def test_a_step_with_an_object_that_can_not_be_read_goes_to_ready_unless_a_newer_one_is_complete() -> None:
    reign = Reign()
    reign.node("a")
    reign.ask("a", "a")
    reign.held_back = {ReadBackHere}
    reign.hold(8, tiers=("object",))

    def not_answered() -> None:
        effects, reign.kept_back = reign.kept_back, []
        for effect in effects:
            assert isinstance(effect, ReadBackHere)
            reign.do(ReadHere(key=effect.task.key, result=None, now_s=reign.now_s))
        reign.wait(3)

    for _ in range(UNANSWERED_MAX + 1):
        not_answered()
    reign.release()
    assert reign.ready_steps == [8], "a store that was away for long costs nothing"
    reign.held_back = {ReadBackHere}
    reign.hold(16, tiers=("object",))
    reign.hold(24, tiers=("object",))
    for _ in range(UNANSWERED_MAX):
        not_answered()
    assert [said.text for said in reign.said if "step 16 can't become READY" in said.text]
    reign.release()
    assert reign.ready_steps == [8, 24]


def test_a_commit_for_which_the_store_never_answers_goes_after_a_newer_one() -> None:
    reign = training()
    reign.held_back = {Commit}
    reign.hold(8, tiers=("object",))
    reign.read_back()
    reign.hold(16, tiers=("object",))
    for _ in range(UNANSWERED_MAX):
        reign.do(CommitFailed(attempt_uid=uid(reign), step=8, text="EIO", final=False, now_s=reign.now_s))
        reign.kept_back = []
        reign.wait(3)
    reign.release()
    reign.read_back()
    assert reign.ready_steps == [16]


# --- documents


def test_desired_is_published_when_it_changes_and_not_otherwise() -> None:
    reign = training()
    count = len(reign.published)
    reign.hear()
    reign.wait(2)
    assert len(reign.published) == count
    versions = [desired.version for desired in reign.published]
    assert versions == sorted(set(versions))


def test_desired_is_published_anew_on_each_connection_and_when_an_older_one_is_retained() -> None:
    reign = training()
    for event in (
        Connected(now_s=reign.now_s),
        SeenDesired(desired=msgspec.structs.replace(reign.desired, version=1), now_s=reign.now_s),
        SeenDesired(desired=msgspec.structs.replace(reign.desired, term=0, version=99), now_s=reign.now_s),
    ):
        count = len(reign.published)
        reign.do(event)
        assert len(reign.published) == count + 1
        assert reign.published[-1] == reign.published[-2]


def test_its_own_desired_coming_back_and_one_of_another_job_change_nothing() -> None:
    reign = training()
    count = len(reign.published)
    reign.do(SeenDesired(desired=reign.desired, now_s=reign.now_s))
    reign.do(SeenDesired(desired=msgspec.structs.replace(reign.desired, job_uid="99" * 16, term=0), now_s=reign.now_s))
    assert len(reign.published) == count


def wanted(desired: Desired) -> Desired:
    return msgspec.structs.replace(desired, version=0, term=0)


def documents() -> tuple[Reign, list[Inventory]]:
    """Return a reign that has heard every version of each node's inventory in order, and those documents."""
    reign = training()
    said: list[Inventory] = [node.inventory() for node in reign.nodes.values()]
    for step in (2, 4, 6, 8):
        reign.hold(step, tiers=("memory", "peer") if step < 8 else ("memory", "object"))
        said += [node.inventory() for node in reign.nodes.values()]
    reign.read_back()
    said += [node.inventory() for node in reign.nodes.values()]
    return reign, said


@given(st.data())
def test_doubled_lost_and_reordered_documents_change_nothing(data: st.DataObject) -> None:
    reign, said = documents()
    last = {one.node: one for one in said}
    shuffled = data.draw(st.permutations(said))
    order = [one for one in shuffled for _ in range(data.draw(st.integers(0, 2)))] + list(last.values())
    after = reign.successor()
    for inventory in order:
        after.do(Heard(inventory=inventory, live=False, now_s=after.now_s))
    assert after.ready_steps == reign.ready_steps == [8]
    for given_ in (reign, after):
        given_.wait(1)
    assert wanted(after.desired) == wanted(reign.desired)


STEPS = [
    "ask",
    "staged0",
    "staged1",
    "applied",
    "memory",
    "peer0",
    "peer1",
    "object0",
    "object1",
    "back",
    "wait",
    "end",
]


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_a_coordinator_restarted_anywhere_comes_to_the_same_end(at: int) -> None:
    reign = two_nodes()
    for number, step in enumerate(STEPS):
        if number == at:
            reign = reign.successor()
            reign.hear()
        act(reign, step)
    assert reign.ready_steps == [8]
    assert reign.desired.protected_step == 8
    assert phase(reign) == "applied"
    assert reign.state.attempt_number == 1


def act(reign: Reign, step: str) -> None:
    match step:
        case "ask":
            reign.ask("a", "b")
        case "staged0" | "staged1":
            reign.verdict("staged", ranks=(int(step[-1]),))
        case "applied":
            reign.verdict("applied")
        case "memory":
            reign.hold(8, tiers=("memory",))
        case "peer0" | "peer1" | "object0" | "object1":
            reign.hold(8, tiers=("peer",) if "peer" in step else ("object",), ranks=(int(step[-1]),))
        case "back":
            reign.read_back()
        case _:
            reign.wait(1)


def test_a_step_that_a_rank_skipped_is_dropped_by_the_others_at_once() -> None:
    reign = training()
    reign.hold(2, ranks=(0,))
    assert not reign.desired.dropped
    reign.nodes["b"].skipped = [Skip(attempt_uid=uid(reign), step=2, rank=1, reason="no free slot")]
    reign.hear("b")
    assert reign.desired.dropped == (Kept(attempt_uid=uid(reign), step=2),)


def test_a_step_before_the_one_that_is_protected_is_not_named_as_it_goes() -> None:
    reign = training()
    reign.hold(2)
    reign.hold(4, tiers=("memory", "peer"))
    assert reign.desired.protected_step == 4
    before = reign.desired.version
    node = reign.nodes["a"]
    node.copies = [copy for copy in node.copies if (copy.step, copy.tier) != (2, "memory")]
    reign.hear()
    assert 2 in reign.core.holdings.assess(copies=1, placed=1).hopeless
    assert (reign.desired.version, reign.desired.dropped) == (before, ())


def test_a_step_that_may_still_become_ready_is_not_dropped_although_a_rank_has_gone_on() -> None:
    reign = training()
    reign.hold(8, ranks=(0,))
    reign.hold(8, tiers=("object",), ranks=(1,))
    reign.hold(10, ranks=(1,))
    assert reign.desired.dropped == ()


def test_a_step_that_a_rank_holds_in_a_peers_memory_only_is_dropped_since_it_can_not_be_protected() -> None:
    reign = training()
    reign.hold(8, ranks=(0,))
    reign.hold(8, tiers=("peer",), ranks=(1,))
    reign.hold(10, ranks=(1,))
    assert reign.desired.dropped == (Kept(attempt_uid=uid(reign), step=8),)


def test_a_step_that_a_ranks_holder_has_passed_over_is_dropped_so_that_the_other_holder_goes_on_too() -> None:
    """Else each waits half a minute with a step of its own, and all ranks run out of slots."""
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory",))
    reign.hold(4, tiers=("peer",), ranks=(1,))
    assert [kept.step for kept in reign.desired.dropped] == []
    reign.hold(6, tiers=("memory",))
    reign.hold(6, tiers=("peer",), ranks=(0,))
    assert [kept.step for kept in reign.desired.dropped] == [4]
    reign.hold(6, tiers=("peer",), ranks=(1,))
    assert reign.desired.protected_step == 6


def test_a_step_that_was_passed_over_is_not_dropped_while_it_may_become_ready() -> None:
    reign = training()
    reign.hold(8, tiers=("memory",))
    reign.hold(8, tiers=("object",), ranks=(0,))
    reign.hold(10, tiers=("memory",))
    reign.hold(10, tiers=("peer",), ranks=(0,))
    assert reign.desired.dropped == ()
