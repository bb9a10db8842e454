"""What the oracle of the simulator holds those to who have given an attempt out that is not in the log."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import JOB_UID, SPEC, LogWriter, attempt, job, uid

from toprope.chaos.sim.unlogged import Unlogged
from toprope.coordinator.wire import AttemptView, Provisional
from toprope.store.log.records import AttemptFacts, Elected, Held, Record, Taint

BEGINS = attempt(1)
NEXT = attempt(2, held=Held(attempt_uid=uid(1), step=5), from_step=5, decided_at=4)
GIVEN_UP = Taint(attempt=1, from_step=1, to_step=None, reason="because a test says so")


class Told:
    """A log, and an ``Unlogged`` that is told of each record."""

    def __init__(self) -> None:
        self.writer = LogWriter(FakeStore()).begin()
        self.unlogged = Unlogged(records=[job(), Elected(), job(spec=SPEC)])

    def append(self, record: Record) -> tuple[list[str], str]:
        self.writer.add(record)
        return self.unlogged.appended(msgspec.structs.replace(record, term=self.writer.term), self.writer.state)


@pytest.mark.parametrize(
    ("givers", "blamed"), [((1,), 1), ((1, 2), 2), ((1, 2, 3), 2), ((2, 1), 1), ((1,), 2), ((2,), 1)]
)
def test_whoever_has_given_an_attempt_out_may_append_nothing_that_it_can_not_follow(
    givers: tuple[int, ...], blamed: int
) -> None:
    told = Told()
    told.append(BEGINS)
    facts = AttemptFacts(world=(), held_digests=(), versions={})
    one = Provisional(job_uid=JOB_UID, parent=uid(1), record=NEXT, facts=facts)
    view = AttemptView(
        number=2,
        uid=NEXT.uid,
        launch_id=NEXT.launch_id,
        round=0,
        world=(),
        source="held",
        source_attempt_uid=uid(1),
        from_step=5,
        restore=(),
        phase="opened",
        provisional=True,
    )
    assert told.unlogged.adopt("n0", "disk", one, told.writer.state) == ""
    assert told.unlogged.open(view, term=givers[0]) == ""
    for term in givers[1:]:
        told.unlogged.give(view, term=term)
    for _ in range(blamed - told.writer.term):
        assert told.append(Elected()) == ([], "")
    ends, why = told.append(GIVEN_UP)
    assert ends == [NEXT.uid]
    assert bool(why) == (blamed in givers), why
