"""Safeguards that can be switched off, one at a time: an oracle that lets such a mutant live is worth nothing.

Each mutant names what it replaces, in all modules that know it by name, with a function that does not care; the
invariant that kills it; and a seed on which it dies, while the same history passes with the safeguard on. Where a
second safeguard would stop the program before the oracle can see (the writer's own check of its record), the mutant
switches that off too. ``pull-or-stage`` switches off a rule of the simulated performer, which copies the real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from toprope.chaos.patching import replace
from toprope.chaos.sim import stand_ins as s
from toprope.chaos.sim.mutant import NO_OWN_CHECK, YES, Mutant
from toprope.chaos.sim.options import PAIR, PEOPLE, RANGES, READERS, SMALL
from toprope.chaos.sim.outage_mutants import OF_OUTAGES

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="gc-holds",
        safeguard="what a reader holds is not deleted",
        invariant="I8",
        seed=3,
        patches={("toprope.store.keep.gc", "held_seqs"): s.always(frozenset())},
        narrow=READERS,
    ),
    Mutant(
        name="gc-alive",
        safeguard="what may become READY yet is not deleted",
        invariant="I8",
        seed=7,
        patches={("toprope.store.keep.gc", "is_dead"): s.always(YES)},
        narrow=READERS,
    ),
    Mutant(
        name="gc-source",
        safeguard="the objects of a source that is not READY are not deleted while its attempt is the current one",
        invariant="I8",
        seed=31,
        patches={("toprope.store.keep.gc", "_needed_by_sources"): s.nothing_more},
        narrow=READERS,
    ),
    Mutant(
        name="gc-before",
        safeguard="a step that the next attempt may go back to is not deleted though it can't become READY",
        invariant="I8",
        seed=3,
        patches={("toprope.store.keep.gc", "_may_be_begun_from"): s.always(not YES)},
        narrow={
            **PAIR,
            "retain": "last=1",
            "faults": ("kill coordinator", "kill rank", "kill rank"),
            "store_fault": 0.02,
            "chaos_s": 24.0,
            "between_s": 1.0,
            "step_s": 0.5,
        },
    ),
    Mutant(
        name="gc-shared",
        safeguard="what any kept checkpoint names is not deleted, whichever step it was written for",
        invariant="I8",
        seed=0,
        patches={("toprope.store.keep.gc", "_named_by_kept"): s.only_head},
        narrow=READERS,
    ),
    Mutant(
        name="gc-unread",
        safeguard="when what a kept checkpoint names can't be read, nothing is deleted",
        invariant="I8",
        seed=0,
        patches={("toprope.store.keep.gc", "_named_by_kept"): s.unread_is_empty},
        narrow={**READERS, "faults": ("kill rank",), "retain": "last=3", "store_fault": 0.06, "chaos_s": 40.0},
    ),
    Mutant(
        name="parent",
        safeguard="the parent of head is not retired",
        invariant="I5",
        seed=0,
        patches={("toprope.store.keep.retention", "needed_by"): s.without("the parent of head"), **NO_OWN_CHECK},
        narrow=READERS,
    ),
    Mutant(
        name="sweep",
        safeguard="what is condemned is deleted",
        invariant="I15",
        seed=0,
        patches={("toprope.coordinator.adapters.objects", "execute"): s.nothing},
        narrow=READERS,
    ),
    Mutant(
        name="orphans",
        safeguard="what an attempt left behind that never became READY is deleted too",
        invariant="I15",
        seed=14,
        patches={("toprope.store.keep.gc", "is_dead"): s.only_retired},
        narrow=READERS,
    ),
    Mutant(
        name="fresh-term",
        safeguard="each election takes a new term",
        invariant="I4",
        seed=0,
        patches={("toprope.store.log.chain", "_stamped"): s.same_term, **NO_OWN_CHECK},
        narrow={**SMALL, "faults": ("two coordinators", "kill coordinator")},
    ),
    Mutant(
        name="hold-ttl",
        safeguard="only a hold that does not beat is taken for left behind",
        invariant="I8",
        seed=1,
        patches={("toprope.store.keep.holds", "HoldWatch.stale"): s.all_silent},
        narrow=READERS,
    ),
    Mutant(
        name="hold-first",
        safeguard="a reader reads the log again once its hold is there",
        invariant="I8",
        seed=0,
        patches={("toprope.store.keep.holds", "read_on"): s.as_it_was},
        narrow={**READERS, "faults": ("reader",), "between_s": 0.3},
    ),
    Mutant(
        name="pinned",
        safeguard="what is pinned is not retired",
        invariant="I5",
        seed=5,
        patches={("toprope.store.keep.retention", "needed_by"): s.without("pinned"), **NO_OWN_CHECK},
        narrow=PEOPLE,
    ),
    Mutant(
        name="begun-from",
        safeguard="what the current attempt began with is not retired",
        invariant="I5",
        seed=0,
        patches={
            ("toprope.store.keep.retention", "needed_by"): s.without("the source of the current attempt"),
            **NO_OWN_CHECK,
        },
        narrow=READERS,
    ),
    Mutant(
        name="guess",
        safeguard="a writer that got no answer looks whether its record is there",
        invariant="I3",
        seed=0,
        patches={("toprope.store.log.chain", "_put"): s.guessed},
        narrow={**SMALL, "store_fault": 0.1},
    ),
    Mutant(
        name="tainted-source",
        safeguard="no attempt begins with a step that is tainted",
        invariant="I5",
        seed=34,
        patches={("toprope.coordinator.restore_choice", "covers"): s.always(not YES), **NO_OWN_CHECK},
        narrow={**PEOPLE, "between_s": 0.5},
    ),
    Mutant(
        name="asked-twice",
        safeguard="a launch that asks again is given the attempt that it was given",
        invariant="I13",
        seed=12,
        patches={("toprope.coordinator.opening", "known"): s.nothing, **NO_OWN_CHECK},
        narrow={
            **SMALL,
            "faults": ("ambush", "kill rank", "kill coordinator"),
            "between_s": 0.7,
            "chaos_s": 24.0,
            "drop": 0.02,
            "duplicate": 0.3,
        },
    ),
    Mutant(
        name="keep",
        safeguard="what a restart would need is not reused",
        invariant="I15",
        seed=8,
        patches={("toprope.sidecar.core", "Core._kept"): s.always(frozenset())},
        narrow={**PAIR, "faults": ("kill rank", "kill sidecar", "pause sidecar"), "object_every": 8, "between_s": 2.0},
    ),
    Mutant(
        name="fence",
        safeguard="a writer of an older term appends nothing",
        invariant="I5",
        seed=1,
        patches={("toprope.coordinator.log", "Log.append"): s.unfenced, **NO_OWN_CHECK},
        narrow={**SMALL, "faults": ("two coordinators", "pause coordinator", "kill rank")},
    ),
    Mutant(
        name="takeover",
        safeguard="one that stands by claims a term when the leader gives no sign of life",
        invariant="I15",
        seed=3,
        patches={("toprope.coordinator.election", "Election.reason"): s.patient},
        narrow={**PAIR, "faults": ("kill coordinator", "kill rank"), "coordinators": 2},
    ),
    Mutant(
        name="dead-attempt",
        safeguard="READY only for the current attempt and past the last step",
        invariant="I18",
        seed=6,
        patches={("toprope.coordinator.committing", "make_ready"): s.ready_whatever, **NO_OWN_CHECK},
        narrow={**SMALL, "faults": ("kill rank",), "between_s": 2.5, "store_fault": 0.1, "chaos_s": 30.0},
    ),
    Mutant(
        name="read-back",
        safeguard="an object counts only when it was read back with its digest",
        invariant="I1",
        seed=21,
        patches={("toprope.coordinator.readiness", "found_digest"): s.believed},
        narrow={**SMALL, "faults": ("kill rank",), "store_fault": 0.08, "chaos_s": 24.0},
    ),
    Mutant(
        name="whose-record",
        safeguard="a record that exists is read before it is taken for one's own",
        invariant="I3",
        seed=26,
        patches={("toprope.store.log.chain", "_put"): s.exists_is_ours},
        narrow={**SMALL, "faults": ("two coordinators",), "store_fault": 0.1},
    ),
    Mutant(
        name="scan",
        safeguard="a file of the local tier is listed only with its digest",
        invariant="I16",
        seed=3,
        patches={("toprope.sidecar.local_tier", "_check"): s.always(None)},
        narrow={**SMALL, "faults": ("flip", "kill sidecar"), "between_s": 1.0},
    ),
    Mutant(
        name="older-document",
        safeguard="of the coordinators' documents the greatest term and version wins",
        invariant="I9",
        seed=15,
        patches={("toprope.sidecar.core", "Core._on_desired"): s.any_document},
        narrow={**SMALL, "duplicate": 0.2, "faults": ("two coordinators", "kill coordinator")},
    ),
    Mutant(
        name="first-word",
        safeguard="no rank applies or trains before all have come as far",
        invariant="I17",
        seed=5,
        patches={("toprope.coordinator.phases", "advance"): s.first_word},
        narrow={
            **PAIR,
            "retain": "",
            "faults": ("kill rank", "flip", "flip"),
            "store_fault": 0.0,
            "chaos_s": 24.0,
            "between_s": 0.4,
            "step_s": 0.5,
        },
    ),
    Mutant(
        name="early-peer",
        safeguard="a peer copy is listed only once it was received and hashed",
        invariant="I11",
        seed=0,
        patches={("toprope.sidecar.peer_book", "PeerBook.held"): s.with_pulling},
        narrow=PAIR,
    ),
    Mutant(
        name="early-local",
        safeguard="a local copy is listed only once it is durable",
        invariant="I11",
        seed=0,
        patches={("toprope.sidecar.tier_book", "TierBook.copies"): s.with_flying},
        narrow=SMALL,
    ),
    Mutant(
        name="half-staged",
        safeguard="a rank is told of its source only when all its shards are there",
        invariant="I17",
        seed=7,
        patches={("toprope.sidecar.restore_book", "RestoreBook.complete"): s.any_staged},
        narrow={**PAIR, "faults": ("kill rank", "kill sidecar")},
    ),
    Mutant(
        name="pull-or-stage",
        safeguard="what was received or staged is hashed before it is believed",
        invariant="I10",
        seed=13,
        patches={
            ("toprope.chaos.sim.copies", "is_right"): s.always(YES),
            ("toprope.chaos.sim.fetching", "is_right"): s.always(YES),
        },
        narrow={**PAIR, "faults": ("flip", "kill rank"), "between_s": 0.7, "retain": ""},
    ),
    Mutant(
        name="asked-anew",
        safeguard="a step that became READY since it was read what there is to begin from is not passed over",
        invariant="I14",
        seed=104,
        patches={("toprope.coordinator.requests", "_are_all"): s.always(YES)},
        narrow={  # the store is so slow that commits go on while both nodes come back with nothing in memory
            **PAIR,
            "copies": 0,
            "retain": "",
            "faults": ("replace machine", "kill rank"),
            "store_fault": 0.0,
            "slow": 40.0,
            "between_s": 2.0,
            "step_s": 0.5,
        },
    ),
    Mutant(
        name="the-rest",
        safeguard="where a range broke off, what is asked for again begins there",
        invariant="I7",
        seed=0,
        patches={("toprope.store.objects.retry", "RetryStore.stream"): s.from_its_beginning},
        narrow=RANGES,
    ),
    Mutant(
        name="short-answer",
        safeguard="an answer that ends early is not taken for all of the range",
        invariant="I7",
        seed=2,
        patches={("toprope.chaos.sim.store", "pieces_of"): s.short_is_whole},
        narrow=RANGES,
    ),
    *OF_OUTAGES,
)


@contextmanager
def switched_off(mutant: Mutant) -> Iterator[None]:
    """Run without the mutant's safeguard until the context ends."""
    with contextlib.ExitStack() as undo:
        for back in replace(mutant.patches):
            undo.callback(back)
        yield
