"""``ckpt rollback``: the job goes back to an earlier checkpoint."""

from __future__ import annotations

import contextlib
import secrets
from typing import Annotated

import msgspec
import typer

from toprope.coordinator.changing import Changer
from toprope.coordinator.cli_common import CoordinatorUrl, DryRun, TokenFile, changer_of
from toprope.store.checkpoint.manifest import encode, sha256
from toprope.store.checkpoint.ready import read_capped
from toprope.store.cli.shared import AsJson, Root, print_json, put, say
from toprope.store.errors import AlreadyExistsError, CkptError, CorruptObjectError, MissingObjectError, UsageError
from toprope.store.keep.rollback import Rollback, opened_for_nobody, plan_rollback
from toprope.store.log.fold import JobState
from toprope.store.log.records import AttemptFacts
from toprope.store.look.show import read_state
from toprope.store.names import facts_key
from toprope.store.objects.opening import open_store
from toprope.store.objects.protocol import ObjectStore

_MAX_FACTS_BYTES = 64 * 1024 * 1024


def rollback(  # noqa: PLR0913 - one for each option
    root: Root,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job that is to go back.", show_default=False)],
    to: Annotated[int, typer.Option("--to", metavar="STEP", help="A step that is READY.", show_default=False)],
    *,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the log.")] = "a person goes back",
    confirm: Annotated[str, typer.Option("--confirm", metavar="JOB", help="Its name once more.")] = "",
    dry_run: DryRun = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Go back to a READY checkpoint: what came after it is tainted in every tier, for good.

    A new attempt is opened from there, so trainers that run now are superseded: each ends at its next step, and its
    launcher starts it again, or you do. The next launch begins from STEP.
    """
    store = open_store(root)
    state = read_state(store, job)
    plan = plan_rollback(state, to_step=to, reason=reason)
    if not dry_run and confirm != job:
        raise UsageError(
            f"{_told(state, plan)}. That can't be taken back, and trainers of job {job} end at their next step: to do "
            f"it, give --confirm {job}; --dry-run says what it is"
        )
    changer = changer_of(store, root, url=coordinator, token_file=token_file)
    after = state if dry_run else _gone_back(changer, state, plan, reason=reason)
    if as_json:
        line = {"job": job, "to": to, "ready": plan.seq, "given_up": plan.given_up, "attempt": after.attempt_number}
        print_json({**line, "changed": after.n != state.n, "done": not dry_run})
        return
    put(_told(state, plan, done=not dry_run))
    if not dry_run:
        say(f"attempt {after.attempt_number} is open for nobody: start the trainers again, they begin from step {to}")


def _gone_back(changer: Changer, state: JobState, plan: Rollback, *, reason: str) -> JobState:
    """Append what goes back; return the log after it.

    Raises:
        CkptError: it could not be done; the message says if it is half done.
    """
    _put_facts(changer.store, state)  # what can't be had, or written, fails before the taint, which can't be taken back
    after = state
    try:
        for taint in plan.taints:
            after = changer.append(after, taint, purpose="rollback")
        facts = _put_facts(changer.store, after)  # of another attempt, if one was opened meanwhile
        uid = secrets.token_hex(16)
        opened = opened_for_nobody(after, plan, uid=uid, facts_sha256=facts, reason=reason)
        return changer.append(after, opened, purpose="rollback")
    except CkptError as error:
        if after.n == state.n:
            raise
        raise type(error)(
            f"{error}. Half is done: the log of job {state.job} has the taint of all after step {plan.step}, which "
            "stays, and no attempt is open from there, so trainers may go on for nothing: give the same command again"
        ) from error


def _told(state: JobState, plan: Rollback, *, done: bool = False) -> str:
    lost = f", READY steps {', '.join(map(str, plan.given_up))} among them" if plan.given_up else ""
    goes, gives = ("goes", "gives") if done else ("would go", "give")
    what = f"job {state.job} {goes} back to step {plan.step} (READY {plan.seq})"
    return f"{what} and {gives} up all later ones{lost}"


def _put_facts(store: ObjectStore, state: JobState) -> str:
    """Put what the new attempt's record is to name into the store, the world of the one before it; return its SHA-256.

    Raises:
        MissingObjectError, CorruptObjectError: what the attempt before it names is gone, or not what it was.
        UnavailableError: it can't be written.
    """
    body = _facts(store, state)
    named = sha256(body)
    with contextlib.suppress(AlreadyExistsError):
        store.create(facts_key(state.job, named), body)
    return named


def _facts(store: ObjectStore, state: JobState) -> bytes:
    attempt = state.attempt
    assert attempt is not None
    key = facts_key(state.job, attempt.facts_sha256)
    why = f"the facts of attempt {attempt.attempt}, which the new one has to have too"
    try:
        body = read_capped(store, key, limit=_MAX_FACTS_BYTES)
    except MissingObjectError as error:
        raise type(error)(f"{error}: {why}; bring it back, and try again") from error
    if sha256(body) != attempt.facts_sha256:
        raise CorruptObjectError(f"{key}: SHA-256 is {sha256(body)}: {why}, are damaged")
    return encode(msgspec.structs.replace(msgspec.json.decode(body, type=AttemptFacts), held_digests=()))
