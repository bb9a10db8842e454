"""The object store: a linearizable map whose requests and replies get lost, or land long after the client gave up.

It is an ``ObjectStore``: the real ``ThreadedStore``, ``ObjectTier`` and ``read_back`` stand on it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from toprope.chaos.sim.loop import PROCESS, SimLoop
from toprope.chaos.sim.threads import turn
from toprope.chaos.sim.trace import Trace
from toprope.store.checkpoint.manifest import Head, Index, Tensor
from toprope.store.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    MissingObjectError,
    ThrottledError,
    UnavailableError,
)
from toprope.store.names import Key
from toprope.store.objects.pieces import pieces_of

Fault: TypeAlias = Literal["request lost", "reply lost", "late", "503", "corrupt"]
FAULTS: tuple[Fault, ...] = ("request lost", "reply lost", "late", "503", "corrupt")
MIDWAY = (*("broke off",) * 4, *("ended early",) * 3, "wrong byte")
"""What may befall an answer after some of its bytes have come, so much likelier than other faults: ranges are few."""
_LIKELIER = 4
_PIECES = 4
"""In so many pieces at least a range comes."""
EVERYBODY = "*"
_LATE_S = (2.0, 30.0)
_PAGES = (2, 1000)


class SimStore:
    """Objects in a dict; ``ever`` has the deleted ones too. ``on_create`` and ``on_delete`` see what is applied.

    ``corrupt`` are those that it has not as they were written; ``spoiled``: it has sent wrong bytes of a right one.
    ``cut`` says who can't reach it just now, and it answers none of those for whom it is ``away``. ``goes_at`` is told
    each record that somebody appends, and says whether the store takes it late and is away from then on.
    """

    def __init__(self, loop: SimLoop, trace: Trace, *, fault: float, cut: Callable[[str], bool]) -> None:
        self.objects: dict[Key, bytes] = {}
        self.corrupt: set[Key] = set()
        self.spoiled = False
        self.fault = fault
        self.away: set[str] = set()
        self.goes_at: Callable[[bytes], bool] = lambda _record: False
        self.ever: dict[Key, bytes] = {}
        self.on_create: Callable[[Key, bytes, str], None] = lambda _key, _body, _who: None
        self.at: Callable[[str], None] = lambda _kind: None
        self.on_delete: Callable[[Key, str], None] = lambda _key, _who: None
        self._loop = loop
        self._trace = trace
        self._cut = cut
        self._left: dict[tuple[str, Key], int] = {}

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object."""
        turn()
        who = _who()
        fault = self._drawn(who, key)
        if "/log/" in key and not fault and self.goes_at(bytes(body)):
            fault = "late"
        if fault == "503":
            raise ThrottledError(f"{key}: slow down")
        if fault == "request lost":
            raise UnavailableError(f"{key}: no answer")
        if fault == "late":
            self._loop.outside(self._loop.rng.uniform(*_LATE_S), self._land, key, bytes(body), who)
            raise UnavailableError(f"{key}: no answer")
        if fault == "corrupt" and key.endswith(".safetensors"):
            self.corrupt.add(key)
            self._apply(key, bytes(body[:-1]) + bytes([body[-1] ^ 1]), who)
            return
        self._apply(key, bytes(body), who)
        if fault == "reply lost":
            raise UnavailableError(f"{key}: no answer")

    def _drawn(self, who: str, key: str) -> Fault | None:
        rng = self._loop.rng
        if self._is_out_of_reach(who):
            fault: Fault = "request lost"
        elif rng.random() < self.fault:
            fault = rng.choice(FAULTS)
        else:
            return None
        self._trace.sometimes(f"store: {fault}")
        self._trace.note("store", f"{fault}: {who} {key}")
        return fault

    def _is_out_of_reach(self, who: str) -> bool:
        return EVERYBODY in self.away or who in self.away or self._cut(who)

    def _land(self, key: Key, body: bytes, who: str) -> None:
        if key not in self.objects:
            self._trace.sometimes("store: late create landed")
            self._trace.note("store", f"landed late: {who} {key}")
            self._apply(key, body, who)

    def _apply(self, key: Key, body: bytes, who: str) -> None:
        if key in self.objects:
            raise AlreadyExistsError(key)
        self.objects[key] = self.ever[key] = body
        self.on_create(key, body, who)
        self.at(key.split("/")[1])

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:  # noqa: ARG002 - there is no cache
        """Return bytes of an object."""
        turn()
        if self._drawn(_who(), key) not in {None, "corrupt"}:
            raise UnavailableError(f"{key}: no answer")
        if key not in self.objects:
            raise MissingObjectError(key)
        body = self.objects[key]
        if length is not None and start + length > len(body):
            raise CorruptObjectError(f"{key}: ends at byte {len(body)}, expected {start + length}")
        return body[start:] if length is None else body[start : start + length]

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield bytes of an object, some at a time; after some the answer may break off, end, or bring wrong ones."""
        body, who = self.read(key, start=start, length=length), _who()
        if self._left.pop((who, key), None) == start:
            kind = "reader" if who.startswith("reader") else "sidecar"
            self._trace.sometimes(f"a {kind} asked for the rest of a range that broke off")

        def read_into(room: memoryview, at: int) -> int:
            count = min(len(room), -(-length // _PIECES))
            room[:count] = body[at - start : at - start + count]
            if at == start:
                return count
            turn()
            fault = self._drawn_midway(who, key, at)
            if fault == "broke off":
                raise UnavailableError(f"{key}: the answer broke off at byte {at}")
            if fault == "wrong byte":
                room[0] ^= 1
            return 0 if fault == "ended early" else count

        def short(at: int) -> UnavailableError:
            return UnavailableError(f"{key}: the answer ended at byte {at} of {start + length}")

        yield from pieces_of(read_into, start=start, length=length, short=short)

    def _drawn_midway(self, who: str, key: Key, at: int) -> str:
        rng = self._loop.rng
        if self._is_out_of_reach(who):
            fault = "broke off"
        elif rng.random() < _LIKELIER * self.fault:
            fault = rng.choice(MIDWAY)
        else:
            return ""
        self._trace.sometimes(f"store: {fault}")
        self._trace.note("store", f"{fault} at byte {at}: {who} {key}")
        if fault == "wrong byte":
            self.spoiled = True
        else:
            self._left[who, key] = at
        return fault

    def size(self, key: Key) -> int:
        """Return an object's length."""
        turn()
        if self._drawn(_who(), key) not in {None, "corrupt"}:
            raise UnavailableError(f"{key}: no answer")
        if key not in self.objects:
            raise MissingObjectError(key)
        return len(self.objects[key])

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects, one after another."""
        who = _who()
        for key in keys:
            turn()
            fault = self._drawn(who, key)
            if fault == "late":
                self._loop.outside(self._loop.rng.uniform(*_LATE_S), self._remove, key, who)
            elif fault in {None, "corrupt", "reply lost"}:
                self._remove(key, who)
            if fault not in {None, "corrupt"}:
                raise UnavailableError(f"{key}: no answer")

    def _remove(self, key: Key, who: str) -> None:
        if self.objects.pop(key, None) is not None:
            self.on_delete(key, who)

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``, a page at a time: what comes in between is seen or not."""
        after = ""
        while True:
            turn()
            if self._drawn(_who(), prefix) not in {None, "corrupt"}:
                raise UnavailableError(f"{prefix}: no answer")
            keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
            page = keys[: self._loop.rng.choice(_PAGES)]
            yield from page
            if len(page) == len(keys):
                return
            after = page[-1]


def image_in(objects: Mapping[Key, bytes], index: Index) -> bytes:
    """Return the image of a rank as it lies in parts in the objects, which are not packed here."""
    parts: tuple[Head | Tensor, ...] = (index.head, *index.tensors)
    return b"".join(objects.get(Key(index.files[part.file].key), b"")[part.begin : part.end] for part in parts)


def _who() -> str:
    process = PROCESS.get()
    return process.name if process is not None else "world"
