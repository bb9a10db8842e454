"""What sidecar and coordinator say to each other: two retained documents and one request.

*Inventory* (up): what a node holds and where its ranks stand. *Desired* (down): how the coordinator wants the job to
be. Both are states, not events: the newest version replaces all before it, so a lost, doubled or reordered message
does no harm, and whoever restarts rebuilds its view by reading. They travel as retained MQTT messages and, without a
broker, by HTTP. *OpenRequest* asks for an attempt; asked twice with the same launch id and round, it gets the same one.

*Health* is what a coordinator says of itself, as leader or as one that stands by.

Topics: ``toprope/<job>/nodes/<node>/inventory``, ``toprope/<job>/nodes/<node>/presence`` (last will),
``toprope/<job>/nodes/<node>/desired`` (what this node needs of it), ``toprope/<job>/desired`` (the whole),
``toprope/<job>/coordinator/presence`` (not retained). Coordinator HTTP:
``PUT /v1/nodes/<node>/inventory`` answers desired; ``POST /v1/attempts`` takes an OpenRequest and answers OpenAnswer;
``POST /v1/changes`` takes a ChangeRequest and answers ChangeAnswer (409: it may not be made, 421: this one serves
another store, which is named, 503: not now);
``PUT /v1/nodes/<node>/dead`` declares a node that does not answer dead, with its memory (204; 404: there is none,
503: not now);
``GET /v1/desired?node=N`` (what N needs of it; without, the whole),
``GET /v1/status``, ``GET /healthz``, ``GET /metrics``; one that stands by answers 409, and the leader's url in the
header ``Toprope-Leader``, to all but the last two. Sidecar HTTP:
``GET /v1/inventory?after=V&wait_s=S`` (long poll), ``GET /v1/copies/<attempt_uid>/<step>/<rank>?tier=T`` (the image, or
a ``Range`` of it), ``.../parts?tier=T`` (what lies where in it, each part's digest), ``GET /v1/adopted`` (the attempts
that it has adopted),
``POST /v1/copies/<attempt_uid>/<step>/<rank>/ack``, ``GET /healthz``, ``GET /metrics``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from toprope.store.log.records import Attempt, AttemptFacts

FORMAT = 4
MAX_INVENTORY_BYTES = 256 * 1024
MAX_DESIRED_BYTES = 16 * 1024 * 1024
TROUBLES_MAX = 16
MAX_OPEN_BYTES = 16 * 1024 * 1024
MAX_HEALTH_BYTES = 4096

LEADER_HEADER = "Toprope-Leader"
Role: TypeAlias = Literal["follower", "claiming", "leader"]
Tier: TypeAlias = Literal["memory", "peer", "local", "object"]
TIERS: tuple[Tier, ...] = ("memory", "peer", "local", "object")
"""Nearest first: the order in which a restore tries them."""


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Holds no cycle, and a large job has a million of them: the garbage collector need not look at any."""


def _format() -> int:
    """Return the format, which is a default that is said all the same."""
    return FORMAT


class RankVerdict(_Document, frozen=True, kw_only=True):
    """How far a rank has come with a restore: ``phase`` it has finished, or in which it failed.

    ``misfit``: the trainer can't take what was verified, being another than the one that was saved. ``unanswered``:
    those who have what is needed did not answer in time. With either, the source is not to blame.
    """

    attempt_uid: str
    phase: Literal["staged", "applied"]
    ok: bool
    reason: str = ""
    misfit: bool = False
    unanswered: bool = False


class StepAsk(_Document, frozen=True, kw_only=True):
    """A rank is about to end. It has ended step ``after``; all should save the later ``step`` and end there."""

    after: int
    step: int


class RankState(_Document, frozen=True, kw_only=True):
    """A rank that this node serves. ``lock_held``: its process lives and may write into its slots.

    ``state_bytes`` is the size that it announced (0: none yet). ``ask`` is about the attempt ``attempt_uid``, and
    ``extra_step`` is the step of it that the coordinator has named for all to save and end at, as far as is known here
    (0: none).
    """

    rank: int
    world: int
    launch_id: str
    attempt_uid: str
    step: int
    lock_held: bool
    state_bytes: int = 0
    verdict: RankVerdict | None = None
    ask: StepAsk | None = None
    extra_step: int = 0


class Copy(_Document, frozen=True, kw_only=True):
    """A shard that this node holds and whose digest it has checked. With tier ``object`` it is a receipt.

    ``bytes`` and ``digest`` are those of the rank's whole image in each tier. ``key`` (local path or object key),
    ``nonce``, ``index_key`` and ``index_sha256`` are set for tier object, and ``stored_bytes`` and ``stored_digest``:
    those of the object ``key`` as it lies there, which may be packed, or hold only what is new. ``rests_on`` are the
    keys of objects of other ranks, written for the same step, that hold tensors of this one.
    """

    attempt: int
    attempt_uid: str
    step: int
    rank: int
    world: int
    tier: Tier
    bytes: int
    digest: str
    key: str = ""
    nonce: str = ""
    index_key: str = ""
    index_sha256: str = ""
    stored_bytes: int = 0
    stored_digest: str = ""
    rests_on: tuple[str, ...] = ()


class Skip(_Document, frozen=True, kw_only=True):
    """A due step of which this rank has no snapshot, or whose snapshot was dropped."""

    attempt_uid: str
    step: int
    rank: int
    reason: str


class ReadBack(_Document, frozen=True, kw_only=True):
    """An object that this node has read past the page cache on request. ``ok``: it had the digest asked for."""

    key: str
    digest: str
    ok: bool
    found: str = ""


class Provisional(_Document, frozen=True, kw_only=True):
    """An attempt that is decided while the log can't be reached: the record to append, and the facts that it names.

    ``parent`` is the uid of the attempt before it. It may be opened once every node of the old and of the new world has
    adopted it: written down that it will adopt no other attempt of this number. ``before`` are those that must come
    into the log before it, in order, none of which has any itself: a node may know them from nowhere else.
    """

    job_uid: str
    parent: str
    record: Attempt
    facts: AttemptFacts
    before: tuple[Provisional, ...] = ()

    @property
    def number(self) -> int:
        """The attempt's number."""
        return self.record.attempt

    @property
    def uid(self) -> str:
        """The attempt's uid."""
        return self.record.uid


class Adoptions(_Document, frozen=True, kw_only=True):
    """The attempts that a node has adopted and that are not in the log yet, as far as it knows."""

    format: int = msgspec.field(default_factory=_format)
    attempts: tuple[Provisional, ...]


class Adopted(_Document, frozen=True, kw_only=True):
    """The name of one of these, as the inventory has it."""

    number: int
    uid: str


class Inventory(_Document, frozen=True, kw_only=True):
    """What one sidecar holds. ``(boot_id, incarnation)`` names its life; ``version`` grows within it.

    ``incarnation`` is drawn by each sidecar process at its start, ``boot_id`` by each memory. ``reading``: it may hold
    more than it lists, for it has not read yet all that was sealed or that an earlier life left; ask again.
    """

    format: int = msgspec.field(default_factory=_format)
    job: str
    job_uid: str
    node: str
    boot_id: str
    incarnation: str
    version: int
    url: str
    domain: dict[str, str]
    ranks: tuple[RankState, ...] = ()
    copies: tuple[Copy, ...] = ()
    skipped: tuple[Skip, ...] = ()
    read_backs: tuple[ReadBack, ...] = ()
    reading: bool = False
    troubles: tuple[str, ...] = ()
    """What costs this node a tier now, for people: what does not fit, and what fails or hangs."""
    no_room_for: tuple[str, ...] = ()
    """Nodes whose copies don't fit into this one's memory: it was tried."""
    adopted: tuple[Adopted, ...] = ()


class Presence(_Document, frozen=True, kw_only=True):
    """Whether a sidecar process says that it lives; its last will says that it does not. A hint, never a verdict."""

    node: str
    boot_id: str
    incarnation: str
    alive: bool


class Member(_Document, frozen=True, kw_only=True):
    """Where a rank sits."""

    rank: int
    node: str
    boot_id: str


class Source(_Document, frozen=True, kw_only=True):
    """A place where a shard can be had: a node's tier by its url, or the object store by the key of its index."""

    tier: Tier
    node: str = ""
    url: str = ""
    key: str = ""


class RestoreShard(_Document, frozen=True, kw_only=True):
    """A shard of an attempt's source, with the places where it can be had, best first.

    ``bytes`` is 0 while there are none: the log has the digest alone, and who has a copy of it knows its length.
    """

    rank: int
    bytes: int
    digest: str
    sources: tuple[Source, ...]


class BaseView(_Document, frozen=True, kw_only=True):
    """The job's base, of which ``restore`` names the shards: the step of another job, all of it or the weights only."""

    job_uid: str
    step: int
    weights_only: bool


class AttemptView(_Document, frozen=True, kw_only=True):
    """The current attempt. ``phase`` is what all its ranks have reached.

    ``opened``: being staged; ``staged``: all ranks have verified what they need and may apply it; ``applied``: all
    have applied it and train; ``failed``: it will not come to that, ``reason`` says why, open another round; with
    ``misfit`` that would fail likewise, since the trainer is another than the one that was saved.
    ``source_attempt_uid`` and ``from_step`` name the snapshot in ``restore``; with source ``base`` it is ``base``.
    ``provisional``: it is not in the log yet.
    """

    number: int
    uid: str
    launch_id: str
    round: int
    world: tuple[Member, ...]
    source: Literal["fresh", "ready", "held", "base"]
    source_attempt_uid: str
    from_step: int
    restore: tuple[RestoreShard, ...]
    phase: Literal["opened", "staged", "applied", "failed"]
    reason: str = ""
    misfit: bool = False
    base: BaseView | None = None
    provisional: bool = False


class Cadence(_Document, frozen=True, kw_only=True):
    """Step s is due if ``s > from_step`` and ``(s - from_step) % every == 0``, with one ``every`` for each tier.

    Each is a power of two times the one before (memory and peer, local, object).
    """

    from_step: int
    every: int
    local_every: int
    object_every: int


class Placement(_Document, frozen=True, kw_only=True):
    """``holder`` pulls a copy of each snapshot of ``owner``, from ``url``."""

    owner: str
    holder: str
    url: str


class Kept(_Document, frozen=True, kw_only=True):
    """A step whose memory, peer and local copies may not be reused."""

    attempt_uid: str
    step: int


class ReadBackTask(_Document, frozen=True, kw_only=True):
    """``node`` is to read this object past the page cache and say what digest it has."""

    node: str
    key: str
    bytes: int
    digest: str


class Desired(_Document, frozen=True, kw_only=True):
    """How the coordinator of ``term`` wants the job to be. The greatest (term, version) wins."""

    format: int = msgspec.field(default_factory=_format)
    job: str
    job_uid: str
    term: int
    version: int
    url: str
    cadence: Cadence
    attempt: AttemptView | None = None
    placement: tuple[Placement, ...] = ()
    keep: tuple[Kept, ...] = ()
    dropped: tuple[Kept, ...] = ()
    """Steps that can't be protected, as a rank has none or its holder has gone on: nothing waits for their copies."""
    read_backs: tuple[ReadBackTask, ...] = ()
    aim: int = 0
    """A step of the current attempt that all ranks hold and that takes long to copy: who copies takes it before later
    ones, and nobody gives it up; 0: none."""
    protected_step: int = 0
    ready_step: int = 0
    extra_step: int = 0
    """A step of the current attempt that all ranks save, due or not, and after which they end; 0: none."""
    logged: int = 0
    """The number of the newest attempt that is in the log."""
    proposed: Provisional | None = None
    """An attempt that all nodes that it concerns are to adopt."""
    fenced: tuple[str, ...] = ()
    """Attempts by uid that were opened while the log could not be reached and that can't be entered into it: over."""
    report_every_s: float = 0.0
    """In so long a node has one turn to tell of its copies, since there are so many nodes; 0: it tells at once."""
    refused: dict[str, str] = {}
    """Nodes whose sidecar is not wanted, by incarnation, each with the reason."""


class Health(_Document, frozen=True, kw_only=True):
    """What a coordinator says of itself. ``url`` is its own.

    ``leader`` is the url of the coordinator that was elected last, as far as this one knows, in ``term``. ``log_s``: so
    long ago it has read the log to its end.
    """

    format: int = msgspec.field(default_factory=_format)
    job: str
    job_uid: str
    role: Role
    url: str
    term: int
    leader: str
    log_s: float


class OpenRequest(_Document, frozen=True, kw_only=True):
    """A launch asks for an attempt. ``spec`` is what the state depends on."""

    job: str
    launch_id: str
    round: int
    world: tuple[Member, ...]
    spec: dict[str, Any]
    versions: dict[str, str]


class OpenAnswer(_Document, frozen=True, kw_only=True):
    """The attempt, or an error: ``code`` is one of ``toprope.trainer_hooks.link.wire.ERROR_CODES``."""

    attempt: AttemptView | None = None
    code: str = ""
    text: str = ""


class DocumentError(Exception):
    """A document that is too long, not JSON, or not of this format."""


class _Peek(msgspec.Struct, frozen=True):
    format: int | None = None


_D = TypeVar("_D", Inventory, Presence, Desired, Health, OpenRequest, OpenAnswer, Adoptions)


def encode(document: msgspec.Struct) -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(document)


def decode(body: bytes, kind: type[_D], *, limit: int) -> _D:
    """Return the document in these bytes, which come from the network.

    Raises:
        DocumentError: it is longer than ``limit`` bytes or not a document of that kind and format.
    """
    if len(body) > limit:
        raise DocumentError(f"{kind.__name__} of {len(body)} bytes; the limit is {limit}")
    try:
        said = msgspec.json.decode(body, type=_Peek).format
        if said not in (None, FORMAT):
            raise DocumentError(
                f"{kind.__name__} of format {said}, and this version speaks format {FORMAT}: "
                "run the same version of Toprope on all nodes and in the coordinator"
            )
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise DocumentError(f"not a {kind.__name__} of format {FORMAT}: {error}") from error
