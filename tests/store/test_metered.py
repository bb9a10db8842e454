"""The store that tells what was read is a store as any other."""

from __future__ import annotations

from pathlib import Path

from tests.support.fake_store import FakeStore

from toprope.store.conformance import ObjectStoreContract
from toprope.store.names import Key
from toprope.store.objects.metered import MeteredStore
from toprope.store.objects.protocol import ObjectStore


class TestMeteredStore(ObjectStoreContract):
    def make(self, tmp_path: Path) -> ObjectStore:
        return MeteredStore(FakeStore(), lambda _: None)


def test_the_bytes_that_were_read_are_told() -> None:
    told: list[int] = []
    store = MeteredStore(FakeStore(), told.append)
    store.create(Key("job/a"), b"12345")
    store.read(Key("job/a"))
    store.read(Key("job/a"), start=1, length=2)
    assert b"".join(map(bytes, store.stream(Key("job/a"), start=1, length=3))) == b"234"
    assert told == [5, 2, 3]
