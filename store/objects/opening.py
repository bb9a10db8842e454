"""From what a user writes after ``--store`` to an object store."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from toprope.store.errors import AlreadyExistsError, NoStoreError, UnavailableError, UsageError
from toprope.store.names import PROBES, Key, checked_id, probe_key, shards_prefix
from toprope.store.objects.directory import DirectoryStore, advice
from toprope.store.objects.patient import PatientStore, is_networked
from toprope.store.objects.protocol import ObjectStore
from toprope.store.objects.retry import RetryStore
from toprope.store.objects.untried import UntriedStore

if TYPE_CHECKING:
    from toprope.store.objects.s3 import S3Store

UPLOAD_GRACE = timedelta(days=1)
"""An upload of a shard that has not come to its end after this time never will."""

_LOG = logging.getLogger("toprope.store")
_S3 = "s3://"
_SILENT_S = 10.0
"""After so long whoever opens a store is told what is waited for."""


def open_store(root: str, *, write: bool = False, patient: bool = True) -> ObjectStore:
    """Return the object store at ``root``: a directory, a ``file://`` URL of one, or ``s3://bucket/prefix?...``.

    With ``write`` a missing directory is made (its parent must exist), and the store is tried out. One that is
    ``patient`` waits on a file system of the network for what another node has just written; S3 shows it at once.

    Raises:
        UsageError: it is no store that this version knows, or it can't be written.
        UnavailableError: nothing to read is there, or no answer came.
    """
    if root.startswith(_S3):
        return _open_s3(root, write=write)
    store = _open_directory(root, write=write)
    return PatientStore(store) if patient and is_networked(store.root) else store


def untried_store(root: str) -> ObjectStore:
    """Return the ``s3://`` store that did not answer when it was opened, to be tried out before its first write."""
    assert root.startswith(_S3), "a directory answers at once"
    bucket = _s3(root)
    return UntriedStore(RetryStore(bucket), lambda: _try_out(bucket))


def absolute_root(root: str) -> str:
    """Return a root that means the same store from every working directory."""
    return root if "://" in root else str(Path(root).absolute())


def check_outside(directory: Path, root: str) -> None:
    """Check that a directory that is to be made does not lie inside a directory store, among its objects.

    Raises:
        UsageError: it does.
    """
    if root.startswith(_S3):
        return
    store = _directory_of(root).resolve()
    if directory.resolve().is_relative_to(store):
        raise UsageError(f"{directory}: lies inside the store {root}; give a directory somewhere else")


def check_apart(target: str, root: str) -> None:
    """Check that a store that is to be copied to is not, and does not lie in, the one that is copied.

    Raises:
        UsageError: it is, or does.
    """
    if target.startswith(_S3) and root.startswith(_S3):
        (to, query), (of, query_of) = (one.partition("?")[::2] for one in (target, root))
        is_inside = f"{to.rstrip('/')}/".startswith(f"{of.rstrip('/')}/") and query == query_of
    elif target.startswith(_S3) or root.startswith(_S3):
        return
    else:
        is_inside = _directory_of(target).resolve().is_relative_to(_directory_of(root).resolve())
    if is_inside:
        raise UsageError(f"{target}: is the store {root} or lies inside it; give another store to copy to")


def sweep_uploads(root: str, job: str, *, grace: timedelta = UPLOAD_GRACE) -> tuple[Key, ...]:
    """Remove what writers of this job's objects left unfinished, and return the keys.

    In S3 these are uploads older than ``grace`` by the server's clock, in a directory temporary files of dead writers.

    Raises:
        UnavailableError: the store did not answer.
    """
    prefix = f"{checked_id(job, what='job')}/"
    if root.startswith(_S3):
        return _s3(root).sweep_uploads(prefix, grace=grace)
    return _open_directory(root, write=False).sweep_temporaries(prefix)


def empty_folders(root: str, job: str) -> tuple[str, ...]:
    """Return the folders among a job's shards that have nothing in them; a bucket has no folders.

    Raises:
        UnavailableError: the store can't be reached.
    """
    if root.startswith(_S3):
        return ()
    return _open_directory(root, write=False).empty_directories(shards_prefix(job))


def _s3(root: str) -> S3Store:
    from toprope.store.objects.s3 import S3Store  # noqa: PLC0415 - botocore takes long to load, and few need it
    from toprope.store.objects.s3_clients import Clients  # noqa: PLC0415 - as above
    from toprope.store.objects.s3_location import parse_location  # noqa: PLC0415 - as above

    clients = Clients(location=parse_location(root))
    clients.current()
    return S3Store(clients)


def _open_s3(root: str, *, write: bool) -> ObjectStore:
    bucket = _s3(root)
    store = RetryStore(bucket)
    with _telling_of_silence(root):
        if write:
            _try_out(bucket)
        else:
            _look_at(store)
    return store


@contextmanager
def _telling_of_silence(root: str) -> Iterator[None]:
    words = "store %s has not answered for %g s; it is waited for"
    timer = threading.Timer(_SILENT_S, _LOG.warning, (words, root, _SILENT_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _look_at(store: ObjectStore) -> None:
    """Look whether a store answers, so that it is said before anything else if not."""
    nothing = f"{PROBES}none/"
    try:
        next(store.list(nothing), None)
    except NoStoreError as error:
        raise type(error)(str(error).removeprefix(f"{nothing}: ")) from error
    except UnavailableError as error:
        said = str(error).removeprefix(f"{nothing}: ")
        raise UnavailableError(f"the store can't be reached: {said}. Is its address right, and does it run?") from error


def _try_out(bucket: S3Store) -> None:
    from toprope.store.objects.s3_errors import FailingError, NoBucketError  # noqa: PLC0415 - as in _s3

    key = probe_key(secrets.token_hex(16))
    try:
        _probe(RetryStore(bucket), key)
    except FailingError:  # as some servers answer a write into a bucket that there is not
        try:
            _look_at(RetryStore(bucket))
        except NoBucketError:
            raise
        except UnavailableError:
            pass
        raise
    finally:
        bucket.forget(key)


def _probe(store: ObjectStore, key: Key) -> None:
    """Check that an object is written once and only once here.

    Raises:
        UsageError: the server takes a second write of the same key.
    """
    first, second = b"first", b"second"
    store.create(key, first)
    try:
        store.create(key, second)
    except AlreadyExistsError:
        if store.read(key, uncached=True) == first:
            return
    raise UsageError(
        f"{store!r} can't be used: the server ignores 'If-None-Match: *' and lets a second write replace the first, "
        "so two coordinators could both win. Use a server that honours conditional puts"
    )


def _open_directory(root: str, *, write: bool) -> DirectoryStore:
    path = _directory_of(root)
    if not write:
        try:
            is_directory = stat.S_ISDIR(path.stat().st_mode)
        except FileNotFoundError as error:
            raise UnavailableError(f"store {root} can't be reached: it does not exist or is not mounted") from error
        except OSError as error:
            why = f"{os.strerror(error.errno or 0)}{advice(error)}"
            raise UnavailableError(f"store {root} can't be reached: {why}") from error
        if not is_directory:
            raise UnavailableError(f"store {root} can't be reached: it is not a directory")
        return DirectoryStore(path)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"store {root} can't be made: {os.strerror(error.errno or 0)}. "
            "Give a directory that this user can write, or one whose parent exists"
        ) from error
    store = DirectoryStore(path)
    store.probe()
    return store


def _directory_of(root: str) -> Path:
    if not root or "\0" in root:
        raise UsageError(f"store {root!r} is not usable: give a directory, or file:///path")
    if root.startswith("file:///"):
        return Path(unquote(root.removeprefix("file://")))
    if root.startswith("file:"):
        raise UsageError(f"store {root!r} is not usable: write file:///path, with three slashes")
    if "://" in root or root.startswith("s3:"):
        raise UsageError(f"store {root!r} is not usable: give a directory, file:///path or s3://bucket/prefix")
    return Path(root)
