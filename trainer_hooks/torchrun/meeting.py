"""Where torchrun's agents meet: its own c10d rendezvous, and then only a world whose agents have all answered in it.

A rendezvous of torch is complete once it has counted the nodes. When one of them dies right then, or has died while it
waited for the others, they wait for its answer until a read fails, which ends them all; and an agent that ends in
failure closes the rendezvous for everybody, for good. Here the agents answer each other first and meet again when an
answer doesn't come; and only an agent whose ranks are done closes the rendezvous.

It imports torch: only an agent does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError
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
from torch.distributed.elastic.utils.store import store_timeout

from toprope.trainer_hooks.torchrun.settings import BACKEND

ANSWERS_S = 15.0
"""An agent looks once in 2 s whether all are there: within this it has answered, on a busy machine too."""
TRIES = 20
"""After so many meetings in which somebody did not answer, the agent ends and says so."""
_HERE, _AGREED = "toprope/here", "toprope/agreed"


class Meeting(RendezvousHandler):
    """An agent's rendezvous: that of ``inner``, whose agents meet at ``store``, until all of a world have answered."""

    def __init__(self, inner: RendezvousHandler, store: Store, *, answers_s: float = ANSWERS_S) -> None:
        """Meet at ``store``; whoever has not answered within ``answers_s`` is taken for gone."""
        self._inner = inner
        self._store = store
        self._answers_s = answers_s
        self._port = _KeptPort()

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet, as often as it takes; return a world in which each agent has answered.

        Raises:
            DistStoreError, RendezvousConnectionError: somebody was missing ``TRIES`` times, or the store is gone.
            RendezvousError: what torch's own raises.
        """
        for number in range(1, TRIES + 1):
            began_s = time.monotonic()
            try:
                with store_timeout(self._store, self._answers_s):
                    return self._agreed(self._inner.next_rendezvous())
            except (DistStoreError, RendezvousConnectionError) as error:
                if number == TRIES or not _was_waiting(error):
                    raise
                waited_s = time.monotonic() - began_s
                _say(f"an agent was counted and has not answered ({waited_s:.0f} s): they meet again ({error})")
        raise AssertionError

    def _agreed(self, met: RendezvousInfo) -> RendezvousInfo:
        """Answer, and learn from rank 0, which has all answers, where the ranks meet.

        Raises:
            DistStoreError: somebody does not answer, or counts other agents.
        """
        store, where = met.store, met.bootstrap_store_info
        assert where is not None, "c10d tells it"
        store.set(f"{_HERE}/{met.rank}", "")
        if met.rank == 0:
            store.wait([f"{_HERE}/{rank}" for rank in range(met.world_size)], timedelta(seconds=self._answers_s))
            store.set(_AGREED, json.dumps({"world": met.world_size, "port": self._port.anew()}))
        agreed = json.loads(store.get(_AGREED))
        if agreed["world"] != met.world_size:
            raise DistStoreError(f"rank 0 counts {agreed['world']} agents, rank {met.rank} counts {met.world_size}")
        there = RendezvousStoreInfo(master_addr=where.master_addr, master_port=int(agreed["port"]))
        return RendezvousInfo(store, met.rank, met.world_size, there)

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
        """Return how many agents want to be let in."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return what the agents have in common."""
        return self._inner.get_run_id()


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


def _was_waiting(error: Exception) -> bool:
    """Say whether something did not come in time; else the store itself is gone, or torch tells another fault."""
    return isinstance(error, DistStoreError) or isinstance(error.__cause__, DistStoreError)


def _say(text: str) -> None:
    sys.stderr.write(f"ckpt launch: {text}\n")
    sys.stderr.flush()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(parameters)
    return Meeting(create_handler(store, backend, parameters), store)


def register() -> None:
    """Let torchrun know it as ``--rdzv-backend=toprope``."""
    rendezvous_handler_registry.register(BACKEND, _create)
