"""What a coordinator offers of the checkpoints in a store from which bytes come wrong."""

from __future__ import annotations

import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import small_store

from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.reading import Reader
from toprope.store.log.chain import read_log
from toprope.store.names import Key


class MisreadStore(FakeStore):
    """Sends a wrong first byte of keys with ``of`` in them the first ``times`` times."""

    of = ""
    times = 0

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        body = super().read(key, start=start, length=length, uncached=uncached)
        if self.of in key and self.times:
            self.times -= 1
            return bytes([body[0] ^ 1]) + body[1:]
        return body

    def size(self, key: Key) -> int:
        return len(self.objects[key])


@pytest.mark.parametrize("of", ["/manifests/", ".index.json"])
async def test_a_manifest_or_an_index_that_comes_wrong_is_read_once_more_before_its_step_is_passed_over(
    of: str,
) -> None:
    store = MisreadStore()
    small_store(store)
    state = read_log(store, "job")
    newest, older = sorted(state.readies, reverse=True)[:2]
    reader = Reader(ThreadedStore(store), "job")
    store.of, store.times = of, 1
    assert [offer.seq for offer in await reader.offers(state, (newest, older))] == [newest]
    assert store.times == 0
    store.times = 2
    damaged, whole = await reader.offers(state, (newest, older))
    assert (damaged.seq, whole.seq, whole.damage) == (newest, older, "")
    assert "SHA-256 is" in damaged.damage
