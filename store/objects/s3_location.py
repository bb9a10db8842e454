"""What ``s3://bucket/prefix?...`` says, parsed and checked. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast
from urllib.parse import parse_qsl, urlsplit

from toprope.store.errors import UsageError
from toprope.store.names import key_parts

Checksums: TypeAlias = Literal["when_supported", "when_required"]

FORM = "s3://BUCKET/PREFIX?endpoint=URL&region=NAME&path_style=1&profile=NAME&checksums=when_required"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STYLES = {"1": True, "0": False}
_CHECKSUMS = ("when_supported", "when_required")
_OPTIONS = ("endpoint", "region", "path_style", "profile", "checksums")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """A bucket, the prefix under which our keys lie (empty, or ending in ``/``), and how to reach it.

    What is None is left to the usual configuration: environment, files, instance role.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    profile: str | None = None
    checksums: Checksums = "when_supported"

    def __str__(self) -> str:
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}{at}"


def parse_location(root: str) -> S3Location:
    """Return the location that an ``s3://`` URL names.

    Raises:
        UsageError: it is not of that form. The message repeats no part of it that could hold a secret.
    """
    if not root.isprintable() or " " in root:
        raise _wrong("it holds white space or characters that can't be printed")
    try:
        url = urlsplit(root)
        pairs = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
    except ValueError as error:
        raise _wrong("its options are not name=value pairs joined by &") from error
    if "@" in url.netloc or ":" in url.netloc or url.fragment:
        raise _wrong("no user, password, port or fragment belongs into it; credentials come from the environment")
    if _BUCKET.fullmatch(url.netloc) is None:
        raise _wrong("a bucket's name is 3 to 63 of a-z 0-9 . -")
    options = _options(pairs)
    style = options.get("path_style")
    return S3Location(
        bucket=url.netloc,
        prefix=_prefix(url.path.removeprefix("/").removesuffix("/")),
        endpoint=_endpoint(options.get("endpoint")),
        region=_plain("region", options),
        path_style=None if style is None else _STYLES[_one_of("path_style", style, tuple(_STYLES))],
        profile=_plain("profile", options),
        checksums=cast("Checksums", _one_of("checksums", options.get("checksums", "when_supported"), _CHECKSUMS)),
    )


def _options(pairs: list[tuple[str, str]]) -> dict[str, str]:
    options = dict(pairs)
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise _wrong(f"there is no option {unknown[0][:40]!r}")
    if len(options) != len(pairs):
        raise _wrong("an option stands there twice")
    return options


def _prefix(path: str) -> str:
    if not path:
        return ""
    try:
        return "/".join(key_parts(path)) + "/"
    except UsageError as error:
        raise _wrong("the parts of a prefix are 1 to 200 of a-z A-Z 0-9 . _ - and begin with no dot") from error


def _endpoint(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        url = urlsplit(value)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        usable = False
        url = urlsplit("")
    if not usable or url.username or url.password or url.query or url.fragment:
        raise _wrong("endpoint is http://HOST:PORT or https://HOST, without user or password")
    return value.rstrip("/")


def _plain(name: str, options: dict[str, str]) -> str | None:
    value = options.get(name)
    if value is not None and _PLAIN.fullmatch(value) is None:
        raise _wrong(f"{name} is not a plain name")
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise _wrong(f"{name} is one of {', '.join(known)}")
    return value


def _wrong(why: str) -> UsageError:
    return UsageError(f"the s3:// store given is not usable: {why}. Write {FORM}")
