"""What placements claim to survive is survived, and the page says so; a placement that claims too much is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.chaos import survival
from toprope.coordinator.placement import Plan, Site

PAGE = Path(__file__).parents[2] / "docs/results/survival.md"


def test_no_set_of_losses_that_is_claimed_to_be_survived_loses_a_snapshot_and_the_page_says_what_is_so() -> None:
    rows = survival.table()
    assert sum(row.losses for row in rows) > 10_000
    assert [row for row in rows if row.lost] == []
    assert [row.survives for row in rows if not row.lines and row.racks > row.copies] == [
        row.copies for row in rows if not row.lines and row.racks > row.copies
    ], "with a rack for each copy as many losses are survived as there are copies"
    assert survival.as_markdown(rows) in PAGE.read_text(), "write it anew: ckpt chaos survive"


def test_holders_that_share_the_owners_rack_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(sites: list[Site], *, before: object, copies: int) -> Plan:
        plan = Plan(holders={}, unmet={}, copies=copies, weakest={})
        names = [site.node for site in sites]
        for at, owner in enumerate(names):
            plan.holders[owner] = tuple(name for name in (names[at:] + names[:at])[1 : copies + 1])
            plan.weakest[owner] = tuple(("node", name) for name in (owner, *plan.holders[owner]))
        return plan

    monkeypatch.setattr(survival, "place", careless)
    assert any(row.lost for row in survival.table(nodes_max=4))
