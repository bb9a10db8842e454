"""``ckpt job``: what holds for a whole job, and its end."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import typer

from toprope.coordinator import spec, status
from toprope.coordinator.changing import ASK_NOBODY
from toprope.coordinator.cli_common import (
    CoordinatorUrl,
    DryRun,
    TokenFile,
    change_or_try,
    changer_of,
    objects_text,
    outcome,
)
from toprope.coordinator.leader import NobodyThereError, StandsByError
from toprope.coordinator.overview import Overview
from toprope.store.checkpoint.manifest import sha256
from toprope.store.checkpoint.ready import read_capped
from toprope.store.cli.shared import AsJson, JobOption, Root, only_job, print_json, put, say
from toprope.store.errors import CorruptObjectError, MissingObjectError, UnavailableError, UsageError
from toprope.store.keep.changes import policy_change
from toprope.store.keep.purging import check_unneeded, delete, keys_of, probes_of
from toprope.store.keep.retention import parse_policy, plan_retention
from toprope.store.log.records import Elected, Job
from toprope.store.look.show import JobLog, read_beginning, read_state
from toprope.store.names import facts_key
from toprope.store.objects.opening import open_store, sweep_uploads
from toprope.store.objects.protocol import ObjectStore

job_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Change what holds for a whole job.")

_ADDRESSES_MAX = 8
_MAX_SPEC_BYTES = 64 * 1024 * 1024


@job_app.command("retain")
def job_retain(  # noqa: PLR0913 - one for each option
    root: Root,
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="As last=3,every=1000; or all.", show_default=False)],
    job: JobOption = None,
    *,
    dry_run: DryRun = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Set the job's policy of retention, which its coordinator carries out after each new READY checkpoint.

    last=N keeps the newest N, every=K the first checkpoint at or past each multiple of K steps, within=12h those of
    that time, best=N:min:val_loss (or max) the best N of those that `ckpt metric` gave a value; all keeps everything.
    """
    store = open_store(root)
    state = read_state(store, only_job(store, root, job))
    change = policy_change(state, policy)
    changer = changer_of(store, root, url=coordinator, token_file=token_file)
    changed = change_or_try(changer, state, change, purpose="retain", dry_run=dry_run)
    retired = plan_retention(state, parse_policy(change.retain or "")).retired
    if as_json:
        plan = {"job": state.job, "retain": change.retain or "all", "would_retire": retired}
        print_json({**plan, **outcome(changed, dry_run=dry_run)})
        return
    put(f"job {state.job} {'would retain' if dry_run else 'retains'} {change.retain or 'all'}")
    if dry_run:
        steps = ", ".join(str(verdict.step) for verdict in retired) or "nothing"
        put(f"of what it has now, that retires {steps}")


@job_app.command("purge")
def job_purge(
    root: Root,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job that is to go.", show_default=False)],
    *,
    confirm: Annotated[str, typer.Option("--confirm", metavar="JOB", help="Its name once more.")] = "",
    dry_run: DryRun = False,
    coordinator: CoordinatorUrl = "",
    as_json: AsJson = False,
) -> None:
    """Delete a job: every checkpoint, pinned ones too, and its log. Nothing of it can be had again.

    End its coordinators and sidecars first. It refuses while a coordinator answers where one was ever elected, which
    says what trainers live; while a reader holds a checkpoint; and while another job starts from one and has none of
    its own. One that has only stood by can't be seen: if it is left running it may write a record after this, which is
    a job with a damaged log. With --coordinator none nobody is asked: for a copy of a store, while the job runs on the
    other one. On the store that a living job uses, it deletes that job under way. A job whose log is damaged goes too,
    its records read as far as they can be. What an interrupted purge left goes with the next one.
    """
    store = open_store(root)
    log, damage = read_beginning(store, job)
    state = log.state
    if damage:
        say(f"the log of job {job} is damaged, so not all of its checkpoints and coordinators are known: {damage}")
    if not dry_run and confirm != job:
        raise UsageError(f"this deletes all of job {job}: to do it, give --confirm {job}; --dry-run says what it is")
    for url in _asked(coordinator, log):
        _check_ended(url, job, root)
    check_unneeded(store, state)
    keys = (*keys_of(store, job), *probes_of(store))
    if not dry_run:
        swept = sweep_uploads(root, job)
        delete(store, keys)
        keys = (*keys, *swept)
    steps = tuple(state.readies[seq].step for seq in state.live)
    if as_json:
        print_json({"job": job, "checkpoints": steps, "objects": len(keys), "done": not dry_run})
        return
    put(f"job {job}: {len(steps)} checkpoints, {objects_text(len(keys))} {'would be ' * dry_run}deleted")


def _asked(coordinator: str, log: JobLog) -> tuple[str, ...]:
    if coordinator == ASK_NOBODY:
        return ()
    return (coordinator,) if coordinator else _addresses(log)


def _addresses(log: JobLog) -> tuple[str, ...]:
    """Return where coordinators of the job have served, the newest first: one of them may stand by there still."""
    elected = [entry.record for entry in reversed(log.entries) if isinstance(entry.record, Elected)]
    return tuple(dict.fromkeys(one.url for one in elected if one.url))[:_ADDRESSES_MAX]


def _check_ended(url: str, job: str, root: str) -> None:
    """Check that no coordinator of the job answers at a url.

    Raises:
        UsageError: one does; the message says which ranks live.
    """
    copied = f"or, if {root} is a copy of the store that it serves, give --coordinator {ASK_NOBODY}"
    try:
        view = status.fetch([url], job="", token="")
    except (UsageError, StandsByError) as error:  # one that wants a token is one
        raise UsageError(f"job {job}: a coordinator answers at {url} ({error}); end it first; {copied}") from error
    except NobodyThereError:
        return
    except UnavailableError as error:  # it may be one that is reading the log, or that is frozen
        raise UsageError(f"job {job}: {error}; end it first; {copied}") from error
    found = msgspec.json.decode(view, type=Overview)
    if found.job == job:
        living = [f"rank {rank.rank} on node {rank.node}" for rank in found.ranks if rank.lock_held]
        who = f"{', '.join(living[:5])} live; end them" if living else "no rank of it is known to live; end it"
        raise UsageError(f"job {job}: its coordinator answers at {url}, and {who} first; {copied}. Nothing was deleted")


@job_app.command("accept-spec")
def job_accept_spec(  # noqa: PLR0913 - one for each option
    root: Root,
    spec_sha256: Annotated[
        str, typer.Argument(metavar="SPEC", help="The SHA-256 that the refusal named.", show_default=False)
    ],
    job: JobOption = None,
    *,
    dry_run: DryRun = False,
    coordinator: CoordinatorUrl = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Accept another spec (names, dtypes and shapes of the state) as the job's, so that the next launch with it opens.

    It prints how the two differ. A launch with another spec than the job's is refused, and the refusal names it.
    Launches with the old one are refused from then on.
    """
    store = open_store(root)
    state = read_state(store, only_job(store, root, job))
    if state.spec_sha256 is None:
        raise UsageError(f"job {state.job}: no spec has been set yet; its first attempt sets it")
    old, new = (_spec(store, state.job, digest) for digest in (state.spec_sha256, spec_sha256))
    change = Job(uid=state.job_uid, name=state.job, spec_sha256=spec_sha256, replaces=state.spec_sha256)
    changer = changer_of(store, root, url=coordinator, token_file=token_file)
    changed = change_or_try(changer, state, change, purpose="accept-spec", dry_run=dry_run)
    if as_json:
        specs = {"spec": spec_sha256, "replaces": state.spec_sha256, "differences": spec.differences(old, new)}
        print_json({"job": state.job, **specs, **outcome(changed, dry_run=dry_run)})
        return
    put(spec.diff(old, new) or "no difference")
    has = "has" if not changed else "would have" if dry_run else "now has"
    put(f"job {state.job} {has} spec {spec_sha256[:12]}")


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
