"""A store that did not answer when it was opened is tried out before anything is written to it."""

from __future__ import annotations

import pytest
from tests.support.fake_store import FakeStore
from tests.support.strict_s3 import Rule, StrictS3

from toprope.store.errors import UnavailableError, UsageError
from toprope.store.names import Key
from toprope.store.objects.opening import untried_store
from toprope.store.objects.untried import UntriedStore

KEY = Key("job/manifests/one")


def test_nothing_is_written_before_it_was_tried_out_and_that_once() -> None:
    store, tries = FakeStore(), 0

    def try_out() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise UnavailableError("away")

    untried = UntriedStore(store, try_out)
    with pytest.raises(UnavailableError, match="away"):
        untried.create(KEY, b"a")
    assert list(untried.list("")) == []
    untried.create(KEY, b"b")
    untried.create(Key("job/manifests/two"), b"c")
    assert (tries, untried.read(KEY), untried.size(KEY)) == (2, b"b", 1)
    untried.delete([KEY])
    assert list(untried.list("")) == ["job/manifests/two"]


@pytest.mark.usefixtures("no_waiting")
def test_a_server_that_comes_back_and_ignores_conditions_is_not_written_to(strict: StrictS3) -> None:
    strict.honours_conditions = False
    strict.rules.append(Rule(operation="PutObject", fault="request lost"))
    store = untried_store(strict.root())
    with pytest.raises(UnavailableError):
        store.create(KEY, b"a")
    for _ in range(2):
        with pytest.raises(UsageError, match="ignores 'If-None-Match"):
            store.create(KEY, b"a")
    assert strict.objects == {}
    strict.honours_conditions = True
    store.create(KEY, b"a")
    assert store.read(KEY) == b"a"
