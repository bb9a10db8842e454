"""Live progress: what happens as lines with the time, and on a terminal a last line that is rewritten."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_LINE_EVERY_S = 5.0


class Progress:
    """Prints to a console. On what is no terminal, ``show`` prints a line at most every five seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._shown_s = 0.0
        # no thread of its own: processes are forked while it is up
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Tell something that happened, for good."""
        self._console.print(Text(f"{self._elapsed_s():6.1f} s  {text}", style="bold red" if alarm else ""))

    def show(self, text: str) -> None:
        """Tell how far it is; soon out of date."""
        now_s = time.monotonic()
        if self._live is not None:
            self._live.update(Text(f"{self._elapsed_s():6.1f} s  {text}", style="cyan"), refresh=True)
        elif now_s - self._shown_s > _LINE_EVERY_S:
            self._shown_s = now_s
            self.say(text)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s
