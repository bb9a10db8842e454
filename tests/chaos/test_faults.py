"""Each kind of fault does what it says to a real process or file, and shows what proves it."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from toprope.chaos.faults.injector import Injector, NotFiredError
from toprope.chaos.faults.kinds import KINDS, injector
from toprope.chaos.journal import Event
from toprope.chaos.killpoints import KillPoints, armed_points
from toprope.chaos.live.processes import Process, wait_until
from toprope.chaos.planned import HELD_S_MAX, Planned, Recurring
from toprope.chaos.scenario import Fault, Scenario, Workload
from toprope.chaos.site import Site, state_of
from toprope.chaos.trainer_points import ending
from toprope.store.errors import UsageError
from toprope.trainer_hooks.link.slot import Page, SlotState, slot_paths, write_page


class Job:
    """Stands in for a site: one real process, called sidecar a, and a node with files."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.job, self.seed = directory, "chaos-mine", 1
        self.scenario = Scenario(
            name="mine",
            about="x.",
            attacks=("told",),
            fault=(Fault(do="kill", target="sidecar a", at_step=1),),
            workload=Workload(steps=100),
        )
        node = SimpleNamespace(memory_dir=directory / "memory", local_dir=directory / "local")
        self.cluster = SimpleNamespace(nodes={"a": node}, store=directory / "store")
        self.process: Process | None = None
        self.down: set[str] = set()
        self.step = 0
        self.at_s = 0.0

    def start(self, _target: str) -> None:
        code = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
        self.process = process = Process("a", [sys.executable, "-c", code], log=self.directory / "a.log")
        wait_until(lambda: "up" in process.log.read_text(), what="it is up", timeout_s=20, alive=[process])
        self.down.clear()

    def service(self, _target: str) -> Process | None:
        return self.process

    def pid(self, _target: str) -> int:
        assert self.process is not None
        return self.process.pid

    def status(self, pid: int) -> int | None:
        assert self.process is not None
        return self.process.status() if pid == self.process.pid else 0

    def armed(self, target: str) -> Path:
        return self.directory / f"{target}.armed"

    def passed(self, target: str) -> Path:
        return self.directory / f"{target}.log"

    def newest_step(self) -> int:
        return self.step

    def begun_s(self) -> float | None:
        return 0.0 if self.step else None

    def now_s(self) -> float:
        return self.at_s


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@contextmanager
def running(job: Job) -> Iterator[None]:
    job.start("sidecar a")
    try:
        yield
    finally:
        assert job.process is not None
        job.process.kill()


def made(job: Job, do: str, target: str = "sidecar a", **how: Any) -> Injector:  # noqa: ANN401 - as TOML has it
    return injector(cast("Site", job), Fault(do=do, target=target, at_step=1, how=how))


@pytest.mark.parametrize(
    ("do", "number"), [("kill", signal.SIGKILL), ("segfault", signal.SIGSEGV), ("terminate", signal.SIGTERM)]
)
def test_a_signal_ends_a_service_and_mending_starts_it_again(do: str, number: int, job: Job) -> None:
    with running(job):
        assert job.process is not None
        first = job.process.pid
        fault = made(job, do)
        fault.strike()
        wait_until(fault.witness, what="it has ended", timeout_s=20)
        assert fault.witness() == f"pid {first} ended with status {-number}"
        assert job.down == {"sidecar a"}
        fault.mend()
        assert job.process.pid != first
        assert job.process.status() is None


def test_a_paused_process_stands_still_and_goes_on(job: Job) -> None:
    with running(job):
        pid = job.pid("")
        fault = made(job, "pause")
        fault.strike()
        assert state_of(pid) == "T"
        fault.mend()
        wait_until(lambda: state_of(pid) in {"S", "R"}, what="it goes on", timeout_s=20)
        assert fault.witness().startswith(f"pid {pid} was in state T for ")


def test_a_slow_process_is_stopped_again_and_again_and_runs_in_the_end(job: Job) -> None:
    with running(job):
        fault = made(job, "slow", share=0.2)
        fault.strike()
        assert fault.witness() == ""
        states = set()
        end_s = time.monotonic() + 20
        while "stopped 3 times" not in fault.witness() and time.monotonic() < end_s:
            fault.tend()
            states.add(state_of(job.pid("")))
        fault.mend()
        assert {"T"} < states
        wait_until(lambda: state_of(job.pid("")) in {"S", "R"}, what="it runs", timeout_s=20)


def slots(job: Job, *states: SlotState) -> list[Path]:
    """Slots whose images are of 8 bytes in 12, of steps 4, 8 and so on."""
    directory = job.directory / "memory" / job.job / "slots" / "rank-0"
    directory.mkdir(parents=True)
    found = []
    for number, state in enumerate(states):
        paths = slot_paths(directory, number)
        paths.data.write_bytes(bytes(12))
        write_page(paths.page, Page(state=state, step=4 * (number + 1), bytes=8))
        found.append(paths.data)
    return found


def test_a_flip_changes_one_bit_of_the_newest_image_that_was_hashed(job: Job) -> None:
    old, newest, unhashed = slots(job, SlotState.HASHED, SlotState.HASHED, SlotState.SEALED)
    fault = made(job, "flip", "node a", tier="memory")
    fault.strike()
    assert newest.read_bytes() == bytes(6) + b"\x01" + bytes(5)
    assert old.read_bytes() == unhashed.read_bytes() == bytes(12)
    assert fault.witness() == "slot-1.data of step 8: byte 6 was 0x00 and is 0x01"


def test_a_flip_of_all_changes_each_image(job: Job) -> None:
    both = slots(job, SlotState.HASHED, SlotState.HASHED)
    made(job, "flip", "node a", tier="memory", of="all").strike()
    assert [path.read_bytes() for path in both] == [bytes(6) + b"\x01" + bytes(5)] * 2


def test_a_torn_file_has_lost_its_second_half(job: Job) -> None:
    directory = job.directory / "local" / job.job
    directory.mkdir(parents=True)
    for step in (8, 16):
        (directory / f"a1-s{step}-rank-0-of-2-ab.safetensors").write_bytes(bytes(10))
    fault = made(job, "tear", "node a", tier="local")
    fault.strike()
    assert [path.stat().st_size for path in sorted(directory.iterdir())] == [5, 10]
    assert fault.witness() == "a1-s16-rank-0-of-2-ab.safetensors of step 16: 10 bytes before, 5 after"


def test_a_tier_with_nothing_in_it_cannot_be_damaged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.chaos.faults.storage._APPEARS_S", 0.0)
    fault = made(job, "flip", "store", tier="object")
    with pytest.raises(NotFiredError, match="tier object of store has no shard"):
        fault.strike()


def test_a_call_of_a_port_fails_as_long_as_the_fault_lasts_and_the_process_itself_says_so(job: Job) -> None:
    points = KillPoints(log=job.passed("sidecar a"), armed=job.armed("sidecar a"))
    write = points.around("disk.write", lambda path: path)
    fault = made(job, "fail", point="before:disk.write", action="ENOSPC")
    fault.strike()
    assert fault.witness() == ""
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            write("tmp.ab")
    assert fault.witness() == "before:disk.write ENOSPC tmp.ab, 2 times"
    fault.mend()
    assert armed_points(job.armed("sidecar a")) == []
    assert write("tmp.ab") == "tmp.ab"


def test_two_faults_of_one_process_do_not_disturb_each_other(job: Job) -> None:
    one = made(job, "fail", point="before:disk.write", action="EIO")
    other = made(job, "fail", point="before:objects.create", action="throttled")
    one.strike()
    other.strike()
    one.mend()
    assert [armed.point for armed in armed_points(job.armed("sidecar a"))] == ["before:objects.create"]


def spoilt(job: Job, do: str, target: str, *losses: float | None) -> tuple[Injector, list[torch.nn.Linear]]:
    """Strike after step 17, let a model of each rank end steps 20 and 21, and let rank 0 lose this from step 20 on."""
    events: list[Event] = []
    job.journal, job.step = SimpleNamespace(events=events), 17  # type: ignore[attr-defined]
    fault = made(job, do, target)
    fault.strike()
    assert fault.witness() == ""
    models = []
    for rank in range(2):
        points = KillPoints(log=job.passed(f"rank {rank}"), armed=job.armed(f"rank {rank}"))
        models.append(torch.nn.Linear(2, 1))
        torch.nn.init.ones_(models[-1].weight)
        trainer = SimpleNamespace(_parts=SimpleNamespace(models=lambda model=models[-1]: model))
        end_step = ending(points, lambda *_: None)
        for step in (19, 20, 21):
            end_step(trainer, step)
    for number, loss in enumerate(losses):
        events.append(Event(event="step", rank=0, pid=1, monotonic_s=time.monotonic(), step=20 + number, loss=loss))
    return fault, models


def test_a_gradient_is_spoilt_once_and_proved_by_a_step_that_loses_no_number(job: Job) -> None:
    fault, models = spoilt(job, "nan", "rank 1", 1.0, None)
    assert fault.witness() == "a gradient of rank 1 was NaN, and rank 0 lost NaN in step 21"
    for model, times in zip(models, ((False, False), (True, False)), strict=True):
        for is_spoilt in times:
            model.zero_grad()
            model(torch.ones(2)).sum().backward()
            found = [bool(one.grad.isnan().any()) for one in model.parameters() if one.grad is not None]
            assert found == [is_spoilt, False]


def test_a_spike_makes_the_weights_of_all_ranks_larger_after_one_step_and_is_proved_by_the_loss(job: Job) -> None:
    fault, models = spoilt(job, "spike", "world", 2.0, 5.0)
    assert [model.weight.tolist() for model in models] == [[[8.0, 8.0]]] * 2
    assert fault.witness() == "all weights were multiplied by 8 after step 20; rank 0 lost 2 in it and 5 in the next"


def test_larger_weights_that_cost_nothing_are_no_spike(job: Job) -> None:
    fault, _ = spoilt(job, "spike", "world", 2.0, 2.1)
    assert fault.witness() == ""


def test_one_weight_of_one_replica_is_flipped_and_told(job: Job) -> None:
    fault, models = spoilt(job, "weight", "rank 1", 2.0)
    assert [model.weight.tolist() for model in models] == [[[1.0, 1.0]], [[1.5, 1.0]]]
    assert fault.witness() == "rank 1: a weight was 1 and is 1.5 after step 20"


def test_a_clock_is_off_as_long_as_the_fault_lasts(job: Job) -> None:
    points = KillPoints(log=job.passed("sidecar a"), armed=job.armed("sidecar a"))
    fault = made(job, "clock", seconds=3600)
    fault.strike()
    assert fault.witness() == ""
    assert points.clock_off_s() == 3600.0
    assert fault.witness() == "the wall clock of sidecar a was off by 3600 s"
    fault.mend()
    assert points.clock_off_s() == 0.0


@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").exists(), reason="root, cgroups"
)
def test_a_process_with_a_quota_is_throttled_and_put_back(job: Job) -> None:
    burn = "print('up', flush=True)\nwhile True: pass"
    process = job.process = Process("a", [sys.executable, "-c", burn], log=job.directory / "a.log")
    before = Path(f"/proc/{process.pid}/cgroup").read_text()
    try:
        wait_until(lambda: "up" in process.log.read_text(), what="it is up", timeout_s=20, alive=[process])
        fault = made(job, "quota", share=0.05)
        fault.strike()
        group = re.search(r":cpu:/(toprope-chaos-\w+)\n", Path(f"/proc/{process.pid}/cgroup").read_text())
        assert group is not None
        end_s = time.monotonic() + 0.3
        wait_until(lambda: time.monotonic() > end_s, what="it was throttled", timeout_s=20)
        fault.mend()
        assert Path(f"/proc/{process.pid}/cgroup").read_text() == before
        assert re.fullmatch(rf"pid {process.pid} was throttled [1-9]\d* times, .* s in all", fault.witness())
    finally:
        process.kill()
    assert not Path("/sys/fs/cgroup/cpu", group[1]).exists()


def test_wrong_use_of_a_fault_is_told(job: Job) -> None:
    for do, target, how, says in (
        ("flip", "node z", {"tier": "memory"}, "give a node that is there"),
        ("flip", "node a", {"tier": "attic"}, "tier 'attic'"),
        ("fail", "sidecar a", {"point": "before:x", "action": "explode"}, "action 'explode'"),
        ("network", "broker", {"mode": "cut"}, "target 'broker'"),
        ("power", "all", {}, "give topology.disk_mib"),
        ("fill", "node a", {}, "topology.memory_mib"),
    ):
        job.proxies = {}  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match=says):
            made(job, do, target, **how).strike()


def test_every_kind_has_a_sentence_for_the_list() -> None:
    assert all((kind.__doc__ or "").strip().endswith(".") for kind in KINDS.values())


# When


@pytest.fixture(autouse=True)
def _audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def planned(job: Job, **fault: Any) -> Planned:  # noqa: ANN401 - as TOML has it
    whole = {"do": "fail", "target": "sidecar a", "how": {"point": "before:disk.write", "action": "EIO"}} | fault
    return Planned(cast("Site", job), Fault(**whole), lambda _: None)


def stage_of(fault: Planned) -> str:
    return "over" if fault.over else "lasts" if fault.lasts else "waits"


def test_a_fault_comes_once_its_step_has_ended_and_is_mended_in_time(job: Job, tmp_path: Path) -> None:
    fault = planned(job, at_step=10, for_s=2.0)
    job.step, job.at_s = 9, 5.0
    fault.turn()
    assert stage_of(fault) == "waits"
    assert not (tmp_path / "toprope" / "chaos.jsonl").exists()
    job.step = 10
    fault.turn()
    assert stage_of(fault) == "lasts"
    assert len((tmp_path / "toprope" / "chaos.jsonl").read_text().splitlines()) == 1
    job.at_s = 6.9
    fault.turn()
    assert stage_of(fault) == "lasts"
    job.at_s = 7.0
    fault.turn()
    assert stage_of(fault) == "over"
    assert (fault.result().at_s, fault.result().until_s) == (5.0, 7.0)


def test_a_fault_that_leaves_no_trace_has_not_fired(job: Job) -> None:
    fault = planned(job, at_step=10)
    assert (fault.result().fired, fault.result().witness) == (False, "its moment never came")
    job.step = 10
    fault.turn()
    fault.mend()
    assert (fault.result().fired, fault.result().witness) == (False, "nothing shows that it happened")


def test_a_fault_that_could_not_be_done_says_why(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.chaos.faults.storage._APPEARS_S", 0.0)
    fault = planned(job, do="flip", target="store", how={"tier": "object"}, at_step=1)
    job.step = 1
    fault.turn()
    assert fault.over
    assert fault.result().witness == "tier object of store has no shard to damage"


def test_a_fault_in_a_phase_strikes_while_a_process_is_held_there_and_then_lets_it_go(job: Job) -> None:
    points = KillPoints(log=job.passed("sidecar a"), armed=job.armed("sidecar a"))
    upload = points.around("objects.create", lambda key: key)
    struck = planned(job, do="pause", during="object upload", of="sidecar a", at_step=16, how={})
    job.step = 4
    struck.turn()
    assert not job.armed("sidecar a").exists()
    job.step = 8
    struck.turn()
    (held,) = armed_points(job.armed("sidecar a"))
    assert (held.action, held.match) == ("hold", "/s000000016/")
    with running(job):
        pid = os.fork()
        if pid == 0:
            upload("shards/a1/s000000016/rank-0")
            os._exit(7)
        end_s = time.monotonic() + 20
        while not struck.lasts and time.monotonic() < end_s:
            struck.turn()
        assert state_of(job.pid("")) == "T"
        assert armed_points(job.armed("sidecar a")) == []
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        struck.mend()


def test_a_fault_that_shows_only_once_the_process_has_left_the_phase_has_not_come_in_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = KillPoints(log=job.passed("sidecar a"), armed=job.armed("sidecar a"))
    upload = points.around("objects.create", lambda key: key)
    receive = points.around("peers.receive", lambda key: key)
    how = {"point": "before:peers.receive", "action": "delay", "seconds": 0.01}
    late, soon = (
        planned(job, during="object upload", of="sidecar a", at_step=16, for_s=60.0, how=how) for _ in range(2)
    )
    for fault, shows in ((late, False), (soon, True)):
        job.step = 16
        fault.turn()
        pid = os.fork()
        if pid == 0:
            upload("shards/a1/s000000016/rank-0")
            os._exit(7)
        wait_until(lambda fault=fault: fault.turn() or fault.lasts, what="it strikes", timeout_s=20)  # type: ignore[misc]
        assert [one.action for one in armed_points(job.armed("sidecar a"))].count("hold") == 1
        if shows:
            receive("url")
        else:
            job.at_s += HELD_S_MAX
        fault.turn()
        assert [one.action for one in armed_points(job.armed("sidecar a"))].count("hold") == 0
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        receive("url")
        fault.mend()
        assert fault.result().fired is shows
    assert late.result().witness.endswith("but not while sidecar a was in object upload")
    assert soon.result().witness.endswith(", while sidecar a was in object upload")


def test_faults_that_recur_come_at_times_drawn_from_the_seed_one_after_another(job: Job) -> None:
    fault = Fault(do="any", target="sidecar a", mtbf_s=5.0, for_s=1.0, how={"among": "pause sidecar a; kill sidecar a"})

    def times(seed: int) -> list[tuple[float, str]]:
        recurring = Recurring(cast("Site", job), fault, lambda _: None, random.Random(seed))
        job.step = 1
        for tenth in range(1000):
            job.at_s = tenth / 10
            recurring.turn()
        return [(one.at_s, one.fault.do) for one in recurring.come]

    assert fault.trigger == "every 5 s on average"
    with running(job):
        first = times(3)
        assert first == times(3) != times(4)
    assert 8 < len(first) < 40
    assert {do for _, do in first} == {"pause", "kill"}
    assert all(later - earlier >= 1.0 for (earlier, _), (later, _) in pairwise(first))
