"""Faults of what is stored: a bit flipped or a file torn in a tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toprope.chaos.faults.injector import Base, NotFiredError
from toprope.chaos.live.processes import LiveError, wait_until
from toprope.store.errors import UsageError
from toprope.trainer_hooks.link.slot import SlotState, read_page

_APPEARS_S = 15.0


@dataclass(frozen=True, slots=True)
class _Found:
    """A stored shard: its file, its length in it and the step."""

    path: Path
    bytes: int
    step: int


class Damage(Base):
    """Flips a bit (``flip``) or cuts off the second half (``tear``) of the newest shard that a tier has."""

    _said = ""

    def strike(self) -> None:
        """Change the bytes in place, as a medium would."""
        found: list[_Found] = []

        def look() -> bool:
            found[:] = self._shards()
            return bool(found)

        try:
            wait_until(look, what="there is a shard", timeout_s=_APPEARS_S)
        except LiveError as error:
            raise NotFiredError(f"tier {self.word('tier')} of {self.fault.target} has no shard to damage") from error
        newest = max(one.step for one in found)
        self._said = "; ".join(self._damage(one) for one in found if one.step == newest or self.word("of") == "all")

    def _damage(self, shard: _Found) -> str:
        with shard.path.open("r+b") as stream:
            if self.fault.do == "tear":
                stream.truncate(shard.bytes // 2)
                return f"{shard.path.name} of step {shard.step}: {shard.bytes} bytes before, {shard.bytes // 2} after"
            at = int(shard.bytes * self.number("at", 0.75))
            stream.seek(at)
            before = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([before ^ 1]))
        return f"{shard.path.name} of step {shard.step}: byte {at} was {before:#04x} and is {before ^ 1:#04x}"

    def _shards(self) -> list[_Found]:
        tier = self.word("tier", "memory")
        if tier == "object":
            return list(_objects(self.site.cluster.store / self.site.job / "shards"))
        kind, _, name = self.fault.target.partition(" ")
        node = self.site.cluster.nodes.get(name)
        if kind != "node" or node is None:
            raise UsageError(f"{self.fault.do} of {self.fault.target!r}: give a node that is there, or tier = 'object'")
        match tier:
            case "memory":
                return list(_pages((node.memory_dir / self.site.job / "slots").glob("rank-*/slot-*.page")))
            case "peer":
                return list(_pages((node.memory_dir / self.site.job / "peer").glob("*.page")))
            case "local":
                return list(_files((node.local_dir / self.site.job).glob("*.safetensors"), step_at=1))
            case _:
                raise UsageError(f"{self.fault.do}: tier {tier!r}: give memory, peer, local or object")

    def witness(self) -> str:
        """Return file, place and bytes."""
        return self._said


def _pages(pages: Iterator[Path]) -> Iterator[_Found]:
    for path in pages:
        page = read_page(path)
        if page.state == SlotState.HASHED:
            yield _Found(path.with_suffix(".data"), page.bytes, page.step)


def _files(paths: Iterator[Path], *, step_at: int) -> Iterator[_Found]:
    for path in paths:
        yield _Found(path, path.stat().st_size, int(path.name.split("-")[step_at].removeprefix("s")))


def _objects(directory: Path) -> Iterator[_Found]:
    for path in directory.glob("a*/s*/rank-*.safetensors*"):
        yield _Found(path, path.stat().st_size, int(path.parent.name.removeprefix("s")))
