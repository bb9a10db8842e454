"""An S3 server in this process that is as strict as the real one and fails in any way that a test asks for.

It knows the operations that the store uses, by path style, in memory. ``server.rules`` says what befalls which calls;
``server.calls`` is what was asked.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

BUCKET = "bucket"
ACCESS_KEY = "AKIASTRICT"
SECRET_KEY = "canary-of-a-secret-key"
XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"

Operation: TypeAlias = Literal[
    "PutObject",
    "GetObject",
    "HeadObject",
    "DeleteObject",
    "DeleteObjects",
    "ListObjectsV2",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "AbortMultipartUpload",
    "ListMultipartUploads",
]
Fault: TypeAlias = Literal[
    "409 ConditionalRequestConflict",
    "503 SlowDown",
    "403 AccessDenied",
    "507 InsufficientStorage",
    "500 InternalError",
    "done, then 404 NoSuchUpload",
    "done, then 412 PreconditionFailed",
    "body damaged",
    "request lost",
    "reply lost",
    "lands late",
    "body cut short",
    "no length told",
]


@dataclass(slots=True, kw_only=True)
class Call:
    """What was asked: one line of the server's journal."""

    operation: str
    key: str
    part: int
    access_key: str
    headers: dict[str, str]


@dataclass(slots=True, kw_only=True)
class Rule:
    """Befalls the next ``times`` calls of an operation for which ``when`` holds."""

    operation: Operation
    fault: Fault
    times: int = 1
    when: Callable[[Call], bool] = lambda _: True


@dataclass(slots=True, kw_only=True)
class Stored:
    body: bytes
    etag: str
    metadata: dict[str, str]
    checksum: str = ""


@dataclass(slots=True, kw_only=True)
class Upload:
    key: str
    metadata: dict[str, str]
    checksums: bool
    initiated: datetime
    parts: dict[int, Stored] = field(default_factory=dict)


class Refused(Exception):  # noqa: N818 - it is an answer
    def __init__(self, status: int, code: str) -> None:
        self.status = status
        self.code = code


@dataclass(slots=True, kw_only=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class StrictS3:
    """The state of the server, and how strict it is."""

    page: int = 1000
    min_part_bytes: int = 5 * 1024 * 1024
    checksums: Literal["checked", "refused", "ignored"] = "checked"
    honours_conditions: bool = True
    honours_ranges: bool = True
    honours_prefixes: bool = True
    clock_ahead: timedelta = timedelta()
    max_skew: timedelta = timedelta(minutes=15)
    expired: set[str] = field(default_factory=set)
    rules: list[Rule] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    late: list[Callable[[], object]] = field(default_factory=list)
    on_call: Callable[[Call], object] = lambda _: None
    endpoint: str = ""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def root(self, prefix: str = "", **options: str) -> str:
        asked = {"endpoint": self.endpoint, "region": "us-east-1", "path_style": "1"} | options
        return f"s3://{BUCKET}/{prefix}?" + "&".join(f"{name}={quote(v, safe='')}" for name, v in asked.items())

    def now(self) -> datetime:
        return datetime.now(UTC) + self.clock_ahead

    def land(self) -> None:
        """Let the writes that were late arrive."""
        for write in self.late:
            with contextlib.suppress(Refused):
                write()
        self.late.clear()

    def asked(self, operation: Operation) -> list[Call]:
        return [call for call in self.calls if call.operation == operation]

    def fault_for(self, call: Call) -> Fault | None:
        with self._lock:
            self.calls.append(call)
            for rule in self.rules:
                if rule.operation == call.operation and rule.times and rule.when(call):
                    rule.times -= 1
                    return rule.fault
        return None

    def perform(self, call: Call, query: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            self._check(call, body)
            handler: Callable[[Call, dict[str, str], bytes], Answer] = getattr(self, f"_{call.operation}")
            return handler(call, query, body)

    # Checks

    def _check(self, call: Call, body: bytes) -> None:
        if len(call.key.encode()) > 1024:
            raise Refused(400, "KeyTooLongError")
        if call.access_key in self.expired:
            raise Refused(400, "ExpiredToken")
        if call.access_key != ACCESS_KEY and not call.access_key.startswith("AKIAFRESH"):
            raise Refused(403, "InvalidAccessKeyId")
        told = datetime.strptime(call.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs(self.now() - told) > self.max_skew:
            raise Refused(403, "RequestTimeTooSkewed")
        signed = call.headers.get("x-amz-content-sha256", "")
        if re.fullmatch(r"[0-9a-f]{64}", signed) and signed != hashlib.sha256(body).hexdigest():
            raise Refused(400, "XAmzContentSHA256Mismatch")
        self._check_checksums(call, body)

    def _check_checksums(self, call: Call, body: bytes) -> None:
        given = [name for name in call.headers if name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum-"))]
        if self.checksums == "refused" and (given or "aws-chunked" in call.headers.get("content-encoding", "")):
            if call.operation in ("PutObject", "UploadPart", "CreateMultipartUpload"):
                raise Refused(400, "InvalidArgument")
        elif self.checksums == "checked":
            crc = call.headers.get("x-amz-checksum-crc32")
            if crc is not None and crc != crc32(body):
                raise Refused(400, "BadDigest")

    def _check_free(self, call: Call) -> None:
        if self.honours_conditions and call.headers.get("if-none-match") == "*" and call.key in self.objects:
            raise Refused(412, "PreconditionFailed")

    # Operations

    def _PutObject(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        self._check_free(call)
        stored = Stored(body=body, etag=self._etag(body), metadata=metadata_of(call), checksum=self._crc(body))
        self.objects[call.key] = stored
        return Answer(headers={"ETag": stored.etag} | self._crc_header(stored))

    def _CreateMultipartUpload(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        upload_id = secrets.token_hex(16)
        self.uploads[upload_id] = Upload(
            key=call.key,
            metadata=metadata_of(call),
            checksums="x-amz-checksum-algorithm" in call.headers and self.checksums == "checked",
            initiated=self.now(),
        )
        text = f"<Bucket>{BUCKET}</Bucket><Key>{escape(call.key)}</Key><UploadId>{upload_id}</UploadId>"
        return xml("InitiateMultipartUploadResult", text)

    def _UploadPart(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        upload = self._upload(call, query)
        if not 1 <= call.part <= 10_000:
            raise Refused(400, "InvalidArgument")
        if upload.checksums and "x-amz-checksum-crc32" not in call.headers:
            raise Refused(400, "InvalidRequest")
        stored = Stored(body=body, etag=self._etag(body), metadata={}, checksum=self._crc(body))
        upload.parts[call.part] = stored
        return Answer(headers={"ETag": stored.etag} | self._crc_header(stored))

    def _CompleteMultipartUpload(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        upload = self._upload(call, query)
        named = [{child.tag.rpartition("}")[2]: child.text or "" for child in part} for part in ET.fromstring(body)]
        numbers = [int(part["PartNumber"]) for part in named]
        if not numbers or numbers != sorted(set(numbers)):
            raise Refused(400, "InvalidPartOrder")
        for part, number in zip(named, numbers, strict=True):
            self._check_part(upload, part, last=number == numbers[-1])
        self._check_free(call)
        whole = b"".join(upload.parts[number].body for number in numbers)
        etag = f'"{hashlib.md5(whole, usedforsecurity=False).hexdigest()}-{len(numbers)}"'
        self.objects[call.key] = Stored(body=whole, etag=etag, metadata=upload.metadata)
        del self.uploads[query["uploadId"]]
        return xml("CompleteMultipartUploadResult", f"<Key>{escape(call.key)}</Key><ETag>{escape(etag)}</ETag>")

    def _check_part(self, upload: Upload, part: dict[str, str], *, last: bool) -> None:
        stored = upload.parts.get(int(part["PartNumber"]))
        if stored is None or stored.etag != part["ETag"]:
            raise Refused(400, "InvalidPart")
        if upload.checksums and part.get("ChecksumCRC32") != stored.checksum:
            raise Refused(400, "InvalidPart")
        if not last and len(stored.body) < self.min_part_bytes:
            raise Refused(400, "EntityTooSmall")

    def _AbortMultipartUpload(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        self._upload(call, query)
        del self.uploads[query["uploadId"]]
        return Answer(status=204)

    def _GetObject(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        stored = self._object(call)
        headers = {"ETag": stored.etag} | stored.metadata | self._crc_header(stored)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("range", ""))
        if wanted is None or not self.honours_ranges:
            return Answer(body=stored.body, headers=headers)
        begin, total = int(wanted[1]), len(stored.body)
        if begin >= total:
            raise Refused(416, "InvalidRange")
        end = min(int(wanted[2]) + 1 if wanted[2] else total, total)
        headers = {"ETag": stored.etag, "Content-Range": f"bytes {begin}-{end - 1}/{total}"}
        return Answer(status=206, body=stored.body[begin:end], headers=headers)

    def _HeadObject(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        return self._GetObject(call, query, body)

    def _DeleteObject(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        self.objects.pop(call.key, None)
        return Answer(status=204)

    def _DeleteObjects(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        keys = [child.text or "" for child in ET.fromstring(body).iter() if child.tag.endswith("}Key")]
        if not 1 <= len(keys) <= 1000:
            raise Refused(400, "MalformedXML")
        if "content-md5" not in call.headers and not any(name.startswith("x-amz-checksum-") for name in call.headers):
            raise Refused(400, "InvalidRequest")
        for key in keys:
            self.objects.pop(key, None)
        return xml("DeleteResult", "")

    def _ListObjectsV2(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        after = unquote(query.get("continuation-token", ""))
        keys = sorted(key for key in self.objects if key.startswith(query.get("prefix", "")) and key > after)
        page = keys[: self.page]
        text = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key].body)}</Size></Contents>" for key in page
        )
        text += f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(len(keys) > len(page)).lower()}</IsTruncated>"
        if len(keys) > len(page):
            text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        return xml("ListBucketResult", text)

    def _ListMultipartUploads(self, call: Call, query: dict[str, str], body: bytes) -> Answer:  # noqa: N802
        after = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        there = sorted(
            (upload.key, upload_id)
            for upload_id, upload in self.uploads.items()
            if upload.key.startswith(query.get("prefix", "") * self.honours_prefixes)
            and (upload.key, upload_id) > after
        )
        page = there[: self.page]
        text = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{self.uploads[upload_id].initiated.strftime('%Y-%m-%dT%H:%M:%S.000Z')}</Initiated></Upload>"
            for key, upload_id in page
        )
        text += f"<IsTruncated>{str(len(there) > len(page)).lower()}</IsTruncated>"
        if len(there) > len(page):
            text += f"<NextKeyMarker>{escape(page[-1][0])}</NextKeyMarker>"
            text += f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
        return xml("ListMultipartUploadsResult", text)

    # Parts of operations

    def _object(self, call: Call) -> Stored:
        if call.key not in self.objects:
            raise Refused(404, "NoSuchKey")
        return self.objects[call.key]

    def _upload(self, call: Call, query: dict[str, str]) -> Upload:
        upload = self.uploads.get(query["uploadId"])
        if upload is None or upload.key != call.key:
            raise Refused(404, "NoSuchUpload")
        return upload

    def _etag(self, body: bytes) -> str:
        return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'

    def _crc(self, body: bytes) -> str:
        return crc32(body) if self.checksums == "checked" else ""

    def _crc_header(self, stored: Stored) -> dict[str, str]:
        return {"x-amz-checksum-crc32": stored.checksum} if stored.checksum else {}


def write_credentials(path: Path, access_key: str) -> None:
    """Put credentials where an SDK finds them."""
    path.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {SECRET_KEY}\n")


def environment(credentials: Path) -> dict[str, str]:
    """The environment in which an SDK finds these credentials and no others."""
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_PROFILE": "default",
    }


def crc32(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4)).decode()


def metadata_of(call: Call) -> dict[str, str]:
    return {name: value for name, value in call.headers.items() if name.startswith("x-amz-meta-")}


def xml(name: str, text: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="{XMLNS}">{text}</{name}>'
    return Answer(body=body.encode(), headers={"Content-Type": "application/xml"})


def operation_of(method: str, key: str, query: dict[str, str]) -> str:
    """Return the name of an S3 operation."""
    if not key:
        if "delete" in query:
            return "DeleteObjects"
        return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
    names = {
        ("PUT", False): "PutObject",
        ("PUT", True): "UploadPart",
        ("POST", False): "CreateMultipartUpload",
        ("POST", True): "CompleteMultipartUpload",
        ("DELETE", False): "DeleteObject",
        ("DELETE", True): "AbortMultipartUpload",
        ("GET", False): "GetObject",
        ("HEAD", False): "HeadObject",
    }
    return names[method, "uploadId" in query]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: StrictS3

    def do_request(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(url.path).removeprefix("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        credential = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        call = Call(
            operation=operation_of(self.command, key, query),
            key=key,
            part=int(query.get("partNumber", 0)),
            access_key=credential[1] if credential else "",
            headers={name.lower(): value for name, value in self.headers.items()},
        )
        fault = self.state.fault_for(call)
        self.state.on_call(call)
        if bucket != BUCKET and not (fault is not None and fault[0].isdigit()):
            self._refuse(404, "NoSuchBucket")
        else:
            self._answer(call, query, body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_request  # noqa: N815

    def _answer(self, call: Call, query: dict[str, str], body: bytes, fault: Fault | None) -> None:
        if fault is not None and fault[0].isdigit():
            status, _, code = fault.partition(" ")
            self._refuse(int(status), code)
        elif fault == "request lost":
            self._hang_up()
        elif fault == "lands late":
            self.state.late.append(lambda: self.state.perform(call, query, body))
            self._hang_up()
        else:
            self._perform(call, query, body, fault)

    def _perform(self, call: Call, query: dict[str, str], body: bytes, fault: Fault | None) -> None:
        if fault == "body damaged":
            body = body[:-1] + bytes([body[-1] ^ 1])
        try:
            answer = self.state.perform(call, query, body)
        except Refused as refusal:
            self._refuse(refusal.status, refusal.code)
            return
        if fault == "reply lost":
            self._hang_up()
        elif fault is not None and fault.startswith("done, then "):
            _, _, status, code = fault.split()
            self._refuse(int(status), code)
        else:
            self._send(answer, cut_short=fault == "body cut short", tell_length=fault != "no length told")

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code} (text with {SECRET_KEY})</Message></Error>"
        self._send(Answer(status=status, body=text.encode(), headers={"Content-Type": "application/xml"}))

    def _send(self, answer: Answer, *, cut_short: bool = False, tell_length: bool = True) -> None:
        self.send_response_only(answer.status)
        self.send_header("Date", format_datetime(self.state.now(), usegmt=True))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204 and tell_length:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // 2] if cut_short else answer.body)
        self.close_connection = self.close_connection or cut_short or not tell_length

    def _hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that is overridden
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is no news."""


@contextlib.contextmanager
def strict_s3() -> Iterator[StrictS3]:
    """Yield a server that answers at ``endpoint``."""
    state = StrictS3()
    handler = type("Bound", (Handler,), {"state": state})
    with _Server(("127.0.0.1", 0), handler) as server:
        state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
