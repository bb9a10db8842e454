"""How often a coordinator decides, hears and asks, in a small job and in a large one."""

from __future__ import annotations

from toprope.coordinator.pacing import PROBES_MAX, WAIT_S_MAX, Asking, Pacing, report_every_s
from toprope.coordinator.readiness import HERE, Receipt, assign
from toprope.coordinator.wire import Copy


def test_a_decision_that_takes_no_time_never_makes_the_next_wait() -> None:
    pacing = Pacing()
    assert pacing.wait_s(now_s=0.0) == 0.0
    pacing.took(5.0, 5.0)
    assert pacing.wait_s(now_s=5.0) == 0.0


def test_decisions_take_a_tenth_of_the_time_and_nobody_waits_longer_than_half_a_second() -> None:
    pacing = Pacing()
    pacing.took(5.0, 5.02)
    assert 0.17 < pacing.wait_s(now_s=5.02) < 0.19
    assert pacing.wait_s(now_s=5.3) == 0.0
    pacing.took(6.0, 7.0)
    assert pacing.wait_s(now_s=7.0) == WAIT_S_MAX


def test_a_small_job_reports_at_once_and_a_large_one_as_often_as_can_be_read() -> None:
    assert report_every_s(8) == report_every_s(127) == 0.0
    assert report_every_s(2048) == report_every_s(2100) == 4.0
    assert report_every_s(4096) == 8.0


def test_few_silent_nodes_are_all_asked_and_of_many_each_in_its_turn() -> None:
    asking = Asking()
    few = [f"n{number:03}" for number in range(PROBES_MAX)]
    assert asking.turn(few, now_s=0.0) == asking.turn(few, now_s=0.0) == few
    many = [f"n{number:03}" for number in range(PROBES_MAX * 2 + 10)]
    turns = [asking.turn(many, now_s=float(second)) for second in range(3)]
    assert turns[0] == many[:PROBES_MAX]
    assert turns[1] == many[PROBES_MAX : 2 * PROBES_MAX]
    assert set(many) == {name for turn in turns for name in turn}
    assert asking.turn(many, now_s=2.1) == ()


def test_nobody_reads_back_what_it_wrote_and_each_of_the_others_has_its_share() -> None:
    def readers(names: list[str], *, writer: str) -> list[str]:
        copies = [
            Copy(
                attempt=1,
                attempt_uid="aa",
                step=1,
                rank=rank,
                world=6,
                tier="object",
                bytes=1,
                digest="0d",
                key=f"k{rank}",
            )
            for rank in range(6)
        ]
        return [task.node for task in assign([Receipt(node=writer, copy=one) for one in copies], names)]

    assert readers(["c", "a", "b"], writer="b") == ["a", "c"] * 3
    assert readers(["c", "a"], writer="b") == ["a", "c"] * 3
    assert readers(["b"], writer="b") == readers([], writer="b") == [HERE] * 6
