"""A real S3 server, started once for all tests that ask for it, and a bucket for each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.support.strict_s3 import ACCESS_KEY, StrictS3, environment, strict_s3, write_credentials

from toprope.chaos.live.s3_server import S3Server, running_s3
from toprope.store.objects.retry import BackOff


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_root(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The root of an empty store on the real server; its credentials are in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{secrets.token_hex(6)}"
    s3_server.make_bucket(bucket)
    return s3_server.root(bucket, "some/where")


@pytest.fixture
def strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictS3]:
    """A strict server of this process; credentials that it takes are in a file that the environment names."""
    credentials = tmp_path / "credentials"
    write_credentials(credentials, ACCESS_KEY)
    for name, value in environment(credentials).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    with strict_s3() as server:
        yield server


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened as a user does wait for nothing before they try again."""
    monkeypatch.setattr("toprope.store.objects.retry.BackOff", partial(BackOff, sleep=lambda _: None))
