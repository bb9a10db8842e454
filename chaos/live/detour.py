"""A proxy before a port, started and told what to do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toprope.chaos.live.processes import Process, free_port, wait_until
from toprope.chaos.live.proxy import done, tell

_LISTENS_S = 30.0
_KNOWS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """A proxy that listens on ``port`` of loopback; its files lie in ``directory``."""

    port: int
    directory: Path
    process: Process

    @property
    def mode_file(self) -> Path:
        """The file that it follows."""
        return self.directory / "mode"

    @property
    def log(self) -> Path:
        """The file in which it notes what it does."""
        return self.directory / "log"

    def tell(self, mode: str) -> None:
        """Tell it what to do, and wait until it does (see ``toprope.chaos.live.proxy``)."""
        before = len(self._noted())
        tell(self.mode_file, mode)
        word = f" mode {mode.partition(' ')[0]} "
        wait_until(lambda: word in self._noted()[before:], what=f"the proxy does {mode}", timeout_s=_KNOWS_S)

    def done(self) -> list[str]:
        """Return what it has done so far."""
        return [text for _, text in done(self.log)]

    def _noted(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextlib.contextmanager
def detour(directory: Path, *, target: str, host: str = "127.0.0.1", port: int = 0) -> Iterator[Detour]:
    """Yield a proxy before ``[HOST:]PORT`` that lets all pass; it ends afterwards.

    It listens at ``host``, on a free port unless one is given.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port, mode_file, log = port or free_port(), directory / "mode", directory / "log"
    tell(mode_file, "pass")
    words = [f"{host}:{port}", target, str(mode_file), str(log)]
    process = Process(
        f"proxy before {target}",
        [sys.executable, "-m", "toprope.chaos.live.proxy", *words],
        log=directory / "proxy.log",
    )
    try:
        wait_until(lambda: listens(port), what="the proxy listens", timeout_s=_LISTENS_S, alive=[process])
        yield Detour(port=port, directory=directory, process=process)
    finally:
        process.kill()


def listens(port: int) -> bool:
    """Say whether a TCP port of this network namespace is taken, without a connection to it."""
    return f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()
