"""Each report says what the verdict says, whatever bytes its texts hold."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tests.support.verdicts import HOSTILE, a_hostile_verdict, a_verdict, injection, promise

from toprope.chaos.reports.files import as_json, read_verdict, write_reports
from toprope.chaos.reports.junit import junit
from toprope.chaos.reports.page import page
from toprope.chaos.reports.text import render
from toprope.chaos.reports.timeline import ticks_s
from toprope.chaos.reports.words import headline, verdict_word
from toprope.chaos.verdict import Span, Verdict
from toprope.store.errors import UsageError


def good(**changes: object) -> Verdict:
    promises = (promise("bit-identical", attacked=True), promise("ready-once"))
    verdict = msgspec.structs.replace(a_verdict(), promises=promises)
    return msgspec.structs.replace(verdict, **changes)


BAD = {
    "broken": good(promises=(promise("ready-once", "broken"),)),
    "a fault that did not fire": good(injections=(injection("kill", 1.0), injection("cut", 2.0, fired=False))),
    "attacked and not judged": good(promises=(promise("ready-once"), promise("x", "not judged", attacked=True))),
    "nothing judged": good(promises=()),
    "stopped": good(stopped="the broker did not start"),
}


def cases(verdict: Verdict) -> dict[str, str]:
    """Return each testcase of the JUnit XML with what became of it."""
    suite = ET.fromstring(junit(verdict)).find("testsuite")
    assert suite is not None
    kinds = ("failure", "error", "skipped")
    found = {
        case.get("name", ""): next((kind for kind in kinds if case.find(kind) is not None), "passed")
        for case in suite.findall("testcase")
    }
    counted = {kind: sum(one == kind for one in found.values()) for kind in kinds}
    assert {
        kind: int(suite.get(attribute, "-1"))
        for kind, attribute in zip(kinds, ("failures", "errors", "skipped"), strict=True)
    } == counted
    assert suite.get("tests") == str(len(found))
    return found


def text_of(verdict: Verdict) -> str:
    out = io.StringIO()
    render(verdict, Console(file=out, width=200))
    return out.getvalue()


class Shown(HTMLParser):
    """What a page shows, and which elements it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_good_verdict_is_good_in_every_report() -> None:
    verdict = good()
    assert (verdict.good, headline(verdict), verdict_word(verdict)) == (True, "every promise held", "held")
    assert set(cases(verdict).values()) == {"passed"}
    assert text_of(verdict).rstrip().endswith("every promise held")
    assert 'class="verdict held"' in page(verdict)


@pytest.mark.parametrize("verdict", BAD.values(), ids=BAD.keys())
def test_what_is_not_good_is_good_in_no_report(verdict: Verdict) -> None:
    assert verdict.exit_status == 1
    assert "every promise held" not in text_of(verdict) + page(verdict)
    assert 'class="verdict held"' not in page(verdict)
    assert verdict_word(verdict) != "held"
    if verdict.promises:
        assert {"failure", "error"} & set(cases(verdict).values())


def test_junit_has_a_case_for_each_promise_and_each_planned_fault() -> None:
    verdict = a_verdict()
    assert cases(verdict) == {
        "promise: bit-identical": "passed",
        "promise: steps-lost": "failure",
        "promise: ready-once": "passed",
        "promise: trainer-stall": "skipped",
        "fault 1: kill: node b, at step 20": "passed",
        "fault 2: 503: node b, at step 20": "passed",
        "fault 3: bit flip: node b, at step 20": "passed",
        "fault 4: pause: node b, at step 20": "passed",
    }
    unfired = msgspec.structs.replace(verdict, injections=(injection("kill", 1.0, fired=False),))
    assert cases(unfired)["fault 1: kill: node b, at step 20"] == "failure"
    assert "step 40 was never reached" in junit(unfired).decode()


def test_the_page_shows_each_promise_fault_witness_and_figure() -> None:
    verdict = a_verdict()
    shown = Shown(page(verdict)).text
    for one in verdict.promises:
        assert one.says in shown
        assert all(line in shown for line in one.evidence)
    for fault in verdict.injections:
        assert fault.witness in shown
        assert f"{fault.fault}: {fault.target}" in shown
    for wanted in (
        "1.37 s",
        "14,680,064 bytes",
        "61.2 rank s",
        verdict.log[-1],
        "rank 3: restoring from 30.10 to 34.00 s",
    ):
        assert wanted in shown


def test_each_span_is_drawn_in_its_row_where_it_belongs() -> None:
    verdict = a_verdict()
    rows = page(verdict).split('<div class="row">')[1:]
    assert [re.findall(r'class="name">([^<]*)<', row)[0] for row in rows] == [
        "services",
        *(f"rank {n}" for n in range(4)),
    ]
    for row, rank in zip(rows, (-1, 0, 1, 2, 3), strict=True):
        spans = [span for span in verdict.timeline if span.rank == rank]
        drawn = re.findall(r'<i class="(\w+)" style="left:([\d.]+)%;width:([\d.]+)%"', row)
        percent = 100 / verdict.seconds
        wanted = sorted((one.kind, one.begin_s * percent, (one.end_s - one.begin_s) * percent) for one in spans)
        found = sorted((kind, float(left), float(width)) for kind, left, width in drawn)
        assert [kind for kind, _, _ in found] == [kind for kind, _, _ in wanted]
        places = [(left, width) for _, left, width in found]
        assert places == [pytest.approx((left, width), abs=0.001) for _, left, width in wanted]


@pytest.mark.parametrize("verdict", [a_verdict(), a_hostile_verdict()], ids=["usual", "hostile"])
def test_a_page_needs_nothing_from_elsewhere_and_runs_nothing(verdict: Verdict) -> None:
    shown = Shown(page(verdict))
    assert not {"script", "iframe", "img", "object", "embed"} & set(shown.tags)
    assert [value for name, value in shown.attributes if name in {"src", "href"}] == ["data:,"]
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert "@import" not in page(verdict)
    assert "url(" not in page(verdict)


def test_texts_that_would_break_a_report_are_shown_as_they_are_but_for_control_characters() -> None:
    verdict = a_hostile_verdict()
    wanted = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert Shown(page(verdict)).text.count(wanted) >= 7
    suites = ET.fromstring(junit(verdict))
    assert any(wanted in (case.get("name") or "") for case in suites.iter("testcase"))
    assert any(wanted in (one.text or "") for one in suites.iter("error"))
    assert wanted in text_of(verdict)
    assert "\x1b[31m" not in text_of(verdict)


def test_json_can_be_read_back_and_says_first_what_came_of_it(tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    for verdict in (a_verdict(), a_hostile_verdict(), good()):
        file.write_bytes(as_json(verdict))
        assert read_verdict(file) == verdict
        said = msgspec.json.decode(file.read_bytes())
        assert (said["good"], said["exit_status"]) == (verdict.good, verdict.exit_status)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"good": true, "exit_status": 0, "verdict": {}}', b"\xff"])
def test_what_is_no_verdict_is_wrong_use_and_named(body: bytes, tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    file.write_bytes(body)
    with pytest.raises(UsageError, match=r"verdict\.json"):
        read_verdict(file)
    with pytest.raises(UsageError, match=r"other\.json"):
        read_verdict(tmp_path / "other.json")


def test_only_the_reports_that_are_asked_for_are_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "reports"
    write_reports(a_verdict(), json=out / "v.json", html=out / "v.html")
    assert sorted(path.name for path in out.iterdir()) == ["v.html", "v.json"]
    assert (out / "v.html").read_text() == page(a_verdict())


@pytest.mark.parametrize(("end_s", "last"), [(62.4, 60), (1.0, 1.0), (0.03, 0.03), (1800.0, 1500), (9.99, 8)])
def test_the_axis_has_a_few_round_times(end_s: float, last: float) -> None:
    ticks = ticks_s(end_s)
    assert ticks[0] == 0
    assert ticks[-1] == last
    assert 3 <= len(ticks) <= 8


def test_snapshots_that_would_be_drawn_over_each_other_are_not_and_all_are_counted() -> None:
    marks = tuple(
        Span(rank=0, begin_s=at, end_s=at + 0.1, kind="snapshot", what=f"step {at}") for at in range(1, 10_001)
    )
    told = page(msgspec.structs.replace(a_verdict(), timeline=marks, injections=(), seconds=10_000.0))
    assert 900 <= told.count('class="snapshot"') <= 1000
    assert "rank 0: 10000 snapshots" in told
