"""The frames that a trainer and its sidecar exchange over the Unix socket.

One frame is a little-endian u32 length (at most ``MAX_FRAME_BYTES``) and that many bytes of JSON: an object whose
``kind`` names the frame. The first frame of each side carries ``version``. The hook owns these definitions because it
is the lighter side: this module loads the standard library only, so that a sidecar can share it without torch.

One conversation::

    hook     HELLO                                   who I am
    sidecar  WELCOME                                 which node, which memory
    hook     OPEN      (rank 0, after the gather)    asks for an attempt; the same launch_id and round, the same answer
    sidecar  ATTEMPT | ERROR                         the decision (rank 0 broadcasts it to the other ranks)
    hook     JOIN      (every rank)                  "I am in this attempt", and what it needs of which shards: at first
                                                     its own shard, or of each the header and document; when it has read
                                                     those, again with the next ``ask`` and the tensors that it needs
    sidecar  STAGED                                  what the newest JOIN wants, verified, mapped read-only by the hook
    hook     VERDICT   staged                        names, shapes and dtypes fit
    sidecar  GO        staged                        so say all ranks: apply
    hook     SIZE                                    bytes of one image, once all of the state is there: when it was
                                                     brought back, else at the first end_step
    hook     VERDICT   applied
    sidecar  GO        applied                       so say all ranks: train
    sidecar  SLOT*                                   slots lent to the hook, one frame each, after GO and SIZE
    hook     SEALED | SKIPPED                        one for each due step
    hook     ASK                                     at any time: this process is about to end, or wants its last step
                                                     in each tier
    sidecar  DESIRED                                 whenever attempt, schedule, or what is safe has changed
    hook     BYE

A connection that ends is made again, and begins with all that the sidecar must know: HELLO, then as far as they have
been said OPEN (while it is unanswered) or the newest JOIN and VERDICT, SIZE, SEALED of each slot that has not been lent
again since, and the newest ASK of this attempt. All of these may be heard twice. A launch that restores again in the
same process asks with the next ``round``; only a source whose attempt failed before all had applied it is struck off by
that.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias

VERSION = 1
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class WireError(Exception):
    """A peer sent what is not a frame of this version; the connection is of no further use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Where a rank sits: its node, and the boot id that names the node's memory."""

    rank: int
    node: str
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Step s is due if ``s > from_step`` and ``(s - from_step) % every == 0``: a pure function of the step."""

    from_step: int
    every: int

    def due(self, step: int) -> bool:
        """Say whether a snapshot of this step is due."""
        return step > self.from_step and (step - self.from_step) % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedShard:
    """One verified shard image, a file that the hook maps read-only; of it only what was wanted need be there.

    ``bytes`` is the exact image length, ``digest`` its XXH3-128 in hex; ``tier`` and ``node`` say where it came from.
    Beside a file of which only some is there lies, under ``DIGESTS`` for its suffix, what the digest of each tensor is,
    there or not: a JSON object by name.
    """

    rank: int
    path: str
    bytes: int
    digest: str
    tier: str
    node: str


DIGESTS = ".digests"
ALL = "*"
"""Among the tensors of a ``Want``: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a rank needs of the shard of ``rank``: header and document, and the tensors of these names."""

    rank: int
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Hook: the first frame of a connection."""

    kind: ClassVar[str] = "HELLO"
    job: str
    launch_id: str
    rank: int
    world: int
    pid: int
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Hook of rank 0: asks for an attempt. ``spec`` is what the state depends on; ``versions`` is recorded only."""

    kind: ClassVar[str] = "OPEN"
    launch_id: str
    round: int
    world: tuple[Member, ...]
    spec: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Hook: this rank is in the attempt; stage what it wants. ``ask`` counts what it asked for in this attempt."""

    kind: ClassVar[str] = "JOIN"
    attempt_uid: str
    ask: int = 1
    wants: tuple[Want, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Hook: what came of a phase (``staged`` or ``applied``) on this rank; ``reason`` when not ok.

    ``misfit``: this trainer can't take what was verified, being another than the one that was saved: the source is
    not to blame.
    """

    kind: ClassVar[str] = "VERDICT"
    attempt_uid: str
    phase: str
    ok: bool
    reason: str = ""
    misfit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Hook: how many bytes one image of this rank's state takes, room for growth of its document included."""

    kind: ClassVar[str] = "SIZE"
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Hook: the slot holds the state after ``step``, ``bytes`` long. ``seq`` repeats that of the grant."""

    kind: ClassVar[str] = "SEALED"
    slot: int
    seq: int
    attempt_uid: str
    step: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Hook: a due step of which no snapshot was taken, and why."""

    kind: ClassVar[str] = "SKIPPED"
    attempt_uid: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Hook: asks that a step go to each tier, due or not. ``after`` is the last step that this rank has ended.

    A later ``step``: this process is about to end, all ranks are to save that step and end there, too. ``after``
    itself: it is sealed already, and this rank's shard of it is meant; each rank asks for its own.
    """

    kind: ClassVar[str] = "ASK"
    attempt_uid: str
    after: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """Hook: the trainer is done with this job; what is sealed stays and is carried on."""

    kind: ClassVar[str] = "BYE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Sidecar: the answer to HELLO."""

    kind: ClassVar[str] = "WELCOME"
    node: str
    boot_id: str
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Sidecar: the attempt that answers OPEN. ``source`` is ``fresh``, ``ready``, ``held`` or ``base``.

    ``source_world``: how many ranks saved the source. Fresh has from_step 0. A base is step ``base_step`` of another
    job, all of it or the ``weights_only``.
    """

    kind: ClassVar[str] = "ATTEMPT"
    job_uid: str
    number: int
    uid: str
    launch_id: str
    round: int
    source: str
    source_world: int
    from_step: int
    schedule: Schedule
    why: str = ""
    base_job_uid: str = ""
    base_step: int = 0
    weights_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Sidecar: what JOIN number ``ask`` wanted of the attempt's source; empty when the attempt starts fresh."""

    kind: ClassVar[str] = "STAGED"
    attempt_uid: str
    ask: int
    shards: tuple[StagedShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Sidecar: all ranks said ok to ``phase``; or, not ok, the attempt is over and another round may be opened.

    ``misfit``: none would do better, since a rank is another trainer than the one that was saved.
    """

    kind: ClassVar[str] = "GO"
    attempt_uid: str
    phase: str
    ok: bool
    reason: str = ""
    misfit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Sidecar: lends slot number ``slot`` for one snapshot. ``bytes`` is its capacity."""

    kind: ClassVar[str] = "SLOT"
    slot: int
    seq: int
    path: str
    page_path: str
    lock_path: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """Sidecar: the job as the coordinator wants it now, and what it knows to be safe (0: nothing yet).

    ``extra_step``: all ranks save this step, due or not, and end there; 0: none. ``no_slots``: why this rank can have
    no slots of the size that it told; empty: it has them, or they are being made. ``trouble``: what costs this node a
    tier now; empty: nothing does.
    """

    kind: ClassVar[str] = "DESIRED"
    attempt: int
    attempt_uid: str
    schedule: Schedule
    protected_step: int
    ready_step: int
    extra_step: int = 0
    no_slots: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Sidecar: the request can't be met. ``code`` is one of ``ERROR_CODES``."""

    kind: ClassVar[str] = "ERROR"
    code: str
    text: str


ERROR_CODES = frozenset(
    {
        "busy",  # a live world holds the current attempt: ask again
        "unavailable",  # the coordinator or the log can't be reached: ask again
        "spec-mismatch",  # the job was started with another spec; text holds the diff
        "nothing-left",  # checkpoints exist and none can be restored; text lists what was tried
        "superseded",  # a later attempt has been opened
        "refused",  # this connection is not wanted: wrong job, wrong version, rank taken; text says which
    }
)

FromHook: TypeAlias = Hello | Open | Join | Verdict | Size | Sealed | Skipped | Ask | Bye
FromSidecar: TypeAlias = Welcome | Attempt | Staged | Go | Slot | Desired | Error
Frame: TypeAlias = FromHook | FromSidecar

_FRAMES: dict[str, type[Any]] = {
    frame.kind: frame
    for frame in (
        *(Hello, Open, Join, Verdict, Size, Sealed, Skipped, Ask, Bye),
        *(Welcome, Attempt, Staged, Go, Slot, Desired, Error),
    )
}
_NESTED: dict[tuple[str, str], type[Any]] = {
    ("OPEN", "world"): Member,
    ("JOIN", "wants"): Want,
    ("STAGED", "shards"): StagedShard,
    ("ATTEMPT", "schedule"): Schedule,
    ("DESIRED", "schedule"): Schedule,
}


def answers(frame: FromSidecar, kind: type[FromSidecar], *, uid: str, phase: str) -> bool:
    """Say whether a frame ends the wait for one of ``kind``: that frame, or the GO or ERROR that comes in its stead.

    ``uid`` is that of the attempt, or for ATTEMPT the launch id; ``phase`` counts for GO, and for STAGED it is the
    number of the ask.
    """
    match frame:
        case Error():
            return True
        case Attempt():
            return kind is Attempt and frame.launch_id == uid
        case Staged():
            return kind is Staged and frame.attempt_uid == uid and str(frame.ask) == phase
        case Go():
            return frame.attempt_uid == uid and (not frame.ok or (kind is Go and frame.phase == phase))
        case _:
            return False


def encode(frame: Frame) -> bytes:
    """Return the frame as length and JSON.

    Raises:
        WireError: the frame is longer than ``MAX_FRAME_BYTES``.
    """
    body = json.dumps({"kind": frame.kind, **asdict(frame)}, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"{frame.kind} frame of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def body_length(prefix: bytes) -> int:
    """Return the length of the body that follows these four bytes.

    Raises:
        WireError: it is larger than ``MAX_FRAME_BYTES``.
    """
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"peer announced a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
    return int(length)


def decode(body: bytes) -> Frame:
    """Return the frame in this JSON body.

    Raises:
        WireError: it is not JSON, of an unknown kind, or its fields are not those of the kind.
    """
    try:
        values = json.loads(body)
        kind = values.pop("kind")
        frame = _FRAMES[kind]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"not a frame of version {VERSION}: {body[:80]!r}") from error
    wanted = {field.name for field in fields(frame)}
    if set(values) != wanted:
        raise WireError(f"{kind} frame has fields {sorted(values)}; expected {sorted(wanted)}")
    try:
        built = frame(**{name: _value(kind, name, value) for name, value in values.items()})
    except TypeError as error:
        raise WireError(f"{kind} frame does not fit: {error}") from error
    _check_types(built)
    return built  # type: ignore[no-any-return]


def _value(kind: str, name: str, value: object) -> object:
    nested = _NESTED.get((kind, name))
    if nested is None:
        return value
    if isinstance(value, list):
        return tuple(
            nested(**{key: tuple(one) if isinstance(one, list) else one for key, one in item.items()}) for item in value
        )
    if isinstance(value, dict):
        return nested(**value)
    raise WireError(f"{kind}.{name} is {type(value).__name__}")


_SCALARS = {"int": int, "str": str, "bool": bool}


def _check_types(built: Any) -> None:  # noqa: ANN401 - any frame or value in it
    """Check the scalar fields; nested values are checked in turn."""
    for field in fields(built):
        value = getattr(built, field.name)
        wanted = _SCALARS.get(str(field.type))
        if wanted is not None and type(value) is not wanted:
            raise WireError(f"{type(built).__name__}.{field.name} is {value!r}; expected {field.type}")
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, (Member, StagedShard, Schedule, Want)):
                _check_types(item)
            if isinstance(built, Want) and field.name == "tensors" and type(item) is not str:
                raise WireError(f"Want.tensors has {item!r}; expected text")
