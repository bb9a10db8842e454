"""The suite that each object store passes: inherit ``ObjectStoreContract`` in a test class and give ``make``.

::

    class TestMyStore(ObjectStoreContract):
        def make(self, tmp_path: Path) -> ObjectStore:
            return MyStore(tmp_path)
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from toprope.store.errors import AlreadyExistsError, CorruptObjectError, MissingObjectError
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore

_KEY = Key("job/log/00000000000000000000.json")


def _streamed(store: ObjectStore, *, start: int, length: int) -> bytes:
    """Return what is streamed, each piece taken before the next is asked for."""
    return b"".join(map(bytes, store.stream(_KEY, start=start, length=length)))


class ObjectStoreContract:
    """What ``ObjectStore`` promises, as tests."""

    race_rounds: ClassVar[int] = 10
    """How many keys are raced for; fewer where a server takes seconds to settle each."""

    deletes: ClassVar[int] = 20
    """How many objects are deleted at once; more than a server takes in one call, where there is such a limit."""

    def make(self, tmp_path: Path) -> ObjectStore:
        """Return an empty store."""
        raise NotImplementedError

    def test_what_was_created_is_read_back(self, tmp_path: Path) -> None:
        """Cached and uncached, bytes and memoryview."""
        store = self.make(tmp_path)
        store.create(_KEY, b"first")
        store.create(Key("job/b"), memoryview(bytearray(b"second")))
        assert store.read(_KEY) == b"first"
        assert store.read(Key("job/b"), uncached=True) == b"second"

    def test_create_never_overwrites(self, tmp_path: Path) -> None:
        """The second writer loses and the first one's bytes stay."""
        store = self.make(tmp_path)
        store.create(_KEY, b"first")
        with pytest.raises(AlreadyExistsError):
            store.create(_KEY, b"second")
        assert store.read(_KEY) == b"first"

    def test_an_empty_object_is_an_object(self, tmp_path: Path) -> None:
        """It has size 0, is read as no bytes, and is taken."""
        store = self.make(tmp_path)
        store.create(_KEY, b"")
        assert store.size(_KEY) == 0
        assert store.read(_KEY) == store.read(_KEY, uncached=True) == b""
        with pytest.raises(AlreadyExistsError):
            store.create(_KEY, b"")

    def test_of_many_racing_creators_one_wins(self, tmp_path: Path) -> None:
        """Whoever was told that it wrote finds its own bytes there."""
        store = self.make(tmp_path)
        racers = 8
        start = threading.Barrier(racers)

        def race(racer: int, key: Key) -> int | None:
            start.wait()
            try:
                store.create(key, b"%d" % racer)
            except AlreadyExistsError:
                return None
            return racer

        with ThreadPoolExecutor(racers) as pool:
            for number in range(self.race_rounds):
                key = Key(f"job/race/{number}")
                told = list(pool.map(race, range(racers), itertools.repeat(key)))
                winners = [racer for racer in told if racer is not None]
                assert len(winners) == 1
                assert store.read(key) == b"%d" % winners[0]

    def test_a_missing_object_is_missing(self, tmp_path: Path) -> None:
        """To read, uncached or not, and size alike; a prefix of a key is no key."""
        store = self.make(tmp_path)
        with pytest.raises(MissingObjectError):
            store.read(_KEY)
        with pytest.raises(MissingObjectError):
            store.size(_KEY)
        with pytest.raises(MissingObjectError):
            store.read(_KEY, uncached=True)
        for length in (0, 1):
            with pytest.raises(MissingObjectError):
                _streamed(store, start=0, length=length)

    @pytest.mark.parametrize("uncached", [False, True])
    def test_ranges_are_read_exactly(self, tmp_path: Path, *, uncached: bool) -> None:
        """At odd places, over pages, and up to the end."""
        store = self.make(tmp_path)
        body = bytes(range(256)) * 64 + b"tail"
        store.create(_KEY, body)
        for start, length in ((0, 1), (1, 4095), (4095, 2), (5000, 9000), (len(body) - 3, 3), (len(body), 0)):
            assert store.read(_KEY, start=start, length=length, uncached=uncached) == body[start : start + length]
            assert _streamed(store, start=start, length=length) == body[start : start + length]
        assert store.read(_KEY, start=10, uncached=uncached) == body[10:]

    @pytest.mark.parametrize("uncached", [False, True])
    def test_a_range_past_the_end_is_an_error(self, tmp_path: Path, *, uncached: bool) -> None:
        """It is never fewer bytes than were asked for, and a huge length costs no memory."""
        store = self.make(tmp_path)
        store.create(_KEY, b"12345")
        for start, length in ((0, 6), (5, 1), (3, 2**62)):
            with pytest.raises(CorruptObjectError):
                store.read(_KEY, start=start, length=length, uncached=uncached)
        for start, length in ((0, 6), (5, 1), (9, 9)):
            with pytest.raises(CorruptObjectError):
                _streamed(store, start=start, length=length)

    def test_what_was_deleted_is_missing_and_can_be_created_again(self, tmp_path: Path) -> None:
        """A missing key is no error, more than a thousand go in one call, and all others stay."""
        store = self.make(tmp_path)
        keys = [Key(f"job/shards/a1/s{number % 3}/{number}") for number in range(self.deletes)]
        for key in keys:
            store.create(key, b"x")
        store.create(_KEY, b"stays")
        store.delete([*keys[1:], Key("job/none")])
        assert list(store.list("")) == [_KEY, keys[0]]
        with pytest.raises(MissingObjectError):
            store.read(keys[1])
        store.delete([])
        store.delete(keys)
        store.delete(keys)
        assert list(store.list("")) == [_KEY]
        store.create(keys[1], b"again")
        assert store.read(keys[1]) == b"again"

    def test_list_yields_the_keys_of_a_prefix_in_order(self, tmp_path: Path) -> None:
        """In the order of the whole keys, ``-`` before ``/``, and none but those."""
        store = self.make(tmp_path)
        keys = [Key(key) for key in ("a-b/x", "a/log/2", "a/log/10", "a/m", "a/log-x", "b/log/1")]
        for key in keys:
            store.create(key, b"")
        assert list(store.list("")) == sorted(keys)
        assert list(store.list("a/")) == ["a/log-x", "a/log/10", "a/log/2", "a/m"]
        assert list(store.list("a/log/1")) == ["a/log/10"]
        assert list(store.list("a/lo")) == ["a/log-x", "a/log/10", "a/log/2"]
        assert list(store.list("c/")) == []
