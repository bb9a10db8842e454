"""``ckpt pin``, ``unpin``, ``taint``, ``gc`` and ``job``: what changes a job, or deletes what it needs no more."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from toprope.coordinator import spec
from toprope.coordinator.changing import Changer
from toprope.coordinator.serving import read_token
from toprope.store.changes import policy_change, taints_of
from toprope.store.checkpoint import read_capped
from toprope.store.cli_shared import AsJson, JobOption, Root, only_job, print_json, print_table, put, say, table
from toprope.store.errors import (
    CorruptObjectError,
    MissingObjectError,
    NothingToVerifyError,
    UnavailableError,
    UsageError,
)
from toprope.store.fold import JobState
from toprope.store.gc import GcPlan, execute, survey
from toprope.store.holds import TTL_S, HoldWatch
from toprope.store.manifest import sha256
from toprope.store.names import Key, facts_key
from toprope.store.objects.opening import open_store, sweep_uploads
from toprope.store.objects.protocol import ObjectStore
from toprope.store.places import parsed_place, parsed_range
from toprope.store.records import Job, Pin, Retire, Unpin
from toprope.store.retention import RETIRED_AT_ONCE_MAX, RetentionPlan, parse_policy, plan_retention
from toprope.store.show import read_state
from toprope.store.sizes import size_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
job_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Change what holds for a whole job.")
app.add_typer(job_app, name="job")

_MAX_SPEC_BYTES = 64 * 1024 * 1024
_REASONS_SHOWN = 20

At = Annotated[str, typer.Argument(metavar="JOB@STEP", help="The checkpoint, as run7@1200.", show_default=False)]
CoordinatorUrl = Annotated[
    str, typer.Option("--coordinator", help="URL of the job's coordinator. Default: the one that the log names.")
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the coordinator's token.")]


@app.callback()
def _group() -> None:
    """Change a job: by its coordinator if one answers, else by an append of the command's own."""


@app.command()
def pin(root: Root, at: At, coordinator: CoordinatorUrl = "", token_file: TokenFile = None) -> None:
    """Pin a checkpoint: no policy retires it, and nothing of it is deleted, until it is unpinned."""
    store = open_store(root)
    state, step = _job_at(store, at)
    seq = _ready_of(state, step)
    after = _changer(store, url=coordinator, token_file=token_file).append(state, Pin(seq=seq), purpose="pin")
    put(f"step {step} of job {state.job} (READY {seq}) is {'already ' * (after.n == state.n)}pinned")


@app.command()
def unpin(root: Root, at: At, coordinator: CoordinatorUrl = "", token_file: TokenFile = None) -> None:
    """Lift the pin of a checkpoint."""
    store = open_store(root)
    state, step = _job_at(store, at)
    seq = _ready_of(state, step)
    after = _changer(store, url=coordinator, token_file=token_file).append(state, Unpin(seq=seq), purpose="unpin")
    put(f"step {step} of job {state.job} (READY {seq}) {'was not' if after.n == state.n else 'is no longer'} pinned")


def _job_at(store: ObjectStore, at: str) -> tuple[JobState, int]:
    name, step = parsed_place(at)
    return read_state(store, name), step


@app.command()
def taint(
    root: Root,
    at: Annotated[
        str,
        typer.Argument(
            metavar="JOB@STEPS", help="Steps, as run7@1200, run7@1200..1300 or run7@1200.. (and all later ones)."
        ),
    ],
    reason: Annotated[str, typer.Option("--reason", help="What is wrong with them.", show_default=False)],
    *,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Steps of this attempt; else of those that led to here.")
    ] = None,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
) -> None:
    """Say that steps are not to be trusted, in any tier: no restore begins from them.

    A taint can't be taken back. One with an open end, as run7@1200.., ends the current attempt: nothing more of it
    becomes READY, and the next one begins before it.
    """
    store = open_store(root)
    name, first, end = parsed_range(at)
    last = first if end is None else (None if end < 0 else end)
    state = read_state(store, name)
    taints = taints_of(state, from_step=first, to_step=last, reason=reason, attempt=attempt)
    changer = _changer(store, url=coordinator, token_file=token_file)
    for one in taints:
        after = changer.append(state, one, purpose="taint")
        steps = f"step {one.from_step} on" if one.to_step is None else f"steps {one.from_step} to {one.to_step}"
        put(f"attempt {one.attempt}, {steps}: tainted" + (" already" if after.n == state.n else ""))
        state = after
    good = next(iter(state.restorable()), None)
    say(f"newest checkpoint that is left: {f'step {good[1].step} (READY {good[0]})' if good else 'none'}")


@app.command()
def gc(  # noqa: PLR0913 - one for each option
    root: Root,
    job: JobOption = None,
    *,
    retain: Annotated[
        str, typer.Option("--retain", help="Retire by this policy, as last=3,every=1000; else by the job's own.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    drop_holds: Annotated[
        bool,
        typer.Option("--drop-holds", help="Watch the readers' holds for five minutes, and drop those left behind."),
    ] = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Retire what the policy does not keep, then delete the objects that the log has condemned, and no others.

    What is pinned, head, its parent, the newest untainted checkpoint and the source of the current attempt always stay.
    No age decides. To retire needs room for one small record; to delete needs none, so on a full store what is
    condemned already goes first.

    Exit status: 0 done; 2 a manifest or index of what is kept can't be read, so nothing was deleted.
    """
    store = open_store(root)
    state = read_state(store, only_job(store, root, job))
    policy = parse_policy(retain or state.retain)
    plan = plan_retention(state, policy)
    if dry_run:
        seqs = frozenset(verdict.seq for verdict in plan.retired)
        _report(plan, survey(store, state, as_if_retired=seqs, weigh=True), as_json=as_json, done=False)
        return
    swept = sweep_uploads(root, state.job)
    list_holds = _watched(store, state.job) if drop_holds else None
    state = _retired(store, _changer(store, url=coordinator, token_file=token_file), state, plan)
    found = survey(store, state, list_holds=list_holds, weigh=True)
    execute(store, found)
    _report(plan, found, as_json=as_json, done=True)
    if swept:
        say(f"removed {len(swept)} unfinished writes")


def _watched(store: ObjectStore, job: str) -> Callable[[], tuple[Key, ...]]:
    """Watch the holds for as long as a reader has to renew one; return what lists those that count."""
    watch = HoldWatch()
    if watch.look(store, job, now_s=time.monotonic()):
        say(f"watching what readers hold for {TTL_S:.0f} s")
        time.sleep(TTL_S)
    return lambda: watch.look(store, job, now_s=time.monotonic())


def _retired(store: ObjectStore, changer: Changer, state: JobState, plan: RetentionPlan) -> JobState:
    """Append what the plan retires. Where there is no room for a record, make some first."""
    if not plan.retired:
        return state
    retire = Retire(seqs=tuple(verdict.seq for verdict in plan.retired[:RETIRED_AT_ONCE_MAX]))
    try:
        return changer.append(state, retire, purpose="gc")
    except UnavailableError as error:
        condemned = survey(store, state)
        if not condemned.condemned:
            raise
        say(f"{error}; deleting what is condemned already, then trying again")
        execute(store, condemned)
    return changer.append(state, retire, purpose="gc")


def _report(plan: RetentionPlan, found: GcPlan, *, as_json: bool, done: bool) -> None:
    if as_json:
        print_json({"done": done, "retention": plan, "garbage": found, "bytes": found.bytes})
        return
    rows = table("STEP", "READY", "ATTEMPT", "SIZE", "VERDICT", "WHY")
    marked = [(one, "keep") for one in plan.kept] + [(one, "retire") for one in plan.retired]
    for one, verdict in sorted(marked, key=lambda pair: pair[0].seq):
        rows.add_row(str(one.step), str(one.seq), str(one.attempt), size_text(one.bytes), verdict, one.why)
    if marked:
        print_table(rows)
    reasons: dict[str, list[int]] = {}
    for garbage in found.condemned:
        reasons.setdefault(garbage.why, []).append(garbage.bytes or 0)
    for why, sizes in list(reasons.items())[:_REASONS_SHOWN]:
        put(f"{'deleted' if done else 'would delete'} {_objects(len(sizes))}, {size_text(sum(sizes))}: {why}")
    if len(reasons) > _REASONS_SHOWN:
        put(f"and more for {len(reasons) - _REASONS_SHOWN} other reasons: --json has all")
    for seq in found.held:
        put(f"READY {seq} stays for now: a reader holds it")
    total = f"{_objects(len(found.condemned))}, {size_text(found.bytes)}"
    say(f"{'deleted' if done else 'would delete'} {total}" if found.condemned else "nothing to delete")


def _objects(number: int) -> str:
    return f"{number:,} object{'s' * (number != 1)}"


@job_app.command("retain")
def job_retain(
    root: Root,
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="As last=3,every=1000; or all.", show_default=False)],
    job: JobOption = None,
    *,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
) -> None:
    """Set the job's policy of retention, which its coordinator carries out after each new READY checkpoint.

    last=N keeps the newest N, every=K the first checkpoint at or past each multiple of K steps; all keeps everything.
    """
    store = open_store(root)
    state = read_state(store, only_job(store, root, job))
    change = policy_change(state, policy)
    _changer(store, url=coordinator, token_file=token_file).append(state, change, purpose="retain")
    put(f"job {state.job} retains {change.retain or 'all'}")


@job_app.command("accept-spec")
def job_accept_spec(
    root: Root,
    spec_sha256: Annotated[
        str, typer.Argument(metavar="SPEC", help="The SHA-256 that the refusal named.", show_default=False)
    ],
    job: JobOption = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print how the specs differ.")] = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
) -> None:
    """Accept another spec (names, dtypes and shapes of the state) as the job's, so that the next launch with it opens.

    A launch with another spec than the job's is refused, and the refusal names it. Launches with the old one are
    refused from then on.
    """
    store = open_store(root)
    state = read_state(store, only_job(store, root, job))
    if state.spec_sha256 is None:
        raise UsageError(f"job {state.job}: no spec has been set yet; its first attempt sets it")
    put(spec.diff(_spec(store, state.job, state.spec_sha256), _spec(store, state.job, spec_sha256)) or "no difference")
    if dry_run:
        return
    change = Job(uid=state.job_uid, name=state.job, spec_sha256=spec_sha256, replaces=state.spec_sha256)
    _changer(store, url=coordinator, token_file=token_file).append(state, change, purpose="accept-spec")
    say(f"job {state.job} has spec {spec_sha256[:12]} from now on")


def _spec(store: ObjectStore, job: str, digest: str) -> Any:  # noqa: ANN401 - JSON
    try:
        body = read_capped(store, facts_key(job, digest), limit=_MAX_SPEC_BYTES)
    except MissingObjectError:
        raise UsageError(
            f"job {job}: no launch was refused for a spec {digest[:80]}; give the whole name that the refusal shows"
        ) from None
    if sha256(body) != digest:
        raise CorruptObjectError(f"{facts_key(job, digest)}: SHA-256 is {sha256(body)}")
    found = json.loads(body)
    if not isinstance(found, dict) or "model" not in found:
        raise UsageError(f"job {job}: {digest[:12]} is no spec")
    return found


def _changer(store: ObjectStore, *, url: str, token_file: Path | None) -> Changer:
    return Changer(store=store, coordinator_url=url, token=read_token(token_file), say=say)


def _ready_of(state: JobState, step: int) -> int:
    """Return the newest live READY of a step.

    Raises:
        NothingToVerifyError: there is none.
    """
    seqs = [seq for seq in state.live if state.readies[seq].step == step]
    if not seqs:
        have = sorted({state.readies[seq].step for seq in state.live})
        raise NothingToVerifyError(f"job {state.job}: no READY checkpoint of step {step}; there are steps {have}")
    return seqs[-1]
