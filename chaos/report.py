"""The demo's report: computed from evidence by a pure function, printed for people or as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from toprope.chaos.journal import Event, Final
from toprope.chaos.oracle import compare, steps_lost_allowed, torn_restores


class KilledProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A killed process and its wait status (-9: SIGKILL)."""

    what: str
    pid: int
    status: int


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank sat."""

    rank: int
    node: str
    boot_id: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that the report is computed from."""

    job: str
    steps: int
    seed: int
    every: int
    world: int
    node: str
    killed: tuple[KilledProcess, ...]
    killed_at_s: float
    killed_at_utc: str
    kill_took_s: float
    boot_id_old: str
    boot_id_new: str
    world_before: tuple[Member, ...]
    world_after: tuple[Member, ...]
    due_from: int
    protected_at_kill: int
    events: tuple[Event, ...]
    log: tuple[str, ...]
    finals: tuple[Final, ...]
    reference: tuple[Final, ...]


class ShardSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node got a shard from. ``lived_on``: the node whose rank had saved it."""

    node: str
    shard: int
    lived_on: str
    tier: str
    holder: str
    holder_boot_id: str


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's final digest of one kind in both runs."""

    rank: int
    kind: str
    run: str
    reference: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, in numbers and in tables. ``broken`` lists promises that were not kept."""

    job: str
    steps: int
    seed: int
    every: int
    bit_identical: Literal["yes", "no"]
    differences: tuple[str, ...]
    broken: tuple[str, ...]
    node: str
    killed: tuple[KilledProcess, ...]
    killed_at_utc: str
    kill_took_s: float
    boot_id_old: str
    boot_id_new: str
    newest_step_at_kill: int
    newest_due_at_kill: int
    newest_due_protected: bool
    restored_step: int
    steps_lost: int
    steps_lost_allowed: int
    detected_after_s: float
    first_new_step_after_s: float
    regained_after_s: float
    sources: tuple[ShardSource, ...]
    digests: tuple[Digests, ...]
    log: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Say whether the runs are bit-identical and every promise was kept."""
        return self.bit_identical == "yes" and not self.broken


def build(evidence: Evidence) -> Report:
    """Compute the report."""
    before = [event for event in evidence.events if event.monotonic_s <= evidence.killed_at_s]
    after = [event for event in evidence.events if event.monotonic_s > evidence.killed_at_s]
    newest = max((event.step for event in before if event.event == "step"), default=0)
    due = newest - (newest - evidence.due_from) % evidence.every
    begins = [event for event in after if event.event == "begin"]
    restored = max((event.step for event in begins), default=0)
    protected = evidence.protected_at_kill >= due
    judgement = compare(evidence.finals, evidence.reference, world=evidence.world)
    starts = {event.pid for event in begins}
    new_steps = [event for event in after if event.event == "step" and event.pid in starts]
    report = Report(
        job=evidence.job,
        steps=evidence.steps,
        seed=evidence.seed,
        every=evidence.every,
        bit_identical="yes" if judgement.identical else "no",
        differences=judgement.differences,
        broken=(),
        node=evidence.node,
        killed=evidence.killed,
        killed_at_utc=evidence.killed_at_utc,
        kill_took_s=evidence.kill_took_s,
        boot_id_old=evidence.boot_id_old,
        boot_id_new=evidence.boot_id_new,
        newest_step_at_kill=newest,
        newest_due_at_kill=due,
        newest_due_protected=protected,
        restored_step=restored,
        steps_lost=newest - restored,
        steps_lost_allowed=steps_lost_allowed(newest_due_protected=protected, every=evidence.every),
        detected_after_s=_first(after, evidence, "failed"),
        first_new_step_after_s=_first(new_steps, evidence, "step"),
        regained_after_s=_first((event for event in new_steps if event.step > newest), evidence, "step"),
        sources=_sources(begins, evidence),
        digests=_digests(evidence),
        log=evidence.log,
    )
    return msgspec.structs.replace(report, broken=_broken(report, evidence))


def _first(events: Iterable[Event], evidence: Evidence, kind: str) -> float:
    """Return seconds from the kill to the first event of a kind; -1 when there was none."""
    times = [event.monotonic_s - evidence.killed_at_s for event in events if event.event == kind]
    return round(min(times), 2) if times else -1.0


def _sources(begins: Iterable[Event], evidence: Evidence) -> tuple[ShardSource, ...]:
    lived = {member.rank: member.node for member in evidence.world_before}
    sits = {member.rank: member.node for member in evidence.world_after}
    boots = {member.node: member.boot_id for member in evidence.world_after}
    found: dict[tuple[str, int], ShardSource] = {}
    for event in begins:
        for shard in event.restored:
            node, rank = sits.get(event.rank, "?"), int(shard["rank"])
            found[node, rank] = ShardSource(
                node=node,
                shard=rank,
                lived_on=lived.get(rank, "?"),
                tier=str(shard["tier"]),
                holder=str(shard["node"]),
                holder_boot_id=boots.get(str(shard["node"]), "?"),
            )
    return tuple(found[key] for key in sorted(found))


def _digests(evidence: Evidence) -> tuple[Digests, ...]:
    rows: list[Digests] = []
    for rank in range(evidence.world):
        run: dict[str, Any] = next((final.digests for final in evidence.finals if final.rank == rank), {})
        reference: dict[str, Any] = next((final.digests for final in evidence.reference if final.rank == rank), {})
        for kind in sorted(run.keys() | reference.keys()):
            rows.append(  # noqa: PERF401 - clearer so
                Digests(rank=rank, kind=kind, run=run.get(kind, "-"), reference=reference.get(kind, "-"))
            )
    return tuple(rows)


def _broken(report: Report, evidence: Evidence) -> tuple[str, ...]:
    found = list(torn_restores(evidence.events))
    if report.steps_lost > report.steps_lost_allowed:
        found.append(f"{report.steps_lost} steps were lost, {report.steps_lost_allowed} are allowed")
    if report.restored_step == 0:
        found.append("training began afresh")
    last = {event.rank: event.step for event in evidence.events if event.event == "begin"}
    if len(set(last.values())) > 1:
        found.append(f"ranks restored different steps: {last}")
    orphans = [source for source in report.sources if source.lived_on == report.node and source.node == report.node]
    if not orphans or any(source.tier != "peer" or source.holder == report.node for source in orphans):
        found.append(f"the shards of node {report.node} did not all come from a peer's memory")
    if report.boot_id_old == report.boot_id_new:
        found.append("the new node has the boot id of the old one")
    found += [f"{process.what} ended with {process.status}" for process in report.killed if process.status != -9]  # noqa: PLR2004 - SIGKILL
    return tuple(found)


def render(report: Report, console: Console) -> None:
    """Print the report for a person."""
    console.rule("What happened")
    console.print(
        f"At {report.killed_at_utc} node {report.node} was killed, after step {report.newest_step_at_kill} "
        f"of {report.steps} (seed {report.seed}):"
    )
    for process in report.killed:
        console.print(f"  pid {process.pid}  status {process.status}  {process.what}", highlight=False)
    console.print(f"  its memory and local disk were erased; all gone within {report.kill_took_s:.2f} s")
    _render_figures(report, console)
    _render_sources(report, console)
    console.rule("Job log")
    for line in report.log:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    _render_digests(report, console)
    for line in (*report.differences, *report.broken):
        console.print(f"[red]![/red] {line}", highlight=False)
    colour = "green" if report.good else "red"
    console.print(f"[bold {colour}]bit-identical: {report.bit_identical}[/]", highlight=False)


def _render_figures(report: Report, console: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    state = "was protected" if report.newest_due_protected else "was not yet protected"
    for name, value in (
        ("boot id of the old node", report.boot_id_old),
        ("boot id of the new node", report.boot_id_new),
        ("newest step ended before the kill", str(report.newest_step_at_kill)),
        (f"newest due step (every {report.every})", f"{report.newest_due_at_kill}, {state}"),
        ("restored step", str(report.restored_step)),
        ("steps lost", f"{report.steps_lost} (allowed: {report.steps_lost_allowed})"),
        ("time to detect", f"{report.detected_after_s:.2f} s"),
        ("time to first new step", f"{report.first_new_step_after_s:.2f} s"),
        ("time until the lost steps were done again", f"{report.regained_after_s:.2f} s"),
    ):
        table.add_row(name, value)
    console.print(table)


def _render_sources(report: Report, console: Console) -> None:
    table = Table(title="Where each shard came from", title_justify="left")
    for name in ("node", "shard of rank", "saved on node", "holder", "tier", "holder's boot id"):
        table.add_column(name)
    for source in report.sources:
        cells = (
            source.node,
            str(source.shard),
            source.lived_on,
            source.holder,
            source.tier,
            source.holder_boot_id[:12],
        )
        table.add_row(*cells)
    console.print(table)


def _render_digests(report: Report, console: Console) -> None:
    console.rule("SHA-256 of the final state, with the node's loss / uninterrupted")
    for row in report.digests:
        if row.run == row.reference:
            console.print(f"rank {row.rank} {row.kind:<9} {row.run} [green]=[/]", highlight=False, soft_wrap=True)
        else:
            console.print(f"rank {row.rank} {row.kind:<9} {row.run}", highlight=False, soft_wrap=True)
            console.print(f"{'reference':>16} {row.reference} [red]≠[/]", highlight=False, soft_wrap=True)
