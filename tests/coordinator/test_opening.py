"""Opening an attempt: who gets one, who must wait, who is refused, and from which step it begins."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs
from tests.support.reigns import JOB, LAUNCH, SPEC, FakeNode, Reign, copy_of, training, two_nodes

from toprope.coordinator import spec as specs
from toprope.coordinator.effects import Answer, Append, Prepare
from toprope.coordinator.events import Asked, OpenFailed
from toprope.coordinator.wire import Copy, Kept, Member, OpenAnswer, OpenRequest
from toprope.store.log.records import NOBODY, Job, Pin, Taint

OTHER = "2b" * 16


def opened(answer: OpenAnswer | None) -> OpenAnswer:
    assert answer is not None
    assert answer.attempt is not None, answer
    return answer


def request(*, world: tuple[Member, ...], job: str = "job") -> OpenRequest:
    return OpenRequest(job=job, launch_id=OTHER, round=0, world=world, spec=SPEC, versions={})


def code(answer: OpenAnswer | None) -> str:
    assert answer is not None
    assert answer.attempt is None
    return answer.code


def test_the_first_launch_gets_a_fresh_attempt_and_sets_the_spec() -> None:
    reign = two_nodes()
    view = opened(reign.ask("a", "b")).attempt
    assert view is not None
    assert (view.number, view.source, view.from_step, view.phase) == (1, "fresh", 0, "opened")
    assert reign.desired.attempt == view
    assert reign.state.spec_sha256 is not None


def test_the_same_launch_and_round_asked_twice_gets_the_same_attempt() -> None:
    reign = two_nodes()
    first = opened(reign.ask("a", "b"))
    assert reign.ask("a", "b") == first
    assert reign.state.attempt_number == 1


def test_a_launch_asked_twice_while_it_is_decided_gets_one_attempt_and_two_answers() -> None:
    reign = two_nodes()
    reign.held_back = {Append}
    assert reign.ask("a", "b") is None
    assert reign.ask("a", "b") is None
    assert len(reign.kept_back) == 1
    reign.release()
    assert len(reign.answers) == 2
    assert reign.answers[1] == reign.answers[2]


def test_a_second_launch_is_told_busy_while_another_is_being_decided() -> None:
    reign = two_nodes()
    reign.held_back = {Append}
    reign.ask("a", "b")
    assert code(reign.ask("a", "b", launch_id=OTHER)) == "busy"


def test_a_new_launch_is_busy_while_a_rank_of_the_current_attempt_lives() -> None:
    reign = training()
    answer = reign.ask("a", "b", launch_id=OTHER)
    assert code(answer) == "busy"
    assert answer is not None
    assert "rank 0 on node a" in answer.text


def test_a_launch_beside_a_living_world_that_makes_steps_ready_all_the_time_is_told_busy_at_once() -> None:
    reign = training()
    reign.held_back = {Prepare}
    assert reign.ask("a", "b", launch_id=OTHER) is None
    (prepare,) = reign.kept_back
    assert isinstance(prepare, Prepare)
    asked = reign._prepare(prepare)
    reign.hold(8, tiers=("memory", "peer", "local", "object"))
    reign.read_back()
    assert reign.ready_steps == [8]
    reign.do(asked)
    assert reign.kept_back == [prepare], "all nodes and the store are not asked again"
    assert code(reign.answers[reign.requests]) == "busy"


def test_a_new_launch_is_granted_once_all_locks_are_free() -> None:
    reign = training()
    reign.end_trainers()
    view = opened(reign.ask("a", "b", launch_id=OTHER)).attempt
    assert view is not None
    assert view.number == 2


def test_a_rank_that_lives_on_a_node_that_does_not_answer_does_not_hold_up_a_new_launch() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.end_trainers()
    reign.lose("b")
    reign.node("c")
    opened(reign.ask("a", "c", launch_id=OTHER))


def test_a_launch_waits_for_a_node_that_is_still_reading_what_it_holds() -> None:
    reign = training()
    reign.hold(2)
    reign.end_trainers()
    found, reign.nodes["b"].copies = reign.nodes["b"].copies, []
    reign.nodes["b"].reading = True
    reign.hear("b")
    assert code(reign.ask("a", "b", launch_id=OTHER)) == "unavailable", "or the job would begin afresh"
    reign.nodes["b"].copies, reign.nodes["b"].reading = found, False
    reign.hear("b")
    view = opened(reign.ask("a", "b", launch_id=OTHER)).attempt
    assert view is not None
    assert view.from_step == 2


def test_what_an_earlier_life_of_a_node_held_is_not_counted_on_when_another_life_answers() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4)
    reign.node("c")
    uid, fresh = reign.state.job_uid, "5f" * 16
    reign.nodes["b"] = FakeNode(name="b", job_uid=uid, boot_id=fresh, incarnation=fresh)
    reign.nodes["a"].ranks = {}
    reign.hear("a")
    view = opened(reign.ask("a", "c", launch_id=OTHER)).attempt
    assert view is not None
    assert view.from_step == 2, "step 4 went with the memory of the old b"
    assert reign.core.roll.nodes["b"].inventory.boot_id == fresh


def test_another_node_at_the_address_of_one_is_not_taken_for_it() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4)
    reign.node("c")
    known = reign.nodes["b"].boot_id
    reign.nodes["b"] = FakeNode(name="d", job_uid=reign.state.job_uid)
    reign.nodes["a"].ranks = {}
    reign.hear("a")
    view = opened(reign.ask("a", "c", launch_id=OTHER)).attempt
    assert view is not None
    assert view.from_step == 2, "what b was heard to hold was not asked for just now"
    assert reign.core.roll.nodes["b"].inventory.boot_id == known


def test_a_launch_that_was_superseded_is_told_so_and_fences_nobody() -> None:
    reign = training()
    reign.end_trainers()
    opened(reign.ask("a", "b", launch_id=OTHER))
    reign.end_trainers()
    assert code(reign.ask("a", "b", launch_id=LAUNCH, round_number=1)) == "superseded"
    assert reign.state.attempt_number == 2


def test_an_older_round_of_the_current_launch_is_superseded() -> None:
    reign = two_nodes()
    opened(reign.ask("a", "b", round_number=1))
    assert code(reign.ask("a", "b", round_number=0)) == "superseded"


def test_a_launch_waits_for_a_node_that_the_coordinator_has_not_heard() -> None:
    reign = two_nodes()
    answer = reign.ask("a", "c")
    assert code(answer) == "unavailable"
    assert answer is not None
    assert "node c of rank 1" in answer.text


def test_a_launch_waits_for_a_node_whose_memory_is_another_than_it_says() -> None:
    reign = two_nodes()
    world = (Member(rank=0, node="a", boot_id=reign.nodes["a"].boot_id), Member(rank=1, node="b", boot_id="dead"))
    assert code(reign.request(request(world=world))) == "unavailable"


def test_a_world_with_a_rank_missing_or_doubled_is_refused() -> None:
    reign = two_nodes()
    boot_id = reign.nodes["a"].boot_id
    for ranks in ((0, 2), (0, 0), (1, 0), ()):
        world = tuple(Member(rank=rank, node="a", boot_id=boot_id) for rank in ranks)
        assert code(reign.request(request(world=world))) == "refused"


def test_a_launch_of_another_job_is_refused() -> None:
    assert code(two_nodes().request(request(world=(), job="other"))) == "refused"


def test_another_spec_is_refused_with_the_difference() -> None:
    reign = training()
    reign.end_trainers()
    answer = reign.ask("a", "b", launch_id=OTHER, spec={"model": {"w": ["float32", [8]]}})
    assert code(answer) == "spec-mismatch"
    assert answer is not None
    assert "~ model.w[1]: [4] -> [8]" in answer.text
    assert reign.state.attempt_number == 1
    assert reign.core.log_view.spec == SPEC


def test_another_world_begins_from_what_the_world_before_it_saved() -> None:
    """Each step has as many shards as the attempt had ranks; the new one need not have so many."""
    for count in (1, 3):
        reign = training()
        reign.hold(2)
        reign.end_trainers()
        answer = reign.ask(*"aba"[:count], launch_id=OTHER)
        assert answer is not None
        assert answer.attempt is not None
        assert (answer.attempt.source, answer.attempt.from_step) == ("held", 2)
        assert [shard.rank for shard in answer.attempt.restore] == [0, 1]
        assert len(answer.attempt.world) == count


def test_another_world_size_is_fine_while_nothing_was_saved() -> None:
    reign = training()
    reign.end_trainers()
    opened(reign.ask("a", "b", "a", launch_id=OTHER))


def test_a_log_that_does_not_answer_makes_the_launch_ask_again() -> None:
    reign = two_nodes()
    reign.log_up = False
    assert code(reign.ask("a", "b")) == "unavailable"
    reign.log_up = True
    opened(reign.ask("a", "b"))


def test_an_attempt_whose_append_seemed_to_fail_is_found_in_the_log() -> None:
    reign = two_nodes()
    reign.held_back = {Append}
    reign.ask("a", "b")
    (append,) = reign.kept_back
    assert isinstance(append, Append)
    landed = reign._open(append.intent)
    reign.do(OpenFailed(uid=append.intent.uid, text="no answer", again=False, now_s=0.0))
    assert reign.answers[1].code == "unavailable"
    reign.do(landed)
    view = opened(reign.ask("a", "b")).attempt
    assert view is not None
    assert view.uid == append.intent.uid
    assert reign.state.attempt_number == 1


# --- from which step


def restarted(reign: Reign, *places: str) -> OpenAnswer:
    reign.end_trainers()
    return opened(reign.ask(*(places or ("a", "b")), launch_id=OTHER))


def test_a_restart_begins_at_the_newest_step_that_is_whole_in_memory() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory",))
    reign.hold(6, tiers=("memory",), ranks=(0,))
    view = restarted(reign).attempt
    assert view is not None
    assert (view.source, view.from_step) == ("held", 4)
    assert {source.tier for shard in view.restore for source in shard.sources} == {"memory"}
    assert reign.desired.keep == (Kept(attempt_uid=view.source_attempt_uid, step=4),)


def test_after_the_loss_of_a_node_its_shards_come_from_its_peer() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory",))
    reign.lose("b")
    reign.node("c")
    view = restarted(reign, "a", "c").attempt
    assert view is not None
    assert (view.source, view.from_step) == ("held", 2)
    assert [(source.tier, source.node) for source in view.restore[1].sources] == [("peer", "a")]


def test_a_replacement_of_the_same_name_has_nothing_of_the_life_before_it() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.lose("b")
    reign.node("b", boot_id="bb" * 16, incarnation="b2" * 16)
    view = restarted(reign, "a", "b").attempt
    assert view is not None
    assert [(source.tier, source.node) for source in view.restore[1].sources] == [("peer", "a")]


def test_copies_with_different_digests_are_passed_over_for_an_older_step() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))

    def spoil(copy: Copy) -> Copy:
        return msgspec.structs.replace(copy, digest="ff" * 16) if (copy.step, copy.tier) == (4, "peer") else copy

    reign.nodes["a"].copies = [spoil(copy) for copy in reign.nodes["a"].copies]
    reign.hear()
    view = restarted(reign).attempt
    assert view is not None
    assert view.from_step == 2
    assert reign.state.attempt is not None
    assert "different digests" in reign.state.attempt.why


def test_a_source_that_failed_is_struck_off_and_the_next_older_step_is_taken() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    restarted(reign)
    reign.verdict("staged", ranks=(0,), ok=False, reason="shard of rank 1 has another digest")
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.phase == "failed"
    view = opened(reign.ask("a", "b", launch_id=OTHER, round_number=1)).attempt
    assert view is not None
    assert view.from_step == 2
    assert reign.state.attempt is not None
    assert [(struck.step, "another digest" in struck.why) for struck in reign.state.attempt.struck] == [(4, True)]


def test_a_trainer_that_does_not_fit_strikes_nothing_off_and_gets_no_other_source() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    restarted(reign)
    reign.verdict("staged", ranks=(1,), ok=False, reason="extra: unexpected here", misfit=True)
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.misfit, "the others need not ask again"
    answer = reign.ask("a", "b", launch_id=OTHER, round_number=1)
    assert code(answer) == "refused"
    assert answer is not None
    assert "rank 1 on node b could not be staged: extra: unexpected here" in answer.text
    reign.end_trainers()
    view = opened(reign.ask("a", "b", launch_id="3c" * 16)).attempt
    assert view is not None
    assert view.from_step == 4
    assert not reign.state.struck


def test_an_attempt_that_trains_is_not_failed_because_a_later_coordinator_missed_a_verdict() -> None:
    reign = training()
    reign.nodes["b"].ranks = {}
    reign.lose("b")
    after = reign.successor()
    after.hear()
    after.wait(301)
    assert after.desired.attempt is not None
    assert after.desired.attempt.phase == "failed"
    after.hold(2, ranks=(0,))
    trains = after.desired.attempt
    assert trains is not None
    assert trains.phase == "applied", "or its trainers would be lent no slots any more"


def test_a_damaged_source_is_struck_off_although_a_trainer_does_not_fit_either() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    restarted(reign)
    reign.verdict("staged", ranks=(1,), ok=False, reason="extra: unexpected here", misfit=True)
    reign.verdict("staged", ranks=(0,), ok=False, reason="another digest")
    view = opened(reign.ask("a", "b", launch_id=OTHER, round_number=1)).attempt
    assert view is not None
    assert view.from_step == 2


def test_what_was_struck_off_stays_so_for_a_later_launch_and_a_later_coordinator() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    restarted(reign)
    reign.verdict("staged", ranks=(0,), ok=False)
    opened(reign.ask("a", "b", launch_id=OTHER, round_number=1))
    after = reign.successor()
    after.end_trainers()
    view = opened(after.ask("a", "b", launch_id="3c" * 16)).attempt
    assert view is not None
    assert view.from_step == 2


def test_nothing_left_is_an_error_with_the_list_of_what_was_tried() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    restarted(reign)
    reign.verdict("staged", ranks=(1,), ok=False, reason="gone")
    answer = reign.ask("a", "b", launch_id=OTHER, round_number=1)
    assert code(answer) == "nothing-left"
    assert answer is not None
    assert "step 2" in answer.text
    assert "gone" in answer.text


def test_a_source_that_is_nowhere_any_more_is_no_reason_to_start_from_scratch() -> None:
    reign = training()
    reign.hold(2, tiers=("memory",))
    restarted(reign)
    for node in reign.nodes.values():
        node.copies = []
    reign.end_trainers()
    assert code(reign.ask("a", "b", launch_id="3c" * 16)) == "nothing-left"


def test_a_launch_starts_from_scratch_when_the_log_holds_no_checkpoint_and_no_step_is_whole() -> None:
    reign = training()
    reign.hold(2, tiers=("memory",))
    reign.lose("b")
    reign.node("c")
    view = restarted(reign, "a", "c").attempt
    assert view is not None
    assert view.source == "fresh"
    assert reign.state.attempt is not None
    assert "passed over step 2" in reign.state.attempt.why


def test_a_tainted_step_is_not_begun_from() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    reign.append_record(Taint(attempt=1, from_step=3, to_step=None, reason="loss spike"))
    view = restarted(reign).attempt
    assert view is not None
    assert view.from_step == 2
    assert reign.state.attempt is not None
    assert "loss spike" in reign.state.attempt.why


def committed(reign: Reign, step: int) -> None:
    reign.hold(step, tiers=("object",))
    reign.read_back()
    assert reign.ready_steps[-1] == step


def test_a_ready_step_is_begun_from_when_memory_is_gone() -> None:
    reign = training()
    committed(reign, 2)
    for name in ("a", "b"):
        reign.nodes[name].copies = []
        reign.lose(name)
    reign.node("c")
    reign.node("d")
    view = restarted(reign, "c", "d").attempt
    assert view is not None
    assert (view.source, view.from_step) == ("ready", 2)
    assert {source.tier for shard in view.restore for source in shard.sources} == {"object"}


def test_a_protected_step_in_memory_beats_an_older_ready_one() -> None:
    reign = training()
    committed(reign, 2)
    reign.hold(4, tiers=("memory", "peer"))
    view = restarted(reign).attempt
    assert view is not None
    assert (view.source, view.from_step) == ("held", 4)


def test_a_damaged_ready_step_is_passed_over_with_the_reason() -> None:
    reign = training()
    committed(reign, 2)
    committed(reign, 4)
    for node in reign.nodes.values():
        node.copies = []
    reign.hear()
    reign.core.commits.receipts.clear()
    reign.damaged[max(reign.readies)] = "index has another SHA-256"
    view = restarted(reign).attempt
    assert view is not None
    assert (view.source, view.from_step) == ("ready", 2)
    assert reign.state.attempt is not None
    assert "another SHA-256" in reign.state.attempt.why


def test_a_step_that_becomes_ready_while_a_launch_is_decided_is_not_passed_over() -> None:
    reign = training()
    committed(reign, 2)
    reign.end_trainers()
    for node in reign.nodes.values():
        node.copies = []
    reign.held_back = {Prepare}
    assert reign.ask("a", "b", launch_id=OTHER) is None
    committed(reign, 4)
    for node in reign.nodes.values():
        node.copies = []
    reign.hear()
    reign.core.commits.receipts.clear()
    reign.release()
    view = reign.answers[reign.requests].attempt
    assert view is not None
    assert (view.source, view.from_step) == ("ready", 4), "all nodes were asked before step 4 was READY"


def test_no_more_is_promised_of_an_attempt_once_the_next_one_is_decided() -> None:
    reign = training()
    committed(reign, 2)
    reign.end_trainers()
    reign.held_back = {Append}
    assert reign.ask("a", "b", launch_id=OTHER) is None
    before = reign.desired
    reign.hold(4, tiers=("memory", "peer"))
    assert (reign.desired.protected_step, reign.desired.keep) == (before.protected_step, before.keep)
    assert before.protected_step < 4
    reign.release()
    view = reign.answers[reign.requests].attempt
    assert view is not None
    assert view.from_step == 2, "decided before anybody had told of step 4"


def test_no_more_is_promised_of_an_attempt_while_the_next_one_may_be_in_the_log_although_that_seemed_to_fail() -> None:
    reign = training()
    committed(reign, 2)
    reign.end_trainers()
    reign.held_back = {Append}
    assert reign.ask("a", "b", launch_id=OTHER) is None
    append = reign.lost_append()
    reign.do(OpenFailed(uid=append.uid, text="no answer", again=False, now_s=0.0))
    assert reign.answers[reign.requests].code == "unavailable"
    before = reign.desired
    reign.hold(4, tiers=("memory", "peer"))
    assert (reign.desired.protected_step, reign.desired.keep) == (before.protected_step, before.keep)
    assert before.protected_step < 4
    assert reign.state.head is not None
    reign.append_record(Pin(seq=reign.state.head))
    assert reign.desired.protected_step == 4, "a record is in its place"


def test_what_was_promised_of_an_attempt_is_not_said_of_the_one_that_somebody_goes_back_to() -> None:
    reign = training()
    committed(reign, 2)
    reign.hold(4, tiers=("memory", "peer"))
    assert reign.desired.protected_step == 4
    reign.end_trainers()
    reign.held_back = {Append}
    assert reign.ask("a", "b", launch_id=OTHER) is None
    before = reign.state.attempt
    assert before is not None
    back = structs.replace(
        before, attempt=2, uid="9f" * 16, launch_id=NOBODY, ready=reign.state.head, held=None, from_step=2
    )
    reign.append_record(back)
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.uid == back.uid
    assert reign.desired.protected_step == 0


def test_an_attempt_that_seemed_to_fail_does_not_stop_the_one_that_is_decided_by_now() -> None:
    reign = two_nodes()
    reign.held_back = {Append}
    reign.ask("a", "b")
    first = reign.lost_append()
    reign.do(reign._open(first))
    reign.verdict("applied")
    reign.end_trainers()
    assert reign.ask("a", "b", launch_id=OTHER) is None
    reign.do(OpenFailed(uid=first.uid, text="no answer", again=False, now_s=0.0))
    before = reign.desired
    reign.hold(2, tiers=("memory", "peer"))
    assert reign.desired.protected_step == before.protected_step == 0
    reign.release()
    opened(reign.answers[reign.requests])


def test_objects_that_garbage_collection_may_take_are_nothing_to_begin_from() -> None:
    reign = training()
    committed(reign, 2)
    committed(reign, 4)
    for node in reign.nodes.values():
        node.copies = []
    reign.hold(3, tiers=("object",))
    reign.core.commits.receipts.clear()
    reign.damaged[max(reign.readies)] = "index has another SHA-256"
    view = restarted(reign).attempt
    assert view is not None
    assert (view.source, view.from_step) == ("ready", 2), "step 3 never became READY, and step 4 did"


def test_a_copy_in_memory_that_differs_from_the_manifest_is_not_used() -> None:
    reign = training()
    committed(reign, 2)
    attempt = reign.state.attempt
    assert attempt is not None
    reign.nodes["a"].copies.append(copy_of(attempt.uid, 2, 0, "memory", digest_is="ff" * 16))
    view = restarted(reign).attempt
    assert view is not None
    assert view.from_step == 2
    assert [source.tier for source in view.restore[0].sources] == ["object"]


def test_a_step_that_the_current_attempt_wrote_before_it_began_is_not_on_the_lineage() -> None:
    reign = training()
    reign.hold(4, tiers=("memory", "peer"))
    restarted(reign)
    attempt = reign.state.attempt
    assert attempt is not None
    for rank, name in enumerate(("a", "b")):
        reign.nodes[name].copies.append(copy_of(attempt.uid, 3, rank, "memory", attempt=2))
        reign.nodes[name].copies = [one for one in reign.nodes[name].copies if one.step != 4]
    reign.end_trainers()
    assert code(reign.ask("a", "b", launch_id="3c" * 16)) == "nothing-left"


def test_a_log_that_moves_while_a_launch_is_decided_has_it_decided_anew() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    reign.end_trainers()
    reign.held_back = {Append}
    assert reign.ask("a", "b", launch_id=OTHER) is None
    reign.append_record(Taint(attempt=1, from_step=4, to_step=4, reason="bad"))
    reign.release()
    assert reign.state.attempt is not None
    assert reign.state.attempt.from_step == 2


def test_a_launch_that_is_decided_while_another_spec_is_accepted_is_refused_and_holds_up_nobody() -> None:
    reign = training()
    reign.end_trainers()
    reign.held_back = {Append}
    assert reign.ask("a", "b", launch_id=OTHER) is None
    (append,) = reign.kept_back
    assert isinstance(append, Append)
    reign.kept_back = []
    other = {"model": {"class": "N", "params": {}, "buffers": {}}}
    reign.store.objects[f"facts/{specs.name(other)}"] = specs.encode(other)  # type: ignore[index] # a short key will do
    uid, before = reign.state.job_uid, reign.state.spec_sha256
    assert before is not None
    reign.append_record(Job(uid=uid, name=JOB, spec_sha256=specs.name(other), replaces=before))
    reign.do(reign._open(append.intent))
    assert [answer.code for answer in reign.answers.values()] == ["", "spec-mismatch"]
    reign.held_back = set()
    assert opened(reign.ask("a", "b", launch_id=OTHER, spec=other)).attempt is not None


def test_nothing_is_begun_afresh_while_every_ready_step_is_tainted() -> None:
    reign = training()
    committed(reign, 2)
    for node in reign.nodes.values():
        node.copies = []
    reign.append_record(Taint(attempt=1, from_step=1, to_step=None, reason="loss spike"))
    reign.end_trainers()
    answer = reign.ask("a", "b", launch_id=OTHER)
    assert code(answer) == "nothing-left"
    assert answer is not None
    assert "1 READY" in answer.text


def test_ids_that_are_none_are_refused_before_they_reach_the_log() -> None:
    reign = two_nodes()
    good = Member(rank=0, node="a", boot_id=reign.nodes["a"].boot_id)
    wrong = [
        msgspec.structs.replace(request(world=(good,)), launch_id="x" * 70000),
        msgspec.structs.replace(request(world=(good,)), round=-1),
        request(world=(Member(rank=0, node="../a", boot_id="00"),)),
        request(world=(Member(rank=0, node="a", boot_id="no hex"),)),
    ]
    for one in wrong:
        assert code(reign.request(one)) == "refused"
    assert reign.state.attempt_number == 0


def test_a_source_whose_ranks_only_went_silent_is_begun_from_by_the_next_launch() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    restarted(reign)
    reign.wait(301)
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.phase == "failed"
    view = opened(reign.ask("a", "b", launch_id="3c" * 16)).attempt
    assert view is not None
    assert view.from_step == 2


@pytest.mark.parametrize("launch_id", [OTHER, "3c" * 16], ids=["the same launch", "another launch"])
def test_a_source_whose_holders_did_not_answer_is_begun_from_again(launch_id: str) -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    restarted(reign)
    reign.verdict("staged", ranks=(0,), ok=False, reason="peer of b: no answer", unanswered=True)
    assert reign.desired.attempt is not None
    assert (reign.desired.attempt.phase, reign.desired.attempt.reason[-20:]) == ("failed", "peer of b: no answer")
    reign.end_trainers()
    view = opened(reign.ask("a", "b", launch_id=launch_id, round_number=1)).attempt
    assert view is not None
    assert view.from_step == 4
    assert not reign.state.struck


def test_a_source_is_struck_off_for_what_one_rank_says_of_it_while_another_got_no_answer() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    restarted(reign)
    reign.verdict("staged", ranks=(0,), ok=False, reason="peer of b: no answer", unanswered=True)
    reign.verdict("staged", ranks=(1,), ok=False, reason="its digest is another")
    view = opened(reign.ask("a", "b", launch_id=OTHER, round_number=1)).attempt
    assert view is not None
    assert view.from_step == 2


def test_a_source_of_which_the_same_launch_heard_nothing_is_begun_from_again() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, tiers=("memory", "peer"))
    restarted(reign)
    reign.wait(301)
    view = opened(reign.ask("a", "b", launch_id=OTHER, round_number=1)).attempt
    assert view is not None
    assert view.from_step == 4


def test_a_launch_on_a_node_that_nobody_has_heard_is_answered_before_any_node_is_asked() -> None:
    reign = two_nodes()
    world = tuple(Member(rank=rank, node=node, boot_id="00") for rank, node in enumerate(("a", "z")))
    request = OpenRequest(job=JOB, launch_id=LAUNCH, round=0, world=world, spec=SPEC, versions={})
    (effect,) = reign.core.handle(Asked(request_id=7, request=request, now_s=1.0))
    assert isinstance(effect, Answer)
    assert effect.answer.code == "unavailable"
    assert effect.answer.text == "node z of rank 1 has not been heard by the coordinator yet"
