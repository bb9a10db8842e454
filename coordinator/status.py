"""``ckpt status``: what is safe where, on one screen of 80 columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http import HTTPStatus

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toprope.coordinator.leader import ask_leader
from toprope.coordinator.overview import Overview, RankLine
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.sizes import size_text

_RANKS_SHOWN = 32


def fetch(urls: Sequence[str], *, job: str, token: str) -> bytes:
    """Return the status document of the coordinator that leads, given the url of any.

    Raises:
        UnavailableError: none that leads answers (``NobodyThereError`` if none is there), or not with a status.
        UsageError: a url is none, the token is wrong, or the coordinator there serves another job.
    """
    answer = ask_leader(urls, "/v1/status", token=token)
    if answer.status != HTTPStatus.OK:
        raise UnavailableError(f"the coordinator at {answer.url} answered {answer.status}: {answer.text}")
    try:
        view = msgspec.json.decode(answer.body, type=Overview)
    except msgspec.MsgspecError:
        raise UnavailableError(f"what answers at {answer.url} is no coordinator of this version") from None
    if job and view.job != job:
        raise UsageError(f"the coordinator at {answer.url} serves job {view.job!r}, not {job!r}")
    return answer.body


def show(body: bytes) -> None:
    """Print a status document for people."""
    view = msgspec.json.decode(body, type=Overview)
    console = Console(file=sys.stdout, highlight=False)
    attempt = view.attempt
    console.print(Text(f"job {view.job}", style="bold"), f" term {view.term}, broker {view.broker}, {view.url}")
    standbys = ", ".join(view.standbys) or "none"
    console.print(Text(f"standby: {standbys}", style="" if view.standbys else "dim"), soft_wrap=True)
    if attempt is None:
        console.print("no attempt yet: start the trainers")
    else:
        console.print(
            f"attempt {attempt.number} ({attempt.uid[:8]}) of {attempt.world} ranks from step {attempt.from_step}: "
            f"{attempt.phase}{', not in the log yet' if attempt.provisional else ''}",
            soft_wrap=True,
        )
    cadence = view.cadence
    console.print(
        f"every {cadence.every} steps to memory and peer, {cadence.local_every} local, {cadence.object_every} object"
    )
    console.print(_safe_line(view))
    if view.ranks:
        console.print(_ranks(view.ranks))
    console.print(_nodes(view))
    for alarm in view.alarms:
        console.print(Text("!", style="bold red"), Text(alarm))
    if not view.alarms:
        console.print("no alarms", style="green")


def _safe_line(view: Overview) -> Text:
    text = Text("protected: ")
    text.append(f"step {view.protected_step}" if view.protected_step else "nothing", style="bold")
    if view.protected_step:
        text.append(f" {_safety_text(view)}")
        text.append(f" (since {view.protected_age_s:.0f} s)")
    text.append("   READY: ")
    text.append(f"step {view.ready_step}" if view.ready_step else "nothing", style="bold")
    return text


def _safety_text(view: Overview) -> str:
    """Return what protection is worth."""
    if not view.copies:
        return "in its own nodes' memory only"
    losses = "any 1 loss" if view.survives == 1 else f"any {view.survives} losses"
    return f"against {losses}"


def _ranks(ranks: tuple[RankLine, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("rank", "node"):
        table.add_column(title, justify="right" if title == "rank" else "left", no_wrap=True, max_width=24)
    for title in ("step", "memory", "peer", "local", "object"):
        table.add_column(title, justify="right")
    for line in ranks[:_RANKS_SHOWN]:
        steps = (line.step, line.memory, line.peer, line.local, line.object)
        table.add_row(
            str(line.rank),
            Text(line.node if line.alive else f"{line.node} (gone)", style="" if line.alive else "red"),
            *(str(step) if step else "-" for step in steps),
        )
    if len(ranks) > _RANKS_SHOWN:
        table.add_row("...", f"{len(ranks) - _RANKS_SHOWN} more: --json", *[""] * 5)
    return table


def _nodes(view: Overview) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("node", "state", "holds copies for", "memory id"):
        table.add_column(title, no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("held", justify="right")
    for node in view.nodes:
        state = Text("alive", style="green") if node.alive else Text(f"silent {node.silent_s:.0f} s", style="red")
        table.add_row(node.node, state, ", ".join(node.holds_for) or "-", node.boot_id[:8], size_text(node.bytes))
    if not view.nodes:
        table.add_row("none heard yet", "", "", "", "")
    return table
