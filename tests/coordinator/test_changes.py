"""Pins, taints, retention and specs: by a coordinator that lives, by a command alone, and by both in turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import aiohttp
import msgspec
import pytest
from tests.support.logs import LogWriter
from tests.support.reigns import FakeNode
from tests.support.stores import JobBuilder, small_store

from toprope.__main__ import main
from toprope.coordinator.adapters.http import application, served
from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.changing import ask
from toprope.coordinator.config import Config
from toprope.coordinator.core import Core
from toprope.coordinator.log import Log
from toprope.coordinator.ports import Ports
from toprope.coordinator.settings import Address
from toprope.coordinator.terms import Terms
from toprope.coordinator.wire import Adopted, Cadence, Inventory, Member, OpenRequest
from toprope.store.errors import FencedError, UnavailableError, UsageError
from toprope.store.keep.changes import Change, ChangeRequest, append_in_passing
from toprope.store.log.chain import read_entries, read_log
from toprope.store.log.fold import JobState
from toprope.store.log.records import Elected, Job, Pin, Retire
from toprope.store.look.verify import CheckpointReport, verify_checkpoint
from toprope.store.objects.directory import NO_ROOM, DirectoryStore
from toprope.store.objects.probing import leave_probe
from toprope.store.objects.protocol import ObjectStore

ANYWHERE = Address(host="127.0.0.1", port=0)
PATIENCE_S = 20.0
TOKEN = "a secret of some length"


class Silence:
    """Neither nodes nor other coordinators answer."""

    async def inventory(self, url: str) -> Inventory | None:
        return None

    async def adopted(self, url: str) -> None:
        return None

    async def health(self, url: str, *, standby: str) -> Literal["silent"]:
        return "silent"


@dataclass
class Live:
    """A coordinator that serves in this event loop."""

    coordinator: Terms
    url: str
    root: Path

    @property
    def core(self) -> Core | None:
        return self.coordinator.reign.core if self.coordinator.reign is not None else None

    async def state(self) -> JobState:
        return await asyncio.to_thread(read_log, DirectoryStore(self.root), "job")

    async def kinds(self) -> list[str]:
        return await asyncio.to_thread(kinds, self.root)

    async def term(self, number: int) -> None:
        """Wait until it reigns for this term."""
        async with asyncio.timeout(PATIENCE_S):
            while self.core is None or self.core.term != number:  # noqa: ASYNC110 - it polls too
                await asyncio.sleep(0.01)

    async def request(self, job_uid: str, change: Change) -> ChangeRequest:
        """Return a request of somebody who sees the store."""
        probe = await asyncio.to_thread(leave_probe, DirectoryStore(self.root))
        return ChangeRequest(job_uid=job_uid, probe=probe, change=change)

    async def ckpt(self, *words: object) -> int:
        return await asyncio.to_thread(ckpt, *words)


@asynccontextmanager
async def reigning(root: Path, *, retain: str | None = None, token: str = "") -> AsyncIterator[Live]:
    config = Config(
        job="job",
        store=str(root),
        listen=ANYWHERE,
        broker=None,
        embedded_broker=None,
        cadence=Cadence(from_step=0, every=1, local_every=1, object_every=1),
        token=token,
        ready_file=None,
        heartbeat_s=0.05,
        retain=retain,
    )
    coordinator, stop, serving = Terms(config), asyncio.Event(), asyncio.Event()
    ports = Ports(
        store=ThreadedStore(DirectoryStore(root)),
        nodes=Silence(),
        coordinators=Silence(),
        connect=lambda *_, **__: None,
    )
    async with served(application(coordinator, token=token), ANYWHERE) as url, asyncio.TaskGroup() as tasks:
        tasks.create_task(coordinator.run(ports, url=url, stop=stop, on_serving=serving.set))
        async with asyncio.timeout(PATIENCE_S):
            await serving.wait()
        yield Live(coordinator, url, root)
        stop.set()


@pytest.fixture
def job(tmp_path: Path) -> JobBuilder:
    """Return a job with READY 4 to 8: steps 10 to 50."""
    return small_store(DirectoryStore(tmp_path), steps=(10, 20, 30, 40, 50))


def ckpt(*words: object) -> int:
    return main([str(word) for word in words])


def kinds(root: Path) -> list[str]:
    return [type(entry.record).__name__ for entry, _ in read_entries(DirectoryStore(root), "job")]


def verified(root: Path) -> list[int]:
    store = DirectoryStore(root)
    state = read_log(store, "job")
    for seq in state.live:
        assert verify_checkpoint(store, state, seq).damages == ()
    return [state.readies[seq].step for seq in state.live]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# --- with no coordinator


def test_a_command_alone_is_elected_for_the_moment(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("pin", tmp_path, "job@10") == 0
    out, err = capsys.readouterr()
    assert out == "step 10 of job job (READY 4) is pinned\n"
    assert "no coordinator of job job answers" in err
    assert kinds(tmp_path)[-2:] == ["Elected", "Pin"]
    assert read_log(job.store, "job").passing
    assert ckpt("pin", tmp_path, "job@10") == 0
    assert "is already pinned" in capsys.readouterr().out
    assert ckpt("unpin", tmp_path, "job@10") == 0
    assert kinds(tmp_path)[-3:] == ["Pin", "Elected", "Unpin"], "what is so already elects nobody"
    assert read_log(job.store, "job").pins == frozenset()


@pytest.mark.parametrize(
    ("words", "status", "what"),
    [
        (("pin", "job@11"), 3, "no READY checkpoint of step 11; there are steps [10, 20, 30, 40, 50]"),
        (("pin", "job"), 64, "give JOB@STEP"),
        (("pin", "job@10..20"), 64, "is a range: give one step"),
        (("pin", "other@10"), 64, "no such job in this store; there are job"),
        (("pin", "../x@10"), 64, "job '../x' is not usable"),
        (("taint", "job@30..20", "--reason", "x"), 64, "the last is before the first"),
        (("taint", "job@30", "--reason", "  "), 64, "a taint needs a reason"),
        (("taint", "job@0", "--reason", "x", "--attempt", "1"), 64, "the first step is 1"),
        (("taint", "job@30", "--reason", "x", "--attempt", "2"), 64, "there is no attempt 2"),
        (("taint", "job@25", "--reason", "x"), 3, "step 25 has never been READY; there are steps [10, 20, 30, 40, 50]"),
        (("taint", "job@41..49", "--reason", "x"), 3, "any of the steps 41 to 49 has never been READY"),
        (("taint", "job@25", "--reason", "x", "--attempt", "1"), 3, "step 25 has never been READY"),
        (("job", "retain", "last=0"), 64, "give last=N, every=K, within=TIME"),
        (("job", "accept-spec", "ab" * 32), 64, "no launch was refused for a spec"),
        (("metric", "job@11", "val_loss=2"), 3, "no READY checkpoint of step 11"),
        (("metric", "job@10", "val_loss"), 64, "'val_loss' is not usable: give NAME=VALUE"),
        (("metric", "job@10", "val_loss=low"), 64, "give NAME=VALUE, as val_loss=2.31"),
        (("metric", "job@10", "val_loss=nan"), 64, "a value is a finite number"),
        (("metric", "job@10", "=2"), 64, "a name is 1 to 64 of"),
        (("metric", "job@10", "a:b=2"), 64, "a name is 1 to 64 of"),
        (("gc", "--retain", "newest"), 64, "give last=N, every=K, within=TIME"),
    ],
)
def test_bad_input_changes_nothing(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, what: str
) -> None:
    before = contents(tmp_path)
    at = 2 if words[0] == "job" else 1
    assert ckpt(*words[:at], tmp_path, *words[at:]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert what in line
    assert contents(tmp_path) == before


def test_a_taint_covers_the_attempts_that_led_to_here(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.open_attempt(ready=6, from_step=30).checkpoint(35)
    assert ckpt("taint", tmp_path, "job@25..", "--reason", "NaN in the loss") == 0
    out, err = capsys.readouterr()
    assert out == "attempt 1, steps 25 to 30: tainted\nattempt 2, step 31 on: tainted\n"
    assert err.endswith("READY steps given up: 30, 35; newest checkpoint that is left: step 20 (READY 5)\n")
    state = read_log(job.store, "job")
    assert [state.readies[seq].step for seq, _ in state.restorable()] == [20, 10]
    assert state.is_ended(2)


def test_nothing_is_changed_before_an_attempt_that_a_node_has_adopted_is_known(job: JobBuilder, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with reigning(tmp_path) as live:
            state = await live.state()
            node = FakeNode(name="a", job_uid=state.job_uid)
            adopted = (Adopted(number=state.attempt_number + 1, uid="0d" * 16),)
            live.coordinator.heard(msgspec.structs.replace(node.say(), adopted=adopted))
            with pytest.raises(UnavailableError, match="comes into it first"):
                await live.coordinator.change(await live.request(state.job_uid, Retire(seqs=(4,))))
            assert (await live.state()).retired == frozenset()

    asyncio.run(scenario())


def test_a_taint_says_which_ready_steps_it_gives_up(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def given_up(*words: str) -> list[int]:
        assert ckpt("taint", tmp_path, *words, "--reason", "x", "--json") == 0
        steps: list[int] = json.loads(capsys.readouterr().out)["given_up"]
        return steps

    assert given_up("job@15..30", "--dry-run") == given_up("job@15..30") == [20, 30]
    assert given_up("job@15..30") == given_up("job@20") == [], "they were given up before"
    assert given_up("job@77") == [], "a node may hold it, past the newest READY"
    assert ckpt("taint", tmp_path, "job@78", "--reason", "x") == 0
    assert "no READY step is given up; newest checkpoint that is left: step 50" in capsys.readouterr().err
    assert read_log(job.store, "job").is_tainted(attempt=1, step=77)


def test_gc_shows_its_plan_and_then_does_it(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt("pin", tmp_path, "job@10")
    before = contents(tmp_path)
    capsys.readouterr()
    assert ckpt("gc", tmp_path, "--retain", "last=1", "--dry-run", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert contents(tmp_path) == before
    assert [one["step"] for one in shown["retention"]["retired"]] == [20, 30]
    assert [(one["step"], one["why"]) for one in shown["retention"]["kept"]] == [
        (10, "pinned"),
        (40, "the parent of head"),
        (50, "head"),
    ]
    assert ckpt("gc", tmp_path, "--retain", "last=1", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert done == shown | {"done": True}
    after = contents(tmp_path)
    gone = {key: body for key, body in before.items() if key not in after}
    assert set(gone) == {one["key"] for one in shown["garbage"]["condemned"]}
    assert sum(map(len, gone.values())) == shown["bytes"]
    assert verified(tmp_path) == [10, 40, 50]
    assert ckpt("gc", tmp_path) == 0
    assert "nothing to delete" in capsys.readouterr().err


@pytest.mark.fault("B83")
def test_gc_leaves_a_damaged_shard_and_all_else_as_it_is(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = tmp_path.glob("job/shards/a1/s000000020/rank-00001-*.safetensors")
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    before = contents(tmp_path)
    for words in (("gc", tmp_path, "--dry-run"), ("gc", tmp_path)):
        assert ckpt(*words) == 0
        assert "nothing to delete" in capsys.readouterr().err
        assert contents(tmp_path) == before
    state = job.log.state
    damaged = {state.readies[seq].step: verify_checkpoint(job.store, state, seq).damages for seq in state.live}
    assert {step: len(damages) for step, damages in damaged.items()} == {10: 0, 20: 1, 30: 0, 40: 0, 50: 0}
    assert damaged[20][0].key == str(path.relative_to(tmp_path))


def test_gc_that_cant_read_what_is_kept_deletes_nothing_and_says_what_to_do(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt("pin", tmp_path, "job@10")
    (path,) = tmp_path.glob("job/shards/a1/s000000010/rank-00000-*.index.json")
    path.unlink()
    before = contents(tmp_path)
    capsys.readouterr()
    assert ckpt("gc", tmp_path, "--retain", "last=1", "--dry-run") == 2
    err = capsys.readouterr().err
    assert "Nothing was deleted" in err
    assert "`ckpt unpin` it (READY 4 is pinned)" in err
    assert contents(tmp_path) == before
    ckpt("unpin", tmp_path, "job@10")
    assert ckpt("gc", tmp_path, "--retain", "last=1") == 0
    assert verified(tmp_path) == [40, 50]


def test_verify_takes_what_was_retired_and_deleted_meanwhile_for_no_damage(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify_late(store: ObjectStore, state: JobState, seq: int) -> CheckpointReport:
        ckpt("gc", tmp_path, "--retain", "last=1")
        return verify_checkpoint(store, state, seq)

    monkeypatch.setattr("toprope.store.cli.verify.verify_checkpoint", verify_late)
    assert ckpt("verify", tmp_path) == 0
    err = capsys.readouterr().err
    assert "step 10 of job job was retired meanwhile, and is passed over" in err
    assert "all good: 2 checkpoints" in err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    assert subprocess.run(["mountpoint", "-q", str(directory)], check=False).returncode == 0
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_on_a_full_store_what_is_condemned_makes_room_for_the_record_that_retires(
    small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toprope.store.log.chain.BACK_OFF_S", ())
    job = small_store(DirectoryStore(small_disk), steps=(10, 20, 30))
    job.put_shard(step=25, rank=0)
    with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(small_disk).f_bavail == 0
    assert ckpt("gc", small_disk, "--retain", "last=1") == 0
    assert "deleting what is condemned already, then trying again" in capsys.readouterr().err
    assert os.statvfs(small_disk).f_bavail > 0
    assert verified(small_disk) == [20, 30]


def test_gc_that_makes_room_does_not_advise_to_call_gc(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    small_store(store, steps=(10, 20, 30)).put_shard(step=25, rank=0)
    LogWriter(store, "job").add(Elected(url="http://127.0.0.1:9"))
    full = [UnavailableError(f"probe/0a: No space left on device in store here{NO_ROOM}")]

    def leave(where: ObjectStore) -> str:
        if full:
            raise full.pop()
        return leave_probe(where)

    monkeypatch.setattr("toprope.coordinator.changing.leave_probe", leave)
    assert ckpt("gc", tmp_path, "--retain", "last=1") == 0
    said = capsys.readouterr().err
    assert "(probe/0a: No space left on device in store here)" in said
    assert "; deleting what is condemned already, then trying again" in said
    assert verified(tmp_path) == [20, 30]


# --- with a coordinator


async def test_a_coordinator_makes_the_change_and_keeps_its_term(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with reigning(tmp_path) as live:
        assert (await live.state()).url == live.url
        assert await live.ckpt("pin", tmp_path, "job@10") == 0
        assert await live.ckpt("taint", tmp_path, "job@45..50", "--reason", "bad data", "--coordinator", live.url) == 0
        assert await live.ckpt("unpin", tmp_path, "job@10") == 0
        told = "READY steps given up: 50; newest checkpoint that is left: step 40 (READY 7)\n"
        assert capsys.readouterr().err == told
        assert (await live.kinds())[-4:] == ["Elected", "Pin", "Taint", "Unpin"]
        assert (await live.state()).term == 2


async def test_a_coordinator_whose_token_is_missing_is_not_gone_around(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with reigning(tmp_path, token=TOKEN) as live:
        assert await live.ckpt("pin", tmp_path, "job@10") == 64
        assert "give --token-file" in capsys.readouterr().err
        assert (await live.state()).pins == frozenset()
        assert await live.ckpt("pin", tmp_path, "job@10", "--token-file", file) == 0
        assert (await live.state()).pins == {4}


async def test_a_coordinator_that_was_named_and_does_not_answer_is_an_error(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with reigning(tmp_path) as live:
        url = live.url
    n = (await live.state()).n
    assert await live.ckpt("pin", tmp_path, "job@10", "--coordinator", url) == 4
    assert f"no coordinator answers at {url}" in capsys.readouterr().err
    assert (await live.state()).n == n
    assert await live.ckpt("pin", tmp_path, "job@10") == 0, "one that the log names and that is gone is gone around"
    assert (await live.state()).pins == {4}


async def test_a_coordinator_is_elected_again_after_a_command_was_in_passing(job: JobBuilder, tmp_path: Path) -> None:
    async with reigning(tmp_path) as live:
        for term in (4, 6):
            job.log.state = await live.state()
            await asyncio.to_thread(job.log.add, Elected(passing=True))
            await live.term(term)
        assert await live.ckpt("pin", tmp_path, "job@20") == 0
        assert [(await live.kinds())[-5:], (await live.state()).term] == [["Elected"] * 4 + ["Pin"], 6]
        assert (await live.state()).url == live.url


def elected_at(url: str) -> Callable[[JobState], Elected]:
    return lambda _: Elected(url=url)


async def test_a_coordinator_that_was_replaced_is_not_elected_again_after_a_command_was_in_passing(
    job: JobBuilder,
) -> None:
    logs = {name: Log(ThreadedStore(job.store), "job", writer_id=name, url=f"http://{name}") for name in ("b", "a")}
    for name, log in logs.items():
        await log.elect(elected_at(f"http://{name}"), job_uid="0b" * 16)
    before, after = logs.values()
    await asyncio.to_thread(append_in_passing, job.store, "job", lambda _: Pin(seq=4), purpose="pin")
    with pytest.raises(FencedError):
        await before.catch_up()
    await after.catch_up()
    assert (after.state.writer_id, after.state.url, after.state.passing) == ("a", "http://a", False)


async def test_what_a_policy_does_not_keep_is_retired_and_deleted_after_a_change(
    job: JobBuilder, tmp_path: Path
) -> None:
    async with reigning(tmp_path, retain="last=2") as live:
        assert (await live.state()).retain == "last=2"
        assert await live.ckpt("job", "retain", tmp_path, "last=1,every=25") == 0
        async with asyncio.timeout(PATIENCE_S):
            while live.coordinator.metrics.objects_deleted._value.get() < 10:  # noqa: ASYNC110 - it is counted
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(verified, tmp_path) == [30, 40, 50]
        assert live.coordinator.metrics.readies_retired._value.get() == 2
    async with reigning(tmp_path) as live:
        assert (await live.state()).retain == "last=1,every=25", "the log keeps it over restarts"


async def test_a_spec_that_was_refused_can_be_accepted(
    job: JobBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"model": {"weight": ["F32", [2, 4]]}}
    async with reigning(tmp_path) as live:
        node = FakeNode(name="a", job_uid=(await live.state()).job_uid)
        world = (Member(rank=0, node="a", boot_id=node.boot_id),)
        ask = OpenRequest(job="job", launch_id="1a" * 16, round=0, world=world, spec=wanted, versions={})
        refused = await live.coordinator.open(ask)
        assert refused.code == "spec-mismatch"
        command = refused.text.rpartition("ckpt ")[2].replace("ROOT", str(tmp_path)).split()
        n = (await live.state()).n
        assert await live.ckpt(*command, "--dry-run") == 0
        told = "~ model.weight[1]: [2, 3] -> [2, 4]\njob job would have spec " + command[3][:12] + "\n"
        assert capsys.readouterr().out == told
        assert (await live.state()).n == n
        assert await live.ckpt(*command) == 0
        assert (await live.coordinator.open(ask)).code != "spec-mismatch"
        before = OpenRequest(
            job="job", launch_id="2a" * 16, round=0, world=world, spec=json.loads(job.spec), versions={}
        )
        refused = await live.coordinator.open(before)
        assert (refused.code, "~ model.weight[1]: [2, 4] -> [2, 3]" in refused.text) == ("spec-mismatch", True)


async def test_a_request_of_another_job_or_of_no_form_changes_nothing(job: JobBuilder, tmp_path: Path) -> None:
    async with reigning(tmp_path) as live, aiohttp.ClientSession() as client:
        n = (await live.state()).n
        other = msgspec.json.encode(await live.request("0c" * 16, Pin(seq=4)))
        uid, spec = (await live.state()).job_uid, (await live.state()).spec_sha256
        assert spec is not None

        async def asked(change: Change) -> bytes:
            return msgspec.json.encode(await live.request(uid, change))

        odd: tuple[tuple[Change, str], ...] = (
            (Retire(seqs=(4, 4)), "one READY twice"),
            (Job(uid="0c" * 16, name="job", retain="last=1"), "it is of job uid"),
            (Job(uid=uid, name="other", retain="last=1"), "it names job 'other'"),
            (Job(uid=uid, name="job", retain="last=1", replaces="5e" * 32), "replaces a spec with none"),
            (Job(uid=uid, name="job", spec_sha256="5e" * 32, replaces=spec, retain="last=1"), "more than one"),
            (Job(uid=uid, name="job", spec_sha256="5e", replaces=spec), "it sets no spec"),
            (Job(uid=uid, name="job"), "neither a spec nor a policy"),
        )
        ready = other.replace(b"PIN", b"ELECTED")
        for body, what in (
            (other, "of another uid"),
            (ready, "not a change"),
            (b"{", "not a change"),
            *[(await asked(change), what) for change, what in odd],
        ):
            async with client.post(f"{live.url}/v1/changes", data=body) as answer:
                assert answer.status == 409
                assert what in await answer.text()
        of_another_version = await live.request(uid, cast("Change", Elected()))
        with pytest.raises(
            UsageError, match=r"not a change of a job: .*; the coordinator is of another version: restart"
        ):
            await asyncio.to_thread(ask, live.url, of_another_version, token="")
        assert (await live.state()).n == n
