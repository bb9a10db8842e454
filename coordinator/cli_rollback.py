"""``ckpt rollback``: the job goes back to an earlier checkpoint."""

from __future__ import annotations

import contextlib
import secrets
from typing import Annotated

import msgspec
import typer

from toprope.coordinator.cli_common import CoordinatorUrl, DryRun, TokenFile, changer_of
from toprope.store.checkpoint.manifest import encode, sha256
from toprope.store.checkpoint.ready import read_capped
from toprope.store.cli.shared import AsJson, Root, print_json, put, say
from toprope.store.errors import AlreadyExistsError, UsageError
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
    after = state
    if not dry_run:
        changer = changer_of(store, root, url=coordinator, token_file=token_file)
        for taint in plan.taints:
            after = changer.append(after, taint, purpose="rollback")
        opened = opened_for_nobody(
            after, plan, uid=secrets.token_hex(16), facts_sha256=_facts(store, after), reason=reason
        )
        after = changer.append(after, opened, purpose="rollback")
    if as_json:
        line = {"job": job, "to": to, "ready": plan.seq, "given_up": plan.given_up, "attempt": after.attempt_number}
        print_json({**line, "changed": after.n != state.n, "done": not dry_run})
        return
    put(_told(state, plan, done=not dry_run))
    if not dry_run:
        say(f"attempt {after.attempt_number} is open for nobody: start the trainers again, they begin from step {to}")


def _told(state: JobState, plan: Rollback, *, done: bool = False) -> str:
    lost = f", READY steps {', '.join(map(str, plan.given_up))} among them" if plan.given_up else ""
    goes, gives = ("goes", "gives") if done else ("would go", "give")
    what = f"job {state.job} {goes} back to step {plan.step} (READY {plan.seq})"
    return f"{what} and {gives} up all later ones{lost}"


def _facts(store: ObjectStore, state: JobState) -> str:
    """Write what the attempt's record names, the world of the one before it, and return its name."""
    attempt = state.attempt
    assert attempt is not None
    body = read_capped(store, facts_key(state.job, attempt.facts_sha256), limit=_MAX_FACTS_BYTES)
    facts = msgspec.json.decode(body, type=AttemptFacts)
    body = encode(msgspec.structs.replace(facts, held_digests=()))
    with contextlib.suppress(AlreadyExistsError):
        store.create(facts_key(state.job, sha256(body)), body)
    return sha256(body)
