"""The S3 store on a real server: the contract, with and without parts, and what races and kills leave behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from toprope.store.conformance import ObjectStoreContract
from toprope.store.errors import AlreadyExistsError
from toprope.store.names import Key
from toprope.store.objects.opening import open_store
from toprope.store.objects.parts import Limits
from toprope.store.objects.protocol import ObjectStore
from toprope.store.objects.s3 import S3Store
from toprope.store.objects.s3_clients import Clients
from toprope.store.objects.s3_location import parse_location

MIB = 1024 * 1024


class OnARealServer(ObjectStoreContract):
    race_rounds = 1  # SeaweedFS lets some of those who race wait for whole seconds

    @pytest.fixture(autouse=True)
    def _root(self, s3_root: str) -> None:
        self.root = s3_root

    def make(self, tmp_path: Path) -> ObjectStore:
        return s3_store(self.root)


class TestS3StoreOnARealServer(OnARealServer):
    pass


class TestOpenedS3StoreOnARealServer(OnARealServer):
    """Opened as a user does: probed, and wrapped in the store that tries again."""

    def make(self, tmp_path: Path) -> ObjectStore:
        return open_store(self.root, write=True)


def s3_store(root: str, *, limits: Limits | None = None) -> S3Store:
    return S3Store(Clients(location=parse_location(root)), limits=limits)


@pytest.mark.fault("B117")
@pytest.mark.parametrize(("racers", "size"), [(12, 1024), (3, 6 * MIB)])
def test_of_many_that_race_on_a_real_server_one_wins(s3_root: str, racers: int, size: int) -> None:
    """SeaweedFS looks whether the name is taken before it joins parts, so that two may be told that they have won.

    No name that decides anything is written in parts: a record is small, and the others are named by what they hold.
    """
    stores = [s3_store(s3_root, limits=Limits(part_bytes=5 * MIB)) for _ in range(2)]
    start = threading.Barrier(racers)
    key = Key("job/manifests/a")

    def commit(racer: int) -> bool:
        body = bytes([racer]) * size
        start.wait()
        try:
            stores[racer % 2].create(key, body)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(commit, range(racers)))
    found = stores[0].read(key)
    assert won[found[0]]
    assert found == bytes([found[0]]) * size
    assert sum(won) == 1 or size > 5 * MIB
    assert stores[0].sweep_uploads("job/", grace=timedelta()) == ()


@pytest.mark.fault("B127")
def test_an_upload_that_was_left_on_a_real_server_is_swept(s3_root: str) -> None:
    store = s3_store(s3_root)
    client = Clients(location=parse_location(s3_root)).current()
    for key in ("some/where/job/shards/a", "some/where/job-1/shards/a"):
        client.create_multipart_upload(Bucket=parse_location(s3_root).bucket, Key=key)
    assert store.sweep_uploads("job/", grace=timedelta(hours=1)) == ()
    assert store.sweep_uploads("job/", grace=timedelta()) == ("job/shards/a",)
    assert store.sweep_uploads("job/", grace=timedelta()) == ()
    assert store.sweep_uploads("job-1/", grace=timedelta()) == ("job-1/shards/a",)
