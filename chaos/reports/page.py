"""A verdict as one page of HTML that needs nothing else: no request leaves it, no script runs in it."""

from __future__ import annotations

from collections.abc import Iterable

from toprope.chaos.reports.style import CSS
from toprope.chaos.reports.timeline import timeline
from toprope.chaos.reports.words import fault_of, figure, headline, mark_of, quoted, title_of, verdict_word
from toprope.chaos.verdict import Goodput, Injection, Promise, Verdict

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_CHART = (600, 120)
"""Width and height of the drawing of goodput, in units that the page stretches."""


def page(verdict: Verdict) -> str:
    """Return the document."""
    title = f"{verdict.scenario}, seed {verdict.seed}: {verdict_word(verdict)}"
    parts = (
        _head(verdict),
        _figures(verdict),
        timeline(verdict),
        _promises(verdict.promises),
        _injections(verdict.injections),
        _goodput(verdict),
        _log(verdict.log),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{quoted(title)}</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "".join(parts)
        + "</main>\n</body>\n</html>\n"
    )


def _head(verdict: Verdict) -> str:
    kind = {"held": "held", "broken": "broken"}.get(verdict_word(verdict), "unproved")
    facts = (f"seed {verdict.seed}", f"{verdict.steps} steps", f"{verdict.world} ranks", f"{verdict.seconds:.0f} s")
    return (
        f'<header>\n<p class="kicker">Toprope chaos</p>\n<h1>{quoted(verdict.scenario)}</h1>\n'
        f"<p>{quoted(verdict.about)}</p>\n"
        f'<p class="verdict {kind}">{quoted(headline(verdict))}</p>\n'
        f'<p class="facts">{"".join(f"<span>{fact}</span>" for fact in facts)}</p>\n</header>\n'
    )


def _figures(verdict: Verdict) -> str:
    cards = [figure(name, value) for name, value in verdict.figures.items()]
    if not cards:
        return ""
    body = "".join(f"<div><dt>{quoted(name)}</dt><dd>{quoted(value)}</dd></div>\n" for name, value in cards)
    return f'<dl class="figures">\n{body}</dl>\n'


def _promises(promises: tuple[Promise, ...]) -> str:
    def row(promise: Promise) -> tuple[str, ...]:
        kind = promise.outcome.replace(" ", "-")
        attacked = ' <span class="attacked">attacked</span>' if promise.attacked else ""
        return (
            f'<span class="outcome {kind}">{mark_of(promise.outcome)} {promise.outcome}</span>',
            f"<b>{quoted(title_of(promise.name))}</b>{attacked}<br>{quoted(promise.says)}",
            _lines(promise.evidence),
        )

    return _table("What was promised", ("outcome", "promise", "evidence"), map(row, promises))


def _injections(injections: tuple[Injection, ...]) -> str:
    def row(numbered: tuple[int, Injection]) -> tuple[str, ...]:
        number, injection = numbered
        until = f" to {injection.until_s:.1f} s" if injection.until_s > injection.at_s else ""
        at = f"{injection.at_s:.1f} s{until}" if injection.fired else "did not fire"
        kind = "" if injection.fired else ' class="outcome broken"'
        return (
            f'<span class="number">{number}</span> <span{kind}>{at}</span>',
            f"<b>{quoted(fault_of(injection))}</b><br>{quoted(injection.trigger)}",
            _lines((injection.witness,)),
        )

    rows = map(row, enumerate(injections, 1))
    return _table("What was done to it", ("fired", "fault", "witness"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    body = "".join(
        "<tr>"
        + "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(columns, row, strict=True))
        + "</tr>\n"
        for row in rows
    )
    if not body:
        return f"<section>\n<h2>{title}</h2>\n<p>Nothing.</p>\n</section>\n"
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return (
        f"<section>\n<h2>{title}</h2>\n<table>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table>\n</section>\n"
    )


def _lines(lines: tuple[str, ...]) -> str:
    return "".join(f"<code>{quoted(line)}</code>" for line in lines)


def _goodput(verdict: Verdict) -> str:
    if not verdict.losses and not verdict.goodput:
        return ""
    most = max((loss.rank_seconds for loss in verdict.losses), default=0.0) or 1.0
    bars = "".join(
        f'<div><dt>{quoted(loss.cause)}</dt><dd><span class="bar" style="width:{60 * loss.rank_seconds / most:.1f}%">'
        f"</span>{loss.rank_seconds:,.1f} rank s</dd></div>\n"
        for loss in sorted(verdict.losses, key=lambda loss: -loss.rank_seconds)
    )
    losses = f'<h3>Where the rest went</h3>\n<dl class="bars">\n{bars}</dl>\n' if bars else ""
    return f"<section>\n<h2>Goodput</h2>\n{_chart(verdict.goodput)}{losses}</section>\n"


def _chart(points: tuple[Goodput, ...]) -> str:
    """Draw the share of new training over time as steps: each point stands for the stretch that ends at it."""
    if not points:
        return ""
    width, height = _CHART
    end_s = points[-1].at_s or 1.0
    path, at_x = "", 0.0
    for point in points:
        x, y = width * point.at_s / end_s, height * (1.0 - min(1.0, max(0.0, point.share)))
        path += f"{'L' if path else 'M'}{at_x:.1f} {y:.1f}H{x:.1f}"
        at_x = x
    return (
        f'<figure>\n<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="goodput over {end_s:.0f} seconds">'
        f'<path class="area" d="{path}V{height}H0Z"/><path class="line" d="{path}"/></svg>\n'
        f"<figcaption><span>0 s</span><span>share of time in new training, 0 to 100 %</span>"
        f"<span>{end_s:.0f} s</span></figcaption>\n</figure>\n"
    )


def _log(lines: tuple[str, ...]) -> str:
    if not lines:
        return ""
    return (
        f"<section>\n<details>\n<summary>The job log, {len(lines)} records</summary>\n"
        f"<pre>{quoted(chr(10).join(lines))}</pre>\n</details>\n</section>\n"
    )
