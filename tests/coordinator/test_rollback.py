"""Going back to an earlier checkpoint: what it appends and refuses, who ends, what the next launch begins from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.reigns import training
from tests.support.stores import JobBuilder, small_store

from toprope.__main__ import main
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.keep.changes import checked
from toprope.store.keep.rollback import opened_for_nobody, plan_rollback
from toprope.store.log.chain import read_entries, read_log
from toprope.store.log.fold import JobState
from toprope.store.log.records import NOBODY, Attempt, Record
from toprope.store.names import Key, facts_key, log_key
from toprope.store.objects.directory import DirectoryStore

WHY = "the loss went up"


@pytest.fixture
def job(tmp_path: Path) -> JobBuilder:
    """Return a job with READY 4 to 8: steps 10 to 50."""
    return small_store(DirectoryStore(tmp_path), steps=(10, 20, 30, 40, 50))


def ckpt(*words: object) -> int:
    return main([str(word) for word in words])


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def kinds(job: JobBuilder) -> list[str]:
    return [type(entry.record).__name__ for entry, _ in read_entries(job.store, "job")]


def test_all_later_steps_of_the_lineage_are_tainted_and_an_attempt_opens_from_there(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.open_attempt(ready=6, from_step=30).checkpoint(35)
    assert ckpt("rollback", tmp_path, "job", "--to", 20, "--reason", WHY, "--confirm", "job") == 0
    out, err = capsys.readouterr()
    assert out == "job job goes back to step 20 (READY 5) and gives up all later ones, READY steps 30, 35 among them\n"
    assert "attempt 3 is open for nobody: start the trainers again, they begin from step 20" in err
    state = read_log(job.store, "job")
    assert [(one.attempt, one.from_step, one.to_step, one.reason) for one in state.taints] == [
        (1, 21, 30, WHY),
        (2, 31, None, WHY),
    ]
    attempt = state.attempt
    assert attempt is not None
    assert (attempt.attempt, attempt.ready, attempt.from_step, attempt.launch_id) == (3, 5, 20, NOBODY)
    assert attempt.why == f"rolled back to step 20: {WHY}"
    assert state.restorable()[0][0] == state.head == 5
    assert state.is_ended(2)
    assert state.passing, "the job's coordinator is elected again"


def test_to_go_back_twice_changes_nothing(job: JobBuilder, tmp_path: Path) -> None:
    for _ in range(2):
        assert ckpt("rollback", tmp_path, "job", "--to", 20, "--confirm", "job") == 0
        assert kinds(job)[-4:] == ["Elected", "Taint", "Elected", "Attempt"]
    assert ckpt("rollback", tmp_path, "job", "--to", 10, "--confirm", "job") == 0
    state = read_log(job.store, "job")
    assert (state.attempt_number, [seq for seq, _ in state.restorable()]) == (3, [4])


def test_one_that_was_cut_off_is_finished_by_the_next(job: JobBuilder, tmp_path: Path) -> None:
    assert ckpt("taint", tmp_path, "job@21..", "--reason", WHY) == 0
    assert ckpt("rollback", tmp_path, "job", "--to", 20, "--reason", WHY, "--confirm", "job") == 0
    assert kinds(job)[-4:] == ["Elected", "Taint", "Elected", "Attempt"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--to", 15, "--confirm", "job"), "can't go back to step 15: .*there are steps 10, 20, 30, 40, 50"),
        (("--to", 0, "--confirm", "job"), "can't go back to step 0"),
        (("--to", 20), "would go back to step 20 .*can't be taken back.*to do it, give --confirm job"),
        (("--to", 20, "--confirm", "other"), "give --confirm job"),
        (("--to", 20, "--confirm", "job", "--reason", " "), "a taint needs a reason"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], what: str
) -> None:
    before = contents(tmp_path)
    assert ckpt("rollback", tmp_path, "job", *words) == 64
    assert re.search(what, capsys.readouterr().err)
    assert contents(tmp_path) == before
    assert job.log.state.n == read_log(job.store, "job").n


def test_a_dry_run_says_what_would_be_and_changes_nothing(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tmp_path)
    assert ckpt("rollback", tmp_path, "job", "--to", 30, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "job": "job",
        "to": 30,
        "ready": 6,
        "given_up": [40, 50],
        "attempt": 1,
        "changed": False,
        "done": False,
    }
    assert contents(tmp_path) == before
    assert job.log.state.attempt_number == 1


def test_a_step_off_the_lineage_or_tainted_is_none_to_go_back_to(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.open_attempt(ready=5, from_step=20).checkpoint(25)
    assert ckpt("taint", tmp_path, "job@10", "--reason", WHY) == 0
    for step in (10, 40):
        assert ckpt("rollback", tmp_path, "job", "--to", step, "--confirm", "job") == 64
        assert "there are steps 20, 25" in capsys.readouterr().err


def test_no_attempt_is_opened_for_nobody_from_what_is_not_the_newest_left(job: JobBuilder) -> None:
    state = job.log.state
    plan = plan_rollback(state, to_step=20, reason=WHY)
    opened = opened_for_nobody(state, plan, uid="2b" * 16, facts_sha256="3c" * 32, reason=WHY)
    with pytest.raises(UsageError, match="READY 5 is not the newest that is left, which is 8"):
        checked(state, opened)


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_nothing_is_tainted_where_no_attempt_could_be_opened(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    attempt = job.log.state.attempt
    assert attempt is not None
    facts = tmp_path / facts_key("job", attempt.facts_sha256)
    if how == "gone":
        facts.unlink()
    else:
        facts.write_bytes(facts.read_bytes()[:-1] + b" ")
    before = contents(tmp_path)
    assert ckpt("rollback", tmp_path, "job", "--to", 20, "--confirm", "job") == 2
    assert f"{facts_key('job', attempt.facts_sha256)}: " in (err := capsys.readouterr().err)
    assert "the facts of attempt 1, which the new one has to have too" in err
    assert contents(tmp_path) == before


class Failing(DirectoryStore):
    """A store that takes no new objects with ``without`` in their key."""

    without = "/facts/"

    def create(self, key: Key, body: bytes | memoryview) -> None:
        if self.without in key:
            raise UnavailableError(f"{key}: No space left on device")
        super().create(key, body)


def test_where_facts_can_not_be_written_nothing_is_tainted(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("toprope.coordinator.cli_rollback.open_store", lambda _: Failing(tmp_path))
        assert ckpt("rollback", tmp_path, "job", "--to", 20, "--confirm", "job") == 4
    assert "No space left on device" in (err := capsys.readouterr().err)
    assert "Half is done" not in err
    assert contents(tmp_path) == before
    assert ckpt("rollback", tmp_path, "job", "--to", 20, "--confirm", "job") == 0


def test_one_that_is_half_done_says_so_and_what_to_run(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Failing(tmp_path)
    store.without = log_key("job", job.log.state.n + 2)
    with monkeypatch.context() as broken:
        broken.setattr("toprope.coordinator.cli_rollback.open_store", lambda _: store)
        assert ckpt("rollback", tmp_path, "job", "--to", 20, "--confirm", "job") == 4
    err = capsys.readouterr().err
    assert "; append again later. Half is done: the log of job job has the taint of all after step 20" in err
    assert err.endswith("give the same command again\n")
    assert kinds(job)[-2:] == ["Elected", "Taint"]
    assert ckpt("rollback", tmp_path, "job", "--to", 20, "--confirm", "job") == 0
    assert kinds(job)[-4:] == ["Elected", "Taint", "Elected", "Attempt"]


# --- what the coordinator makes of it


def test_trainers_learn_of_the_attempt_and_the_next_launch_begins_from_the_step() -> None:
    reign = training()
    for step in (8, 16):
        reign.hold(step, tiers=("memory", "peer", "object"))
        reign.read_back()
    reign.hold(18, tiers=("memory", "peer"))
    assert reign.ready_steps == [8, 16]
    for record in records(reign.state, to_step=8):
        reign.append_record(record)
    view = reign.desired.attempt
    assert view is not None
    assert (view.number, view.source, view.from_step, view.phase) == (2, "ready", 8, "opened")
    reign.wait(301)
    assert reign.core.progress.phase == "opened", "nobody is late for it"

    answer = reign.ask("a", "b", launch_id="2b" * 16)
    assert answer is not None
    assert answer.attempt is not None, answer.text
    assert (answer.attempt.number, answer.attempt.source, answer.attempt.from_step) == (3, "ready", 8)
    assert not reign.state.struck


def records(state: JobState, *, to_step: int) -> list[Record]:
    """Return what going back appends."""
    plan = plan_rollback(state, to_step=to_step, reason=WHY)
    attempt = state.attempt
    assert isinstance(attempt, Attempt)
    opened = opened_for_nobody(state, plan, uid="2b" * 16, facts_sha256=attempt.facts_sha256, reason=WHY)
    return [*plan.taints, opened]
