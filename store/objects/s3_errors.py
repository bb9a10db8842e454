"""What botocore says, in our words: the one place where its errors become ours.

The text of a server is not passed on: it may repeat what was sent. Its code and status are.
"""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    MissingDependencyException,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)

from toprope.store.errors import (
    AlreadyExistsError,
    CkptError,
    CorruptObjectError,
    MissingObjectError,
    NoStoreError,
    ThrottledError,
    UnavailableError,
    UsageError,
)

FOREIGN = (BotoCoreError, ClientError, OSError)
"""What a call of an S3 client can raise when the world fails."""

_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})
_THROTTLED = frozenset({"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded"})
_THROTTLED_STATUS = frozenset({429, 503})
_REPLACED_ON_THE_WAY = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "IncompleteBody"})
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, TokenRetrievalError)


class ExpiredCredentialsError(UnavailableError):
    """The store no longer takes the credentials: read them again. Nothing was done."""


class NoBucketError(NoStoreError):
    """There is no such bucket."""


class FailingError(UnavailableError):
    """The server says that it failed: whether it has done what was asked is not known."""


class NotFoundError(UnavailableError):
    """Object or bucket are not there: which of them, the answer to a HEAD does not say."""


_EXISTS = (AlreadyExistsError, "exists already in {where}; it was not touched")
_PAST_ITS_END = (CorruptObjectError, "ends before the bytes that were asked for")
_EXACT: dict[str, tuple[type[CkptError], str]] = {
    "PreconditionFailed": _EXISTS,
    "412": _EXISTS,
    "NoSuchKey": (MissingObjectError, "no such object in {where}"),
    "NoSuchBucket": (NoBucketError, "store {where}: there is no such bucket; check its name, or make it"),
    "NoSuchUpload": (UnavailableError, "its upload is no longer known to store {where}"),
    "404": (NotFoundError, "nothing is found there by store {where}"),
    "InvalidRange": _PAST_ITS_END,
    "416": _PAST_ITS_END,
}


def translated(error: Exception, *, what: str, where: str) -> CkptError:
    """Return our error for one of ``FOREIGN``. ``what`` is the key or the act, ``where`` the store."""
    if isinstance(error, ClientError):
        return _from_server(error.response, what=f"{what}: ", where=where)
    if isinstance(error, _NO_CREDENTIALS):
        return UsageError(
            f"store {where}: no usable credentials were found. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give profile= in the store's URL"
        )
    if isinstance(error, ProfileNotFound):
        return UsageError(f"store {where}: the profile that is asked for is not in the AWS configuration files")
    if isinstance(error, MissingDependencyException):
        return UsageError(f"store {where}: what the AWS configuration asks for needs the package botocore[crt]")
    if isinstance(error, FlexibleChecksumError):
        return CorruptObjectError(f"{what}: its bytes do not have the checksum that store {where} keeps for it")
    return UnavailableError(f"{what}: no answer from store {where} ({type(error).__name__})")


def _from_server(response: Any, *, what: str, where: str) -> CkptError:  # noqa: ANN401 - botocore's type has no use here
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(response.get("Error", {}).get("Code", status))
    exact = _exact(code, response, what=what, where=where)
    if exact is not None:
        return exact
    if code in _THROTTLED or status in _THROTTLED_STATUS:
        return ThrottledError(f"{what}store {where} is busy ({status} {code})")
    if status == 409:  # noqa: PLR2004 - HTTP: conflict; who of several writers won is not known
        return UnavailableError(f"{what}store {where} is busy with another write of it ({status} {code})")
    if status in (401, 403):
        return NoStoreError(
            f"{what}store {where} refuses access ({status} {code}): check the credentials and what they allow "
            "(without s3:ListBucket a missing object is refused as well)"
        )
    if code in _REPLACED_ON_THE_WAY:
        return UnavailableError(f"{what}the bytes did not arrive at store {where} as they were sent ({code})")
    kind = FailingError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else UnavailableError
    return kind(f"{what}store {where} answered {status} {code}{_hint(code)}")


def _exact(code: str, response: Any, *, what: str, where: str) -> CkptError | None:  # noqa: ANN401 - as above
    """Return the error for a code that says exactly what is the matter, or None."""
    kind, text = _EXACT.get(code, (None, ""))
    if code in _EXPIRED:
        kind, text = ExpiredCredentialsError, "the credentials for store {where} have expired; renew them"
    elif code in _SKEWED:
        kind, text = UnavailableError, "store {where} refuses requests{skew}. Set the clock (NTP)"
    return None if kind is None else kind(what + text.format(where=where, skew=_skew(response)))


def server_time(response: Any) -> datetime | None:  # noqa: ANN401 - as above
    """Return the server's clock as it was when it sent this response, if it says so."""
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        told = parsedate_to_datetime(date) if date else None
    except ValueError:
        return None
    return None if told is None else told.replace(tzinfo=told.tzinfo or UTC)


def _skew(response: Any) -> str:  # noqa: ANN401 - as above
    theirs = server_time(response)
    if theirs is None:
        return ": this machine's clock and the store's differ"
    ahead_s = round((datetime.now(UTC) - theirs).total_seconds())
    return f": this machine's clock is {abs(ahead_s)} s {'ahead of' if ahead_s > 0 else 'behind'} the store's"


def _hint(code: str) -> str:
    if code in ("InvalidArgument", "InvalidRequest", "NotImplemented", "400", "501"):
        return "; if the server does not know checksum headers, add checksums=when_required to the store's URL"
    return ""
