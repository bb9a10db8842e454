"""One coordinator and one broker under the load of thousands of nodes: how fast it decides, and what that costs.

The coordinator and the broker are real processes; the nodes are played by this one (``toprope.chaos.live.fleet``),
which shares the machine with them. A decision counts from the last report that it rests on, as it leaves its node,
until a node knows: through the broker, the coordinator, and the broker again. A node of a large job tells in its turn;
what that takes is printed by itself ("since held"). How late the fleet was with what it had
to do is printed beside it: when it is late, so is what it measures.

    python benchmarks/scale.py [--nodes 2048] [--ranks-per-node 8] [--every 10] [--snapshots 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.chaos.live.broker import start_broker
from toprope.chaos.live.fleet import Fleet, Step
from toprope.chaos.live.processes import Process, free_port, wait_ready
from toprope.chaos.live.scratch import DISK, Scratch
from toprope.coordinator.settings import Address

JOB = "scale"
STEPS = 10
"""Training steps from one snapshot to the next."""
LOCAL_EVERY = 2
"""Of so many snapshots one goes to the local tier."""
SLOWEST = 5
"""So many of the slowest decisions are told by themselves: after a step that is stored they take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process and its children have used so far, and their memory."""

    cpu_s: float
    rss_mib: float
    peak_mib: float

    @staticmethod
    def of(pid: int) -> Usage:
        """Read it from /proc; of this process without its children, which are measured themselves."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        ticks = int(fields[11]) + int(fields[12])
        children = [Usage.of(int(child)) for child in _children(pid) if pid != os.getpid()]
        return Usage(
            cpu_s=ticks / os.sysconf("SC_CLK_TCK") + sum(child.cpu_s for child in children),
            rss_mib=int(status["VmRSS"].split()[0]) / 1024 + sum(child.rss_mib for child in children),
            peak_mib=int(status["VmHWM"].split()[0]) / 1024 + sum(child.peak_mib for child in children),
        )


def _children(pid: int) -> list[str]:
    return [child for of in Path(f"/proc/{pid}/task").glob("*/children") for child in of.read_text().split()]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one snapshot to the next")
    parser.add_argument("--snapshots", type=int, default=12)
    parser.add_argument("--object-every", type=int, default=8, help="of so many snapshots one goes to the store")
    parser.add_argument("--connections", type=int, default=16, help="to the broker, each for many nodes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="profile the coordinator into this file")
    parser.add_argument("--json", type=Path, help="write the figures as JSON too")
    return parser


def main() -> None:
    options = parser().parse_args()
    with Scratch(DISK) as scratch:
        figures = measure(options, scratch.path)
    show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the load once and return the figures."""
    broker = Address(host="127.0.0.1", port=free_port())
    running = [start_broker(port=broker.port, directory=directory, log=directory / "broker.log")]
    try:
        running.append(_coordinator(directory, broker, options))
        url = wait_ready(running[1], directory / "coordinator.ready")["url"]
        fleet = Fleet(
            JOB,
            nodes=options.nodes,
            ranks_per_node=options.ranks_per_node,
            store=directory / "store",
            connections=options.connections,
            every_s=options.every,
            seed=options.seed,
        )
        figures = asyncio.run(_measured(fleet, options, url=url, broker=broker, processes=running))
        log = (directory / "coordinator.log").read_text().splitlines()
        return figures | {"warnings": [line for line in log if " WARNING " in line or " ERROR " in line]}
    except TimeoutError as error:
        sys.stderr.write((directory / "coordinator.log").read_text()[-4000:])
        raise SystemExit(str(error)) from error
    finally:
        for process in reversed(running):
            process.stop()


def _coordinator(directory: Path, broker: Address, options: argparse.Namespace) -> Process:
    profile = options.profile
    python = [sys.executable, *(["-m", "cProfile", "-o", str(profile.absolute())] if profile is not None else [])]
    words = [*python, "-m", "toprope", "coordinator", "--job", JOB, "--store", str(directory / "store")]
    words += ["--broker", str(broker), "--ready-file", str(directory / "coordinator.ready"), "--every", str(STEPS)]
    words += ["--local-every", str(LOCAL_EVERY * STEPS), "--object-every", str(options.object_every * STEPS)]
    (directory / "store").mkdir()
    return Process("coordinator", words, log=directory / "coordinator.log")


async def _measured(
    fleet: Fleet, options: argparse.Namespace, *, url: str, broker: Address, processes: list[Process]
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    async with fleet.running(coordinator=url, broker=broker):
        began_s = loop.time()
        await fleet.arrive()
        came_s = loop.time()
        await fleet.open()
        applied_s = loop.time()
        _tell(f"{len(fleet.nodes)} nodes came in {came_s - began_s:.1f} s, opened in {applied_s - came_s:.1f} s")
        pids = {process.name: process.pid for process in processes} | {"fleet": os.getpid()}
        opening = Usage.of(pids["coordinator"])
        stored = [number for number in range(1, options.snapshots + 1) if number % options.object_every == 0]
        for number in stored:
            fleet.prepare(number * STEPS)
        await asyncio.to_thread(os.sync)  # a node that lists a receipt has brought its object to the disk
        await asyncio.sleep(options.every)
        fleet.counts.clear()
        fleet.late_s.clear()
        before, since_s = {name: Usage.of(pid) for name, pid in pids.items()}, loop.time()
        for number in range(1, options.snapshots + 1):
            fleet.snapshot(number * STEPS, local=number % LOCAL_EVERY == 0, store=number in stored)
            await asyncio.sleep(max(0.0, since_s + number * options.every - loop.time()))
            _tell(f"snapshot {number} of {options.snapshots}")
        wall_s, after = loop.time() - since_s, {name: Usage.of(pid) for name, pid in pids.items()}
        counts, late_s = Counter(fleet.counts), sorted(fleet.late_s)
        await fleet.wait(
            lambda: _are_known(fleet) and fleet.counts["whole document"] > 0,
            what="every decision is known to every node",
            timeout_s=120,
        )
    return {
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "nodes": len(fleet.nodes),
        "ranks": fleet.world,
        "snapshots": options.snapshots,
        "every_s": options.every,
        "arrival_s": came_s - began_s,
        "opening_s": applied_s - came_s,
        "opening_cpu_s": opening.cpu_s,
        "protected_s": _latencies(fleet.protected.values()),
        "ready_s": _latencies(fleet.ready.values()),
        "slowest_s": _slowest(fleet.protected),
        "fleet_late_s": _quantiles(late_s),
        "processes": {
            name: {
                "cores": (now.cpu_s - before[name].cpu_s) / wall_s,
                "rss_mib": now.rss_mib,
                "peak_mib": now.peak_mib,
            }
            for name, now in after.items()
        },
        "bytes_each": {
            what: fleet.counts[f"{what} bytes"] / fleet.counts[what] for what in ("desired", "whole document")
        },
        "per_second": {what: count / wall_s for what, count in sorted(counts.items())},
    }


def _are_known(fleet: Fleet) -> bool:
    steps = [*fleet.protected.values(), *fleet.ready.values()]
    return all(len(step.known_s) == len(fleet.nodes) for step in steps)


def _latencies(steps: Any) -> dict[str, dict[str, float]]:  # noqa: ANN401 - what .values() gives
    """Return the time from the last report that a decision rests on: until a node knows it, and until each does.

    "since held": from when all of it was there to be told of; a node of a large job waits for its turn to tell.
    """
    first = sorted(min(step.known_s.values()) - step.told_s for step in steps)
    each = sorted(known_s - step.told_s for step in steps for known_s in step.known_s.values())
    held = sorted(min(step.known_s.values()) - step.held_s for step in steps)
    return {"decided": _quantiles(first), "known": _quantiles(each), "decided since held": _quantiles(held)}


def _slowest(steps: dict[int, Step]) -> dict[str, float]:
    """Return which decisions took longest, and how long."""
    took = {str(number): min(step.known_s.values()) - step.told_s for number, step in steps.items()}
    return dict(sorted(took.items(), key=lambda one: -one[1])[:SLOWEST])


def _quantiles(of: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the greatest of what is sorted."""
    if not of:
        return {}
    return {"p50": of[len(of) // 2], "p99": of[min(len(of) - 1, int(len(of) * 0.99))], "max": of[-1]}


def show(figures: dict[str, Any]) -> None:
    """Print the figures."""
    print(
        f"{figures['nodes']} nodes, {figures['ranks']} ranks, {figures['snapshots']} snapshots, one each "
        f"{figures['every_s']:g} s, {figures['machine']['cpus']} CPUs for all"
    )
    print(f"came in {figures['arrival_s']:.1f} s, attempt applied in {figures['opening_s']:.1f} s")
    for name in ("protected", "ready"):
        for until, quantiles in figures[f"{name}_s"].items():
            print(f"{name} {until:20} {_shown(quantiles)}")
    print(f"{'slowest, by step':28} {_shown(figures['slowest_s'])}")
    print(f"{'the fleet was late':28} {_shown(figures['fleet_late_s'])}")
    for name, used in figures["processes"].items():
        print(f"{name:12} {used['cores']:.2f} cores, {used['rss_mib']:.0f} MiB now, {used['peak_mib']:.0f} MiB at most")
    for line in figures["warnings"][:20]:
        print(line[:300])
    for what, count in figures["per_second"].items():
        print(f"{what:28} {count:14.1f} / s")


def _shown(quantiles: dict[str, float]) -> str:
    return ", ".join(f"{what} {value:.3f} s" for what, value in quantiles.items()) or "not measured"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
