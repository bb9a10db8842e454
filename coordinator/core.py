"""The coordinator as a state machine: events in, effects out; no I/O, no clock, no chance.

Its view is a function of the job log (``LogView``) and of what the nodes say (``Roll``). After each event it looks at
both and says how the job is wanted to be: which attempt in which phase, who holds copies, what is kept, what is to be
read back, and which step goes to READY.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec

from toprope.coordinator import leaving, phases, protection
from toprope.coordinator.aim import Aim
from toprope.coordinator.attempt_view import attempt_view
from toprope.coordinator.commits import Commits
from toprope.coordinator.effects import Effect, Enter, Learn, Probe, Publish, Say, Tidy
from toprope.coordinator.events import (
    Asked,
    CommitFailed,
    Connected,
    Declared,
    EnterEnded,
    Event,
    Heard,
    Hinted,
    Learned,
    LogMoved,
    LogReached,
    OpenFailed,
    Prepared,
    Probed,
    ReadHere,
    SeenDesired,
    Ticked,
)
from toprope.coordinator.holdings import Holdings
from toprope.coordinator.log_view import LogView
from toprope.coordinator.outage import Outage
from toprope.coordinator.pacing import SILENT_ROUNDS, Asking, report_every_s
from toprope.coordinator.placing import Placing
from toprope.coordinator.readiness import HERE
from toprope.coordinator.requests import Known, Requests
from toprope.coordinator.roll import Roll
from toprope.coordinator.wire import (
    AttemptView,
    Cadence,
    Copy,
    Desired,
    Inventory,
    Kept,
    Member,
    OpenAnswer,
)
from toprope.store.log.fold import JobState
from toprope.store.log.records import NOBODY, AttemptFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What does not change in a reign. Times in seconds of the clock that events carry."""

    job: str
    url: str
    cadence: Cadence
    copies: int = 1
    verdict_deadline_s: float = 300.0
    silence_s: float = 3.0
    silent_probes_max: int = 3
    settle_s: float = 5.0
    read_back_deadline_s: float = 30.0
    commit_retry_s: float = 2.0
    proceeds: bool = False
    """Attempts may be opened while the log can't be reached."""


class Core:
    """One reign over one job."""

    def __init__(self, settings: Settings, log_view: LogView, *, now_s: float) -> None:
        self.settings = settings
        self.logged = log_view
        self.log_view = log_view
        """The log as it is to be, with what was opened without it."""
        self.outage = Outage(proceeds=settings.proceeds)
        self.roll = Roll(job_uid=log_view.state.job_uid)
        self.term = log_view.state.term
        self._writer_id = log_view.state.writer_id
        self.progress = phases.Progress(phase="opened")
        self.desired: Desired | None = None
        self.placing = Placing(settings.copies)
        self.protected_at_s = now_s
        self._started_s = now_s
        self._phase_since_s = now_s
        self.requests = Requests()
        self._keep: tuple[Kept, ...] = ()
        self.aim = Aim()
        self._extra_step = 0
        self.commits = self._new_commits()
        self.holdings = self._new_holdings()
        self._world: tuple[AttemptFacts | None, tuple[Member, ...]] = (None, ())
        self._asking = Asking()
        self._probing: set[str] = set()
        self._seen: tuple[int, int] = (0, 0)
        self._said: dict[str, str] = {}

    def handle(self, event: Event) -> tuple[Effect, ...]:
        """Take in one event and return what is to be done."""
        return (*self.take(event), *self.steer(event.now_s))

    # --- what is heard -------------------------------------------------------------------------------------------

    def take(self, event: Event) -> list[Effect]:  # noqa: C901, PLR0911, PLR0912 - one line per kind of event
        """Take in one event, and decide nothing that ``steer`` decides."""
        match event:
            case Heard():
                effects = self._hear(event.inventory, live=event.live, now_s=event.now_s)
                self._count()
                return effects
            case Hinted():
                return self._probe(event.presence.node) if self.roll.hint(event.presence) else []
            case Probed():
                return self._probed(event)
            case Asked():
                return self.requests.ask(event, self._known())
            case Prepared():
                return self._prepared(event)
            case LogMoved():
                return self._log_moved(event.log_view, event.now_s)
            case LogReached():
                self.outage.reached(why=event.why, now_s=event.now_s)
                return []
            case Learned():
                return self._learned(event)
            case EnterEnded():
                self.outage.entering = False
                return []
            case Declared():
                return self._declared(event.node)
            case OpenFailed():
                return self.requests.failed(event, self._known())
            case CommitFailed():
                self.commits.failed(event)
                return self._say("error", "commit", f"step {event.step} did not become READY: {event.text}")
            case ReadHere():
                self.commits.read_here(event)
                return []
            case SeenDesired():
                return self._seen_desired(event.desired)
            case Connected():
                return [Publish(desired=self.desired)] if self.desired is not None else []
            case Ticked():
                return self._tick(event.now_s)
            case _:
                assert_never(event)

    def _hear(self, inventory: Inventory, *, live: bool, now_s: float) -> list[Effect]:
        first = inventory.node not in self.roll.nodes
        if live:
            self.outage.lives(inventory.node, inventory.boot_id)
        match self.roll.hear(inventory, now_s=now_s, live=live):
            case "foreign":
                text = f"inventory of job uid {inventory.job_uid[:8]} ignored: this job is {self.roll.job_uid[:8]}"
                return self._say("warning", f"foreign {inventory.node}", f"node {inventory.node}: {text}")
            case "contested":
                return self._probe(inventory.node)
            case "news":
                self.commits.collect(inventory)
                self.outage.note(inventory)
                return self._probe(inventory.node) if first and not live else []
            case "known" | "stale":
                return []
            case other:
                assert_never(other)

    def _probe(self, node: str) -> list[Effect]:
        if node in self._probing or node not in self.roll.nodes:
            return []
        self._probing.add(node)
        return [Probe(node=node, url=self.roll.nodes[node].url)]

    def _probed(self, event: Probed) -> list[Effect]:
        self._probing.discard(event.node)
        return self._answered(event.node, event.inventory, event.now_s)

    def _answered(self, name: str, inventory: Inventory | None, now_s: float) -> list[Effect]:
        before = self.roll.nodes.get(name)
        changed = self.roll.answered(name, inventory, now_s=now_s, silent_probes_max=self.settings.silent_probes_max)
        if inventory is not None:
            self.outage.lives(inventory.node, inventory.boot_id)
        if not changed:
            return []
        after = self.roll.nodes[name]
        self.commits.collect(after.inventory)
        self.outage.note(after.inventory)
        if before is None or before.alive == after.alive:
            return []
        text = f"node {name} answers" if after.alive else f"node {name} at {after.url} does not answer any more"
        return self._say("info" if after.alive else "warning", f"alive {name}", text)

    def _seen_desired(self, seen: Desired) -> list[Effect]:
        if seen.job_uid != self.log_view.state.job_uid:
            return []
        ours = (self.term, self.desired.version if self.desired is not None else 0)
        self._seen = (seen.term, seen.version)
        if self._seen >= ours:
            return []
        if not self._keep and seen.term < self.term:
            self._keep = seen.keep
            self.placing.remember(seen.placement)
        return [Publish(desired=self.desired)] if self.desired is not None else []

    def _tick(self, now_s: float) -> list[Effect]:
        self.outage.tick()
        nodes = self.roll.all()
        silence_s = self.settings.silence_s + SILENT_ROUNDS * report_every_s(len(nodes))
        silent = [node.name for node in nodes if now_s - node.heard_s >= silence_s]
        return [effect for name in self._asking.turn(silent, now_s=now_s) for effect in self._probe(name)]

    def _learned(self, event: Learned) -> list[Effect]:
        self.outage.learned(event)
        untold = self.outage.untold(self.logged, self.roll.nodes)
        said = [effect for node, text in untold.items() for effect in self._say("error", f"untold {node}", text)]
        return [*said, *self._look_ahead(event.now_s)]

    def _log_moved(self, log_view: LogView, now_s: float) -> list[Effect]:
        if log_view.state.n <= self.logged.state.n:
            return []
        before, self.logged = self.logged.state, log_view
        effects: list[Effect] = [Tidy()] if _may_be_tidied(before, log_view.state) else []
        return [*effects, *self._look_ahead(now_s)]

    def _look_ahead(self, now_s: float) -> list[Effect]:
        """Take in what the log comes to, with what was opened without it."""
        before, fenced, pending = self.log_view.state, set(self.outage.fenced), self.outage.pending
        self.log_view = self.outage.look_ahead(self.logged)
        after = self.log_view.state
        effects: list[Effect] = []
        for uid in sorted(set(self.outage.fenced) - fenced):
            effects += self._say("error", f"fenced {uid}", self.outage.fate(uid))
            effects += self.requests.fenced(pending[uid].record) if uid in pending else []
        if after.writer_id == self._writer_id:
            self.term = after.term  # a new one, if a command was elected in between
        attempt, uid_before = after.attempt, before.attempt.uid if before.attempt is not None else ""
        if attempt is not None and attempt.uid != uid_before:
            self._forget_attempt(now_s)
            how = " without the log" if self.provisional else ""
            text = f"attempt {attempt.attempt} opens{how} at step {attempt.from_step}: {attempt.why}"
            effects += self._say("warning" if how else "info", "attempt", text)
        elif after.head != before.head and self.log_view.ready_step > 0:
            effects += self._say("info", "ready", f"step {self.log_view.ready_step} is READY")
        self.commits.moved(after.last_step)
        effects += self.requests.opened(self._view())
        return effects

    @property
    def provisional(self) -> bool:
        """Say whether the current attempt is not in the log yet."""
        return self.log_view is not self.logged

    @property
    def held_up(self) -> bool:
        """Say whether there is, or may be, an attempt that must come into the log before all else."""
        return self.outage.holds_up(self.logged, self.roll.nodes)

    def known_nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that were heard, or that the current attempt was placed on."""
        facts = self.log_view.facts
        placed = {one.node for one in facts.world} if facts is not None else set()
        return tuple(sorted(placed | {*self.roll.nodes}))

    def _declared(self, name: str) -> list[Effect]:
        """Take in that a node is dead: the life of it that the current attempt was placed on."""
        facts = self.log_view.facts
        placed = {one.boot_id for one in facts.world if one.node == name} if facts is not None else set()
        if placed:
            self.outage.declare(name, max(placed))
        return self._say("warning", f"dead {name}", f"node {name} was declared dead")

    def _forget_attempt(self, now_s: float) -> None:
        self.progress = phases.Progress(phase="opened")
        self._phase_since_s = now_s
        self.protected_at_s = now_s
        self._extra_step = 0
        self.aim.forget()
        self.outage.placed(self.log_view.facts)
        self.commits = self._new_commits()
        self.holdings = self._new_holdings()
        for node in self.roll.all():
            self.commits.collect(node.inventory)
            self.roll.told.add(node.name)

    def _new_holdings(self) -> Holdings:
        attempt = self.log_view.state.attempt
        return Holdings("", 0) if attempt is None else Holdings(attempt.uid, attempt.world_size)

    def _new_commits(self) -> Commits:
        return Commits(
            attempt=self.log_view.state.attempt,
            last_step=self.log_view.state.last_step,
            retry_s=self.settings.commit_retry_s,
            read_back_deadline_s=self.settings.read_back_deadline_s,
        )

    def _prepared(self, event: Prepared) -> list[Effect]:
        if self.requests.deciding is None or self.requests.appending:
            return []
        effects: list[Effect] = []
        for name, inventory in sorted(event.answers.items()):
            effects += self._answered(name, inventory, event.now_s)
        if event.offers is None:
            return [*effects, *self._decide_without_log(event)]
        if self.held_up:
            text = "an attempt that was opened without the log is being entered into it; ask again"
            return [*effects, *self.requests.answer(OpenAnswer(code="unavailable", text=text))]
        return [*effects, *self.requests.decide(event, self._known(), objects=self.object_copies())]

    def _decide_without_log(self, event: Prepared) -> list[Effect]:
        if event.why:
            self.outage.reached(why=event.why, now_s=event.now_s)
        request = self.requests.deciding
        assert request is not None
        known = self._known()
        refused = self.outage.decide(request, event, known, self.requests.answered(event, self.roll))
        if refused is not None:
            return self.requests.answer(refused)
        self.requests.appending = event.uid
        return []

    def _known(self) -> Known:
        return Known(
            log_view=self.log_view,
            logged_n=self.logged.state.n,
            without_log=self.outage.proceeds and self.outage.away_since_s is not None,
            roll=self.roll,
            progress=self.progress,
            view=self._view(),
        )

    def object_copies(self) -> tuple[Copy, ...]:
        """Return the shard objects that any node, alive or not, was ever heard to have written."""
        listed = [copy for node in self.roll.all() for copy in node.inventory.copies if copy.tier == "object"]
        return (*listed, *self.commits.copies())

    # --- how the job is wanted to be -----------------------------------------------------------------------------

    def steer(self, now_s: float) -> list[Effect]:
        """Decide anew how the job is wanted to be, from all that was taken in; return what is to be done."""
        effects = self._steer_outage(now_s)
        effects += self._steer_phase(now_s)
        effects += self._steer_commit(now_s)
        if self._may_speak(now_s):
            effects += self._steer_desired(now_s)
        return effects

    def _may_speak(self, now_s: float) -> bool:
        """Say whether to speak: one that just began lets come into the log first what was opened without it.

        Nodes that have heard of it and need not adopt it would let go of what they hold for it.
        """
        waits = self.desired is None and self.held_up and now_s - self._started_s < self._settle_s()
        return self._settled(now_s) and not waits

    def _settled(self, now_s: float) -> bool:
        """Say whether enough was heard to speak: a coordinator that just began must not let go what it can't see."""
        if self.desired is not None or now_s - self._started_s >= self._settle_s():
            return True
        facts = self.log_view.facts
        return facts is None or all(one.node in self.roll.nodes for one in facts.world)

    def _settle_s(self) -> float:
        """Return how long nodes are given to tell what they have; in a large job each waits for its turn."""
        facts = self.log_view.facts
        nodes = {one.node for one in facts.world} if facts is not None else set()
        return self.settings.settle_s + report_every_s(len(nodes))

    def _steer_outage(self, now_s: float) -> list[Effect]:
        outage = self.outage
        if not outage.adopted and not outage.pending:
            return []
        effects: list[Effect] = []
        if node := outage.to_learn(self.logged, self.roll.nodes):
            outage.learning.add(node)
            effects.append(Learn(node=node, url=self.roll.nodes[node].url))
        if (opened := outage.to_open(self.log_view)) is not None:
            outage.opened.add(opened.uid)
            effects += self._look_ahead(now_s)
        if self._settled(now_s) and (entry := outage.to_enter(self.logged)) is not None:
            outage.entering = True
            effects.append(Enter(attempt=entry))
        return effects

    def _steer_phase(self, now_s: float) -> list[Effect]:
        attempt = self.log_view.state.attempt
        if attempt is None or self.progress.phase == "applied":  # which is final
            return []
        nodes = self.roll.all()
        awaited = attempt.launch_id != NOBODY
        late = awaited and now_s - self._phase_since_s >= self.settings.verdict_deadline_s
        after = phases.advance(
            self.progress,
            phases.verdicts(nodes, attempt.uid),
            world=attempt.world_size,
            trains=phases.trains(nodes, attempt.uid, attempt.from_step),
            overdue_s=self.settings.verdict_deadline_s if late else 0.0,
        )
        if after == self.progress:
            return []
        self.progress, self._phase_since_s = after, now_s
        reason = f": {after.reason}" if after.reason else ""
        return self._say(
            "error" if after.phase == "failed" else "info",
            "phase",
            f"attempt {attempt.attempt} is {after.phase}{reason}",
        )

    def _steer_commit(self, now_s: float) -> list[Effect]:
        if self.provisional:
            return []  # READY needs the log
        return self.commits.steer(last_step=self.log_view.state.last_step, readers=self.roll.alive_names(), now_s=now_s)

    def _steer_desired(self, now_s: float) -> list[Effect]:
        effects = self._steer_placement()
        safety = self.safety()
        keep, protected_step = self._steer_keep(safety, now_s)
        effects += self._steer_extra()
        wanted = Desired(
            job=self.settings.job,
            job_uid=self.log_view.state.job_uid,
            term=self.term,
            version=0,
            url=self.settings.url,
            cadence=self.settings.cadence,
            attempt=self._view(),
            placement=self.placing.placements(),
            keep=keep,
            dropped=self._dropped(safety),
            read_backs=tuple(
                task for task in self.commits.tasks(readers=self.roll.alive_names(), now_s=now_s) if task.node != HERE
            ),
            aim=self._steer_aim(safety, now_s),
            protected_step=protected_step,
            ready_step=self.log_view.ready_step,
            extra_step=self._extra_step,
            logged=self.logged.state.attempt_number,
            proposed=self.outage.proposal(self.log_view),
            fenced=tuple(sorted(self.outage.fenced)),
            report_every_s=report_every_s(len(self.roll.nodes)),
            refused=dict(sorted(self.roll.refused.items())),
        )
        version = self.desired.version if self.desired is not None else 0
        if self.desired is None or wanted != _versioned(self.desired, 0):
            self.desired = _versioned(wanted, version + 1)
            effects.append(Publish(desired=self.desired))
        return effects

    def _steer_placement(self) -> list[Effect]:
        facts = self.log_view.facts
        world = facts.world if facts is not None else ()
        told = self.placing.steer(self.roll.alive(), world, moves=self.roll.moves)
        return [effect for level, owner, text in told for effect in self._say(level, f"place {owner}", text)]

    def safety(self) -> protection.Safety | None:
        """Return what of the current attempt is safe in memory; None before the first."""
        attempt = self.log_view.state.attempt
        if attempt is None:
            return None
        self._count()
        return self.holdings.assess(copies=self.settings.copies, placed=self.placing.plan.copies, aim=self.aim.step)

    def _count(self) -> None:
        """Count what nodes have told of; done as they tell it, so that a decision need not wait for it."""
        for name in sorted(self.roll.told):
            self.holdings.see(self.roll.nodes[name])
        self.roll.told.clear()

    def _steer_keep(self, safety: protection.Safety | None, now_s: float) -> tuple[tuple[Kept, ...], int]:
        attempt = self.log_view.state.attempt
        if attempt is None or safety is None:
            return self._keep, 0
        source = self.log_view.source
        before = self._promised_step(attempt.uid)
        if self.requests.may_be_next(self.logged.state.n, attempt):
            # one that is decided would pass over what is promised of this one now
            return self._keep, before
        if safety.protected_step > before:
            self.protected_at_s = now_s
        self._keep = protection.keep(
            safety,
            attempt_uid=attempt.uid,
            source=Kept(attempt_uid=source[0], step=source[1]) if source is not None else None,
            before=self._keep,
            can_protect=self.placing.plan.copies > 0 or self.settings.copies == 0,
        )
        return self._keep, safety.protected_step

    def _promised_step(self, attempt_uid: str) -> int:
        """Return up to which step of an attempt the nodes were told that it is protected."""
        told = self.desired
        ours = told is not None and told.attempt is not None and told.attempt.uid == attempt_uid
        return told.protected_step if told is not None and ours else 0

    def _steer_aim(self, safety: protection.Safety | None, now_s: float) -> int:
        if safety is None or not self.placing.plan.copies:
            self.aim.forget()
        else:
            reached = self._reached() if self.aim.step else 0
            self.aim.steer(safety, self.roll.alive(), reached=reached, now_s=now_s)
        return self.aim.step

    def _reached(self) -> int:
        """Return the newest step that a rank of the current attempt has told of."""
        attempt = self.log_view.state.attempt
        states = (state for node in self.roll.alive() for state in node.inventory.ranks)
        return max((state.step for state in states if attempt and state.attempt_uid == attempt.uid), default=0)

    def _steer_extra(self) -> list[Effect]:
        attempt = self.log_view.state.attempt
        if attempt is None:
            return []
        asking = [self.roll.nodes[name] for name in sorted(self.roll.asking)]
        step = leaving.extra_step(asking, attempt_uid=attempt.uid, before=self._extra_step)
        if step == self._extra_step:
            return []
        self._extra_step = step
        return self._say("info", "leaving", f"ranks are about to be ended: all save step {step} and end there")

    def _dropped(self, safety: protection.Safety | None) -> tuple[Kept, ...]:
        """Return the steps of the current attempt that no one need keep waiting for.

        Those before the one that is protected nobody does: to name each as it comes and goes would be half of what a
        coordinator says.
        """
        attempt = self.log_view.state.attempt
        if attempt is None or safety is None:
            return ()
        hopeless = [step for step in safety.hopeless if step > safety.protected_step]
        return tuple(Kept(attempt_uid=attempt.uid, step=step) for step in hopeless)

    def _view(self) -> AttemptView | None:
        restoring = self.progress.phase in ("opened", "staged")
        return attempt_view(
            self.log_view,
            self.progress,
            world=self._members(),
            nodes=self.roll.alive() if restoring else (),
            objects=self.object_copies() if restoring else (),
            provisional=self.provisional,
        )

    def _members(self) -> tuple[Member, ...]:
        """Return where the ranks of the current attempt sit: the same value as before unless that has changed."""
        facts = self.log_view.facts
        if facts is not self._world[0]:
            world = () if facts is None else facts.world
            members = tuple(Member(rank=one.rank, node=one.node, boot_id=one.boot_id) for one in world)
            self._world = facts, members
        return self._world[1]

    def _say(self, level: Literal["info", "warning", "error"], subject: str, text: str) -> list[Effect]:
        """Tell people something about a subject, once until it changes."""
        if self._said.get(subject) == text:
            return []
        self._said[subject] = text
        return [Say(level=level, text=text)]


def _may_be_tidied(before: JobState, after: JobState) -> bool:
    """Return whether a policy may have more to retire than before, or the log has grown by a checkpoint."""
    return (before.head, before.attempt_number, before.retain) != (after.head, after.attempt_number, after.retain)


def _versioned(desired: Desired, version: int) -> Desired:
    return msgspec.structs.replace(desired, version=version)
