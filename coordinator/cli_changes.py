"""``ckpt pin``, ``unpin``, ``metric``, ``taint`` and ``gc``: what changes a job, or deletes what it needs no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from toprope.coordinator.changing import Changer
from toprope.coordinator.cli_common import (
    CoordinatorUrl,
    DryRun,
    TokenFile,
    change_or_try,
    changer_of,
    objects_text,
    outcome,
)
from toprope.coordinator.cli_job import job_app
from toprope.coordinator.cli_rollback import rollback
from toprope.store.cli.shared import AsJson, JobOption, Root, only_job, print_json, print_table, put, say, table
from toprope.store.errors import NothingToVerifyError, StoreError, UnavailableError, UsageError
from toprope.store.keep.changes import checked, given_up, taints_of
from toprope.store.keep.gc import GcPlan, execute, survey
from toprope.store.keep.gone import gone, in_words, make_letting_go
from toprope.store.keep.holds import TTL_S, HoldWatch
from toprope.store.keep.retention import RETIRED_AT_ONCE_MAX, RetentionPlan, parse_policy, plan_retention
from toprope.store.log.fold import JobState
from toprope.store.log.records import Metric, Pin, Retire, Unpin
from toprope.store.look.show import read_state
from toprope.store.names import Key
from toprope.store.objects.directory import NO_ROOM
from toprope.store.objects.opening import open_store, sweep_uploads
from toprope.store.objects.protocol import ObjectStore
from toprope.store.places import parse_place, parse_range
from toprope.store.sizes import size_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(job_app, name="job")
app.command()(rollback)

_REASONS_SHOWN = 20

_SAID: dict[type[Pin | Unpin], tuple[str, str, str]] = {
    Pin: ("would be", "is", "is already"),
    Unpin: ("would no longer be", "is no longer", "was not"),
}
"""What becomes of a pin: if it is only tried, if it is done, and if it was so before."""

At = Annotated[str, typer.Argument(metavar="JOB@STEP", help="The checkpoint, as run7@1200.", show_default=False)]


@app.callback()
def _group() -> None:
    """Change a job: by its coordinator if one answers, else by an append of the command's own."""


@app.command()
def pin(
    root: Root,
    at: At,
    *,
    dry_run: DryRun = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Pin a checkpoint: no policy retires it, and nothing of it is deleted, until it is unpinned."""
    _set_pin(root, at, Pin, dry_run=dry_run, coordinator=coordinator, token_file=token_file, as_json=as_json)


@app.command()
def unpin(
    root: Root,
    at: At,
    *,
    dry_run: DryRun = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Lift the pin of a checkpoint."""
    _set_pin(root, at, Unpin, dry_run=dry_run, coordinator=coordinator, token_file=token_file, as_json=as_json)


def _set_pin(  # noqa: PLR0913 - the options of both words
    root: str,
    at: str,
    kind: type[Pin | Unpin],
    *,
    dry_run: bool,
    coordinator: str,
    token_file: Path | None,
    as_json: bool,
) -> None:
    store = open_store(root)
    state, step, seq = _ready_at(store, at)
    changer = changer_of(store, root, url=coordinator, token_file=token_file)
    changed = change_or_try(changer, state, kind(seq=seq), purpose=kind.__name__.lower(), dry_run=dry_run)
    if as_json:
        pinned = kind is Pin
        line = {"job": state.job, "step": step, "ready": seq, "pinned": pinned, **outcome(changed, dry_run=dry_run)}
        print_json(line)
        return
    tried, done, before = _SAID[kind]
    verb = before if not changed else tried if dry_run else done
    put(f"step {step} of job {state.job} (READY {seq}) {verb} pinned")


def _ready_at(store: ObjectStore, at: str) -> tuple[JobState, int, int]:
    """Return the job, the step and the number of the newest live READY of ``JOB@STEP``."""
    name, step = parse_place(at)
    state = read_state(store, name)
    return state, step, _ready_of(state, step)


@app.command()
def metric(  # noqa: PLR0913 - one for each option
    root: Root,
    at: At,
    value: Annotated[
        str, typer.Argument(metavar="NAME=VALUE", help="What was measured, as val_loss=2.31.", show_default=False)
    ],
    *,
    dry_run: DryRun = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint was found to be worth: a policy with best=N:min:NAME (or max) keeps the best by it.

    Of one name the last value counts. `ckpt ls` shows it.
    """
    name, _, number = value.partition("=")
    try:
        measured = float(number)
    except ValueError:
        raise UsageError(f"{value[:80]!r} is not usable: give NAME=VALUE, as val_loss=2.31") from None
    store = open_store(root)
    state, step, seq = _ready_at(store, at)
    change = Metric(seq=seq, name=name, value=measured)
    changer = changer_of(store, root, url=coordinator, token_file=token_file)
    changed = change_or_try(changer, state, change, purpose="metric", dry_run=dry_run)
    if as_json:
        line = {"job": state.job, "step": step, "ready": seq, "name": name, "value": measured}
        print_json({**line, **outcome(changed, dry_run=dry_run)})
        return
    verb = "has" if not changed else "would have" if dry_run else "now has"
    put(f"step {step} of job {state.job} (READY {seq}) {verb} {name} {measured:.6g}")


@app.command()
def taint(  # noqa: PLR0913 - one for each option
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
    dry_run: DryRun = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Say that steps are not to be trusted, in any tier: no restore begins from them.

    A taint can't be taken back. One with an open end, as run7@1200.., ends the current attempt: nothing more of it
    becomes READY, and the next one begins before it. Steps past the newest READY one may be in the nodes' memory; of
    others at least one must have been READY.

    Exit status: 0 done; 3 none of these steps has ever been READY.
    """
    store = open_store(root)
    name, first, end = parse_range(at)
    last = first if end is None else (None if end < 0 else end)
    state = read_state(store, name)
    taints = taints_of(state, from_step=first, to_step=last, reason=reason, attempt=attempt)
    changer = changer_of(store, root, url=coordinator, token_file=token_file)
    made = []
    for one in taints:
        checked(state, one)
    lost = given_up(state, taints)
    for one in taints:
        changed = checked(state, one) is not None
        state = state if dry_run else changer.append(state, one, purpose="taint")
        made.append({"attempt": one.attempt, "from": one.from_step, "to": one.to_step, "changed": changed})
        if not as_json:
            steps = f"step {one.from_step} on" if one.to_step is None else f"steps {one.from_step} to {one.to_step}"
            put(f"attempt {one.attempt}, {steps}: {'would be ' * dry_run}tainted" + " already" * (not changed))
    after = replace(state, taints=(*state.taints, *taints)) if dry_run else state
    good = next(iter(after.restorable()), None)
    if as_json:
        left = None if good is None else {"step": good[1].step, "ready": good[0]}
        print_json({"job": name, "taints": made, "given_up": lost, "newest": left, "done": not dry_run})
        return
    ready = f"READY steps given up: {', '.join(map(str, lost))}" if lost else "no READY step is given up"
    say(f"{ready}; newest checkpoint that is left: {f'step {good[1].step} (READY {good[0]})' if good else 'none'}")


@app.command()
def gc(  # noqa: PLR0913 - one for each option
    root: Root,
    job: JobOption = None,
    *,
    retain: Annotated[
        str, typer.Option("--retain", help="Retire by this policy, as last=3,every=1000; else by the job's own.")
    ] = "",
    dry_run: DryRun = False,
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
    condemned already goes first. A checkpoint that somebody removed from the store by hand is unpinned and retired,
    with a warning.

    Exit status: 0 done; 2 a manifest or index of what is kept can't be read, so nothing was deleted.
    """
    store = open_store(root)
    state = read_state(store, only_job(store, root, job))
    policy = parse_policy(retain or state.retain)
    plan = plan_retention(state, policy)
    if dry_run:
        seqs = frozenset(verdict.seq for verdict in plan.retired)
        _report(plan, _surveyed(store, state, changer=None, as_if_retired=seqs), as_json=as_json, done=False)
        return
    swept = sweep_uploads(root, state.job)
    list_holds = _watched(store, state.job) if drop_holds else None
    changer = changer_of(store, root, url=coordinator, token_file=token_file)
    state = _retired(store, changer, state, plan)
    found = _surveyed(store, state, changer=changer, list_holds=list_holds)
    execute(store, found)
    _report(plan, found, as_json=as_json, done=True)
    if swept:
        say(f"removed {len(swept)} unfinished writes")


def _watched(store: ObjectStore, job: str) -> Callable[[], tuple[Key, ...]]:
    """Watch the holds for as long as a reader has to renew one; return what lists those that count."""
    watch = HoldWatch()
    if watch.look(store, job, now_s=time.monotonic):
        say(f"watching what readers hold for {TTL_S:.0f} s")
        time.sleep(TTL_S)
    return lambda: watch.look(store, job, now_s=time.monotonic)


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
        say(f"{str(error).replace(NO_ROOM, '')}; deleting what is condemned already, then trying again")
        execute(store, condemned)
    return changer.append(state, retire, purpose="gc")


def _surveyed(
    store: ObjectStore,
    state: JobState,
    *,
    changer: Changer | None,
    list_holds: Callable[[], tuple[Key, ...]] | None = None,
    as_if_retired: frozenset[int] = frozenset(),
) -> GcPlan:
    """Return what may be deleted, once what was removed by hand is let go of; without ``changer``, as if it had been.

    Raises:
        StoreError: a manifest or an index of what is kept can't be read, so nothing may be deleted.
    """
    try:
        return survey(store, state, list_holds=list_holds, as_if_retired=as_if_retired, weigh=True)
    except StoreError:
        seqs = gone(store, state)
        if not seqs:
            raise
    say(in_words(state, seqs, done=changer is not None))
    while changer is not None and (change := make_letting_go(state, seqs=seqs)) is not None:
        state = changer.append(state, change, purpose="gc")
    retired = as_if_retired if changer is not None else as_if_retired | set(seqs)
    return survey(store, state, list_holds=list_holds, as_if_retired=retired, weigh=True)


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
        put(f"{'deleted' if done else 'would delete'} {objects_text(len(sizes))}, {size_text(sum(sizes))}: {why}")
    if len(reasons) > _REASONS_SHOWN:
        put(f"and more for {len(reasons) - _REASONS_SHOWN} other reasons: --json has all")
    for seq in found.held:
        put(f"READY {seq} stays for now: a reader holds it")
    total = f"{objects_text(len(found.condemned))}, {size_text(found.bytes)}"
    say(f"{'deleted' if done else 'would delete'} {total}" if found.condemned else "nothing to delete")


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
