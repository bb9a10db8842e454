"""May anything be broken here? Only if a flag, the environment and the label of the job agree. And it is written down.

The audit trail has a line of JSON for each fault, in ``$XDG_STATE_HOME/toprope/chaos.jsonl``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from toprope.store.errors import UsageError

VARIABLE = "CKPT_CHAOS"
LABEL = "chaos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """What each of the three says. ``flag``: whoever starts it says so; ``environment`` is that of ``CKPT_CHAOS``."""

    flag: bool
    environment: str
    label: str

    def check(self, job: str) -> None:
        """Check that the three agree.

        Raises:
            UsageError: one does not; nothing was touched.
        """
        if self.label == "production":
            raise UsageError(f"job {job} is labelled 'production': nothing of it is broken on purpose")
        missing = []
        if not self.flag:
            missing.append("the flag --break")
        if self.environment != LABEL:
            missing.append(f"{VARIABLE}={LABEL} in the environment")
        if self.label != LABEL:
            missing.append(f"label = {LABEL!r} in the scenario")
        if missing:
            raise UsageError(f"job {job}: nothing is broken on purpose without {' and '.join(missing)}")


def permit(*, flag: bool, label: str) -> Permit:
    """Return what the flag, this process's environment and a label say."""
    return Permit(flag=flag, environment=os.environ.get(VARIABLE, ""), label=label)


def audit_file() -> Path:
    """Return where the audit trail lies."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "toprope" / "chaos.jsonl"


def note(what: str, **more: object) -> None:
    """Add a line to the audit trail, durably, before or after something is done on purpose."""
    line = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "uid": os.getuid(), "what": what, **more}
    file = audit_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file.open("ab") as stream:
        stream.write(msgspec.json.encode(line) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
