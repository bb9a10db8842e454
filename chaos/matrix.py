"""The fault matrix: what comes of each fault in each phase of a shard's way, 11 rows by 8 columns, as data.

Forbidden in every cell: wrong bytes, READY without all shards, a trainer that stalls for longer than the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Row: TypeAlias = Literal[
    "trainer killed",
    "sidecar killed",
    "node lost",
    "coordinator crash",
    "two coordinators",
    "partition",
    "disk errors",
    "bit flip, torn write",
    "store errors",
    "slow",
    "memory, clocks",
]
Phase: TypeAlias = Literal[
    "shm copy",
    "hashing",
    "local write",
    "peer replication",
    "object upload",
    "manifest commit",
    "restore",
    "garbage collection",
]
Code: TypeAlias = Literal["S", "R", "T", "D", "L", "N"]
ROWS: tuple[Row, ...] = get_args(Row)
PHASES: tuple[Phase, ...] = get_args(Phase)
MEANS: dict[Code, str] = {
    "S": "the step is skipped, training goes on untouched",
    "R": "retried, READY later",
    "T": "another tier or holder serves",
    "D": "dropped and swept",
    "L": "a loud typed error, exit status not 0",
    "N": "no effect: the phase ends as if nothing had happened",
}
FAULTS_OF: dict[Row, str] = {
    "trainer killed": "SIGKILL or a segmentation fault of a trainer",
    "sidecar killed": "SIGKILL of a sidecar",
    "node lost": "a node loses power",
    "coordinator crash": "SIGKILL of the coordinator",
    "two coordinators": "two at once, or one stopped for 90 s",
    "partition": "a node cut off, the broker down",
    "disk errors": "ENOSPC, EIO, a failed sync",
    "bit flip, torn write": "a changed bit, half a write",
    "store errors": "5xx, time-outs, a late apply, 409, 412",
    "slow": "a straggler: rank, disk, peer, store",
    "memory, clocks": "OOM kill, a full tmpfs, a clock that jumps",
}
_TABLE: dict[Row, str] = {
    "trainer killed": "S N N N N ND R N",
    "sidecar killed": "N R R R R N R N",
    "node lost": "S D DN TD DN ND T N",
    "coordinator crash": "N N N N N R N R",
    "two coordinators": "N N N N N R N N",
    "partition": "N N N T R R TL N",
    "disk errors": "NS N T N N N T N",
    "bit flip, torn write": "D D D DR DR L TL N",
    "store errors": "N N N N R R RL R",
    "slow": "S RS T T R RD R N",
    "memory, clocks": "S R N R R N L N",
}
"""The outcomes that are right, by phase; of several one comes about, by what exactly is hit."""


_POINTS = (
    "tests/integration/test_killpoints.py::test_each_kill_between_seal_and_ready_leaves_what_was_ready_and_nothing_half"
)
_FILES = "tests/sidecar/test_files.py"
_CELLS = "tests/integration/test_cells.py::test_cells_of_five_rows_hold_in_one_training"
TESTS: dict[tuple[Row, Phase], tuple[str, ...]] = {
    ("trainer killed", "shm copy"): (
        _POINTS,
        "tests/integration/test_lazy_kill.py::test_a_trainer_killed_in_the_midst_of_a_lazy_copy_goes_on_from_the_snapshot_before",
    ),
    ("node lost", "peer replication"): (_CELLS,),
    ("two coordinators", "manifest commit"): (_CELLS,),
    ("partition", "hashing"): (_CELLS,),
    ("store errors", "object upload"): (_CELLS,),
    ("slow", "peer replication"): (_CELLS,),
    ("sidecar killed", "hashing"): (_POINTS,),
    ("sidecar killed", "local write"): (_POINTS,),
    ("sidecar killed", "peer replication"): (_POINTS,),
    ("sidecar killed", "object upload"): (_POINTS,),
    ("coordinator crash", "manifest commit"): (_POINTS,),
    ("coordinator crash", "garbage collection"): ("tests/store/test_gc.py::test_a_collector_may_die_at_each_deletion",),
    ("disk errors", "shm copy"): (f"{_FILES}::test_a_full_tmpfs_is_an_error_with_both_numbers_and_no_signal",),
    ("disk errors", "local write"): (
        f"{_FILES}::test_a_full_disk_is_an_error_that_leaves_nothing",
        f"{_FILES}::test_a_second_failed_sync_gives_the_disk_up",
    ),
    ("bit flip, torn write", "hashing"): (f"{_FILES}::test_a_slot_that_is_written_to_while_it_is_hashed_is_dropped",),
    ("bit flip, torn write", "local write"): (f"{_FILES}::test_a_scan_lists_what_receipt_and_digest_vouch_for",),
    ("bit flip, torn write", "peer replication"): (
        "tests/sidecar/test_peers.py::test_a_peer_refuses_bytes_that_were_flipped_after_hashing_and_the_owner_drops_them",
    ),
    ("bit flip, torn write", "manifest commit"): (
        "tests/store/test_log.py::test_every_flipped_byte_of_a_log_is_found",
        "tests/store/test_log.py::test_a_damaged_log_takes_no_append",
    ),
    ("bit flip, torn write", "restore"): (
        "tests/sidecar/test_restore.py::test_a_damaged_slot_is_passed_over_for_the_local_copy",
    ),
    ("bit flip, torn write", "garbage collection"): (
        "tests/store/test_gc.py::test_with_one_unreadable_manifest_or_index_nothing_is_deleted",
    ),
    ("memory, clocks", "restore"): (
        "tests/sidecar/test_fetching.py::test_what_does_not_fit_is_refused_with_both_numbers_before_a_byte_is_taken",
    ),
    ("memory, clocks", "shm copy"): (
        "tests/integration/test_wrong_use.py::test_too_little_memory_says_what_is_needed_and_what_there_is",
    ),
}
"""Where a cell is shown with real processes, files or sockets, besides what ``LIVE_ROWS`` have in common."""
_LIVE = "tests/integration/long/test_live_cells.py::test_a_cell_holds_on_real_processes"
LIVE_ROWS: tuple[Row, ...] = (
    "trainer killed",
    "sidecar killed",
    "node lost",
    "coordinator crash",
    "two coordinators",
    "partition",
    "store errors",
    "slow",
)
"""The rows of which each cell has a test with real processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A fault and a phase. ``right`` are the outcomes that are right; ``tests`` those with real processes."""

    row: Row
    phase: Phase
    right: frozenset[Code]
    tests: tuple[str, ...] = ()


def _cells() -> tuple[Cell, ...]:
    found = []
    for row in ROWS:
        for phase, codes in zip(PHASES, _TABLE[row].split(), strict=True):
            right = frozenset(code for code in MEANS if code in codes)
            found.append(
                Cell(
                    row=row,
                    phase=phase,
                    right=right,
                    tests=(*TESTS.get((row, phase), ()), *((_LIVE,) if row in LIVE_ROWS else ())),
                )
            )
    return tuple(found)


CELLS = _cells()
