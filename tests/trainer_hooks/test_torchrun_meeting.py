"""Agents that met go on only together, and none closes the rendezvous for the others by its own end."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from toprope.trainer_hooks.torchrun import meeting
from toprope.trainer_hooks.torchrun.meeting import Meeting, NodeLeavesError, register
from toprope.trainer_hooks.torchrun.settings import BACKEND
from toprope.trainer_hooks.torchrun.strikes import Failures, Strikes, open_pipe, tell

SOON_S = 0.05
NEW = json.dumps({"counts": 2, "of": "", "size": 0, "first": False, "last": False})
"""The answer of an agent that comes from no other world."""
AGREED = {"size": 2, "uid": "before", "port": 7, "struck": None, "leaves": False}
TORCHS = RendezvousStoreInfo(master_addr="node", master_port=1)


@dataclass
class Counted(RendezvousHandler):
    """Torch's rendezvous, as one agent sees it: worlds of (rank, size) one after another, or what it raises."""

    rounds: Iterator[tuple[int, int] | Exception]
    store: Store = field(default_factory=HashStore)
    met: int = 0
    closed: bool = False

    def next_rendezvous(self) -> RendezvousInfo:
        found = next(self.rounds)
        self.met += 1
        if isinstance(found, Exception):
            raise found
        return RendezvousInfo(self.round(self.met), *found, TORCHS)

    def round(self, number: int) -> Store:
        return PrefixStore(f"round-{number}", self.store)

    def shutdown(self) -> bool:
        self.closed = True
        return True

    def get_backend(self) -> str:
        return "c10d"

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        self.closed = True

    def num_nodes_waiting(self) -> int:
        return 2

    def get_run_id(self) -> str:
        return "job"


def agent(*rounds: tuple[int, int] | Exception) -> tuple[Meeting, Counted]:
    counted = Counted(iter(rounds))
    return Meeting(counted, counted.store, answers_s=SOON_S), counted


def test_all_meet_at_one_port_that_nobody_else_is_given_and_a_store_may_listen_on() -> None:
    first, counted = agent((0, 2))
    counted.round(1).set("toprope/here/1", NEW)
    met = first.next_rendezvous()
    assert (met.rank, met.world_size) == (0, 2)
    assert met.bootstrap_store_info is not None
    assert met.bootstrap_store_info.master_addr == "node"
    port = met.bootstrap_store_info.master_port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert server.port == port
    second = Meeting(Counted(iter([(1, 2)]), store=counted.store), counted.store, answers_s=SOON_S)
    assert second.next_rendezvous().bootstrap_store_info == met.bootstrap_store_info


def test_a_port_is_let_go_at_the_next_meeting() -> None:
    one, _ = agent((0, 1), (0, 1))
    ports = []
    for _ in range(2):
        met = one.next_rendezvous().bootstrap_store_info
        assert met is not None
        ports.append(met.master_port)
    with socket.socket() as other:
        other.bind(("", ports[0]))
    assert ports[0] != ports[1]


def test_agents_meet_again_when_one_that_was_counted_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    first, counted = agent((0, 2), (0, 1))
    assert first.next_rendezvous().world_size == 1
    assert counted.met == 2
    other, counted = agent((1, 2), (0, 1))
    counted.round(1).set("toprope/here/0", NEW)  # it died before it told anything
    assert other.next_rendezvous().world_size == 1
    assert counted.met == 2
    assert capsys.readouterr().err.count("agents have met in vain") == 2


def test_whoever_waits_says_again_and_again_how_many_are_missing_and_who_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(meeting, "_say", said.put)
    monkeypatch.setattr(meeting, "SAYS_EVERY_S", 0.01)

    class Lonely(Counted):
        _state_holder: Any
        _settings: Any

        def next_rendezvous(self) -> RendezvousInfo:
            for _ in range(2):
                assert said.get(timeout=20).startswith("waits for 2 more of 3 nodes; there are: here (")
            self._state_holder.state.participants |= {"a": 1, "b": 2}
            return super().next_rendezvous()

    counted = Lonely(iter([(0, 1)]))
    counted._state_holder = SimpleNamespace(state=SimpleNamespace(participants={"here": 0}))
    counted._settings = SimpleNamespace(min_nodes=3)
    Meeting(counted, counted.store, answers_s=SOON_S).next_rendezvous()
    assert not any(thread.name == "toprope-meeting" for thread in threading.enumerate())
    assert meeting.absence(counted) == ""
    assert meeting.absence(Counted(iter(()))) == "waits for other agents"


def test_of_torch_s_own_rendezvous_it_is_known_who_is_there() -> None:
    parameters = RendezvousParameters(backend="c10d", endpoint="localhost:0", run_id="j", min_nodes=2, max_nodes=2)
    backend, store = create_backend(parameters)
    inner = create_handler(store, backend, parameters)
    assert meeting.absence(inner) == "waits for 2 more of 2 nodes; there are: none"
    inner._state_holder.state.participants[inner._this_node] = 0
    assert meeting.absence(inner) == f"waits for 1 more of 2 nodes; there are: {inner._this_node.addr}"


def test_agents_that_count_each_other_otherwise_meet_again() -> None:
    other, counted = agent((1, 2), (1, 2))
    counted.round(1).set("toprope/agreed", json.dumps(AGREED | {"size": 3}))
    counted.round(2).set("toprope/agreed", json.dumps(AGREED))
    assert other.next_rendezvous().world_size == 2
    assert counted.met == 2


def test_when_one_counts_others_than_rank_0_all_meet_again_at_once() -> None:
    first, counted = agent((0, 2), (0, 1))
    counted.round(1).set("toprope/here/1", json.dumps(json.loads(NEW) | {"counts": 3}))
    assert first.next_rendezvous().world_size == 1
    told = json.loads(counted.round(1).get("toprope/agreed"))
    assert told == {"size": 0}, "whoever has answered, too"


def late() -> Exception:
    """What torch's own raises when the store does not answer in time."""
    error = RendezvousConnectionError("The connection to the C10d store has failed.")
    error.__cause__ = DistStoreError("wait timeout after 15000ms")
    return error


def test_a_store_that_is_slow_is_asked_again_and_one_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "TRIES", 3)
    one, counted = agent(late(), DistStoreError("wait timeout"), (0, 1))
    assert one.next_rendezvous().world_size == 1
    one, counted = agent(late(), late(), late(), (0, 1))
    with pytest.raises(RendezvousConnectionError):
        one.next_rendezvous()
    assert counted.met == 3
    gone = RendezvousConnectionError("The connection to the C10d store has failed.")
    gone.__cause__ = DistNetworkError("Connection reset by peer")
    one, counted = agent(gone, (0, 1))
    with pytest.raises(RendezvousConnectionError):
        one.next_rendezvous()
    assert counted.met == 1


def test_reads_wait_as_long_as_before_once_the_agents_have_met() -> None:
    one, counted = agent(late(), DistStoreError("wait timeout"), (0, 1))
    counted.store.set_timeout(timedelta(seconds=0.5))
    one.next_rendezvous()
    began_s = time.monotonic()
    with pytest.raises(DistStoreError):
        counted.store.get("never")
    assert time.monotonic() - began_s >= 10 * SOON_S


def test_only_an_agent_that_has_not_failed_closes_the_rendezvous(capsys: pytest.CaptureFixture[str]) -> None:
    one, counted = agent()
    with pytest.raises(ZeroDivisionError):
        fail_and_shut_down(one)
    assert not counted.closed
    assert "it leaves the rendezvous open for the others" in capsys.readouterr().err
    assert one.shutdown()
    assert one.is_closed()


def fail_and_shut_down(one: Meeting) -> None:
    """End as torch's launcher does."""
    try:
        _ = 1 / 0
    finally:
        one.shutdown()


def comes_from(world: str, *, first: bool, last: bool = False) -> str:
    return json.dumps({"counts": 2, "of": world, "size": 2, "first": first, "last": last})


def striking(*rounds: tuple[int, int], most: int) -> tuple[Meeting, Counted, int]:
    """An agent that hears of its ranks' failures through a pipe: the end to write to comes last."""
    counted = Counted(iter(rounds))
    read, write = open_pipe()
    made = Meeting(
        counted, counted.store, answers_s=SOON_S, strikes=Strikes(most, clock=lambda: 5000.0), failures=Failures(read)
    )
    return made, counted, write


def uid_of(counted: Counted) -> str:
    return str(json.loads(counted.round(counted.met).get("toprope/agreed"))["uid"])


def test_a_node_whose_rank_was_the_first_to_fail_too_often_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    one, counted, write = striking((0, 2), (0, 2), (0, 2), most=2)
    counted.round(1).set("toprope/here/1", NEW)
    one.next_rendezvous()
    tell(os.getpid(), write)
    counted.round(2).set("toprope/here/1", comes_from(uid_of(counted), first=False))
    one.next_rendezvous()
    assert "ranks of this node were the first to fail: 1 times within an hour" in capsys.readouterr().err
    tell(os.getpid(), write)
    counted.round(3).set("toprope/here/1", comes_from(uid_of(counted), first=False))
    with pytest.raises(NodeLeavesError, match="the first to fail 2 times"):
        one.next_rendezvous()
    assert json.loads(counted.round(3).get("toprope/agreed"))["leaves"] is True


def test_the_others_meet_again_at_once_when_a_node_leaves() -> None:
    other, counted, _ = striking((1, 2), (1, 2), (0, 1), most=2)
    counted.round(1).set("toprope/agreed", json.dumps(AGREED))
    other.next_rendezvous()
    counted.round(2).set("toprope/agreed", json.dumps(AGREED | {"struck": 0, "leaves": True}))
    assert other.next_rendezvous().world_size == 1


def test_a_node_that_failed_since_another_did_is_not_to_blame() -> None:
    one, counted, write = striking((0, 2), (0, 2), most=1)
    counted.round(1).set("toprope/here/1", NEW)
    one.next_rendezvous()
    counted.round(1).compare_set("toprope/first", "", "1")
    tell(os.getpid(), write)
    counted.round(2).set("toprope/here/1", comes_from(uid_of(counted), first=True))
    assert one.next_rendezvous().world_size == 2
    assert json.loads(counted.round(2).get("toprope/agreed"))["struck"] == 1


def test_nobody_is_to_blame_when_one_of_the_world_before_is_gone() -> None:
    one, counted, write = striking((0, 2), (0, 2), most=1)
    counted.round(1).set("toprope/here/1", NEW)
    one.next_rendezvous()
    tell(os.getpid(), write)  # since the other node was lost, which can't say so
    counted.round(2).set("toprope/here/1", NEW)
    assert one.next_rendezvous().world_size == 2
    assert json.loads(counted.round(2).get("toprope/agreed"))["struck"] is None


def test_one_that_is_alone_by_now_does_not_leave() -> None:
    one, counted, write = striking((0, 1), (0, 1), most=1)
    one.next_rendezvous()
    tell(os.getpid(), write)
    assert one.next_rendezvous().world_size == 1
    told = json.loads(counted.round(2).get("toprope/agreed"))
    assert (told["struck"], told["leaves"]) == (0, False)


def test_nobody_is_to_blame_for_an_end_that_lets_another_node_in() -> None:
    one, counted, write = striking((0, 2), (0, 2), most=1)
    counted.round(1).set("toprope/here/1", NEW)
    one.next_rendezvous()
    assert one.num_nodes_waiting() == 2
    tell(os.getpid(), write)  # its ranks fail since the other node has ended its own
    counted.round(2).set("toprope/here/1", comes_from(uid_of(counted), first=False))
    one.next_rendezvous()
    assert json.loads(counted.round(2).get("toprope/agreed"))["struck"] is None


def test_a_failure_that_can_not_be_told_is_said_and_the_next_is_heard(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, counted, _ = striking((0, 2), most=1)
    counted.round(1).set("toprope/here/1", NEW)
    one.next_rendezvous()
    assert one._world is not None

    def gone(*_: str) -> bytes:
        raise DistNetworkError("reset by peer")

    with monkeypatch.context() as away:
        away.setattr(type(one._world.store), "compare_set", gone)
        one._note_failure()
    assert "nobody hears that a rank of this node has failed: reset by peer" in capsys.readouterr().err
    one._note_failure()
    assert counted.round(1).get("toprope/first") == b"0"


def test_strikes_count_for_an_hour() -> None:
    now = [0.0]
    strikes = Strikes(2, clock=lambda: now[0])
    strikes.add()
    assert strikes.is_last()
    now[0] = 3601.0
    assert not strikes.is_last()
    strikes.add()
    assert strikes.is_last()
    assert not Strikes(0).is_last()


def test_all_else_is_as_torch_says() -> None:
    one, counted = agent()
    assert (one.get_run_id(), one.num_nodes_waiting()) == ("job", 2)
    assert not one.use_agent_store
    one.set_closed()
    assert counted.closed


def test_torchrun_has_it_by_its_name_and_one_agent_meets_itself() -> None:
    register()
    register()  # twice does no harm
    made = rendezvous_handler_registry.create_handler(
        RendezvousParameters(backend=BACKEND, endpoint="localhost:0", run_id="job", min_nodes=1, max_nodes=1)
    )
    assert isinstance(made, Meeting)
    met = made.next_rendezvous()
    assert (met.rank, met.world_size) == (0, 1)
    assert met.bootstrap_store_info is not None
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", met.bootstrap_store_info.master_port))
    assert made.shutdown()
    assert made.is_closed()
