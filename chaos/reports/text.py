"""A verdict in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toprope.chaos.reports.words import fault_of, figure, headline, mark_of, plain, title_of
from toprope.chaos.verdict import Verdict

_STYLES = {"held": "green", "broken": "bold red", "not judged": "yellow"}


def render(verdict: Verdict, console: Console) -> None:
    """Print the report for a person."""
    console.rule(_shown(f"{verdict.scenario}, seed {verdict.seed}"))
    console.print(_shown(verdict.about), highlight=False)
    _injections(verdict, console)
    _promises(verdict, console)
    _figures(verdict, console)
    good = verdict.good
    console.print(f"[bold {'green' if good else 'red'}]{_shown(headline(verdict))}[/]", highlight=False)


def _injections(verdict: Verdict, console: Console) -> None:
    table = _table("What was done", ("", "at", "fault", "when", "witness"))
    for injection in verdict.injections:
        mark = "[green]fired[/]" if injection.fired else "[bold red]did not fire[/]"
        at = f"{injection.at_s:.1f} s" if injection.fired else "-"
        cells = (fault_of(injection), injection.trigger, injection.witness)
        table.add_row(mark, at, *map(_shown, cells))
    console.print(table)


def _promises(verdict: Verdict, console: Console) -> None:
    table = _table("What was promised", ("", "promise", "evidence"))
    for promise in verdict.promises:
        style = _STYLES[promise.outcome]
        name = _shown(title_of(promise.name)) + (" [bold](attacked)[/]" if promise.attacked else "")
        evidence = "\n".join(promise.evidence) or promise.says
        table.add_row(f"[{style}]{mark_of(promise.outcome)} {promise.outcome}[/]", name, _shown(evidence))
    console.print(table)


def _figures(verdict: Verdict, console: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in verdict.figures.items():
        table.add_row(*map(_shown, figure(name, value)))
    for loss in verdict.losses:
        table.add_row(_shown(f"lost to {loss.cause}"), f"{loss.rank_seconds:.1f} rank seconds")
    if table.row_count:
        console.print(table)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    return table


def _shown(text: str) -> str:
    """Return a text as rich's markup that shows it."""
    return escape(plain(text))
