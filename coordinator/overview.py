"""What is safe where, as one value: what ``GET /v1/status`` answers and ``ckpt status`` shows. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from toprope.coordinator.moment import Moment
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import Cadence, Tier

# What is written for each rank and node is kept from the collector (``gc=False``): made by the ten thousand, they would
# let it look through all that the coordinator knows, while no decision can be made.
_STEPS_TOLD = 3
_RANKS_TOLD = 8
_T = TypeVar("_T")


class RankLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A rank: where it sits, the last step it told of, and the newest step of it in each tier (0: none).

    ``alive``: its node is, with the memory that it had; ``lock_held``: a process of it lives there and has slots.
    """

    rank: int
    node: str
    alive: bool
    lock_held: bool
    step: int
    memory: int
    peer: int
    local: int
    object: int


class NodeLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A node: whether it is there, for whom it holds copies, and how much it holds."""

    node: str
    alive: bool
    silent_s: float
    url: str
    boot_id: str
    domain: str
    holds_for: tuple[str, ...]
    bytes: int


class AttemptLine(msgspec.Struct, frozen=True, kw_only=True):
    """The current attempt. ``provisional``: it was opened without the log, and is not in it yet."""

    number: int
    uid: str
    phase: str
    reason: str
    from_step: int
    world: int
    why: str
    provisional: bool


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A job on one screen. ``broker`` is ``connected``, ``away`` or ``none``.

    ``copies`` are wanted of each snapshot beside the one in its own node's memory; what is protected survives as many
    losses as ``survives`` says, of nodes or of whole domains, whichever they are.
    """

    job: str
    job_uid: str
    term: int
    url: str
    standbys: tuple[str, ...]
    broker: str
    cadence: Cadence
    attempt: AttemptLine | None
    ranks: tuple[RankLine, ...]
    nodes: tuple[NodeLine, ...]
    copies: int
    survives: int
    protected_step: int
    protected_age_s: float
    ready_step: int
    log_away_s: float
    alarms: tuple[str, ...]


Slices: TypeAlias = Generator[None, None, _T]
"""Work of which a few milliseconds are done whenever it is asked to go on: decisions are made in between."""


def overview(known: Moment) -> Slices[Overview]:
    """Work out what the coordinator knows, as it is shown."""
    state, progress = known.log_view.state, known.progress
    attempt = state.attempt
    ranks = yield from _ranks(known)
    alarms = (*known.outage, *_alarms(known), *_skips(known, ranks))
    yield
    return Overview(
        job=known.settings.job,
        job_uid=state.job_uid,
        term=known.term,
        url=known.settings.url,
        standbys=known.standbys,
        broker=known.broker,
        cadence=known.settings.cadence,
        attempt=None
        if attempt is None
        else AttemptLine(
            number=attempt.attempt,
            uid=attempt.uid,
            phase=progress.phase,
            reason=progress.reason,
            from_step=attempt.from_step,
            world=attempt.world_size,
            why=attempt.why,
            provisional=known.provisional,
        ),
        ranks=ranks,
        nodes=(yield from _nodes(known)),
        copies=known.settings.copies,
        survives=known.plan.survives,
        protected_step=known.protected_step,
        protected_age_s=round(known.protected_age_s, 1),
        ready_step=known.log_view.ready_step,
        log_away_s=round(known.log_away_s, 1),
        alarms=alarms,
    )


def _ranks(known: Moment) -> Slices[tuple[RankLine, ...]]:
    facts, attempt = known.log_view.facts, known.log_view.state.attempt
    if facts is None or attempt is None:
        return ()
    newest = yield from _newest(known, attempt.uid, attempt.world_size)
    boots = {node.name: node.inventory.boot_id for node in known.nodes if node.alive}
    sits = {member.rank: member.node for member in facts.world}
    steps: dict[int, int] = {}
    locked: set[int] = set()
    for nodes in _sliced(known.nodes, 128):
        yield
        for node in nodes:
            for one in node.inventory.ranks:
                if one.attempt_uid == attempt.uid and sits.get(one.rank) == node.name:
                    steps[one.rank] = max(one.step, steps.get(one.rank, 0))
                    if one.lock_held and node.alive:
                        locked.add(one.rank)
    lines: list[RankLine] = []
    for world in _sliced(facts.world, 1024):
        yield
        lines += [
            RankLine(
                rank=member.rank,
                node=member.node,
                alive=boots.get(member.node) == member.boot_id,
                lock_held=member.rank in locked,
                step=steps.get(member.rank, 0),
                memory=newest["memory"].get(member.rank, 0),
                peer=newest["peer"].get(member.rank, 0),
                local=newest["local"].get(member.rank, 0),
                object=newest["object"].get(member.rank, 0),
            )
            for member in world
        ]
    return tuple(lines)


def _newest(known: Moment, attempt_uid: str, world: int) -> Slices[Mapping[Tier, Mapping[int, int]]]:
    """Return the newest step of each rank in each tier; what was in a node's memory or on its disk is gone with it."""
    newest: dict[Tier, dict[int, int]] = {"memory": {}, "peer": {}, "local": {}, "object": {}}
    for step in sorted(known.stored):
        yield
        newest["object"].update(dict.fromkeys(known.stored[step], step))
    for nodes in _sliced(known.nodes, 32):
        yield
        for node in nodes:
            for copy in node.inventory.copies:
                if copy.attempt_uid == attempt_uid and copy.world == world and (node.alive or copy.tier == "object"):
                    of_tier = newest[copy.tier]
                    if copy.step > of_tier.get(copy.rank, 0):
                        of_tier[copy.rank] = copy.step
    return newest


def _nodes(known: Moment) -> Slices[tuple[NodeLine, ...]]:
    holds_for: dict[str, list[str]] = {}
    for place in known.placement:
        holds_for.setdefault(place.holder, []).append(place.owner)
    lines: list[NodeLine] = []
    for nodes in _sliced(known.nodes, 128):
        yield
        lines += [_node(node, known.now_s, holds_for=tuple(holds_for.get(node.name, ()))) for node in nodes]
    yield
    return tuple(lines)


def _sliced(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    return (items[at : at + length] for at in range(0, len(items), length))


def _node(node: Node, now_s: float, *, holds_for: tuple[str, ...]) -> NodeLine:
    return NodeLine(
        node=node.name,
        alive=node.alive,
        silent_s=round(now_s - node.heard_s, 1),
        url=node.url,
        boot_id=node.inventory.boot_id,
        domain=",".join(f"{key}={value}" for key, value in node.domain),
        holds_for=holds_for,
        bytes=sum(copy.bytes for copy in node.inventory.copies if copy.tier != "object"),
    )


def _alarms(known: Moment) -> tuple[str, ...]:
    alarms = []
    attempt, unmet, cadence = known.log_view.state.attempt, known.plan.unmet, known.settings.cadence
    if known.progress.phase == "failed" and attempt is not None:
        alarms.append(f"attempt {attempt.attempt} failed: {known.progress.reason}")
    alarms += [f"node {node.name} does not answer" for node in known.nodes if not node.alive]
    alarms += [f"snapshots of node {owner} are not safe from its loss: {why}" for owner, why in sorted(unmet.items())]
    reached = _reached(known)
    behind = _lag(known, known.protected_step, reached, interval=cadence.every)
    if behind and not unmet:
        alarms.append(f"protection is {behind} steps behind the ranks, and {known.protected_age_s:.0f} s old")
    unready = _lag(known, known.log_view.ready_step, reached, interval=cadence.object_every)
    if unready:
        alarms.append(f"READY is {unready} steps behind the ranks: is the object store full or away?")
    if known.broker == "away":
        alarms.append("the broker is away; documents go by HTTP")
    alarms += [f"node {node.name}: {text}" for node in known.nodes if node.alive for text in node.inventory.troubles]
    alarms += [known.advice] if known.advice else []
    return tuple(alarms)


def _skips(known: Moment, lines: Sequence[RankLine]) -> list[str]:
    """Return of the newest steps that some ranks have not saved, nor any since, which ranks these are, and why."""
    attempt = known.log_view.state.attempt
    told = [
        skip
        for node in known.nodes
        if node.alive and attempt is not None
        for skip in node.inventory.skipped
        if skip.attempt_uid == attempt.uid
    ]
    ranks = {skip.rank for skip in told}
    saved = {one.rank: max(one.memory, one.peer, one.local, one.object) for one in lines if one.rank in ranks}
    skipped: dict[int, dict[int, str]] = {}
    for skip in told:
        if saved.get(skip.rank, 0) < skip.step:
            skipped.setdefault(skip.step, {})[skip.rank] = skip.reason
    return [
        f"step {step} was not saved by {_ranks_text(sorted(reasons))}: {', '.join(sorted(set(reasons.values())))}"
        for step, reasons in sorted(skipped.items())[-_STEPS_TOLD:]
    ]


def _ranks_text(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:_RANKS_TOLD]))
    more = f" and {len(ranks) - _RANKS_TOLD} more" if len(ranks) > _RANKS_TOLD else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"


def _reached(known: Moment) -> int:
    """Return the newest step that a rank of the current attempt has told of."""
    attempt = known.log_view.state.attempt
    states = (state for node in known.nodes if node.alive for state in node.inventory.ranks)
    return max((state.step for state in states if attempt and state.attempt_uid == attempt.uid), default=0)


def _lag(known: Moment, step: int, reached: int, *, interval: int) -> int:
    """Return by how many steps ``step`` lags behind the ranks, when that is more than two intervals; else 0."""
    attempt = known.log_view.state.attempt
    lag = 0 if attempt is None else reached - max(step, attempt.from_step)
    return lag if lag > 2 * interval else 0
