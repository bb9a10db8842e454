"""``ckpt job purge``, and changes that are only tried: what goes, what stands against it, and that no more goes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace
from tests.coordinator.test_changes import ANYWHERE, TOKEN, ckpt, contents, reigning
from tests.support.fake_store import FakeStore
from tests.support.logs import SPEC, LogWriter, attempt, ready, uid
from tests.support.reigns import shown, training
from tests.support.stores import JobBuilder, small_store

from toprope.coordinator.adapters.http import served
from toprope.coordinator.basing import pinned_base
from toprope.coordinator.wire import LEADER_HEADER
from toprope.store.checkpoint.manifest import sha256
from toprope.store.errors import UnavailableError
from toprope.store.keep.holds import holding
from toprope.store.keep.purging import delete, keys_of
from toprope.store.log.chain import read_log
from toprope.store.log.records import Elected, Held, Job
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key, facts_key, log_key
from toprope.store.objects.directory import DirectoryStore


@pytest.fixture
def two_jobs(tmp_path: Path) -> DirectoryStore:
    """Return a store of the jobs ``job`` and ``other``, and what a probe left."""
    store = DirectoryStore(tmp_path)
    small_store(store)
    small_store(store, name="other")
    store.create(Key("probe/" + "0a" * 16), b"")
    store.create(facts_key("job", sha256(WIDER)), WIDER)
    return store


WIDER = b'{"model":{"weight":["F32",[2,4]]}}'
"""A spec that no attempt of ``job`` has had."""


def of_job(root: Path, name: str) -> dict[str, bytes]:
    return {key: body for key, body in contents(root).items() if key.startswith(f"{name}/")}


def test_a_purged_job_is_gone_and_the_other_one_has_each_byte(
    two_jobs: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = of_job(tmp_path, "other")
    assert ckpt("pin", tmp_path, "job@10") == 0
    assert ckpt("job", "purge", tmp_path, "job", "--confirm", "job") == 0
    assert "job job: 2 checkpoints, " in capsys.readouterr().out
    assert contents(tmp_path) == kept
    assert ckpt("show", tmp_path, "--job", "job") == 64
    small_store(two_jobs)
    assert ckpt("verify", tmp_path, "--job", "job") == 0


@pytest.mark.usefixtures("two_jobs")
@pytest.mark.parametrize("words", [[], ["--confirm", "other"], ["--dry-run"]], ids=["bare", "misspelt", "tried"])
def test_without_its_name_once_more_nothing_goes(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tmp_path)
    assert ckpt("job", "purge", tmp_path, "job", *words) == (0 if words == ["--dry-run"] else 64)
    said = capsys.readouterr()
    assert "would be deleted" in said.out or "give --confirm job" in said.err
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("how", "record"), [("damaged", 0), ("damaged", 3), ("damaged", 5), ("missing", 0), ("missing", 3)]
)
def test_a_job_whose_log_is_damaged_goes_too(
    two_jobs: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, record: int
) -> None:
    """What an operator wants rid of most; and what a coordinator leaves that wrote after its job was purged."""
    kept = of_job(tmp_path, "other")
    path = tmp_path / log_key("job", record)
    if how == "damaged":
        path.write_bytes(path.read_bytes().replace(b"nonce", b"nonse"))
    else:
        path.unlink()
    assert ckpt("show", tmp_path, "--job", "job") == 2
    before = contents(tmp_path)
    assert ckpt("job", "purge", tmp_path, "job") == 64
    assert contents(tmp_path) == before
    capsys.readouterr()
    assert ckpt("job", "purge", tmp_path, "job", "--confirm", "job") == 0
    told = capsys.readouterr().err
    assert "the log of job job is damaged" in told
    assert f"record {record}" in told
    assert contents(tmp_path) == kept
    assert two_jobs.size(log_key("other", 0)) > 0


def test_a_damaged_log_that_can_still_tell_is_heeded(
    two_jobs: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = pinned_base(
        two_jobs, "tuned", at="other@10", take="all", token="", into=lambda: two_jobs, say=lambda _: None
    )
    log = LogWriter(two_jobs, "tuned")
    log.add(Job(uid="0d" * 16, name="tuned"), Elected(), Job(uid="0d" * 16, name="tuned", base=base))
    log.add(Job(uid="0d" * 16, name="tuned", spec_sha256=SPEC))
    for path in (tmp_path / log_key("tuned", 3), tmp_path / log_key("other", 5)):
        path.write_bytes(b"{}")
    before = contents(tmp_path)
    assert ckpt("job", "purge", tmp_path, "other", "--confirm", "other") == 64
    assert "job tuned starts from its step 10" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert ckpt("job", "purge", tmp_path, "tuned", "--confirm", "tuned") == 0
    assert ckpt("job", "purge", tmp_path, "other", "--confirm", "other") == 0


@pytest.mark.usefixtures("job_of_50")
@pytest.mark.parametrize("token", ["", TOKEN], ids=["open", "with a token"])
def test_it_refuses_while_a_coordinator_answers(tmp_path: Path, token: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def purge() -> tuple[int, int]:
        async with reigning(tmp_path, token=token) as live:
            return await live.ckpt("job", "purge", tmp_path, "job", "--confirm", "job"), len(contents(tmp_path))

    status, files = asyncio.run(purge())
    assert status == 64
    assert "coordinator answers at http" in capsys.readouterr().err
    assert files == len(contents(tmp_path)) > 5


@pytest.mark.usefixtures("two_jobs")
@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ((), "rank 0 on node a, rank 1 on node b live; end them first"),
        ((1,), "rank 0 on node a live; end them first"),
        ((0, 1), "no rank of it is known to live; end it first"),
    ],
)
def test_it_names_the_ranks_that_live_and_none_that_has_ended_on_a_node_that_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: tuple[int, ...], said: str
) -> None:
    reign = training()
    for node in reign.nodes.values():
        node.ranks = {rank: replace(state, lock_held=rank not in ended) for rank, state in node.ranks.items()}
    reign.hear()
    body = msgspec.json.encode(shown(reign.core, now_s=reign.now_s))

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=body)

    async def purge() -> int:
        application = web.Application()
        application.router.add_get("/v1/status", status)
        async with served(application, ANYWHERE) as url:
            words = ("job", "purge", tmp_path, "job", "--dry-run", "--coordinator", url)
            return await asyncio.to_thread(ckpt, *words)

    assert asyncio.run(purge()) == 64
    copied = f"; or, if {tmp_path} is a copy of the store that it serves, give --coordinator none. Nothing was deleted"
    assert f"{said}{copied}\n" in capsys.readouterr().err


@pytest.mark.usefixtures("two_jobs")
@pytest.mark.parametrize("said", [None, {"job": 7}], ids=["it reads the log", "it is another service"])
def test_it_refuses_while_something_answers_that_may_be_its_coordinator(
    tmp_path: Path, said: object, capsys: pytest.CaptureFixture[str]
) -> None:
    async def status(_: web.Request) -> web.Response:
        return web.Response(status=503) if said is None else web.json_response(said)

    async def purge() -> int:
        application = web.Application()
        application.router.add_get("/v1/status", status)
        async with served(application, ANYWHERE) as url:
            words = ("job", "purge", tmp_path, "job", "--confirm", "job", "--coordinator", url)
            return await asyncio.to_thread(ckpt, *words)

    before = contents(tmp_path)
    assert asyncio.run(purge()) == 64
    assert "end it first; or, if " in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_it_refuses_while_one_answers_that_reigned_before_the_last(
    two_jobs: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def purge() -> int:
        async with served(web.Application(), ANYWHERE) as url:
            log = LogWriter(two_jobs, "other")
            log.add(Elected(url=url), Elected(url=nobody_at()), Elected(passing=True))
            return await asyncio.to_thread(ckpt, "job", "purge", tmp_path, "other", "--confirm", "other")

    assert asyncio.run(purge()) == 64
    assert "end it first; or, if " in capsys.readouterr().err
    assert asyncio.run(asyncio.to_thread(ckpt, "job", "purge", tmp_path, "other", "--confirm", "other")) == 0


@pytest.mark.parametrize("knows", [True, False])
def test_it_refuses_while_one_stands_by_whether_or_not_it_knows_a_leader_that_is_away(
    two_jobs: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, knows: bool
) -> None:
    leader = nobody_at() if knows else ""

    async def stands_by(_: web.Request) -> web.Response:
        raise web.HTTPConflict(headers={LEADER_HEADER: leader})

    async def purge() -> int:
        application = web.Application()
        application.router.add_get("/v1/status", stands_by)
        async with served(application, ANYWHERE) as url:
            LogWriter(two_jobs, "other").add(Elected(url=url), Elected(url=nobody_at()))
            return await asyncio.to_thread(ckpt, "job", "purge", tmp_path, "other", "--confirm", "other")

    before = contents(tmp_path)
    assert asyncio.run(purge()) == 64
    assert "end it first; or, if " in capsys.readouterr().err
    assert set(before) < set(contents(tmp_path)), "the two elections, and nothing gone"


def nobody_at() -> str:
    """Return a url at which nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as was:
        return f"http://127.0.0.1:{was.getsockname()[1]}"


@pytest.mark.usefixtures("two_jobs")
def test_the_coordinator_of_another_job_at_its_address_does_not_keep_it(tmp_path: Path) -> None:
    async def purge() -> int:
        async with reigning(tmp_path) as live:
            words = ("job", "purge", tmp_path, "other", "--confirm", "other", "--coordinator", live.url)
            return await live.ckpt(*words)

    assert asyncio.run(purge()) == 0
    assert of_job(tmp_path, "other") == {}


@pytest.fixture
def job_of_50(tmp_path: Path) -> JobBuilder:
    return small_store(DirectoryStore(tmp_path), steps=(10, 20, 30, 40, 50))


def test_it_refuses_while_a_reader_holds_a_checkpoint(two_jobs: DirectoryStore, tmp_path: Path) -> None:
    with holding(two_jobs, read_log(two_jobs, "job"), 4):
        assert ckpt("job", "purge", tmp_path, "job", "--confirm", "job") == 64
    assert ckpt("job", "purge", tmp_path, "job", "--confirm", "job") == 0


def test_it_refuses_while_another_job_has_nothing_but_this_one_to_start_from(
    two_jobs: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = pinned_base(two_jobs, "new", at="job@10", take="all", token="", into=lambda: two_jobs, say=lambda _: None)
    log = LogWriter(two_jobs, "new")
    log.add(named(), Elected(), named(base=base), named(spec_sha256=SPEC))
    assert ckpt("job", "purge", tmp_path, "job", "--confirm", "job") == 64
    assert "job new starts from its step 10" in capsys.readouterr().err
    assert ckpt("job", "purge", tmp_path, "other", "--confirm", "other") == 0
    own = attempt(1, uid=uid(9), held=Held(attempt_uid=base.attempt_uid, step=10), from_step=10)
    log.add(own, msgspec.structs.replace(ready(20), attempt_uid=uid(9)))
    assert ckpt("job", "purge", tmp_path, "job", "--confirm", "job") == 0, "it has one of its own by now"


def test_a_job_that_started_from_an_earlier_one_of_that_name_does_not_keep_it(
    two_jobs: DirectoryStore, tmp_path: Path
) -> None:
    base = pinned_base(two_jobs, "new", at="job@10", take="all", token="", into=lambda: two_jobs, say=lambda _: None)
    earlier = msgspec.structs.replace(base, job_uid="0e" * 16)
    LogWriter(two_jobs, "new").add(named(), Elected(), named(base=earlier), named(spec_sha256=SPEC))
    assert ckpt("job", "purge", tmp_path, "job", "--confirm", "job") == 0


def named(**more: Any) -> Job:  # noqa: ANN401 - as the record takes it
    return Job(uid="0d" * 16, name="new", **more)


def test_a_purge_that_is_cut_off_anywhere_leaves_a_job_that_can_be_purged(tmp_path: Path) -> None:
    class Mortal(FakeStore):
        left = 0

        def delete(self, keys: Sequence[Key]) -> None:
            for key in keys:
                if not self.left:
                    raise UnavailableError("cut off")
                self.left -= 1
                super().delete([key])

    whole = FakeStore()
    small_store(whole, steps=(10,))
    facts = sum(key.startswith("job/facts/") for key in whole.objects)
    for deletions in range(len(whole.objects)):
        store = Mortal()
        store.objects = dict(whole.objects)
        store.left = deletions
        with pytest.raises(UnavailableError):
            delete(store, keys_of(store, "job"))
        state = read_log(store, "job")  # the log is a log of its own as long as there is one
        for seq in state.live:
            assert bool(verify_checkpoint(store, state, seq).damages) == (deletions > facts), "what is gone is named"
        store.left = 1000
        delete(store, keys_of(store, "job"))
        assert store.objects == {}


TRIED: dict[str, Callable[[Path], list[object]]] = {
    "pin": lambda root: ["pin", root, "job@10"],
    "unpin": lambda root: ["unpin", root, "job@20"],
    "taint": lambda root: ["taint", root, "job@20..", "--reason", "nan"],
    "metric": lambda root: ["metric", root, "job@20", "val_loss=2.5"],
    "retain": lambda root: ["job", "retain", root, "last=1", "--job", "job"],
    "accept-spec": lambda root: ["job", "accept-spec", root, sha256(WIDER), "--job", "job"],
}


@pytest.mark.usefixtures("two_jobs")
@pytest.mark.parametrize("word", TRIED)
def test_a_change_that_is_only_tried_says_what_it_would_be_and_changes_nothing(
    tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("pin", tmp_path, "job@20") == 0
    before = contents(tmp_path)
    capsys.readouterr()
    assert ckpt(*TRIED[word](tmp_path), "--dry-run") == 0
    assert "would" in capsys.readouterr().out
    assert ckpt(*TRIED[word](tmp_path), "--dry-run", "--json") == 0
    tried = json.loads(capsys.readouterr().out)
    assert contents(tmp_path) == before
    assert ckpt(*TRIED[word](tmp_path), "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (tried.pop("done"), made.pop("done")) == (False, True)
    assert tried == made
    assert contents(tmp_path) != before


@pytest.mark.usefixtures("two_jobs")
def test_a_change_that_may_not_be_made_is_refused_when_it_is_only_tried(tmp_path: Path) -> None:
    assert ckpt("pin", tmp_path, "job@11", "--dry-run") == 3
