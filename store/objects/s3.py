"""An S3 bucket, or a prefix in one, as an object store. Any server will do that honours conditional puts.

Every write is conditional (``If-None-Match: *``) and tried once; each carries an id of its own in the object's
metadata, so that when an answer is lost, or says that the object exists, a look at the object tells whether it is
ours. Large objects go up in parts, several at a time, each read straight from the caller's memory.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from toprope.store.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    MissingObjectError,
    ThrottledError,
    UnavailableError,
    UsageError,
)
from toprope.store.names import PROBES, Key, key_parts
from toprope.store.objects.parts import Limits, Part, plan_parts
from toprope.store.objects.pieces import pieces_of
from toprope.store.objects.protocol import check_whole
from toprope.store.objects.retry import BackOff
from toprope.store.objects.s3_clients import PARALLEL_PARTS, Clients
from toprope.store.objects.s3_errors import (
    FOREIGN,
    ExpiredCredentialsError,
    NotFoundError,
    server_time,
    translated,
)

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import (
        CompletedPartTypeDef,
        GetObjectOutputTypeDef,
        HeadObjectOutputTypeDef,
        ListMultipartUploadsOutputTypeDef,
        ListObjectsV2OutputTypeDef,
        ObjectIdentifierTypeDef,
    )

_LOG = logging.getLogger("toprope.store")
_T = TypeVar("_T")

MAX_KEY_BYTES = 1024
MAX_DELETES = 1000
WRITE_ID = "toprope-write"
"""The name of the metadata that holds a write's own id."""

_MAX_PINS = 1024
_PIECE_BYTES = 1024 * 1024
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class S3Store:
    """Objects under ``clients.location``, whose bucket must exist."""

    def __init__(self, clients: Clients, *, limits: Limits | None = None, back_off: BackOff | None = None) -> None:
        self._clients = clients
        self._limits = limits or Limits()
        self._back_off = back_off or BackOff()
        self._bucket = clients.location.bucket
        self._prefix = clients.location.prefix
        self._where = str(clients.location)
        self._pins: dict[Key, str] = {}

    def __repr__(self) -> str:
        return f"S3Store({self._where!r})"

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object, durably and whole."""
        name = self._name(key)
        write_id = secrets.token_hex(16)
        with memoryview(body) as whole, whole.cast("B") as view:
            parts = plan_parts(len(view), self._limits)
            if len(parts) == 1:
                self._put(key, name, bytes(view), write_id)
            else:
                self._put_in_parts(key, name, view, parts, write_id)

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        """Return bytes of an object; a store that keeps what it reports has no cache to go past.

        After ``size`` they are of the same version of the object as that was, or it is an error.
        """
        del uncached
        if length is None and start:
            length = max(0, self.size(key) - start)
            check_whole(key, length)
        elif length == 0:
            self.size(key)  # which says if there is none
        if length == 0:
            return b""
        return self._call(partial(self._get, key=key, start=start, length=length), what=key)

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield bytes of an object; of which version they are is as with ``read``."""
        if not length:
            self.size(key)
            return
        body = self._call(partial(self._asked, key=key, start=start, length=length), what=key)
        with contextlib.closing(body):
            # What urllib3 reads from: it and botocore copy every byte once more. Both keep these to themselves; where
            # they have changed it is the stream itself, to the same effect.
            answer: Any = getattr(body, "_raw_stream", None)
            source: Any = getattr(answer, "_fp", None) or body
            end = start + length

            def read_into(room: memoryview, _at: int) -> int:
                with self._in_our_words(key):
                    count: int = source.readinto(room)
                    return count

            def short(at: int) -> UnavailableError:
                return UnavailableError(f"{key}: the answer of store {self._where} ended at byte {at} of {end}")

            yield from pieces_of(read_into, start=start, length=length, short=short)
            if answer is not None:
                answer.release_conn()  # or each range would take a connection of its own

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes."""
        head = self._head(key)
        if len(self._pins) >= _MAX_PINS:
            self._pins.clear()
        self._pins[key] = head["ETag"]
        return head["ContentLength"]

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects, many with a call; one by one on a server that does not know that call."""
        for begin in range(0, len(keys), MAX_DELETES):
            batch = left = keys[begin : begin + MAX_DELETES]
            try:
                left = self._call(partial(self._delete_all, keys=batch), what=f"{len(batch)} objects")
            except ThrottledError:
                raise
            except UnavailableError as error:
                _LOG.debug("deleting one by one: %s", error)
            for key in left:
                self._call(partial(self._delete_one, key=key), what=key)

    def _delete_all(self, client: S3Client, *, keys: Sequence[Key]) -> Sequence[Key]:
        """Delete in one call; return those that the server says it did not delete."""
        for key in keys:
            self._pins.pop(key, None)
        named: list[ObjectIdentifierTypeDef] = [{"Key": self._name(key)} for key in keys]
        answer = client.delete_objects(Bucket=self._bucket, Delete={"Objects": named, "Quiet": True})
        failed = {error.get("Key", "") for error in answer.get("Errors", ())}
        return [key for key in keys if self._name(key) in failed]

    def _delete_one(self, client: S3Client, *, key: Key) -> None:
        client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``, in order. Servers differ in theirs, so all are fetched first."""
        keys: list[Key] = []
        token = ""
        while True:
            page = self._patiently(partial(self._keys_page, prefix=self._prefix + prefix, token=token), what=prefix)
            names = (entry["Key"] for entry in page.get("Contents", ()))
            keys += [Key(name.removeprefix(self._prefix)) for name in names if not name.endswith("/")]
            token = page.get("NextContinuationToken", "")
            if not page["IsTruncated"] or not token:
                break
        yield from sorted(keys)

    def sweep_uploads(self, prefix: str, *, grace: timedelta) -> tuple[Key, ...]:
        """Abort the multipart uploads of keys that begin with ``prefix`` and are older than ``grace``; return them.

        Their age is by the server's clock alone. One that can't be aborted is left for the next time, and logged.
        """
        assert prefix.endswith("/"), "a prefix without an end is the beginning of other names too"
        stale = [(key, upload_id) for key, upload_id, age in self._uploads(prefix) if age >= grace]
        return tuple(key for key, upload_id in stale if self._abort(key, upload_id))

    def forget(self, key: Key) -> None:
        """Delete an object that a probe left behind, if that is allowed."""
        assert key.startswith(PROBES)
        with contextlib.suppress(UnavailableError):
            self._call(partial(self._delete_one, key=key), what=key)

    # Writing

    def _put(self, key: Key, name: str, body: bytes, write_id: str) -> None:
        def put(client: S3Client) -> None:
            client.put_object(Bucket=self._bucket, Key=name, Body=body, IfNoneMatch="*", Metadata={WRITE_ID: write_id})

        try:
            self._call(put, what=key)
        except AlreadyExistsError:
            if not self._is_ours(key, write_id):
                raise

    def _put_in_parts(self, key: Key, name: str, view: memoryview, parts: tuple[Part, ...], write_id: str) -> None:
        upload_id = self._patiently(lambda client: self._begin(client, name, write_id), what=key)
        try:
            sent = self._send_all(key, name, view, parts, upload_id)
        except BaseException:
            self._abort(key, upload_id)
            raise
        self._complete(key, sent, upload_id=upload_id, write_id=write_id)

    def _begin(self, client: S3Client, name: str, write_id: str) -> str:
        metadata = {WRITE_ID: write_id}
        if self._clients.location.checksums == "when_supported":
            begun = client.create_multipart_upload(
                Bucket=self._bucket, Key=name, Metadata=metadata, ChecksumAlgorithm="CRC32"
            )
        else:
            begun = client.create_multipart_upload(Bucket=self._bucket, Key=name, Metadata=metadata)
        return begun["UploadId"]

    def _send_all(
        self, key: Key, name: str, view: memoryview, parts: tuple[Part, ...], upload_id: str
    ) -> tuple[CompletedPartTypeDef, ...]:
        """Send all parts, some at a time; the first that fails for good ends the others."""

        def send(part: Part) -> CompletedPartTypeDef:
            return self._patiently(lambda client: self._send(client, name, view, part, upload_id), what=key)

        with ThreadPoolExecutor(min(PARALLEL_PARTS, len(parts)), thread_name_prefix="s3-part") as pool:
            sending = [pool.submit(send, part) for part in parts]
            try:
                wait(sending, return_when=FIRST_EXCEPTION)
            finally:
                for one in sending:
                    one.cancel()
        failed = next((error for one in sending if not one.cancelled() and (error := one.exception())), None)
        if failed is not None:
            raise failed
        return tuple(one.result() for one in sending)

    def _send(self, client: S3Client, name: str, view: memoryview, part: Part, upload_id: str) -> CompletedPartTypeDef:
        with view[part.begin : part.end] as piece, contextlib.closing(_Reader(piece)) as body:
            answer = client.upload_part(
                Bucket=self._bucket,
                Key=name,
                UploadId=upload_id,
                PartNumber=part.number,
                Body=cast("IO[bytes]", body),
            )
        sent: CompletedPartTypeDef = {"PartNumber": part.number, "ETag": answer["ETag"]}
        if "ChecksumCRC32" in answer:
            sent["ChecksumCRC32"] = answer["ChecksumCRC32"]
        return sent

    def _complete(self, key: Key, sent: tuple[CompletedPartTypeDef, ...], *, upload_id: str, write_id: str) -> None:
        """Make an object of the parts. Whatever the answer is, the object itself says whose it is."""
        name = self._name(key)

        def complete(client: S3Client) -> None:
            client.complete_multipart_upload(
                Bucket=self._bucket, Key=name, UploadId=upload_id, IfNoneMatch="*", MultipartUpload={"Parts": sent}
            )

        try:
            self._back_off.call(lambda: self._call(complete, what=key), when_silent=False)
        except (AlreadyExistsError, UnavailableError) as error:
            if self._is_ours(key, write_id):
                return
            aborted = self._abort(key, upload_id)
            if isinstance(error, AlreadyExistsError) or not aborted:
                raise
            if not self._is_ours(key, write_id):  # it may have landed between the look and the abort
                raise

    def _is_ours(self, key: Key, write_id: str) -> bool:
        """Say whether the object there is the one of this write."""
        try:
            head = self._back_off.call(lambda: self._head(key), when_silent=True)
        except MissingObjectError:
            return False
        return head["Metadata"].get(WRITE_ID) == write_id

    def _abort(self, key: Key, upload_id: str) -> bool:
        """Give up a multipart upload; say whether it is gone. One that stays is swept later."""
        name = self._name(key)

        def abort(client: S3Client) -> None:
            with contextlib.suppress(client.exceptions.NoSuchUpload):
                client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload_id)

        try:
            self._patiently(abort, what=key)
        except UnavailableError as error:
            _LOG.warning("an unfinished upload is left in the store until it is swept: %s", error)
            return False
        return True

    def _uploads(self, prefix: str) -> Iterator[tuple[Key, str, timedelta]]:
        """Yield key, id and age of each unfinished upload under a prefix; nothing if the server tells no time."""
        full = self._prefix + prefix
        after = ("", "")
        while True:
            page = self._patiently(partial(self._uploads_page, prefix=full, after=after), what=prefix)
            now = server_time(page)
            if now is None:
                return
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(full):
                    yield Key(upload["Key"].removeprefix(self._prefix)), upload["UploadId"], now - upload["Initiated"]
            following = (page.get("NextKeyMarker", ""), page.get("NextUploadIdMarker", ""))
            if not page.get("IsTruncated") or following == after:
                return
            after = following

    def _uploads_page(
        self, client: S3Client, *, prefix: str, after: tuple[str, str]
    ) -> ListMultipartUploadsOutputTypeDef:
        if not after[0]:
            return client.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix)
        return client.list_multipart_uploads(
            Bucket=self._bucket, Prefix=prefix, KeyMarker=after[0], UploadIdMarker=after[1]
        )

    # Reading

    def _get(self, client: S3Client, *, key: Key, start: int, length: int | None) -> bytes:
        with contextlib.closing(self._asked(client, key=key, start=start, length=length)) as body:
            return body.read()  # all of them, or it is an error of the client

    def _asked(self, client: S3Client, *, key: Key, start: int, length: int | None) -> StreamingBody:
        """Ask for bytes of an object, and return what gives them, once they are known to be those: to be closed."""
        name = self._name(key)
        if start == 0 and length is None:
            answer = client.get_object(Bucket=self._bucket, Key=name)
        else:
            last = "" if length is None else start + length - 1
            answer = client.get_object(Bucket=self._bucket, Key=name, Range=f"bytes={start}-{last}")
        with contextlib.ExitStack() as refused:
            refused.callback(answer["Body"].close)
            self._check(key, answer, start=start, length=length)
            refused.pop_all()
        return answer["Body"]

    def _check(self, key: Key, answer: GetObjectOutputTypeDef, *, start: int, length: int | None) -> None:
        """Raise unless the bytes that are to come are the ones that were asked for."""
        pinned = self._pins.get(key, answer["ETag"])
        if answer["ETag"] != pinned:
            self._pins.pop(key, None)
            raise CorruptObjectError(f"{key}: was replaced in {self._where} while it was read; read it again")
        told = _RANGE.fullmatch(answer.get("ContentRange", ""))
        begin, total = (int(told[1]), int(told[2])) if told else (0, answer["ContentLength"])
        wanted = max(0, total - start) if length is None else length
        if length is None:
            check_whole(key, wanted)
        if start + wanted > total:
            raise CorruptObjectError(f"{key}: ends at byte {total}, expected at least {start + wanted}")
        if begin != start or answer["ContentLength"] != wanted:
            raise UnavailableError(f"{key}: store {self._where} does not send the range that it was asked for")

    def _head(self, key: Key) -> HeadObjectOutputTypeDef:
        def head(client: S3Client) -> HeadObjectOutputTypeDef:
            return client.head_object(Bucket=self._bucket, Key=self._name(key))

        try:
            return self._call(head, what=key)
        except NotFoundError:  # of object or bucket: an answer without a body can't say; that of a GET can
            with contextlib.suppress(CorruptObjectError):  # it is there now, and empty
                self._call(partial(self._get, key=key, start=0, length=1), what=key)
        return self._call(head, what=key)

    def _keys_page(self, client: S3Client, *, prefix: str, token: str) -> ListObjectsV2OutputTypeDef:
        if not token:
            return client.list_objects_v2(Bucket=self._bucket, Prefix=prefix)
        return client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, ContinuationToken=token)

    # Calling

    def _name(self, key: Key) -> str:
        name = self._prefix + "/".join(key_parts(key))
        if len(name) > MAX_KEY_BYTES:
            raise UsageError(
                f"{name[:80]}...: a key of {len(name)} bytes; S3 allows {MAX_KEY_BYTES}. Shorten the prefix"
            )
        return name

    def _call(self, do: Callable[[S3Client], _T], *, what: str) -> _T:
        """Call the server once; once more with new credentials if it no longer takes those that we have."""
        client = self._clients.current()
        try:
            return self._translated(do, client, what=what)
        except ExpiredCredentialsError:
            return self._translated(do, self._clients.renewed(client), what=what)

    def _patiently(self, do: Callable[[S3Client], _T], *, what: str) -> _T:
        """Call the server, again and again where it does no harm that it may have been done before."""
        return self._back_off.call(lambda: self._call(do, what=what), when_silent=True)

    def _translated(self, do: Callable[[S3Client], _T], client: S3Client, *, what: str) -> _T:
        with self._in_our_words(what):
            return do(client)

    @contextlib.contextmanager
    def _in_our_words(self, what: str) -> Iterator[None]:
        try:
            yield
        except FOREIGN as error:
            raise translated(error, what=what, where=self._where) from error
        except KeyError as error:
            raise UnavailableError(f"{what}: store {self._where} answered without {error}, as no S3 does") from error


class _Reader:
    """Lets botocore read a part as if from a file, without a copy of it: each piece is a view of the caller's memory.

    A piece may be longer than asked for, as botocore and urllib3 take it as it comes: they ask for 16 KiB at a time,
    which would cost more than all else that they do.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0
        self._piece = view[:0]

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1, /) -> memoryview:
        """Return the next bytes, valid until the next call."""
        end = len(self._view) if size is None or size < 0 else self._at + max(size, _PIECE_BYTES)
        self._piece.release()
        self._piece = self._view[self._at : end]
        self._at += len(self._piece)
        return self._piece

    def readinto(self, into: memoryview, /) -> int:
        """Fill ``into`` as far as there are bytes. With awscrt installed, botocore's signer asks for them so."""
        count = min(len(into), len(self._view) - self._at)
        into[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to another place."""
        self._at = max(0, offset + (0, self._at, len(self._view))[whence])
        return self._at

    def tell(self) -> int:
        """Return the place that is read next."""
        return self._at

    def close(self) -> None:
        """Let go of the caller's memory."""
        self._piece.release()
