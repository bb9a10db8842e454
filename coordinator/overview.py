"""What is safe where, as one value: what ``GET /v1/status`` answers and ``ckpt status`` shows. Pure."""

from __future__ import annotations

import msgspec

from toprope.coordinator.core import Core
from toprope.coordinator.protection import Safety
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import Cadence, Tier

_STEPS_TOLD = 3
_RANKS_TOLD = 8


class RankLine(msgspec.Struct, frozen=True, kw_only=True):
    """A rank: where it sits, the last step it told of, and the newest step of it in each tier (0: none)."""

    rank: int
    node: str
    alive: bool
    step: int
    memory: int
    peer: int
    local: int
    object: int


class NodeLine(msgspec.Struct, frozen=True, kw_only=True):
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


def overview(core: Core, *, broker: str, standbys: tuple[str, ...] = (), now_s: float) -> Overview:
    """Return what the coordinator knows."""
    safety = core.safety()
    attempt = core.log_view.state.attempt
    age_s = now_s - core.protected_at_s if attempt is not None else 0.0
    return Overview(
        job=core.settings.job,
        job_uid=core.log_view.state.job_uid,
        term=core.term,
        url=core.settings.url,
        standbys=standbys,
        broker=broker,
        cadence=core.settings.cadence,
        attempt=None
        if attempt is None
        else AttemptLine(
            number=attempt.attempt,
            uid=attempt.uid,
            phase=core.progress.phase,
            reason=core.progress.reason,
            from_step=attempt.from_step,
            world=attempt.world_size,
            why=attempt.why,
            provisional=core.provisional,
        ),
        ranks=_ranks(core, safety),
        nodes=_nodes(core, now_s),
        copies=core.placing.copies,
        survives=core.placing.plan.survives,
        protected_step=safety.protected_step if safety is not None else 0,
        protected_age_s=round(age_s, 1),
        ready_step=core.log_view.ready_step,
        log_away_s=round(core.outage.away_s(now_s), 1),
        alarms=(*_outage_alarms(core, now_s), *_alarms(core, safety, broker=broker, age_s=age_s)),
    )


def _ranks(core: Core, safety: Safety | None) -> tuple[RankLine, ...]:
    facts, attempt = core.log_view.facts, core.log_view.state.attempt
    if safety is None or facts is None or attempt is None:
        return ()
    lines = []
    held = [copy for node in core.roll.alive() for copy in node.inventory.copies]
    newest: dict[tuple[int, Tier], int] = {}
    for copy in (*held, *core.object_copies()):
        if copy.attempt_uid == attempt.uid and copy.world == attempt.world_size:
            newest[copy.rank, copy.tier] = max(copy.step, newest.get((copy.rank, copy.tier), 0))
    for member in facts.world:
        node = core.roll.nodes.get(member.node)
        there = node is not None and node.alive and node.inventory.boot_id == member.boot_id
        states = node.inventory.ranks if node is not None else ()
        step = max((one.step for one in states if (one.rank, one.attempt_uid) == (member.rank, attempt.uid)), default=0)
        lines.append(
            RankLine(
                rank=member.rank,
                node=member.node,
                alive=there,
                step=step,
                memory=newest.get((member.rank, "memory"), 0),
                peer=newest.get((member.rank, "peer"), 0),
                local=newest.get((member.rank, "local"), 0),
                object=newest.get((member.rank, "object"), 0),
            )
        )
    return tuple(lines)


def _nodes(core: Core, now_s: float) -> tuple[NodeLine, ...]:
    holds_for: dict[str, list[str]] = {}
    for place in () if core.desired is None else core.desired.placement:
        holds_for.setdefault(place.holder, []).append(place.owner)
    return tuple(_node(node, now_s, holds_for=tuple(holds_for.get(node.name, ()))) for node in core.roll.all())


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


def _outage_alarms(core: Core, now_s: float) -> tuple[str, ...]:
    """Return what to say of a log that can't be reached, and of attempts that are not in it."""
    alarms = []
    outage, attempt = core.outage, core.log_view.state.attempt
    if away_s := outage.away_s(now_s):
        goes_on = "restores from memory go on" if outage.proceeds else "restores wait for it (--on-log-outage wait)"
        alarms.append(f"the job log has been away for {away_s:.0f} s: nothing becomes READY, {goes_on}: {outage.why}")
    if core.provisional and attempt is not None:
        alarms.append(f"attempt {attempt.attempt} was opened without the log, and is not in it yet")
    if (one := outage.next_to_open(core.log_view)) is not None and away_s:
        nodes = ", ".join(outage.missing(one, core.log_view))
        alarms.append(f"attempt {one.number} waits for these nodes to adopt it: {nodes}")
    alarms += outage.untold(core.logged, core.roll.nodes).values()
    alarms += [outage.fate(uid) for uid in outage.fenced]
    return tuple(alarms)


def _alarms(core: Core, safety: Safety | None, *, broker: str, age_s: float) -> tuple[str, ...]:
    alarms = []
    attempt = core.log_view.state.attempt
    if core.progress.phase == "failed" and attempt is not None:
        alarms.append(f"attempt {attempt.attempt} failed: {core.progress.reason}")
    alarms += [f"node {node.name} does not answer" for node in core.roll.all() if not node.alive]
    alarms += [
        f"snapshots of node {owner} are not safe from its loss: {why}"
        for owner, why in sorted(core.placing.plan.unmet.items())
    ]
    behind = _behind(core, safety)
    if behind and not core.placing.plan.unmet:
        alarms.append(f"protection is {behind} steps behind the ranks, and {age_s:.0f} s old")
    unready = _lag(core, core.log_view.ready_step, interval=core.settings.cadence.object_every)
    if unready:
        alarms.append(f"READY is {unready} steps behind the ranks: is the object store full or away?")
    if broker == "away":
        alarms.append("the broker is away; documents go by HTTP")
    alarms += [f"node {node.name}: {text}" for node in core.roll.alive() for text in node.inventory.troubles]
    alarms += [core.aim.advice(core.settings.cadence.every)] if core.aim.steps_missed else []
    return (*alarms, *_skips(core))


def _skips(core: Core) -> list[str]:
    """Return of the newest steps that some ranks have not saved which ranks these are, and why."""
    attempt = core.log_view.state.attempt
    skipped: dict[int, dict[int, str]] = {}
    for node in core.roll.alive():
        for skip in node.inventory.skipped:
            if attempt is not None and skip.attempt_uid == attempt.uid:
                skipped.setdefault(skip.step, {})[skip.rank] = skip.reason
    return [
        f"step {step} was not saved by {_ranks_text(sorted(reasons))}: {', '.join(sorted(set(reasons.values())))}"
        for step, reasons in sorted(skipped.items())[-_STEPS_TOLD:]
    ]


def _ranks_text(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:_RANKS_TOLD]))
    more = f" and {len(ranks) - _RANKS_TOLD} more" if len(ranks) > _RANKS_TOLD else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"


def _behind(core: Core, safety: Safety | None) -> int:
    """Return by how many steps protection lags, when that is more than two intervals; else 0."""
    protected = safety.protected_step if safety is not None else 0
    return _lag(core, protected, interval=core.settings.cadence.every)


def _lag(core: Core, reached: int, *, interval: int) -> int:
    """Return by how many steps something lags behind the ranks, when that is more than two intervals; else 0."""
    attempt = core.log_view.state.attempt
    if attempt is None:
        return 0
    steps = [
        state.step for node in core.roll.alive() for state in node.inventory.ranks if state.attempt_uid == attempt.uid
    ]
    lag = max(steps, default=0) - max(reached, attempt.from_step)
    return lag if lag > 2 * interval else 0
