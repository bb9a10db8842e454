"""Reads hostile stores as verify and restore do, in a process of its own, and tells what each read came to.

``python hostile_reader.py STORE...``: a line of JSON for each store, read in a process of its own, with the most memory
that it had.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from toprope.store.checkpoint.shard import header_length, parse_header
from toprope.store.errors import CkptError
from toprope.store.look.show import read_job
from toprope.store.look.verify import plan, verify_checkpoint, verify_facts
from toprope.store.objects.directory import DirectoryStore
from toprope.store.transfer.restore import restore


def main(*roots: str) -> None:
    for root in roots:
        child = os.fork()
        if child == 0:
            try:
                tell(Path(root))
            finally:
                os._exit(0)  # what it did not tell is missed
        os.waitpid(child, 0)


def tell(path: Path) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # begins the measure of the peak anew
    told = header_of(path / "header") if (path / "header").exists() else read(path)
    peak_mib = _peak_kib() // 1024
    print(json.dumps({"case": path.name, "peak_mib": peak_mib, **told}), flush=True)  # noqa: T201 - its answer


def _peak_kib() -> int:
    """Return the most memory that this program had; ``ru_maxrss`` counts that of the process it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def read(path: Path) -> dict[str, str]:
    store = DirectoryStore(path)
    told = {}
    try:
        state = read_job(store, "job").state
        damages = [*verify_facts(store, state)]
        damages += [damage for seq in plan(state) for damage in verify_checkpoint(store, state, seq).damages]
        told["verify"] = str(damages[0]) if damages else ""
    except CkptError as error:
        told["verify"] = f"{type(error).__name__}: {error}"
    try:
        restore(store, read_job(store, "job").state, to=path.with_name(path.name + "-restored"), step=20)
        told["restore"] = ""
    except CkptError as error:
        told["restore"] = f"{type(error).__name__}: {error}"
    return told


def header_of(path: Path) -> dict[str, str]:
    body = path.read_bytes()
    try:
        header_length(body[:8], size=len(body), name="header")
        parse_header(body, size=len(body), name="header")
    except CkptError as error:
        return {"verify": f"{type(error).__name__}: {error}", "restore": ""}
    return {"verify": "", "restore": ""}


if __name__ == "__main__":
    main(*sys.argv[1:])
