"""The timeline of a page: a row for each rank and one for services, time to the right, faults as numbered lines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import get_args

from toprope.chaos.reports.words import fault_of, quoted, row_of
from toprope.chaos.verdict import NO_RANK, Injection, Kind, Span, Verdict

_TICKS = 7
_CHIP_SHARE = 0.065
"""How much of a narrow row a fault's number takes: closer ones are set below each other."""
_SNAPSHOT_SHARE = 0.001
"""How much of a row is between two marks of snapshots at least."""
_LAST_TICK = 0.97
"""A tick past this share of the axis would stand out of it."""
_LAYERS: tuple[Kind, ...] = ("training", "down", "restore", "snapshot", "fault")
"""What is drawn over what."""
_MEANS: dict[Kind, str] = {
    "training": "training",
    "snapshot": "snapshot taken",
    "fault": "fault in force",
    "down": "down",
    "restore": "restoring",
}
assert set(_LAYERS) == set(_MEANS) == set(get_args(Kind))


def timeline(verdict: Verdict) -> str:
    """Return the section."""
    fired = [(number, one) for number, one in enumerate(verdict.injections, 1) if one.fired]
    ends = [span.end_s for span in verdict.timeline] + [max(one.at_s, one.until_s) for _, one in fired]
    end_s = max((verdict.seconds, *ends)) or 1.0
    ranks = sorted({NO_RANK, *range(verdict.world), *(span.rank for span in verdict.timeline)})
    rows = "".join(_row(rank, [one for one in verdict.timeline if one.rank == rank], fired, end_s) for rank in ranks)
    legend = "".join(f'<li><span class="swatch {kind}"></span>{text}</li>' for kind, text in _MEANS.items())
    return (
        f'<section>\n<h2>Timeline</h2>\n<ul class="legend">{legend}'
        '<li><span class="number">1</span>a fault, as numbered below</li></ul>\n'
        f'<div class="timeline">\n{_chips(fired, end_s)}{rows}{_axis(end_s)}</div>\n'
        f"{_told(verdict.timeline)}</section>\n"
    )


def _row(rank: int, spans: list[Span], fired: list[tuple[int, Injection]], end_s: float) -> str:
    drawn = "".join(
        f'<i class="{span.kind}" style="{_place(span.begin_s, span.end_s, end_s)}" title="{quoted(_text(span))}"></i>'
        for span in sorted(_apart(spans, end_s), key=lambda span: (_LAYERS.index(span.kind), span.begin_s))
    )
    lines = "".join(
        f'<b style="left:{_share(one.at_s, end_s):.3f}%" title="{number}: {quoted(fault_of(one))}"></b>'
        for number, one in fired
    )
    name = row_of(rank)
    return f'<div class="row"><span class="name">{name}</span><div class="track">{drawn}{lines}</div></div>\n'


def _apart(spans: list[Span], end_s: float) -> Iterable[Span]:
    """Leave out snapshots that would be drawn over each other: a long run has thousands."""
    last_s = -end_s
    for span in spans:
        if span.kind == "snapshot":
            if span.begin_s - last_s < _SNAPSHOT_SHARE * end_s:
                continue
            last_s = span.begin_s
        yield span


def _chips(fired: list[tuple[int, Injection]], end_s: float) -> str:
    """Return the numbers of the faults over their lines, in as many lanes as keep them apart."""
    lanes: list[float] = []
    chips = []
    for number, injection in sorted(fired, key=lambda pair: pair[1].at_s):
        share = _share(injection.at_s, end_s) / 100
        lane = next((at for at, last in enumerate(lanes) if share - last >= _CHIP_SHARE), len(lanes))
        lanes[lane : lane + 1] = [share]
        style = f"left:{100 * share:.3f}%;top:{1.3 * lane:.1f}rem"
        chips.append(f'<span class="number" style="{style}" title="{quoted(fault_of(injection))}">{number}</span>')
    if not chips:
        return ""
    height = f"{1.3 * len(lanes):.1f}rem"
    inner = f'<div style="height:{height}">{"".join(chips)}</div>'
    return f'<div class="row chips"><span class="name"></span>{inner}</div>\n'


def _axis(end_s: float) -> str:
    ticks = "".join(
        f'<span style="left:{_share(at_s, end_s):.3f}%">{at_s:g}</span>'
        for at_s in ticks_s(end_s)
        if at_s <= 0.97 * end_s
    )
    return f'<div class="row axis"><span class="name">seconds</span><div>{ticks}</div></div>\n'


def ticks_s(end_s: float) -> list[float]:
    """Return at most eight round times from 0 on that divide a stretch."""
    raw = end_s / _TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= raw * 0.999)
    return [round(number * step, 6) for number in range(_TICKS + 1) if number * step <= end_s]


def _told(spans: tuple[Span, ...]) -> str:
    """Return the same in words, for who can't see it or wants the figures; snapshots are counted."""
    if not spans:
        return ""
    lines = "".join(f"<li>{quoted(line)}</li>\n" for line in _lines(spans))
    return f"<details>\n<summary>The timeline in words</summary>\n<ul>\n{lines}</ul>\n</details>\n"


def _lines(spans: Iterable[Span]) -> list[str]:
    lines, snapshots = [], dict[int, int]()
    for span in sorted(spans, key=lambda span: (span.rank, span.begin_s)):
        if span.kind == "snapshot":
            snapshots[span.rank] = snapshots.get(span.rank, 0) + 1
        else:
            lines.append(f"{row_of(span.rank)}: {_text(span)}")
    return lines + [f"{row_of(rank)}: {count} snapshots" for rank, count in sorted(snapshots.items())]


def _text(span: Span) -> str:
    what = f", {span.what}" if span.what else ""
    return f"{_MEANS[span.kind]} from {span.begin_s:.2f} to {span.end_s:.2f} s{what}"


def _place(begin_s: float, end_s: float, whole_s: float) -> str:
    begin, end = _share(begin_s, whole_s), _share(end_s, whole_s)
    return f"left:{begin:.3f}%;width:{max(0.0, end - begin):.3f}%"


def _share(at_s: float, whole_s: float) -> float:
    return 100 * min(1.0, max(0.0, at_s / whole_s))
