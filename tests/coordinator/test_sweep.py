"""What a coordinator does about uploads that died unfinished, before it reigns."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.strict_s3 import ACCESS_KEY, Rule, StrictS3, Upload, environment, strict_s3, write_credentials

from toprope.coordinator.config import Config
from toprope.coordinator.runtime import _sweep
from toprope.coordinator.settings import Address
from toprope.coordinator.wire import Cadence


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictS3]:
    write_credentials(tmp_path / "credentials", ACCESS_KEY)
    for name, value in environment(tmp_path / "credentials").items():
        monkeypatch.setenv(name, value)
    with strict_s3() as server:
        for number, key in enumerate(("job/shards/a", "job-2/shards/a")):
            begun = server.now() - timedelta(days=2)
            server.uploads[str(number)] = Upload(key=key, metadata={}, checksums=False, initiated=begun)
        yield server


def config(store: str) -> Config:
    loopback = Address(host="127.0.0.1", port=0)
    cadence = Cadence(from_step=0, every=1, local_every=1, object_every=1)
    return Config(
        job="job",
        store=store,
        listen=loopback,
        broker=None,
        embedded_broker=None,
        cadence=cadence,
        token="",
        ready_file=None,
    )


async def test_old_uploads_of_this_job_alone_are_swept_and_named(
    server: StrictS3, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await _sweep(config(server.root()))
    assert [upload.key for upload in server.uploads.values()] == ["job-2/shards/a"]
    assert "swept 1 unfinished uploads: job/shards/a" in caplog.text


async def test_that_uploads_cannot_be_swept_is_said_and_stops_nobody(
    server: StrictS3, caplog: pytest.LogCaptureFixture
) -> None:
    server.rules.append(Rule(operation="ListMultipartUploads", fault="403 AccessDenied", times=99))
    await _sweep(config(server.root()))
    assert "unfinished uploads were not swept" in caplog.text
    assert len(server.uploads) == 2


async def test_a_directory_has_nothing_to_sweep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await _sweep(config(str(tmp_path)))
    assert caplog.text == ""
