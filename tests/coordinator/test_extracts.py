"""What of the coordinator's document each node is told: all that concerns it, and not what concerns others."""

from __future__ import annotations

from msgspec import structs
from tests.support.reigns import JOB

from toprope.coordinator.extracts import Extracts, is_news
from toprope.coordinator.wire import (
    AttemptView,
    Cadence,
    Desired,
    Kept,
    Member,
    Placement,
    ReadBackTask,
    RestoreShard,
    encode,
)

NODES = ("a", "b", "c")
WHOLE = Desired(
    job=JOB,
    job_uid="0b" * 16,
    term=3,
    version=7,
    url="http://c0",
    cadence=Cadence(from_step=0, every=10, local_every=20, object_every=40),
    attempt=AttemptView(
        number=1,
        uid="aa" * 16,
        launch_id="1a" * 16,
        round=0,
        world=tuple(Member(rank=rank, node=NODES[rank // 2], boot_id="") for rank in range(6)),
        source="ready",
        source_attempt_uid="bb" * 16,
        from_step=40,
        restore=tuple(RestoreShard(rank=rank, bytes=1, digest="0d" * 16, sources=()) for rank in range(6)),
        phase="opened",
    ),
    placement=tuple(
        Placement(owner=owner, holder=holder, url=f"http://{owner}")
        for owner, holder in (("a", "b"), ("a", "c"), ("b", "c"), ("b", "a"), ("c", "a"), ("c", "b"))
        if (owner, holder) != ("c", "a")
    ),
    keep=(Kept(attempt_uid="aa" * 16, step=40),),
    read_backs=tuple(ReadBackTask(node=node, key=f"k{node}", bytes=1, digest="0d" * 16) for node in NODES),
    protected_step=40,
)


def test_a_node_is_told_of_its_ranks_its_tasks_and_all_holders_of_those_whom_it_holds_for() -> None:
    extract = Extracts(WHOLE).of("a")
    assert extract.attempt is not None
    assert [member.rank for member in extract.attempt.world] == [0, 1]
    assert [task.key for task in extract.read_backs] == ["ka"]
    assert {(place.owner, place.holder) for place in extract.placement} == {
        ("a", "b"),
        ("a", "c"),
        ("b", "a"),
        ("b", "c"),
    }


def test_what_is_said_to_all_is_in_each_extract_as_it_is_in_the_whole() -> None:
    for node in (*NODES, "z"):
        extract = Extracts(WHOLE).of(node)
        assert extract.attempt is not None
        assert WHOLE.attempt is not None
        assert extract.attempt.restore == WHOLE.attempt.restore
        assert (extract.term, extract.version, extract.keep) == (WHOLE.term, WHOLE.version, WHOLE.keep)
        assert extract.protected_step == WHOLE.protected_step


def test_a_node_without_a_part_in_the_job_is_told_of_no_rank_and_no_task() -> None:
    extract = Extracts(WHOLE).of("z")
    assert extract.attempt is not None
    assert (extract.attempt.world, extract.placement, extract.read_backs) == ((), (), ())


def test_all_extracts_together_are_not_longer_than_a_few_wholes_however_many_nodes_there_are() -> None:
    def told(nodes: int) -> float:
        whole = Desired(
            job=JOB,
            job_uid="0b" * 16,
            term=1,
            version=1,
            url="http://c0",
            cadence=WHOLE.cadence,
            placement=tuple(
                Placement(owner=f"n{one}", holder=f"n{(one + 1) % nodes}", url="http://n") for one in range(nodes)
            ),
            read_backs=tuple(
                ReadBackTask(node=f"n{one}", key="k" * 100, bytes=1, digest="0d" * 16) for one in range(nodes)
            ),
        )
        extracts = Extracts(whole)
        return sum(len(encode(extracts.of(f"n{one}"))) for one in range(nodes)) / nodes

    assert told(200) < 1.1 * told(20)


def test_a_version_that_says_the_same_to_a_node_is_no_news_to_it() -> None:
    told = Extracts(WHOLE).of("a")
    assert not is_news(structs.replace(told, version=8), told)
    assert is_news(structs.replace(told, version=8, read_backs=()), told)
    assert is_news(structs.replace(told, protected_step=50), told)
