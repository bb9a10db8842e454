"""The S3 store on a real server: the contract, with and without parts, and what races and kills leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.store.conformance import ObjectStoreContract
from toprope.store.objects.opening import open_store
from toprope.store.objects.parts import Limits
from toprope.store.objects.protocol import ObjectStore
from toprope.store.objects.s3 import S3Store
from toprope.store.objects.s3_clients import Clients
from toprope.store.objects.s3_location import parse_location


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
