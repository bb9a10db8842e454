"""Gathers what a run is judged from once it is over: the log as it lies there, the store read back, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterable

from toprope.chaos.evidence import ReadyFact, Told
from toprope.chaos.live.processes import command_of, descendants
from toprope.chaos.site import Site, state_of
from toprope.store.errors import StoreError, UsageError
from toprope.store.log.chain import read_log
from toprope.store.look.show import read_job, record_lines
from toprope.store.look.verify import verify_checkpoint, verify_facts
from toprope.store.names import log_prefix
from toprope.store.objects.opening import open_store


def readies(root: str, job: str) -> tuple[ReadyFact, ...]:
    """Return the READY records by a plain look at each object of the log: no fold that could share a fault."""
    store = open_store(root)
    found = []
    for key in store.list(log_prefix(job)):
        record = json.loads(store.read(key))
        if record["kind"] == "READY":
            number = int(key.rsplit("/", 1)[1].removesuffix(".json"))
            found.append(ReadyFact(number=number, attempt=record["attempt"], step=record["step"]))
    return tuple(found)


def log_lines(root: str, job: str) -> tuple[tuple[str, ...], str]:
    """Return a line for each record in the words of ``ckpt show``, and what is wrong with the log; empty: nothing."""
    try:
        log = read_job(open_store(root), job)
    except (StoreError, UsageError) as error:
        return (), str(error)
    return tuple(f"{line.number:>3} {line.kind:<8} {line.what}" for line in record_lines(log.entries)), ""


def verified(root: str, job: str) -> tuple[int, tuple[str, ...]]:
    """Read back each READY checkpoint that is not retired, in full; return how many, and what is damaged."""
    store = open_store(root)
    state = read_log(store, job)
    reports = [verify_checkpoint(store, state, seq) for seq in state.live]
    damages = [damage for report in reports for damage in report.damages]
    return len(reports), tuple(f"{one.key}: {one.what}" for one in (*damages, *verify_facts(store, state)))


def told(site: Site) -> tuple[Told, ...]:
    """Look for the words that must be told in the logs of processes."""
    found = []
    for asked in site.scenario.expected.told:
        process, _, words = (part.strip() for part in asked.partition(":"))
        line = next((line for line in _lines(site, process) if re.search(words, line)), "")
        found.append(Told(process=process, words=words, line=line))
    return tuple(found)


def _lines(site: Site, process: str) -> list[str]:
    kind, _, which = process.partition(" ")
    path = site.world.log(int(which)) if kind == "rank" else site.cluster.log(process.replace(" ", "-"))
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def end_orphans(before: Iterable[int]) -> tuple[str, ...]:
    """Kill processes that descend from us and were not there before, and say which they were."""
    known = {*before}
    found = []
    for pid in descendants(os.getpid()):
        if pid not in known and state_of(pid) not in {"", "Z"}:
            found.append(f"process {pid} still ran: {command_of(pid)}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return tuple(found)


def files_left(site: Site) -> tuple[str, ...]:
    """Return files that should not be there any more once all has ended."""
    found = [str(site.cluster.memory)] if site.cluster.memory.exists() else []
    for node in site.cluster.nodes.values():
        found += [str(path) for path in sorted((node.local_dir / site.job).glob("tmp.*"))]
    return tuple(f"{path} is left over" for path in found)
