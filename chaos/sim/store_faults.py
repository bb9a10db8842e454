"""One fault at one call of the object store, for each call of a commit and each kind of fault in turn.

All programs are the real ones, in a quiet simulated world of two nodes: what is done up to the call is the same in each
run, so the calls of a run without a fault tell where faults can be put. The oracle of the simulator judges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import Literal, TypeAlias, cast, get_args

from toprope.chaos.sim.history import Outcome, run
from toprope.chaos.sim.journey import SEED, Call, Cell
from toprope.chaos.sim.loop import PROCESS, SimLoop
from toprope.chaos.sim.options import QUIET
from toprope.chaos.sim.store import SimStore
from toprope.chaos.sim.world import World
from toprope.store.errors import AlreadyExistsError, CkptError, ThrottledError, UnavailableError
from toprope.store.names import Key

Kind: TypeAlias = Literal[
    "request lost",
    "reply lost",
    "lands late",
    "503",
    "truncated body",
    "wrong checksum",
    "crash before",
    "crash after",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_LATE_S = (0.05, 3.0, 20.0)
_LOOKS, _LOOK_EVERY_S = 600, 0.1


class _EndedError(CkptError):
    """The process that called is no more."""


class PlannedStore:
    """The objects of a ``SimStore``; call number ``at`` meets with ``fault``. It is an ``ObjectStore``.

    A body that arrives short or changed is kept as it came, and called written, where the product's own digests are to
    find it (shards, indexes, manifests); of the log it is refused, as a store does that compares checksums.
    """

    def __init__(self, inner: SimStore, loop: SimLoop, *, at: int = -1, fault: Kind = "request lost") -> None:
        self.objects = inner.objects
        self.corrupt = inner.corrupt
        self.ever = inner.ever
        self.away = inner.away
        self.fault = 0.0
        self.calls: list[Call] = []
        self.struck: Call | None = None
        self._inner = inner
        self._loop = loop
        self._at = at
        self._fault = fault

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object."""
        fault = self._met("create", key)
        if fault in {"truncated body", "wrong checksum"} and _is_digested(key):
            self._inner.create(key, _spoiled(bytes(body), fault))
            self.corrupt.add(key)
            return
        if fault == "lands late":
            after_s = _LATE_S[self._at % len(_LATE_S)]
            self._loop.outside(after_s, self._land, key, bytes(body))
        if fault in {"reply lost", "crash after"}:
            self._inner.create(key, body)
        self._raise(fault, key)
        if fault is None:
            self._inner.create(key, body)

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        """Return bytes of an object."""
        fault = self._met("read", key)
        if fault in {"truncated body", "wrong checksum"} and _is_digested(key):
            body = self._inner.read(key, start=start, length=length, uncached=uncached)
            return body if fault == "truncated body" else _spoiled(body, fault)
        self._raise(fault, key)
        return self._inner.read(key, start=start, length=length, uncached=uncached)

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield bytes of an object, all at once."""
        yield memoryview(self.read(key, start=start, length=length))

    def size(self, key: Key) -> int:
        """Return an object's length."""
        self._raise(self._met("size", key), key)
        return self._inner.size(key)

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects."""
        self._raise(self._met("delete", keys[0]), keys[0])
        self._inner.delete(keys)

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``."""
        self._raise(self._met("list", Key(prefix)), Key(prefix))
        yield from self._inner.list(prefix)

    def _met(self, operation: str, key: Key) -> Kind | None:
        process = PROCESS.get()
        call = Call(who=process.name if process is not None else "", operation=operation, about=_kind(key))
        self.calls.append(call)
        if len(self.calls) - 1 != self._at:
            return None
        self.struck = call
        return self._fault

    def _raise(self, fault: Kind | None, key: Key) -> None:
        if fault in {"crash before", "crash after"}:
            process = PROCESS.get()
            assert process is not None
            process.kill()
            raise _EndedError(key)
        if fault == "503":
            raise ThrottledError(f"{key}: slow down")
        if fault is not None:
            raise UnavailableError(f"{key}: {fault}")

    def _land(self, key: Key, body: bytes) -> None:
        try:
            self._inner.create(key, body)
        except AlreadyExistsError:
            return


def calls_of_a_commit() -> tuple[Call, ...]:
    """Return the calls of a run without a fault, from the election to the second READY."""
    calls, outcome = _run(at=-1, fault="request lost", until_ready=2)
    assert not outcome.invariant, f"without any fault: {outcome}"
    return tuple(calls)


def strike(at: int, fault: Kind) -> Cell:
    """Run with one fault."""
    store: list[PlannedStore] = []
    _, outcome = _run(at=at, fault=fault, until_ready=2, tell=store)
    return Cell(at=at, fault=fault, struck=store[0].struck, outcome=outcome)


def _run(
    *, at: int, fault: Kind, until_ready: int, tell: list[PlannedStore] | None = None
) -> tuple[list[Call], Outcome]:
    calls: list[Call] = []

    async def trouble(world: World) -> None:
        store = PlannedStore(world.store, world.loop, at=at, fault=fault)
        if tell is not None:
            tell.append(store)
        world.store = cast("SimStore", store)
        for _ in range(_LOOKS):
            if len(world.oracle.state.readies) >= until_ready:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        calls.extend(store.calls)

    return calls, run(SEED, QUIET, trouble=trouble)


def _kind(key: Key) -> str:
    return key.split("/")[1] if "/" in key else key


def _is_digested(key: Key) -> bool:
    return _kind(key) in {"shards", "manifests"}


def _spoiled(body: bytes, fault: Kind) -> bytes:
    return body[: len(body) // 2] if fault == "truncated body" else body[:-1] + bytes([body[-1] ^ 1])
