"""S3 clients: one for each process, made anew when its credentials have expired."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import botocore.session
from botocore.config import Config

from toprope.store.objects.s3_errors import FOREIGN, translated
from toprope.store.objects.s3_location import S3Location

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

PARALLEL_PARTS = 8
_QUIET = ("botocore", "urllib3")  # at DEBUG they write down requests with their signatures and tokens
_ADDRESSING: dict[bool | None, Literal["auto", "path", "virtual"]] = {None: "auto", True: "path", False: "virtual"}


@dataclass(slots=True, kw_only=True)
class Clients:
    """Gives each process a client of its own: sockets and locks of another one's do not survive a fork."""

    location: S3Location
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    _by_process: dict[int, S3Client] = field(init=False, default_factory=dict)
    _locks: dict[int, threading.Lock] = field(init=False, default_factory=dict)

    def current(self) -> S3Client:
        """Return this process's client.

        Raises:
            UsageError: the configuration or the credentials are not usable.
        """
        with self._lock():
            client = self._by_process.get(os.getpid())
            if client is None:
                client = self._by_process[os.getpid()] = self._made()
            return client

    def renewed(self, stale: S3Client) -> S3Client:
        """Return a client with credentials read anew, unless another thread has made one since ``stale``."""
        with self._lock():
            if self._by_process.get(os.getpid()) is stale:
                self._by_process[os.getpid()] = self._made()
        return self.current()

    def _lock(self) -> threading.Lock:
        """Return this process's lock: one that another thread held at a fork would stay locked in the child."""
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _made(self) -> S3Client:
        """Return a new client. A call is tried once: what a lost answer means is decided by whoever called.

        It is the one that boto3 makes, without boto3: loading that takes a quarter of a second more.
        """
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)
        where = self.location
        try:
            session = botocore.session.Session(profile=where.profile)
            session.get_credentials()  # which may take seconds, where a service of the machine tells them
            with _uncollected():
                client = session.create_client(
                    "s3",
                    endpoint_url=where.endpoint,
                    region_name=where.region or session.get_config_variable("region") or "us-east-1",
                    config=self._config(),
                )
            return cast("S3Client", client)
        except FOREIGN as error:
            raise translated(error, what="an S3 client", where=str(where)) from error
        except ValueError as error:  # botocore's word for an endpoint of the environment that is no URL
            raise translated(OSError(), what="an S3 client: AWS_ENDPOINT_URL is no URL", where=str(where)) from error

    def _config(self) -> Config:
        where = self.location
        return Config(
            retries={"total_max_attempts": 1},
            connect_timeout=self.connect_timeout_s,
            read_timeout=self.read_timeout_s,
            max_pool_connections=4 * PARALLEL_PARTS,
            s3={"addressing_style": _ADDRESSING[where.path_style]},
            request_checksum_calculation=where.checksums,
            response_checksum_validation=where.checksums,
            user_agent_extra="toprope",
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let Python's collector rest: it would go many times through the models of a client, while they are loaded."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
