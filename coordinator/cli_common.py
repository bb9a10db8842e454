"""What the words of ``ckpt`` that change a job share: their options, and how a change is made or tried."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toprope.coordinator.changing import Changer
from toprope.coordinator.serving import read_token
from toprope.store.cli.shared import say
from toprope.store.keep.changes import Change, checked
from toprope.store.log.fold import JobState
from toprope.store.objects.protocol import ObjectStore

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
CoordinatorUrl = Annotated[
    str,
    typer.Option("--coordinator", help="URL of the job's coordinator; `none` asks nobody. Default: as in the log."),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the coordinator's token.")]


def change_or_try(changer: Changer, state: JobState, change: Change, *, purpose: str, dry_run: bool) -> bool:
    """Make a change, or only see whether it could be made; say whether there is anything to change.

    Raises:
        UsageError: it may not be made.
    """
    if dry_run:
        return checked(state, change) is not None
    return changer.append(state, change, purpose=purpose).n != state.n


def outcome(changed: bool, *, dry_run: bool) -> dict[str, bool]:  # noqa: FBT001 - what came of a change
    """Return what the JSON of each change says: whether it was one, and whether it was made."""
    return {"changed": changed, "done": changed and not dry_run}


def changer_of(store: ObjectStore, root: str, *, url: str, token_file: Path | None) -> Changer:
    """Return what appends a command's changes to the logs of the store at ``root``."""
    return Changer(store=store, root=root, coordinator_url=url, token=read_token(token_file), say=say)


def objects_text(number: int) -> str:
    """Return how many objects, for people."""
    return f"{number:,} object{'s' * (number != 1)}"
