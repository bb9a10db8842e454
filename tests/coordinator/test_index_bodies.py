"""Indexes that were read are kept for the steps that rest on them, and not for as long as a coordinator lives."""

from __future__ import annotations

from tests.support.fake_store import FakeStore
from tests.support.receipts import expected_indexes
from tests.support.stores import JobBuilder, adapter_image

from toprope.coordinator.adapters.objects import KEPT_TURNS, IndexBodies, ThreadedStore
from toprope.store.checkpoint.manifest import sha256
from toprope.store.names import Key


def test_what_no_step_has_used_for_some_is_let_go_of_and_what_is_used_stays() -> None:
    bodies = IndexBodies()
    used, unused = b"used" * 100, b"unused" * 100
    bodies.keep(sha256(used), used)
    bodies.keep(sha256(unused), unused)
    for _ in range(KEPT_TURNS):
        bodies.turn()
        assert bodies.get(sha256(used)) == used
    bodies.turn()
    assert bodies.get(sha256(used)) == used
    assert bodies.get(sha256(unused)) is None


async def test_many_steps_leave_no_more_indexes_than_a_few_do() -> None:
    builder = JobBuilder(FakeStore(), image=adapter_image, codec="none", world=1).begin()
    threaded = ThreadedStore(builder.store)
    sizes, lengths = [], []
    for step in range(1, 101):
        (expected,) = expected_indexes(builder, builder.checkpoint(step))
        await threaded.read_indexes([expected])
        await threaded.create_manifest(Key(f"j/manifest-{step}"), b"{}")
        sizes.append(threaded._bodies._bytes)
        lengths.append(len(builder.store.read(expected.key)))
    assert max(sizes) <= (KEPT_TURNS + 1) * max(lengths)
    assert min(sizes[KEPT_TURNS:]) >= KEPT_TURNS * min(lengths), "those of the last steps are there"
