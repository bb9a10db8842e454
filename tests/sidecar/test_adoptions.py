"""Attempts that a node adopts while the log can't be reached: one of a number, written down, and held to."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support.core_driver import JOB_UID, UID, Driver

from toprope.coordinator.wire import Adopted, Kept, Provisional
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.adapters.files import Disk
from toprope.sidecar.adoptions import AdoptionFiles
from toprope.store.log.records import Attempt, AttemptFacts, Held
from toprope.trainer_hooks.link import wire

NEXT = "2c" * 16
OTHER = "3d" * 16


def proposal(uid: str = NEXT, *, number: int = 2, parent: str = UID, job_uid: str = JOB_UID) -> Provisional:
    record = Attempt(
        attempt=number,
        uid=uid,
        launch_id="bb" * 16,
        round=0,
        ready=None,
        held=Held(attempt_uid=parent, step=5),
        from_step=5,
        struck=(),
        world_size=1,
        facts_sha256="0f" * 32,
        spec_sha256="0e" * 32,
        why="",
        decided_at=4,
    )
    return Provisional(
        job_uid=job_uid, parent=parent, record=record, facts=AttemptFacts(world=(), held_digests=(), versions={})
    )


def in_training() -> Driver:
    driver = Driver()
    driver.train()
    driver.want(logged=1)
    return driver


def adopt(driver: Driver, one: Provisional) -> None:
    driver.want(proposed=one)
    (effect,) = driver.all(do.Adopt)
    driver.on(on.Adopted(adopted=effect.proposed, forgotten=effect.forget))


def open_it(driver: Driver, one: Provisional, **changes: object) -> None:
    driver.attempt(number=one.number, uid=one.uid, launch_id="bb" * 16, provisional=True, **changes)
    driver.hello(connection=2, launch_id="bb" * 16)
    driver.frame(wire.Join(attempt_uid=one.uid, ask=1, wants=()), connection=2)


def test_what_is_proposed_is_written_down_before_anybody_is_told() -> None:
    driver = in_training()
    driver.want(proposed=proposal())
    assert [effect.proposed.uid for effect in driver.all(do.Adopt)] == [NEXT]
    assert not driver.inventory.adopted
    driver.on(on.Adopted(adopted=proposal()))
    assert driver.inventory.adopted == (Adopted(number=2, uid=NEXT),)


def test_no_second_one_of_a_number_is_adopted_until_the_first_is_fenced_off() -> None:
    driver = in_training()
    adopt(driver, proposal())
    driver.want(proposed=proposal(OTHER))
    assert driver.all(do.Adopt) == []
    driver.want(proposed=proposal(OTHER), fenced=(NEXT,))
    assert [effect.proposed.uid for effect in driver.all(do.Adopt)] == [OTHER]


@pytest.mark.parametrize(
    "one",
    [
        proposal(number=1),
        proposal(number=3),
        proposal(parent=OTHER),
        proposal(job_uid="0c" * 16),
    ],
    ids=["in the log", "not the next", "after another attempt", "of another job"],
)
def test_what_does_not_follow_the_current_attempt_is_not_adopted(one: Provisional) -> None:
    driver = in_training()
    driver.want(proposed=one)
    assert driver.all(do.Adopt) == []


def test_a_disk_that_does_not_take_it_is_tried_again_and_said_aloud() -> None:
    driver = in_training()
    driver.want(proposed=proposal())
    driver.on(on.AdoptFailed(reason="/local: no space"))
    (shout,) = driver.all(do.Shout)
    assert (shout.what, "/local: no space" in shout.text) == ("adopt-failed", True)
    assert driver.all(do.Adopt) == []
    driver.tick(3.0)
    assert len(driver.all(do.Adopt)) == 1


def test_a_successor_that_does_not_know_it_yet_takes_nothing_back() -> None:
    driver = in_training()
    one = proposal()
    adopt(driver, one)
    open_it(driver, one)
    driver.want(keep=(Kept(attempt_uid=NEXT, step=7),), proposed=None)
    before = driver.core.desired
    assert before is not None
    driver.want(term=2, attempt=None, keep=())
    assert driver.core.desired is not None
    assert driver.core.desired.attempt == before.attempt
    assert Kept(attempt_uid=NEXT, step=7) in driver.core.desired.keep
    assert driver.inventory.adopted == (Adopted(number=2, uid=NEXT),)


def test_a_restarted_sidecar_shows_what_it_adopted_and_no_attempt_before_it() -> None:
    driver = Driver()
    driver.on(on.AdoptionsRead(found=(proposal(),)))
    driver.want(logged=1)
    driver.attempt()
    assert driver.core.desired is not None
    assert driver.core.desired.attempt is None
    assert driver.inventory.adopted == (Adopted(number=2, uid=NEXT),)
    driver.attempt(number=2, uid=NEXT, provisional=True)
    assert driver.core.desired.attempt is not None


def test_it_is_an_attempt_like_any_other_once_the_log_has_it() -> None:
    driver = in_training()
    one = proposal()
    adopt(driver, one)
    open_it(driver, one)
    driver.want(logged=2, proposed=None)
    assert driver.inventory.adopted == ()
    assert driver.sent(wire.Error, connection=2) == []


@pytest.mark.parametrize("told", ["fenced", "replaced"])
def test_its_trainers_are_told_that_it_is_over_when_the_log_has_gone_on_without_it(told: str) -> None:
    driver = in_training()
    one = proposal()
    adopt(driver, one)
    open_it(driver, one)
    if told == "fenced":
        driver.desired = msgspec.structs.replace(driver.desired, proposed=None, fenced=(NEXT,))
        driver.attempt()
    else:
        driver.desired = msgspec.structs.replace(driver.desired, logged=2)
        driver.attempt(number=2, uid=OTHER)
    (error,) = driver.sent(wire.Error, connection=2)
    assert error.code == "superseded"
    assert "attempt 2 was opened while the job log could not be reached" in error.text
    driver.tick(1.0)
    assert driver.sent(wire.Error, connection=2) == []


def test_an_adoption_survives_the_process(tmp_path: Path) -> None:
    files = AdoptionFiles(tmp_path, Disk())
    files.write(proposal(), nonce="aa")
    later = msgspec.structs.replace(proposal(OTHER, number=3, parent=NEXT), before=(proposal(),))
    files.write(later, nonce="bb")
    assert AdoptionFiles(tmp_path, Disk()).read() == on.AdoptionsRead(found=(proposal(), later))
    files.forget(2)
    assert files.read().found == (later,)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["adopted-3.json"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda body: body.replace(b"3d", b"4d", 1), "it is damaged"),
        (lambda _: b"", "it is damaged"),
        (
            lambda body: with_crc(body[9:].replace(b'"format":1', b'"format":2')),
            "format 2; this version reads format 1",
        ),
        (lambda body: with_crc(body[9:].replace(b'"attempt":3', b'"attempt":4')), "it is of attempt 4"),
        (lambda _: with_crc(b"{}"), "missing required field"),
    ],
    ids=["a byte", "empty", "later format", "another number", "nothing in it"],
)
def test_one_that_can_not_be_read_is_not_believed_and_its_number_stays_given_away(
    tmp_path: Path, change: Callable[[bytes], bytes], why: str
) -> None:
    files = AdoptionFiles(tmp_path, Disk())
    files.write(proposal(OTHER, number=3, parent=NEXT), nonce="bb")
    path = tmp_path / "adopted-3.json"
    path.write_bytes(change(path.read_bytes()))
    read = files.read()
    assert read.found == ()
    assert why in read.lost[3]
    driver = in_training()
    driver.on(read)
    (shout,) = driver.all(do.Shout)
    assert (shout.what, str(path) in shout.text) == ("adoption-lost", True)
    driver.attempt(number=2, uid=NEXT)
    driver.want(proposed=proposal("5e" * 16, number=3, parent=NEXT), logged=2)
    assert driver.all(do.Adopt) == []
    driver.attempt(number=3, uid="5e" * 16)
    driver.want(proposed=proposal("6f" * 16, number=4, parent="5e" * 16), logged=3)
    assert [effect.forget for effect in driver.all(do.Adopt)] == [()]
    driver.on(on.Adopted(adopted=proposal("6f" * 16, number=4, parent="5e" * 16)))
    driver.attempt(number=5, uid="7a" * 16)
    driver.want(proposed=proposal("8b" * 16, number=6, parent="7a" * 16), logged=5)
    assert driver.all(do.Adopt)[-1].forget == (3, 4)


def with_crc(body: bytes) -> bytes:
    return f"{zlib.crc32(body):08x} ".encode() + body


class Sick(Disk):
    """A disk that makes no directory durable."""

    def sync_directory(self, path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_what_can_not_be_made_durable_is_not_told_and_nothing_else_is_adopted(tmp_path: Path) -> None:
    """An earlier life that was told of an error has told nobody: after a power cut the file may be gone."""
    AdoptionFiles(tmp_path, Disk()).write(proposal(), nonce="aa")
    read = AdoptionFiles(tmp_path, Sick()).read()
    assert (read.found, read.lost, read.unread) == ((), {}, f"{tmp_path}: Input/output error")
    driver = in_training()
    driver.on(read)
    assert [shout.what for shout in driver.all(do.Shout)] == ["adoption-lost"]
    driver.want(proposed=proposal(OTHER))
    assert driver.all(do.Adopt) == []
    assert not driver.inventory.adopted


def test_a_directory_that_can_not_be_listed_ends_no_sidecar(tmp_path: Path) -> None:
    assert "No such file" in AdoptionFiles(tmp_path / "gone", Disk()).read().unread


def test_of_a_chain_only_what_is_new_here_is_written_down() -> None:
    driver = in_training()
    adopt(driver, proposal())
    driver.attempt(number=2, uid=NEXT, provisional=True)
    two = proposal("4e" * 16, number=3, parent=NEXT)
    driver.want(proposed=msgspec.structs.replace(two, before=(proposal(),)))
    assert driver.all(do.Adopt)[-1].proposed == two
    newcomer = in_training()
    newcomer.attempt(number=2, uid=NEXT, provisional=True)
    newcomer.want(proposed=msgspec.structs.replace(two, before=(proposal(),)))
    assert newcomer.all(do.Adopt)[-1].proposed.before == (proposal(),)


def test_one_in_the_place_of_another_takes_over_what_only_that_had_before_it() -> None:
    """The file of number 7 is overwritten: the attempts before it that stood in no other file would be gone."""
    five, six = proposal("5a" * 16, number=5, parent="4a" * 16), proposal("6a" * 16, number=6, parent="5a" * 16)
    first, second = (
        msgspec.structs.replace(proposal(uid, number=7, parent=six.uid), before=(five, six)) for uid in (NEXT, OTHER)
    )
    driver = in_training()
    driver.attempt(number=6, uid=six.uid, provisional=True)
    driver.want(logged=4)
    adopt(driver, first)
    assert driver.inventory.adopted == (Adopted(number=7, uid=NEXT),)
    driver.want(proposed=second, fenced=(NEXT,))
    assert driver.all(do.Adopt)[-1].proposed == second
