"""The page of a verdict in a real browser: it fits into the window, says nothing on the console, asks for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.browser import BROWSER, new_page
from tests.support.verdicts import a_hostile_verdict, a_verdict

from toprope.chaos.reports.page import page
from toprope.chaos.verdict import Verdict


@pytest.mark.long
@pytest.mark.skipif(not BROWSER, reason="there is no browser here (Debian: apt-get install chromium)")
@pytest.mark.parametrize("verdict", [a_verdict(), a_hostile_verdict()], ids=["usual", "hostile"])
async def test_a_report_fits_into_narrow_and_wide_windows_and_a_browser_has_nothing_to_say(
    verdict: Verdict, tmp_path: Path
) -> None:
    """The pictures are kept in ``tmp_path``: those of the usual one, looked at, are in docs/results."""
    file = tmp_path / "report.html"
    file.write_text(page(verdict))
    async with new_page() as browser:
        for width in (390, 1440):
            for dark in (False, True):
                seen = await browser.look(file, width=width, dark=dark)
                (tmp_path / f"chaos-report-{width}-{'dark' if dark else 'light'}.png").write_bytes(seen.picture)
                assert seen.window == width
                assert seen.scroll_width <= width
                assert (seen.wider, seen.complaints, seen.requests) == ([], [], [])


@pytest.mark.long
@pytest.mark.skipif(not BROWSER, reason="there is no browser here (Debian: apt-get install chromium)")
async def test_a_page_that_is_too_wide_complains_and_asks_is_found_out(tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    wide = '<div style="width:500px">x</div><img src="file:///nothing.png"><script>nothing()</script>'
    file.write_text(f'<!doctype html><meta name="viewport" content="width=device-width, minimum-scale=1">{wide}')
    async with new_page() as browser:
        seen = await browser.look(file, width=390, dark=False)
    assert seen.scroll_width == 500 or seen.wider
    assert seen.wider
    assert seen.complaints
    assert seen.requests == ["file:///nothing.png"]
