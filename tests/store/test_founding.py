"""Two who found the same job at once: each record comes into the log once, whoever appends it."""

from __future__ import annotations

from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder

from toprope.store.log.chain import read_entries
from toprope.store.log.founding import found
from toprope.store.log.records import Elected, Record
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore


def records_of(store: ObjectStore) -> list[Record]:
    entries = read_entries(store, "job")
    return [entry.record for entry, _ in entries if not isinstance(entry.record, Elected)]


class Outrun(FakeStore):
    """A store in which another one founds all just before so many records of the log have been appended."""

    def __init__(self, records: list[Record], *, after: int) -> None:
        super().__init__()
        self._records, self._left = records, after

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Create an object."""
        if "/log/" in key:
            self._left -= 1
            if self._left == 0:
                found(self, "job", self._records)
        super().create(key, body)


def test_who_is_outrun_before_it_is_elected_appends_nothing_twice() -> None:
    builder = JobBuilder(FakeStore()).begin()
    builder.checkpoint(10)
    records = records_of(builder.store)
    store = Outrun(records, after=2)
    state = found(store, "job", records)
    assert [ready.step for ready in state.readies.values()] == [10]
    assert [type(record) for record in records_of(store)] == [type(record) for record in records]
