"""What the hook raises.

::

    HookError                        1: what a trainer gets from this package
    ├── UsageError                  64: wrong use; nothing was changed
    │   ├── SpecMismatchError           the job was started with another model or optimizer; the text is the diff
    │   ├── WorldMismatchError          saved by another number of ranks, and something has no place on this one
    │   ├── StateMismatchError          the checkpoint's names, shapes, dtypes or keys are not those of this trainer
    │   └── UnsupportedLeafError        a value that can't be kept exactly, by its name
    ├── SidecarUnavailableError      1: restore() found no sidecar, or it went away
    ├── RestoreError                 1: nothing could be restored, or restoring failed half way
    ├── SupersededError              1: a later attempt was opened; this process must end
    └── PreemptedError             143: this process was to be ended, and ends at a step that all ranks have saved
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import ClassVar, Self


class HookError(Exception):
    """A failure of the hook; ``exit_status`` is what a script should end with."""

    exit_status: ClassVar[int] = 1


class UsageError(HookError):
    """Wrong use: nothing was changed, and the message says what to do."""

    exit_status: ClassVar[int] = 64


class SpecMismatchError(UsageError):
    """The job was started with another spec; the message is the difference."""


class WorldMismatchError(UsageError):
    """The source was saved by another number of ranks, and what the message names has no place on this one."""


class StateMismatchError(UsageError):
    """The checkpoint does not fit this trainer; nothing was written into it."""


class UnsupportedLeafError(UsageError):
    """A value in the state that can't be kept exactly."""

    @classmethod
    def at(cls, name: str, reason: str) -> Self:
        """Return the error for the value of that dotted name."""
        return cls(f"{name}: {reason}")


class SidecarUnavailableError(HookError):
    """No sidecar answered; beginning afresh because of that takes ``fresh_ok=True``."""


class RestoreError(HookError):
    """Nothing could be restored, or restoring failed half way: the process must end."""


class SupersededError(HookError):
    """A later attempt of the job was opened: this process saves nothing more and must end."""


class PreemptedError(HookError):
    """A rank was told that it will be ended: all end here, after the step that the message names.

    The status is that of a process that SIGTERM has ended.
    """

    exit_status: ClassVar[int] = 143


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on standard error and the right exit status when the hook raises.

    Put it around the body of a training script::

        with toprope.trainer_hooks.one_line_errors():
            train()
    """
    try:
        yield
    except HookError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_status) from error
