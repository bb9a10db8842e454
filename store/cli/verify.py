"""``ckpt verify``: all, a sample, or deeper than digests go."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from toprope.store.checkpoint.assemble import read_indexes
from toprope.store.checkpoint.ready import Damage
from toprope.store.cli.shared import (
    AsJson,
    JobOption,
    RootOrAt,
    StepOption,
    chosen,
    metered,
    names_of_jobs,
    print_json,
    put,
    say,
)
from toprope.store.errors import NothingToVerifyError, UsageError
from toprope.store.log.chain import read_on
from toprope.store.log.fold import JobState
from toprope.store.look.sample import Sample, Sampled, parse_sample, sample_checkpoint, untold
from toprope.store.look.show import JobNames, read_jobs, without_log_text
from toprope.store.look.verify import CheckpointReport, plan, verify_checkpoint, verify_facts
from toprope.store.objects.opening import open_store
from toprope.store.objects.protocol import ObjectStore
from toprope.store.sizes import size_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What was found in a checkpoint: in the files, and in how their tensors fit together.

    ``tainted``: a person does not trust it, so no restore begins from it, as good as its bytes may be.
    """

    report: CheckpointReport
    sampled: Sampled | None
    tainted: bool
    untiled: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return not self.report.damages and not self.untiled


@app.command()
def verify(  # noqa: PLR0913 - one for each option
    root: RootOrAt,
    job: JobOption = None,
    step: StepOption = None,
    *,
    sample: Annotated[
        str | None,
        typer.Option("--sample", help="Read only so many tensors of each checkpoint, as 20 or 1%; 0: only lengths."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Which tensors a sample has.")] = 0,
    deep: Annotated[
        int | None,
        typer.Option("--deep", min=1, metavar="RANKS", help="Also check that it restores onto so many ranks."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Read everything back and check every digest. Changes nothing.

    A sample reads every manifest and index, looks at the length of every file, and reads some tensors; it says what it
    did not read. --deep also checks that the pieces of all ranks make up whole tensors.

    What is `ok` and tainted has good bytes, but no restore begins from it; `ckpt log` has the reason.

    Exit status: 0 all is as it was written; 2 something is damaged; 3 there is nothing to verify, or a job has objects
    and no log to verify them by; 4 the store can't be reached, or nothing is wrong but that a file system of the
    network does not show all of it: not yet, or it was removed.
    """
    if sample is not None and deep is not None:
        raise UsageError("--deep reads everything: leave out --sample")
    root, job, step = chosen(root, job, step)
    part = None if sample is None else parse_sample(sample, seed=seed)
    store = open_store(root)
    names = _names(store, root, job)
    planned, broken = _planned(store, root, names.jobs, step)
    total = sum(state.readies[seq].bytes for state, seqs in planned for seq in seqs)
    facts = [*broken]
    for damage in broken:
        if not as_json:
            put(f"{'DAMAGED':<8} job {damage.job}, log")
            _print_damages([damage])
    found: list[_Found] = []
    with metered(store, "verifying", total_bytes=total) as watched:
        for state, seqs in planned:
            of_job = verify_facts(watched, state)
            facts += of_job
            if of_job and not as_json:
                put(f"{_word(of_job):<8} job {state.job}, facts")
                _print_damages(of_job)
            for seq in seqs:
                one = _verified(watched, state, seq, part, deep)
                if one.report.damages and seq in read_on(store, state).retired:
                    say(f"step {one.report.step} of job {state.job} was retired meanwhile, and is passed over")
                    continue
                found.append(one)
                if not as_json:
                    _print_found(found[-1], deep)
    good = not facts and all(one.is_good for one in found)
    if as_json:
        told = {"checkpoints": [_as_json(one) for one in found], "damages": _damages(facts, found)}
        print_json({"ok": good and not names.without_log, **told, "without_log": names.without_log})
    else:
        say(_verdict(facts, found))
    bad = 4 if _is_unseen(facts, found) else 2
    return bad if not good else 3 if names.without_log else 0


def _names(store: ObjectStore, root: str, job: str | None) -> JobNames:
    """Return the jobs to verify, having said which have no log; raises where none has one."""
    names = names_of_jobs(store, root, job)
    lost = without_log_text(names.without_log) if names.without_log else ""
    if not names.jobs:
        raise NothingToVerifyError(lost or f"{root}: no jobs, so nothing to verify")
    if lost:
        say(lost)
    return names


def _planned(
    store: ObjectStore, root: str, names: tuple[str, ...], step: int | None
) -> tuple[list[tuple[JobState, tuple[int, ...]]], tuple[Damage, ...]]:
    """Return the jobs and their READYs to verify, and the logs that can't be read.

    That one job of several has nothing is no error.
    """
    logs, broken = read_jobs(store, names)
    states = [log.state for log in logs]
    if len(states) == 1 and not broken:
        return [(states[0], plan(states[0], step=step))], ()
    planned = []
    for state in states:
        try:
            planned.append((state, plan(state, step=step)))
        except NothingToVerifyError:
            planned.append((state, ()))
    if not broken and not any(seqs for _, seqs in planned):
        what = "no READY checkpoint" if step is None else f"no READY checkpoint of step {step}"
        raise NothingToVerifyError(f"{root}: {what} in any of {len(states)} jobs, so nothing to verify")
    return planned, broken


def _verified(store: ObjectStore, state: JobState, seq: int, part: Sample | None, deep: int | None) -> _Found:
    tainted = state.is_tainted(attempt=state.readies[seq].attempt, step=state.readies[seq].step)
    if part is not None:
        report, sampled = sample_checkpoint(store, state, seq, part)
        return _Found(report=report, sampled=sampled, tainted=tainted)
    report = verify_checkpoint(store, state, seq)
    if deep is None or report.damages:
        return _Found(report=report, sampled=None, tainted=tainted)
    wrong, own = untold(read_indexes(store, state, seq)[1], ranks=deep)
    return _Found(report=report, sampled=None, tainted=tainted, untiled=tuple(wrong), own=tuple(own))


def _print_found(found: _Found, deep: int | None) -> None:
    report = found.report
    word = "ok" if found.is_good else "DAMAGED" if found.untiled else _word(report.damages)
    put(
        f"{word:<8} job {report.job}, step {report.step}: {report.world} ranks, "
        f"{size_text(report.bytes)} (READY {report.seq}, attempt {report.attempt}{', tainted' * found.tainted})"
    )
    _print_damages(report.damages)
    for what in found.untiled:
        put(f"  job {report.job}, step {report.step}: tensor {what}")
    if found.sampled is not None:
        read = found.sampled
        put(f"         read {read.tensors:,} of {read.of:,} tensors, {size_text(read.bytes)}; the rest was not read")
    if deep is not None and found.is_good:
        put(f"         its tensors are whole, for {deep} rank{'s' * (deep != 1)} or any other number{_own(found)}")
    sys.stdout.flush()


def _own(found: _Found) -> str:
    if not found.own:
        return ""
    names = ", ".join(found.own[:_NAMED]) + (", ..." if len(found.own) > _NAMED else "")
    return f"; each rank's own, so not to be cut: {names}"


def _word(damages: Iterable[Damage]) -> str:
    return "UNSEEN" if all(damage.unseen for damage in damages) else "DAMAGED"


def _is_unseen(facts: list[Damage], found: list[_Found]) -> bool:
    """Whether of all that is wrong nothing is more than not to be seen."""
    return all(damage.unseen for damage in _damages(facts, found)) and not any(one.untiled for one in found)


def _print_damages(damages: Iterable[Damage]) -> None:
    for damage in damages:
        put(f"  {damage}")


def _verdict(facts: list[Damage], found: list[_Found]) -> str:
    checkpoints = f"{len(found)} checkpoint{'s' * (len(found) != 1)}"
    if not facts and all(one.is_good for one in found):
        is_part = any(one.sampled is not None for one in found)
        total = sum(one.report.bytes if one.sampled is None else one.sampled.bytes for one in found)
        return f"{'all that was read is good' if is_part else 'all good'}: {checkpoints}, {size_text(total)} read"
    number = len(_damages(facts, found)) + sum(len(one.untiled) for one in found)
    bad = sum(not one.is_good for one in found)
    word = "NOT VISIBLE YET, OR REMOVED" if _is_unseen(facts, found) else "DAMAGED"
    return f"{word}: {number} finding{'s' * (number != 1)}, {bad} of {checkpoints}"


def _damages(facts: list[Damage], found: list[_Found]) -> list[Damage]:
    return [*facts, *(damage for one in found for damage in one.report.damages)]


def _as_json(found: _Found) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(found.report)
    if found.sampled is not None:
        plain["sampled"] = found.sampled
    return plain | {"tainted": found.tainted, "untiled": found.untiled, "own": found.own}
