"""The way of a step to READY: receipts, read-backs, one commit at a time. A state machine within the core's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from toprope.coordinator import readiness
from toprope.coordinator.effects import Commit, Effect, ReadAhead, ReadBackHere, Say
from toprope.coordinator.events import CommitFailed, ReadHere
from toprope.coordinator.intents import CommitStep, ReadIndexes
from toprope.coordinator.readiness import HERE, Receipt
from toprope.coordinator.wire import Copy, Inventory, ReadBack, ReadBackTask
from toprope.store.log.records import Attempt

UNANSWERED_MAX = 5
"""How often the store may not answer about a step, or an object of it, before a newer step goes first."""
AHEAD_AT_ONCE = 256
"""So many indexes at least are asked to be read ahead at a time, while more are to come."""
LEAST_READ_BYTES_PER_S = 20e6
"""Nodes that read objects back more slowly than this are not waited for: the coordinator reads them itself."""


def steps_max(world_size: int) -> int:
    """Return how many steps are remembered while none becomes READY: of few ranks more, for it is receipts that cost.

    A sidecar lists the newest 8 of each rank: a rank that is behind is waited for here.
    """
    return min(256, max(32, 100_000 // world_size))


class Book(NamedTuple):
    """What was chosen of a complete step's receipts: one for each rank, in order, and the others that these rest on."""

    receipts: tuple[Receipt, ...]
    others: tuple[Receipt, ...]
    stored_bytes: int

    @property
    def written(self) -> tuple[Receipt, ...]:
        """Return all of them: what is to be read back."""
        return (*self.receipts, *self.others)


@dataclass(slots=True, kw_only=True)
class Commits:
    """What is known of the shard objects of one attempt. ``found`` are the digests that read-backs gave, by key.

    Of steps up to ``last_step``, which can't become READY any more, nothing is remembered; nor of those up to
    ``passed_over``, which are too many, but for the newest complete one and the one under way.
    ``unanswered`` counts, by key of an object or by step, how often the store did not answer.
    ``dead``: steps that can't become READY, each with the reason. ``under_way`` is the step being read back or
    committed (0: none), ``committing`` the one that has been handed over to be committed.
    """

    attempt: Attempt | None
    last_step: int
    retry_s: float
    read_back_deadline_s: float
    passed_over: int = 0
    receipts: dict[int, dict[int, dict[str, Receipt]]] = field(default_factory=dict)
    """By step, rank and key."""
    found: dict[str, str] = field(default_factory=dict)
    unanswered: dict[str | int, int] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    under_way: int = 0
    under_way_since_s: float = 0.0
    committing: int = 0
    not_before_s: float = 0.0
    reading_here: set[str] = field(default_factory=set)
    _unread: dict[int, list[Receipt]] = field(default_factory=dict)
    """By step, those whose index nobody was asked to read yet."""
    _books: dict[int, Book | None] = field(default_factory=dict)
    """By step what was chosen of its receipts, until there are more; None when ranks have none that can be used."""
    _assigned: object = None
    """What the tasks of the step under way were assigned by."""
    _tasks: tuple[ReadBackTask, ...] = ()
    """Those of them of which nothing had been found then. They stay as they are until somebody else is to do them: if
    each finding made them fewer, all that is said of a job would be said anew for each of thousands of objects."""
    _here: tuple[ReadBackTask, ...] = ()
    """Those of them that the coordinator is to do."""
    _open: set[str] = field(default_factory=set)
    """The keys of those of which nothing has been found yet."""
    _wrong: set[str] = field(default_factory=set)
    """The keys of objects that were found to have another digest than their receipt says."""
    _written: dict[str, Receipt] = field(default_factory=dict)
    """All receipts by key."""
    _behind: str = ""
    """Why steps were passed over while none was complete; empty: none were."""
    _said_behind: bool = False

    def collect(self, inventory: Inventory) -> None:
        """Note the receipts and read-backs that a node tells of; nobody vouches for what it wrote itself."""
        attempt = self.attempt
        if attempt is None:
            return
        for copy in inventory.copies:
            ours = copy.attempt_uid == attempt.uid and copy.world == attempt.world_size and self._matters(copy.step)
            if ours and copy.tier == "object" and 0 <= copy.rank < attempt.world_size:
                by_key = self.receipts.setdefault(copy.step, {}).setdefault(copy.rank, {})
                if copy.key not in by_key:
                    by_key[copy.key] = self._written[copy.key] = receipt = Receipt(node=inventory.node, copy=copy)
                    self._unread.setdefault(copy.step, []).append(receipt)
                    self._books.pop(copy.step, None)
        if len(self.receipts) > steps_max(attempt.world_size):
            self._pass_over(attempt.world_size)
        for result in inventory.read_backs:
            about = self._written.get(result.key)
            vouched = about and about.node != inventory.node and about.copy.stored_digest == result.digest
            if vouched and result.key not in self.found:
                self._find(result)

    def _matters(self, step: int) -> bool:
        return step > self.last_step and (step > self.passed_over or step in self.receipts)

    def _pass_over(self, world_size: int) -> None:
        """Forget the oldest steps, but for the newest that can become READY: it may be the only one that ever can."""
        newest = sorted(self.receipts)[-steps_max(world_size) :]
        complete = max((step for step in self._complete() if step not in self.dead), default=0)
        self.passed_over = newest[0] - 1
        if not complete and not self._behind:
            of_rank = {rank: step for step in sorted(self.receipts) for rank in self.receipts[step]}
            last = min(range(world_size), key=lambda rank: of_rank.get(rank, 0))
            self._behind = (
                f"none of {len(self.receipts)} steps was written by all ranks and can become READY: step "
                f"{self.passed_over} and those before are given up; furthest behind is rank {last}, which wrote step "
                f"{of_rank.get(last, 0)} last: look at its node's way to the object store"
            )
        self._remember({*newest, complete, self.under_way, self.committing})

    def _complete(self) -> list[int]:
        return [step for step in sorted(self.receipts) if self._book(step) is not None]

    def copies(self) -> tuple[Copy, ...]:
        """Return the objects that were written."""
        return tuple(
            one.copy for ranks in self.receipts.values() for by_key in ranks.values() for one in by_key.values()
        )

    def stored(self) -> Mapping[int, tuple[int, ...]]:
        """Return the ranks that have written objects, by step."""
        return {step: tuple(ranks) for step, ranks in self.receipts.items()}

    def read_here(self, event: ReadHere) -> None:
        """Note what the coordinator has read back itself."""
        self.reading_here.discard(event.key)
        if event.result is None:
            self._note_unanswered(event.key)
            self.not_before_s = event.now_s + self.retry_s
        else:
            self._find(event.result)

    def _find(self, result: ReadBack) -> None:
        self.found[result.key] = digest = readiness.found_digest(result)
        self._open.discard(result.key)
        receipt = self._written.get(result.key)
        if receipt is not None and digest != receipt.copy.stored_digest:
            self._wrong.add(result.key)

    def _note_unanswered(self, what: str | int) -> None:
        self.unanswered[what] = self.unanswered.get(what, 0) + 1

    def failed(self, event: CommitFailed) -> None:
        """Note that a commit came to nothing."""
        self.committing = 0
        self.not_before_s = event.now_s + self.retry_s
        if self.attempt is None or self.attempt.uid != event.attempt_uid:
            return
        if event.final:
            self.dead[event.step] = event.text
        else:
            self._note_unanswered(event.step)

    def moved(self, last_step: int) -> None:
        """Note that the log has moved on: no step up to ``last_step`` can become READY any more."""
        self.last_step = last_step
        self._remember({step for step in self.receipts if step > last_step})
        if last_step >= self.committing:
            self.committing = 0

    def _remember(self, steps: AbstractSet[int]) -> None:
        """Forget all that is known of other steps."""
        self.receipts = {step: ranks for step, ranks in self.receipts.items() if step in steps}
        self._books = {step: book for step, book in self._books.items() if step in steps}
        self._unread = {step: unread for step, unread in self._unread.items() if step in steps}
        self._written = {key: one for key, one in self._written.items() if one.copy.step in steps}
        self.found = {key: found for key, found in self.found.items() if key in self._written}
        self._wrong &= self._written.keys()
        self.unanswered = {
            what: count for what, count in self.unanswered.items() if what in self._written or what in self.receipts
        }
        self.dead = {step: why for step, why in self.dead.items() if step in steps}

    def steer(self, *, last_step: int, readers: Sequence[str], now_s: float) -> list[Effect]:
        """Return what is to be done next; ``readers`` are the nodes that can read back."""
        going_on = self._go_on(last_step=last_step, readers=readers, now_s=now_s)
        return [*self._say_behind(), *self._read_ahead(), *going_on]

    def _read_ahead(self) -> list[Effect]:
        """Have indexes read of the step that is read back, and of the newest, in portions while it is not complete."""
        wanted = frozenset({self.under_way, max(self.receipts, default=0)} - self.dead.keys())
        return [
            ReadAhead(indexes=self._indexes(step, self._unread.pop(step)), wanted=wanted)
            for step in sorted(wanted & self._unread.keys())
            if len(self._unread[step]) >= AHEAD_AT_ONCE or self._is_complete(step)
        ]

    def _indexes(self, step: int, receipts: Sequence[Receipt]) -> ReadIndexes:
        assert self.attempt is not None
        return ReadIndexes(
            attempt=self.attempt.attempt,
            attempt_uid=self.attempt.uid,
            step=step,
            world=self.attempt.world_size,
            receipts=tuple(receipts),
        )

    def _say_behind(self) -> list[Effect]:
        if not self._behind or self._said_behind:
            return []
        self._said_behind = True
        return [Say(level="error", text=self._behind)]

    def _go_on(self, *, last_step: int, readers: Sequence[str], now_s: float) -> list[Effect]:
        if self.attempt is None or self.committing:
            return []
        steps = [step for step in self._complete() if step > last_step]
        step = readiness.next_step(steps, dead=self.dead, under_way=self.under_way)
        if step != self.under_way:
            self.under_way, self.under_way_since_s = step, now_s
        if not step:
            return []
        book = self._book(step)
        assert book is not None, f"step {step} was complete"
        written = book.written
        newest = readiness.next_step(steps, dead=self.dead, under_way=0)
        why = readiness.spoiled(written, self.found) if self._wrong else ""
        if why := why or self._given_up(step, written, newest=newest):
            self.dead[step] = why
            return [Say(level="error", text=f"step {step} can't become READY: {why}")]
        if now_s < self.not_before_s:
            return []
        self.tasks(readers=readers, now_s=now_s)
        if not self._open:
            self.committing = step
            return [Commit(intent=self._intent(step, book))]
        here = [task for task in self._here if task.key in self._open and task.key not in self.reading_here]
        self.reading_here.update(task.key for task in here)
        return [ReadBackHere(task=task) for task in here]

    def _given_up(self, step: int, receipts: Sequence[Receipt], *, newest: int) -> str:
        """Return why a newer complete step goes first: one object that can't be read must not stop them all."""
        if not self.unanswered:
            return ""
        about: tuple[str | int, ...] = (step, *(one.copy.key for one in receipts))
        tries = max(self.unanswered.get(what, 0) for what in about)
        if tries < UNANSWERED_MAX or newest <= step:
            return ""
        return f"the store did not answer {tries} times, and step {newest} is complete too"

    def _intent(self, step: int, book: Book) -> CommitStep:
        assert self.attempt is not None
        return CommitStep(
            attempt=self.attempt.attempt,
            attempt_uid=self.attempt.uid,
            step=step,
            receipts=book.receipts,
            others=book.others,
            rested_on=frozenset(key for one in book.written for key in one.copy.rests_on),
        )

    def tasks(self, *, readers: Sequence[str], now_s: float) -> tuple[ReadBackTask, ...]:
        """Return who is to read back what of the step under way; when nobody did in time the coordinator is to."""
        if self.attempt is None or not self.under_way or self.under_way in self.dead:
            return ()
        book = self._book(self.under_way)
        if book is None:
            return ()
        each = book.stored_bytes / max(1, len(readers))
        slow = now_s - self.under_way_since_s >= self.read_back_deadline_s + each / LEAST_READ_BYTES_PER_S
        by = (book, () if slow else tuple(readers))
        if by != self._assigned:
            tasks = readiness.assign(book.written, by[1])
            self._assigned, self._tasks = by, tuple(task for task in tasks if task.key not in self.found)
            self._here = tuple(task for task in self._tasks if task.node == HERE)
            self._open = {task.key for task in self._tasks}
        return self._tasks

    def _book(self, step: int) -> Book | None:
        """Return what was chosen of a step's receipts once each rank has one whose rests have receipts too."""
        if not self._is_complete(step):
            return None
        if step not in self._books:
            self._books[step] = self._chosen(self.receipts[step])
        return self._books[step]

    def _is_complete(self, step: int) -> bool:
        """Say whether each rank has a receipt of a step."""
        assert self.attempt is not None
        return len(self.receipts.get(step, {})) == self.attempt.world_size

    def _chosen(self, ranks: Mapping[int, Mapping[str, Receipt]]) -> Book | None:
        written = {key for by_key in ranks.values() for key in by_key}
        usable = [
            [one for one in by_key.values() if all(key in written for key in one.copy.rests_on)]
            for _, by_key in sorted(ranks.items())
        ]
        if not all(usable):
            return None
        receipts = tuple(min(of_rank, key=lambda one: one.copy.key) for of_rank in usable)
        others = self._rested_on(receipts)
        stored_bytes = sum(one.copy.stored_bytes for one in (*receipts, *others))
        return Book(receipts=receipts, others=others, stored_bytes=stored_bytes)

    def _rested_on(self, receipts: Sequence[Receipt]) -> tuple[Receipt, ...]:
        """Return the receipts of the same step that these rest on and that are not among them."""
        among = {one.copy.key for one in receipts}
        wanted = {(one.copy.step, key) for one in receipts for key in one.copy.rests_on if key not in among}
        return tuple(
            one
            for step in sorted({step for step, _ in wanted})
            for _, by_key in sorted(self.receipts[step].items())
            for key, one in sorted(by_key.items())
            if (step, key) in wanted
        )
