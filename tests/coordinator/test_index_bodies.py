"""Indexes that were read are kept for the steps that rest on them, and not for as long as a coordinator lives."""

from __future__ import annotations

from tests.support.fake_store import FakeStore

from toprope.coordinator.adapters.objects import KEPT_TURNS, IndexBodies, ThreadedStore
from toprope.store.checkpoint.manifest import sha256
from toprope.store.names import Key


def test_what_no_step_has_used_for_some_is_let_go_of_and_what_is_used_stays() -> None:
    bodies = IndexBodies()
    used, unused = b"used" * 100, b"unused" * 100
    bodies.keep(used)
    bodies.keep(unused)
    for _ in range(KEPT_TURNS):
        bodies.turn()
        assert bodies.get(sha256(used)) == used
    bodies.turn()
    assert bodies.get(sha256(used)) == used
    assert bodies.get(sha256(unused)) is None


async def test_a_thousand_steps_leave_no_more_indexes_than_a_few_do() -> None:
    store = FakeStore()
    threaded = ThreadedStore(store)
    sizes = []
    for step in range(1000):
        store.objects[Key(f"j/{step}")] = body = b"%06d" % step * 1000
        assert await threaded.read_indexes([Key(f"j/{step}")]) == [body]
        await threaded.create_manifest(Key(f"j/manifest-{step}"), b"{}")
        sizes.append(threaded._bodies._bytes)
    assert max(sizes) <= (KEPT_TURNS + 1) * 6000
    assert min(sizes[KEPT_TURNS:]) >= KEPT_TURNS * 6000, "those of the last steps are there"
