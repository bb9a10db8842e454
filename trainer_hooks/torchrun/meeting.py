"""Where torchrun's agents meet: its own c10d rendezvous, and then only a world whose agents have all answered in it.

A rendezvous of torch is complete once it has counted the nodes. When one of them dies right then, or has died while it
waited for the others, they wait for its answer until a read fails, which ends them all; and an agent that ends in
failure closes the rendezvous for everybody, for good. Here the agents answer each other first and meet again when an
answer doesn't come; and only an agent whose ranks are done closes the rendezvous. A node whose ranks are the first to
fail again and again leaves, if it was told to: then the others have a world without it.

It imports torch: only an agent does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from toprope.trainer_hooks.torchrun.settings import BACKEND
from toprope.trainer_hooks.torchrun.strikes import Failures, Strikes

ANSWERS_S = 15.0
"""An agent looks once in 2 s whether all are there: within this it has answered, on a busy machine too."""
SAYS_EVERY_S = 30.0
"""How long an agent waits for others without a word."""
TRIES = 20
"""After so many meetings in which somebody did not answer, the agent ends and says so."""
_HERE, _AGREED, _FIRST = "toprope/here", "toprope/agreed", "toprope/first"
_NOBODY = "-"
_NAMES_TOLD = 8


class NodeLeavesError(RendezvousError):
    """Ranks of this node were the first to fail too often: it is not to be part of the job any more."""


@dataclass(frozen=True, slots=True)
class _World:
    """A world that this agent is or was part of."""

    uid: str
    rank: int
    size: int
    store: Store


class Meeting(RendezvousHandler):
    """An agent's rendezvous: that of ``inner``, whose agents meet at ``store``, until all of a world have answered."""

    def __init__(
        self,
        inner: RendezvousHandler,
        store: Store,
        *,
        answers_s: float = ANSWERS_S,
        strikes: Strikes | None = None,
        failures: Failures | None = None,
    ) -> None:
        """Meet at ``store``; whoever has not answered within ``answers_s`` is taken for gone."""
        self._inner = inner
        self._store = store
        self._answers_s = answers_s
        self._port = _KeptPort()
        self._strikes = strikes or Strikes(0)
        self._failures = failures
        self._world: _World | None = None
        if failures is not None:
            failures.start(self._note_failure)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet, as often as it takes; return a world in which each agent has answered.

        Raises:
            DistStoreError, RendezvousConnectionError: somebody was missing ``TRIES`` times, or the store is gone.
            NodeLeavesError: this node has failed too often.
            RendezvousError: what torch's own raises.
        """
        for number in range(1, TRIES + 1):
            began_s = time.monotonic()
            try:
                with _reads_within(self._store, self._answers_s):
                    with _saying(lambda: absence(self._inner)):
                        met = self._inner.next_rendezvous()
                    return self._agreed(met)
            except (DistStoreError, RendezvousConnectionError) as error:
                if number == TRIES or not _was_waiting(error):
                    raise
                waited_s = time.monotonic() - began_s
                _say(f"agents have met in vain ({waited_s:.0f} s), and meet again: {error}")
        raise AssertionError("the last try returns or raises")

    def _agreed(self, met: RendezvousInfo) -> RendezvousInfo:
        """Answer, and learn from rank 0, which has all answers, where the ranks meet.

        Raises:
            DistStoreError: somebody does not answer, counts other agents, or leaves.
            NodeLeavesError: it is this node that leaves.
        """
        store, where = met.store, met.bootstrap_store_info
        assert where is not None, "c10d tells it"
        store.set(f"{_HERE}/{met.rank}", json.dumps(self._answer(met.world_size)))
        if met.rank == 0:
            store.set(_AGREED, json.dumps(self._decide(store, met.world_size)))
        store.wait([_AGREED], timedelta(seconds=2 * self._answers_s))  # rank 0 may have met later, and waits as long
        agreed = json.loads(store.get(_AGREED))
        if agreed["size"] != met.world_size:
            raise DistStoreError(f"not all of {met.world_size} agents have answered that they are as many")
        self._heed(agreed, met.rank)
        self._world = _World(agreed["uid"], met.rank, met.world_size, store)
        there = RendezvousStoreInfo(master_addr=where.master_addr, master_port=int(agreed["port"]))
        return RendezvousInfo(store, met.rank, met.world_size, there)

    def _answer(self, counts: int) -> Mapping[str, object]:
        """Say how many this agent counts, which world it comes from, and whether that one's end began here."""
        before = self._world
        if before is None:
            return {"counts": counts, "of": "", "size": 0, "first": False, "last": False}
        if self._failures is not None:
            self._failures.take()
        first = before.store.check([_FIRST]) and before.store.get(_FIRST) == str(before.rank).encode()
        last = self._strikes.is_last()
        return {"counts": counts, "of": before.uid, "size": before.size, "first": first, "last": last}

    def _decide(self, store: Store, size: int) -> Mapping[str, object]:
        """Return, on rank 0, what holds for all, once all have answered; a size of 0 lets all meet again at once."""
        keys = [f"{_HERE}/{rank}" for rank in range(size)]
        try:
            store.wait(keys, timedelta(seconds=self._answers_s))
        except DistStoreError:
            return {"size": 0}
        answers = [json.loads(store.get(key)) for key in keys]
        if any(one["counts"] != size for one in answers):
            return {"size": 0}
        struck = _to_blame(answers)
        leaves = size > 1 and struck is not None and answers[struck]["last"]
        return {"size": size, "uid": uuid4().hex, "port": self._port.anew(), "struck": struck, "leaves": leaves}

    def _heed(self, agreed: Mapping[str, Any], rank: int) -> None:
        """Take in who was to blame for the end of the world before, and whether that node leaves."""
        if agreed["struck"] == rank:
            self._strikes.add()
            _say(f"ranks of this node were the first to fail: {self._strikes.count()} times within an hour")
        if agreed["leaves"] and agreed["struck"] == rank:
            most = self._strikes.most
            raise NodeLeavesError(f"ranks of this node were the first to fail {most} times within an hour: it leaves")
        if agreed["leaves"]:
            self._world = None
            raise DistStoreError(f"the node of rank {agreed['struck']} leaves: its ranks fail again and again")

    def _note_failure(self) -> None:
        """Say to all that a rank of this node has failed, if nobody else has said so: others fail since one did."""
        if (world := self._world) is None:
            return
        try:
            world.store.compare_set(_FIRST, "", str(world.rank))
        except (DistStoreError, DistNetworkError) as error:
            _say(f"nobody hears that a rank of this node has failed: {error}")

    def shutdown(self) -> bool:
        """Close the rendezvous for all, unless this agent fails: then the others may go on without it."""
        if sys.exc_info()[0] is None:
            return self._inner.shutdown()
        _say("this agent ends in failure: it leaves the rendezvous open for the others")
        return True

    def get_backend(self) -> str:
        """Return the name that it is registered by."""
        return BACKEND

    def is_closed(self) -> bool:
        """Say whether nobody can join any more."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Let nobody join any more."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """Return how many agents want to be let in. When there are some, ranks are ended: nobody is to blame for it."""
        waiting = self._inner.num_nodes_waiting()
        if waiting > 0 and (world := self._world) is not None:
            world.store.compare_set(_FIRST, "", _NOBODY)
        return waiting

    def get_run_id(self) -> str:
        """Return what the agents have in common."""
        return self._inner.get_run_id()


@contextmanager
def _reads_within(store: Store, seconds: float) -> Iterator[None]:
    """Let reads of a store end after so long; and afterwards as before, whatever they came to, unlike torch's own."""
    before: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's stubs have it in one kind of store only
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(before)


@contextmanager
def _saying(what: Callable[[], str]) -> Iterator[None]:
    """Say from time to time what there is to say, and for how long that has been so, until this is over."""
    over, began_s = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(SAYS_EVERY_S):
            if text := what():
                _say(f"{text} ({time.monotonic() - began_s:.0f} s)")

    thread = threading.Thread(target=say, name="toprope-meeting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def absence(inner: RendezvousHandler) -> str:
    """Return how many agents are missing at torch's rendezvous, and who has come; empty once enough have.

    torch keeps it to itself: where another version has it elsewhere, it is only said that others are waited for.
    """
    holder, settings = getattr(inner, "_state_holder", None), getattr(inner, "_settings", None)
    there = getattr(getattr(holder, "state", None), "participants", None)
    least = getattr(settings, "min_nodes", None)
    if there is None or least is None:
        return "waits for other agents"
    names = sorted(str(getattr(one, "addr", one)) for one in list(there))
    missing = least - len(names)
    told = ", ".join(names[:_NAMES_TOLD]) + (f" and {len(names) - _NAMES_TOLD} more" if names[_NAMES_TOLD:] else "")
    return f"waits for {missing} more of {least} nodes; there are: {told or 'none'}" if missing > 0 else ""


class _KeptPort:
    """A port for the ranks' store, kept from others from the meeting until the next.

    A socket that does not listen stays bound to it: that keeps out whoever asks for any port, and lets in the one
    server that sets SO_REUSEADDR, as torch's does. torch's own way is to close the socket, and any connection of the
    machine may have the port before the ranks have imported torch.
    """

    def __init__(self) -> None:
        self._file: int | None = None

    def anew(self) -> int:
        """Return another port; the last one is let go."""
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        port = int(holder.getsockname()[1])
        if self._file is not None:
            os.close(self._file)
        self._file = holder.detach()  # open until this process ends
        return port


def _to_blame(answers: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the rank of the agent at which the end of their world began; None: it began with one that is gone."""
    for rank, one in enumerate(answers):
        if one["first"] and sum(other["of"] == one["of"] for other in answers) == one["size"]:
            return rank
    return None


def _was_waiting(error: Exception) -> bool:
    """Say whether something did not come in time; else the store itself is gone, or torch tells another fault."""
    return isinstance(error, DistStoreError) or isinstance(error.__cause__, DistStoreError)


def _say(text: str) -> None:
    sys.stderr.write(f"ckpt launch: {text}\n")
    sys.stderr.flush()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(parameters)
    told_by = parameters.get_as_int("told_by")
    return Meeting(
        create_handler(store, backend, parameters),
        store,
        strikes=Strikes(parameters.get_as_int("leave_after", 0) or 0),
        failures=None if told_by is None else Failures(told_by),
    )


def register() -> None:
    """Let torchrun know it as ``--rdzv-backend=toprope``."""
    rendezvous_handler_registry.register(BACKEND, _create)
