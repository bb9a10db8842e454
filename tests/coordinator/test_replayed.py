"""Completions of a save that was given up: they make no later one READY, and hold none up."""

from __future__ import annotations

import pytest
from tests.support.reigns import copy_of, digest, training

OTHER = "2b" * 16


@pytest.mark.fault("B62")
def test_what_an_aborted_save_completed_late_is_ignored_and_the_same_step_is_saved_anew() -> None:
    reign = training()
    assert reign.state.attempt is not None
    first = reign.state.attempt.uid
    reign.hold(15, tiers=("memory", "peer"))
    reign.hold(20, tiers=("object",), ranks=(0,))  # the other rank's upload was cut off
    reign.end_trainers()
    answer = reign.ask("a", "b", launch_id=OTHER)
    assert answer is not None
    assert answer.attempt is not None
    assert answer.attempt.from_step == 15
    second = answer.attempt.uid
    reign.verdict("staged")
    reign.verdict("applied")

    def replay() -> None:
        reign.nodes["b"].copies.append(copy_of(first, 20, 1, "object"))
        reign.hear()
        reign.read_back()

    for step in (16, 18):
        reign.hold(step, tiers=("object",))
        replay()
        assert reign.ready_steps[-1] == step
    replay()
    assert reign.ready_steps == [16, 18], "step 20 of the attempt before is complete now, and stays nothing"
    reign.hold(20, tiers=("object",))
    replay()
    assert reign.ready_steps == [16, 18, 20]
    for intent, step in zip(reign.readies.values(), (16, 18, 20), strict=True):
        assert intent.attempt_uid == second
        assert [one.copy.digest for one in intent.receipts] == [digest(second, step, rank) for rank in (0, 1)]
