"""The restore decision: from which step an attempt begins. Pure.

Candidates are the steps of the current lineage that were not struck off and are not tainted: what nodes that answered
just now hold of its attempts, and the READY checkpoints from head up their parents. The newest is taken of which each
rank's shard is to be had and all that claim to have it give it the same digest; at the same step memory and object
store stand side by side. Each candidate passed over is told with the reason, and so is a choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from toprope.coordinator.roll import Node
from toprope.coordinator.wire import TIERS, Copy, RestoreShard, Source
from toprope.store.log.fold import Stretch, covers
from toprope.store.log.records import Taint

Shards = dict[int, list[tuple[Node | None, Copy]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A shard of a READY checkpoint as its manifest has it; ``key`` is that of its index."""

    key: str
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A READY checkpoint: its shards by rank, or why they can't be had (``damage``).

    ``seq`` None: it is the job's base, a READY of another job, whose attempts are not numbered here (``attempt`` 0).
    """

    seq: int | None
    attempt: int
    attempt_uid: str
    step: int
    shards: tuple[Stored, ...]
    damage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the log says about where an attempt may begin.

    ``worlds``: the number of ranks of each attempt, by its uid. ``sworn``: digests by rank that the log has for a held
    source, by attempt uid and step. ``readies``: how many READY checkpoints the log has, offered or not.
    """

    worlds: Mapping[str, int]
    lineage: tuple[Stretch, ...]
    offers: tuple[Offer, ...]
    struck: Mapping[tuple[str, int], str]
    taints: tuple[Taint, ...]
    sworn: Mapping[tuple[str, int], tuple[str, ...]]
    readies: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The step to begin from. ``ready`` is the seq of its READY; None: it is held. ``why`` is for people."""

    attempt_uid: str
    step: int
    ready: int | None
    digests: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """The log holds no checkpoint, and no step is complete anywhere: begin at step 0."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingLeft:
    """A checkpoint exists and none can be had: the job must stop. ``tried`` says what was wrong with each."""

    tried: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Why a candidate can't be had. ``incomplete``: a shard of it is nowhere, so that it never was a checkpoint."""

    reason: str
    incomplete: bool = False


def choose(question: Question, nodes: Sequence[Node], objects: Iterable[Copy]) -> Choice | Fresh | NothingLeft:
    """Return where to begin, from what living ``nodes`` hold and from receipts of ``objects`` that are not READY."""
    held = _by_step(question, nodes, objects)
    offers = {(offer.attempt_uid, offer.step): offer for offer in question.offers}
    tried: list[str] = []
    logged = {*offers, *question.sworn, *question.struck}
    bases = {at for at, offer in offers.items() if offer.seq is None}  # oldest, whatever their step
    for uid, step in sorted({*held, *logged}, key=lambda at: (at in bases, -at[1], at[0])):
        offer = offers.get((uid, step))
        found = _judge(question, uid, step, held=held.get((uid, step), {}), offer=offer)
        if isinstance(found, Passed):
            tried.append(f"step {step} of attempt {uid[:8]}: {found.reason}")
            logged |= set() if found.incomplete else {(uid, step)}
            continue
        return _chosen(uid, step, offer=offer, shards=found, tried=tried)
    if not logged and not question.readies:
        return Fresh(why="; ".join(("the log holds no checkpoint", *(f"passed over {line}" for line in tried))))
    if question.readies:
        tried.append(f"the log has {question.readies} READY, of which {len(offers)} may be begun from and were tried")
    return NothingLeft(tried=tuple(tried))


def _by_step(question: Question, nodes: Sequence[Node], objects: Iterable[Copy]) -> dict[tuple[str, int], Shards]:
    stretches = {stretch.attempt_uid: stretch for stretch in question.lineage}
    held: dict[tuple[str, int], Shards] = defaultdict(lambda: defaultdict(list))
    everything: Iterator[tuple[Node | None, Copy]] = (
        (owner, copy)
        for owner, copies in (*((node, node.inventory.copies) for node in nodes), (None, tuple(objects)))
        for copy in copies
        if (copy.tier == "object") == (owner is None)
    )
    for node, copy in everything:
        stretch = stretches.get(copy.attempt_uid)
        if stretch is not None and copy.world == question.worlds.get(copy.attempt_uid) and stretch.holds(copy.step):
            held[copy.attempt_uid, copy.step][copy.rank].append((node, copy))
    return held


def _judge(
    question: Question, uid: str, step: int, *, held: Shards, offer: Offer | None
) -> tuple[RestoreShard, ...] | Passed:
    if (uid, step) in question.struck:
        return Passed(reason=f"struck off before: {question.struck[uid, step]}")
    attempts = {copy.attempt for copies in held.values() for _, copy in copies} | ({offer.attempt} if offer else set())
    for taint in question.taints:
        if any(covers(taint, attempt=attempt, step=step) for attempt in attempts):
            return Passed(reason=f"tainted: {taint.reason}")
    stored: tuple[Stored, ...] = offer.shards if offer is not None and not offer.damage else ()
    damage = f"; its READY checkpoint: {offer.damage}" if offer is not None and offer.damage else ""
    sworn = question.sworn.get((uid, step)) or tuple(one.digest for one in stored)
    shards = []
    for rank in range(question.worlds.get(uid, len(sworn))):
        copies = held.get(rank, [])
        if sworn:
            copies = [(node, copy) for node, copy in copies if copy.digest == sworn[rank]]
        shard = _shard(rank, copies, stored[rank] if rank < len(stored) else None)
        if isinstance(shard, Passed):
            return Passed(reason=shard.reason + damage, incomplete=shard.incomplete)
        shards.append(shard)
    return tuple(shards)


def _shard(rank: int, copies: list[tuple[Node | None, Copy]], stored: Stored | None) -> RestoreShard | Passed:
    known = {(copy.digest, copy.bytes) for _, copy in copies} | ({(stored.digest, stored.bytes)} if stored else set())
    if not known:
        reason = f"the shard of rank {rank} is on no node that answers, and not in the object store"
        return Passed(reason=reason, incomplete=True)
    if len(known) > 1:
        digests = ", ".join(sorted(digest for digest, _ in known))
        return Passed(reason=f"the copies of the shard of rank {rank} have different digests: {digests}")
    ((digest, size),) = known
    sources = [
        Source(tier=copy.tier, node=node.name, url=node.url)
        if node is not None
        else Source(tier="object", key=copy.index_key)
        for node, copy in copies
    ]
    if stored is not None:
        sources.append(Source(tier="object", key=stored.key))
    unique = sorted(set(sources), key=lambda source: (TIERS.index(source.tier), source.node, source.key))
    return RestoreShard(rank=rank, bytes=size, digest=digest, sources=tuple(unique))


def _chosen(
    uid: str, step: int, *, offer: Offer | None, shards: tuple[RestoreShard, ...], tried: Sequence[str]
) -> Choice:
    ready = offer.seq if offer is not None and not offer.damage else None
    where = sorted({shard.sources[0].tier for shard in shards}, key=TIERS.index)
    kind = "READY, " if ready is not None else "the base, " if offer is not None and offer.seq is None else ""
    why = f"step {step} is the newest that can be had ({kind}from {', '.join(where)})"
    return Choice(
        attempt_uid=uid,
        step=step,
        ready=ready,
        digests=tuple(shard.digest for shard in shards),
        why="; ".join((why, *(f"passed over {line}" for line in tried))),
    )


def shards_of(
    digests: Sequence[str],
    *,
    attempt_uid: str,
    step: int,
    nodes: Sequence[Node],
    objects: Iterable[Copy],
    stored: Sequence[Stored] = (),
) -> tuple[RestoreShard, ...]:
    """Return where the shards of an attempt's source are now: those copies that have the digests in the log."""
    question = Question(
        worlds={attempt_uid: len(digests)},
        lineage=(Stretch(attempt_uid=attempt_uid, after=0, upto=step),),
        offers=(),
        struck={},
        taints=(),
        sworn={},
    )
    held = _by_step(question, nodes, objects).get((attempt_uid, step), {})
    shards = []
    for rank, digest in enumerate(digests):
        copies = [(node, copy) for node, copy in held.get(rank, []) if copy.digest == digest]
        shard = _shard(rank, copies, stored[rank] if rank < len(stored) else None)
        missing = RestoreShard(rank=rank, bytes=0, digest=digest, sources=())
        shards.append(missing if isinstance(shard, Passed) else shard)
    return tuple(shards)
