"""Each object of a small checkpoint flipped, cut or removed: verify finds it and no restore uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import small_store

from toprope.store.errors import CkptError, LogCorruptError, StoreError
from toprope.store.log.chain import read_log
from toprope.store.log.fold import JobState
from toprope.store.look.verify import plan, verify_checkpoint, verify_facts
from toprope.store.names import Key
from toprope.store.transfer.restore import restore

CLEAN_VERIFIES = 10_000


def found(store: FakeStore) -> str:
    """Return what verify says of a job: empty if it finds nothing."""
    try:
        state = read_log(store, "job")
        damages = [*verify_facts(store, state)]
        damages += [damage for seq in plan(state) for damage in verify_checkpoint(store, state, seq).damages]
    except CkptError as error:
        return str(error)
    return "; ".join(map(str, damages))


def is_used(store: FakeStore, to: Path) -> bool:
    """Say whether step 20 can be restored."""
    try:
        restore(store, read_log(store, "job"), to=to, step=20)
    except StoreError:
        assert not to.exists()
        return False
    return True


def keys(store: FakeStore) -> list[Key]:
    """Return all keys: the log names each of them."""
    return sorted(store.objects)


def needed_for_20(key: Key) -> bool:
    return "s000000020" in key or "/log/" in key


def last_record(state: JobState) -> str:
    return f"{state.n - 1:020d}.json"


def test_each_object_that_is_cut_at_any_place_or_removed_is_found_and_not_used(tmp_path: Path) -> None:
    store = FakeStore()
    small_store(store)
    last = last_record(read_log(store, "job"))
    tried = 0
    for key in keys(store):
        good = store.objects[key]
        for length in {0, 1, len(good) // 2, len(good) - 1}:
            store.objects[key] = good[:length]
            assert found(store), f"{key} cut to {length} bytes"
            assert not needed_for_20(key) or not is_used(store, tmp_path / "r"), f"{key} cut to {length} bytes"
            tried += 1
        del store.objects[key]
        if not key.endswith(last):  # without its last record a log is that of a moment earlier
            assert found(store), f"{key} removed"
            assert not needed_for_20(key) or not is_used(store, tmp_path / "r"), f"{key} removed"
        store.objects[key] = good
    assert tried >= 4 * len(store.objects) - 4
    assert not found(store)
    assert is_used(store, tmp_path / "r")


def test_no_restore_uses_a_checkpoint_with_a_flipped_byte(tmp_path: Path) -> None:
    store = FakeStore()
    small_store(store)
    for key in filter(needed_for_20, keys(store)):
        good = store.objects[key]
        for at in range(0, len(good), 61):  # verify is tried with each byte: test_verify.py
            store.objects[key] = good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]
            assert not is_used(store, tmp_path / "r"), f"{key} byte {at}"
        store.objects[key] = good


def test_every_flipped_byte_of_the_log_stops_each_reader() -> None:
    store = FakeStore()
    small_store(store)
    for key in [key for key in keys(store) if "/log/" in key]:
        good = store.objects[key]
        for at in range(len(good)):
            store.objects[key] = good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]
            with pytest.raises(LogCorruptError):
                read_log(store, "job")
        store.objects[key] = good


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_verifies_of_what_is_whole_raise_no_alarm() -> None:
    for number in range(CLEAN_VERIFIES // 100):
        store = FakeStore()
        small_store(store, steps=(10 + number, 1000 + number))
        for _ in range(100):
            assert not found(store)
