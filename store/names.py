"""Names and keys: the one place that turns jobs, attempts, steps and ranks into object keys, and checks them first.

Keys are relative to a store's root and use ``/``. See ``docs/format.md`` for who may write each.
"""

from __future__ import annotations

import re
from typing import NewType

from toprope.store.errors import UsageError

Key = NewType("Key", str)

PROBES = "probe/"
"""Under it lies what was written to try a store out, or to show that two see the same one."""

_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_HEX = re.compile(r"[0-9a-f]{1,128}")
_SHARD = re.compile(r"a[0-9]{1,18}/s[0-9]{9,18}/rank-[0-9]{5,18}-of-[0-9]{5,18}-[0-9a-f]{1,128}")

_WRITTEN = re.compile(
    r"shards/a(?P<shard_attempt>[0-9]{1,18})/s(?P<shard_step>[0-9]{9,18})/rank-[0-9]{5,18}-of-[0-9]{5,18}-[0-9a-f]{1,128}"
    r"(\.safetensors|\.safetensors\.zst|\.index\.json)"
    r"|manifests/a(?P<attempt>[0-9]{1,18})-s(?P<step>[0-9]{9,18})-[0-9a-f]{64}\.json"
)
"""What garbage collection may delete; all that is named otherwise is somebody else's."""


def checked_id(value: str, *, what: str) -> str:
    """Return a job or node name that is safe in a path, a key and a topic.

    Raises:
        UsageError: it is not 1 to 64 of ``a-z 0-9 . _ -`` beginning with a letter or digit, or it holds ``..``.
    """
    if not is_id(value):
        raise UsageError(
            f"{what} {value!r} is not usable: give 1 to 64 of a-z 0-9 . _ - that begin with a letter or digit, "
            "without '..'"
        )
    return value


def is_id(value: str) -> bool:
    """Return whether a job or a node may have this name."""
    return _ID.fullmatch(value) is not None and ".." not in value


def checked_hex(value: str) -> str:
    """Return a digest, uid or nonce after a check that it is lower-case hexadecimal."""
    if _HEX.fullmatch(value) is None:
        raise UsageError(f"{value!r} is not lower-case hexadecimal")
    return value


def key_parts(key: str) -> tuple[str, ...]:
    """Return the parts of a key, after a check that none of them can lead out of a directory.

    Raises:
        UsageError: a part is not a plain name (``a-z A-Z 0-9 . _ -``, not beginning with a dot), or is too long.
    """
    parts = tuple(key.split("/"))
    if any(_PART.fullmatch(part) is None for part in parts):
        raise UsageError(
            f"{key[:200]!r} is not a key: its parts are 1 to 200 of a-z A-Z 0-9 . _ - and begin with no dot"
        )
    return parts


def probe_key(nonce: str) -> Key:
    """Return the key of a probe."""
    return Key(f"{PROBES}{checked_hex(nonce)}")


def log_prefix(job: str) -> str:
    """Return the prefix under which the records of a job lie."""
    return f"{checked_id(job, what='job')}/log/"


def log_key(job: str, number: int) -> Key:
    """Return the key of log record ``number``, which counts from 0."""
    assert number >= 0
    return Key(f"{log_prefix(job)}{number:020d}.json")


def is_log_key(job: str, key: Key) -> bool:
    """Return whether a key is that of a log record, and not of something that someone left beside them."""
    return re.fullmatch(r"[0-9]{20}\.json", key.removeprefix(log_prefix(job))) is not None


def facts_key(job: str, sha256: str) -> Key:
    """Return the key of what a record names by its hash: a spec, or the world and digests of an attempt."""
    return Key(f"{checked_id(job, what='job')}/facts/{checked_hex(sha256)}.json")


def manifest_key(job: str, *, attempt: int, step: int, sha256: str) -> Key:
    """Return the key of a manifest."""
    return Key(f"{checked_id(job, what='job')}/manifests/a{attempt}-s{step:09d}-{checked_hex(sha256)}.json")


def shard_key(  # noqa: PLR0913 - what a key consists of
    job: str, *, attempt: int, step: int, rank: int, world: int, nonce: str, packed: bool = False
) -> Key:
    """Return the key of a file of a shard; what is ``packed`` is so by zstd."""
    end = ".safetensors.zst" if packed else ".safetensors"
    return Key(f"{_shard_stem(job, attempt, step, rank, world)}-{checked_hex(nonce)}{end}")


def is_shard_key(job: str, key: str, *, packed: bool) -> bool:
    """Return whether this is the key of a file of some shard of a job."""
    stem = re.escape(f"{checked_id(job, what='job')}/shards/")
    end = r"\.safetensors\.zst" if packed else r"\.safetensors"
    return re.fullmatch(stem + _SHARD.pattern + end, key) is not None


def index_key(job: str, *, attempt: int, step: int, rank: int, world: int, sha256: str) -> Key:
    """Return the key of a rank's index object."""
    return Key(f"{_shard_stem(job, attempt, step, rank, world)}-{checked_hex(sha256)}.index.json")


def _shard_stem(job: str, attempt: int, step: int, rank: int, world: int) -> str:
    assert 0 <= rank < world
    return f"{checked_id(job, what='job')}/shards/a{attempt}/s{step:09d}/rank-{rank:05d}-of-{world:05d}"


def shards_prefix(job: str) -> str:
    """Return the prefix under which the shards and indexes of a job lie."""
    return f"{checked_id(job, what='job')}/shards/"


def manifests_prefix(job: str) -> str:
    """Return the prefix under which the manifests of a job lie."""
    return f"{checked_id(job, what='job')}/manifests/"


def holds_prefix(job: str) -> str:
    """Return the prefix under which readers say what they hold."""
    return f"{checked_id(job, what='job')}/holds/"


def snaps_prefix(job: str) -> str:
    """Return the prefix under which folds of the log lie."""
    return f"{checked_id(job, what='job')}/snap/"


def is_named(key: str) -> bool:
    """Return whether this is the key of an object that others name, and that nobody looks for unless one does."""
    return key.partition("/")[2].startswith(("shards/", "manifests/", "facts/"))


def step_prefix(job: str, *, attempt: int, step: int) -> str:
    """Return the prefix under which the shards and indexes of a step lie."""
    return f"{shards_prefix(job)}a{attempt}/s{step:09d}/"


def written_at(job: str, key: str) -> tuple[int, int] | None:
    """Return the attempt and the step that a shard, an index or a manifest was written for; None for any other key."""
    rest = key.removeprefix(f"{checked_id(job, what='job')}/")
    found = _WRITTEN.fullmatch(rest) if rest != key else None
    if found is None:
        return None
    return int(found["shard_attempt"] or found["attempt"]), int(found["shard_step"] or found["step"])


def index_sha256(key: str) -> str | None:
    """Return the SHA-256 that the key of an index says it has; None if it is not the key of one."""
    found = re.search(r"-([0-9a-f]{64})\.index\.json$", key)
    return found[1] if found else None


def hold_key(job: str, *, seq: int, hold_id: str, beat: int) -> Key:
    """Return the key of a hold: which READY, whose it is, and how often it was renewed."""
    return Key(f"{holds_prefix(job)}{seq:020d}-{checked_hex(hold_id)}-{beat:020d}")


def parse_hold(job: str, key: str) -> tuple[int, str, int] | None:
    """Return seq, id and beat of a hold; None if this is not the key of one."""
    found = re.fullmatch(r"([0-9]{20})-([0-9a-f]{1,128})-([0-9]{20})", key.removeprefix(holds_prefix(job)))
    return (int(found[1]), found[2], int(found[3])) if found else None


def snap_key(job: str, number: int) -> Key:
    """Return the key of the fold of the first ``number`` records."""
    return Key(f"{snaps_prefix(job)}{number:020d}.json")
