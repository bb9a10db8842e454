"""An object is read several chunks at a time, and comes out as if it had been read one after another."""

from __future__ import annotations

import threading

import pytest
from tests.support.fake_store import FakeStore

from toprope.store import digest
from toprope.store.digest import READS_AT_ONCE, chunks_of_object, digest_of_object
from toprope.store.errors import UnavailableError
from toprope.store.names import Key

KEY = Key("job/a")
CHUNK = 100
BODY = bytes(range(251)) * 7


class WatchedStore(FakeStore):
    """Counts reads; with ``meet`` a read returns only once as many are under way as should be."""

    def __init__(self, *, meet: bool = False) -> None:
        super().__init__()
        self.meeting = threading.Barrier(READS_AT_ONCE, timeout=20) if meet else None
        self.starts: list[int] = []
        self.fails_at = -1

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        if length is not None:
            self.starts.append(start)
            if self.meeting is not None:
                self.meeting.wait()
            if start == self.fails_at:
                raise UnavailableError(f"{key}: no answer at {start}")
        return super().read(key, start=start, length=length, uncached=uncached)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", CHUNK)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 9 * CHUNK, len(BODY)])
def test_the_bytes_come_in_order_whatever_the_size(size: int) -> None:
    store = WatchedStore()
    store.create(KEY, BODY[:size])
    chunks = list(chunks_of_object(store, KEY))
    assert b"".join(chunks) == BODY[:size]
    assert all(len(chunk) == CHUNK for chunk in chunks[:-1])
    assert digest_of_object(store, KEY) == digest.digest(BODY[:size])


def test_so_many_chunks_are_read_at_once() -> None:
    store = WatchedStore(meet=True)
    store.create(KEY, BODY[: 8 * CHUNK])
    assert b"".join(chunks_of_object(store, KEY)) == BODY[: 8 * CHUNK]


def test_no_more_is_read_ahead_than_that() -> None:
    store = WatchedStore()
    store.create(KEY, BODY)
    chunks = chunks_of_object(store, KEY)
    for number in range(5):
        next(chunks)
        assert len(store.starts) <= number + READS_AT_ONCE
    chunks.close()  # type: ignore[attr-defined] # it is a generator
    assert len(store.starts) <= 5 + READS_AT_ONCE


def test_a_chunk_that_cannot_be_read_fails_the_whole_and_ends_the_reading() -> None:
    store = WatchedStore()
    store.create(KEY, BODY)
    store.fails_at = 3 * CHUNK
    with pytest.raises(UnavailableError, match="no answer at 300"):
        digest_of_object(store, KEY)
    assert max(store.starts) < (3 + 2 * READS_AT_ONCE) * CHUNK
