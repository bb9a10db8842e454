"""Safeguards of what is opened while the log is away, each of which can be switched off."""

from __future__ import annotations

from typing import Any

from toprope.chaos.sim import stand_ins as s
from toprope.chaos.sim.mutant import YES, Mutant
from toprope.chaos.sim.options import OUTAGE, REPLACED, STANDBYS

_NOTHING_ELSE: dict[str, Any] = {**OUTAGE, "some_of": (), "store_fault": 0.0}
"""Outages, and beside them only what a mutant names."""

OF_OUTAGES: tuple[Mutant, ...] = (
    Mutant(
        name="all-adopt",
        safeguard="an attempt is given out without the log only when all nodes have adopted it",
        invariant="I18",
        seed=5,
        patches={("toprope.coordinator.outage", "Outage.missing"): s.always(())},
        narrow={**OUTAGE, "some_of": (), "faults": ("store outage", "kill rank"), "chaos_s": 20.0, "between_s": 1.5},
    ),
    Mutant(
        name="taken-back",
        safeguard="no document of one that does not know it takes an attempt back that nodes have adopted",
        invariant="I9",
        seed=13,
        patches={
            ("toprope.sidecar.adoption_book", "AdoptionBook.held_to"): s.as_it_came,
            ("toprope.coordinator.core", "Core._may_speak"): s.as_soon_as_settled,
        },
        narrow={**OUTAGE, "some_of": (), "faults": ("store outage", "kill rank", "kill coordinator"), "chaos_s": 30.0},
    ),
    Mutant(
        name="delayed",
        safeguard="the log takes no attempt that was decided without it after what decides about it",
        invariant="I5",
        seed=33,
        patches={("toprope.store.log.fold", "_broken_by_delay"): s.always(None)},
        narrow={
            **_NOTHING_ELSE,
            "faults": ("lone outage", "lone outage", "kill rank"),
            "retain": "",
        },
    ),
    Mutant(
        name="one-adoption",
        safeguard="a node adopts one attempt of a number",
        invariant="I9",
        seed=13,
        patches={
            ("toprope.sidecar.adoption_book", "AdoptionBook.may_adopt"): s.any_proposal,
            ("toprope.sidecar.adoption_book", "AdoptionBook.held_to"): s.as_it_came,
            ("toprope.coordinator.outage", "Outage._unknown"): s.nothing_more,
        },
        narrow={
            **_NOTHING_ELSE,
            "faults": ("store outage", "store outage", "kill rank", "kill coordinator"),
            "between_s": 1.0,
            "chaos_s": 30.0,
        },
    ),
    Mutant(
        name="unsure",
        safeguard="nothing is decided without the log while a record that decides about it may be there or come there",
        invariant="I12",
        seed=13,
        patches={("toprope.coordinator.opener", "Opener._is_unsure"): s.always(not YES)},
        narrow={
            **_NOTHING_ELSE,
            "faults": ("late outage", "kill rank"),
            "retain": "last=1",
        },
    ),
    Mutant(
        name="first-things",
        safeguard="what was opened without the log comes into it before anything else that decides about it",
        invariant="I12",
        seed=8,
        patches={("toprope.coordinator.performer", "Coordinator._held_up"): s.always(not YES)},
        narrow={
            **_NOTHING_ELSE,
            "faults": ("late outage", "store outage", "kill rank"),
            "retain": "last=1",
        },
    ),
    Mutant(
        name="old-world",
        safeguard="an attempt is given out without the log only when the nodes of the one before have adopted it too",
        invariant="I18",
        seed=301,
        patches={("toprope.coordinator.outage", "concerned"): s.new_world},
        narrow=REPLACED,
    ),
    Mutant(
        name="marks-decide-nothing",
        safeguard="what is pinned or measured meanwhile fences no attempt off that was opened without the log",
        invariant="I9",
        seed=12,
        patches={("toprope.store.log.fold", "_settled"): s.marks_decide},
        narrow={
            **STANDBYS,
            "some_of": (),
            "faults": ("marked outage", "marked outage", "kill rank"),
            "store_fault": 0.0,
            "retain": "",
        },
    ),
)
