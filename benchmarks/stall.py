"""How long training stands still for a snapshot, ours and others', as ratios to a plain copy of the same tensors.

In each round a fresh trainer process saves in each way in turn, each round beginning with another one. Between the
saves, one thread copies the same tensors into shared memory, and then two threads copy half of the bytes each, which
is the least that two threads can take on this machine. Machines differ and are noisy: read the ratios, not the times.

    python benchmarks/stall.py [--mib 96] [--rounds 3] [--only KIND ...] [--peers DIRECTORY] [--json FILE]

``--peers`` names a directory with those that are no part of torch:

    pip install --no-deps --target DIRECTORY torch-checkpointing==0.1.1 lm-resiliency==0.2.0
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from first import BYTES_PER_PARAMETER, EVERY, PARAMETERS_EACH, shared, timed, wait_protected
from others import NEED_PEERS, OTHERS, saving

Range: TypeAlias = tuple[int, int, int]
OWN = ("eager", "lazy")
KINDS = (*OWN, *OTHERS)
TAKES = 4
WARM_UP = 2
"""How many saves of others are not counted."""
COMPUTE_S = 0.3
"""How long forward and backward take together: longer than the copy."""
STEP_S = 0.02
"""The step of which a hook with nothing to do may take a thousandth."""
PROOFS, SLOTS = 3, 3
"""Snapshots until lazy copies are trusted; snapshots until each slot was used once."""
WAY_TIMEOUT_S = 45
TIMES = ("two", "blocked", "first", "free", "fence", "protected")
"""``two`` is the plain copy by two threads."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=96, help="size of the state of the one rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="measure these ways to save")
    parser.add_argument("--peers", type=Path, help="a directory that torch-checkpointing and lm-resiliency are in")
    parser.add_argument("--json", type=Path, help="write the figures as JSON too")
    parser.add_argument("--round", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round is not None:
        one_round(options.round, options.coordinator, kinds=options.only, mib=options.mib)
        return
    figures = measure(mib=options.mib, rounds=options.rounds, kinds=options.only, peers=options.peers)
    show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(*, mib: int, rounds: int, kinds: Sequence[str], peers: Path | None) -> dict[str, Any]:
    """Run all rounds on a cluster of two nodes and return the figures."""
    from toprope.chaos.live.cluster import Cadences, running_cluster  # noqa: PLC0415 - not in the trainer's process
    from toprope.chaos.live.scratch import DISK, Scratch  # noqa: PLC0415 - as above

    absent = {} if peers else {kind: "give --peers" for kind in kinds if kind in NEED_PEERS}
    kinds = [kind for kind in kinds if kind not in absent]
    paths = [str(peers.resolve()) if peers else "", os.environ.get("PYTHONPATH", "")]
    env = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    cadences = Cadences(every=EVERY, local_every=64 * EVERY, object_every=64 * EVERY)
    samples: dict[str, list[dict[str, list[float]]]] = {}
    loads = []
    with (
        Scratch(DISK) as scratch,
        Scratch() as memory,
        running_cluster(scratch.path, job="bench", cadences=cadences) as cluster,
    ):
        command = [sys.executable, __file__, "--round", str(cluster.nodes["a"].socket)]
        env["TMPDIR"] = str(memory.path)  # for what others save
        command += ["--coordinator", cluster.coordinator_url, "--mib", str(mib), "--only"]
        for number in range(rounds):
            loads.append(os.getloadavg()[0])
            first = number % len(kinds)
            words = [*command, *kinds[first:], *kinds[:first]]
            done = subprocess.run(words, check=False, capture_output=True, text=True, env=env)
            if done.returncode:
                raise SystemExit(f"the trainer's process failed:\n{done.stderr}")
            for line in done.stdout.splitlines():
                if line.startswith("{"):  # others print as well
                    for kind, found in json.loads(line).items():
                        if isinstance(found, str):
                            absent[kind] = found
                        else:
                            samples.setdefault(kind, []).append(found)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return {
        "mib": mib,
        "rounds": rounds,
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "load": statistics.median(loads)},
        "kinds": {kind: figures_of(found) for kind, found in samples.items()},
        "absent": absent,
    }


def figures_of(rounds: list[dict[str, list[float]]]) -> dict[str, float]:
    """Return the median of each figure, and of its ratio to the plain copy made next to it, with the extremes."""
    names = {name for found in rounds for name, values in found.items() if values}
    figures = {name: statistics.median(value for found in rounds for value in found[name]) for name in sorted(names)}
    for name in TIMES:
        if f"{name}_s" in names:
            ratios = [ratio for found in rounds for ratio in ratios_of(found[f"{name}_s"], found["copy_s"])]
            figures[f"{name}_ratio"] = statistics.median(ratios)
            figures[f"{name}_least"], figures[f"{name}_most"] = min(ratios), max(ratios)
    figures["of_two"] = statistics.median(
        ratio for found in rounds for ratio in ratios_of(found["blocked_s"], found["two_s"])
    )
    return figures


def ratios_of(times_s: list[float], copies_s: list[float]) -> list[float]:
    """Return each time as a ratio to the copy next to it, or to the median copy where there are not as many."""
    if len(times_s) != len(copies_s):
        copies_s = [statistics.median(copies_s)] * len(times_s)
    return [time_s / copy_s for time_s, copy_s in zip(times_s, copies_s, strict=True)]


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    machine = figures["machine"]
    print(
        f"state of {figures['mib']} MiB, {figures['rounds']} rounds of {TAKES}, {machine['cpus']} CPUs, load "
        f"{machine['load']:.1f}; medians in ms, and ratios to the copy by one thread: median, least to most"
    )
    print(f"{'':20}{'copy':>8}" + "".join(f"{name:>28}" for name in TIMES))
    for kind, found in figures["kinds"].items():
        cells = []
        for name in TIMES:
            ratios = [found.get(f"{name}_{which}", 0) for which in ("ratio", "least", "most")]
            cell = "{:.1f}: {:.2f} ({:.2f}-{:.2f})".format(found.get(f"{name}_s", 0) * 1e3, *ratios)
            cells.append(cell if f"{name}_s" in found else "-")
        print(f"{kind:20}{found['copy_s'] * 1e3:8.1f}" + "".join(f"{cell:>28}" for cell in cells))
    for kind, found in figures["kinds"].items():
        print(f"{kind}: blocked is {found['of_two']:.2f} of the copy by two threads")
        if "idle_s" in found:
            share = found["idle_s"] / STEP_S
            print(f"{kind}: a step with nothing due takes {found['idle_s'] * 1e6:.1f} us, {share:.4%} of a 20 ms step")
    for kind, reason in figures["absent"].items():
        print(f"{kind}: {'not in each round' if kind in figures['kinds'] else 'not run'}: {reason}")


class Trainer:
    """A state of equal tensors, an update that changes all of them, and a forward and backward that take a while."""

    def __init__(self, mib: int) -> None:
        import torch  # noqa: PLC0415 - only a trainer needs it

        blocks = max(1, mib * 1024 * 1024 // (PARAMETERS_EACH * BYTES_PER_PARAMETER))
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(PARAMETERS_EACH)) for _ in range(blocks)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self._matrix = torch.randn(256, 256)
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)

    def compute(self) -> None:
        """Be busy, with Python in between, as a forward and backward pass is."""
        end = time.perf_counter() + COMPUTE_S
        while time.perf_counter() < end:
            self._matrix = (self._matrix @ self._matrix).clamp_(-1, 1)

    def state(self) -> dict[str, Any]:
        """Return the same tensors by name, as others want them."""
        return {f"t{index}": tensor.detach() for index, tensor in enumerate(self.tensors())}

    def tensors(self) -> list[Any]:
        """Return all that a snapshot holds but for what is small."""
        return [*self.model, *(self.optimizer.state[p][key] for p in self.model for key in ("exp_avg", "exp_avg_sq"))]

    @contextmanager
    def plain_copies(self) -> Iterator[Copies]:
        """Yield the copies of the same tensors, one after the other, into shared memory that is faulted in."""
        import torch  # noqa: PLC0415 - as above

        with (
            shared(sum(tensor.nbytes for tensor in self.tensors())) as target,
            ThreadPoolExecutor(max_workers=1) as helper,
        ):
            flat = torch.frombuffer(target, dtype=torch.float32)
            places = list(zip(flat.split(PARAMETERS_EACH), self.tensors(), strict=True))
            ranges = [(place.data_ptr(), tensor.data_ptr(), tensor.nbytes) for place, tensor in places]
            mine, other = halves(ranges)

            def by_one() -> None:
                with torch.no_grad():
                    for place, tensor in places:
                        place.copy_(tensor)

            def by_two() -> None:
                rest = helper.submit(move, other)
                move(mine)
                rest.result()

            yield Copies(by_one, by_two)


@dataclass(frozen=True, slots=True)
class Copies:
    """Plain copies of the state."""

    by_one: Callable[[], None]
    by_two: Callable[[], None]

    def take(self, found: dict[str, list[float]]) -> None:
        """Make both, each time the other one first, and note how long they took."""
        both = [("copy_s", self.by_one), ("two_s", self.by_two)]
        for name, work in both if len(found["copy_s"]) % 2 else reversed(both):
            found[name].append(timed(work)[1])


def halves(ranges: Sequence[Range]) -> tuple[list[Range], list[Range]]:
    """Cut the ranges, each as where to, where from and how many bytes, into two times as many bytes."""
    left = sum(count for _, _, count in ranges) // 2
    mine, other = [], []
    for to, source, count in ranges:
        cut = min(count, left) // 64 * 64
        mine.append((to, source, cut))
        other.append((to + cut, source + cut, count - cut))
        left -= cut
    return mine, other


def move(ranges: Sequence[Range]) -> None:
    """Copy; other threads run meanwhile."""
    for to, source, count in ranges:
        if count:
            ctypes.memmove(to, source, count)


def one_round(socket_path: str, coordinator_url: str, *, kinds: Sequence[str], mib: int) -> None:
    """Train and save in each way, and print what was found or why nothing was; this is a trainer's process."""
    trainer = Trainer(mib)
    trainer.optimizer.step()
    with trainer.plain_copies() as copies:
        copies.take({"copy_s": [], "two_s": []})  # the first use of their memory
        for kind in kinds:
            found: dict[str, list[float]] | str
            try:
                with at_most(WAY_TIMEOUT_S):
                    if kind in OWN:
                        found = own_way(trainer, copies, socket_path, coordinator_url, lazy=kind == "lazy")
                    else:
                        found = others_way(trainer, copies, kind)
            except (RuntimeError, OSError, ImportError, ValueError, TypeError, SystemExit) as error:
                found = f"{type(error).__name__}: {error}"
            print(json.dumps({kind: found}), flush=True)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Have what takes longer end with a TimeoutError."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def own_way(
    trainer: Trainer, copies: Copies, socket_path: str, coordinator_url: str, *, lazy: bool
) -> dict[str, list[float]]:
    """Take snapshots with the hook."""
    from toprope.trainer_hooks import Checkpointer  # noqa: PLC0415 - only a trainer needs it

    ckpt = Checkpointer(job="bench", model=trainer.model, optimizer=trainer.optimizer, socket=socket_path, lazy=lazy)
    found: dict[str, list[float]] = {
        name: [] for name in ("free_s", "fence_s", "protected_s", "idle_s", "copy_s", "two_s")
    }
    blocked: list[float] = []
    warm_up = SLOTS + (PROOFS if lazy else 0)
    step = restored = ckpt.restore()
    while len(blocked) < warm_up + TAKES:
        trainer.optimizer.step()  # through the fence; the gradients stay, so the state goes on changing
        while (step + 1 - restored) % EVERY:
            step += 1
            found["idle_s"].append(timed(lambda: ckpt.end_step(step))[1])  # noqa: B023 - called at once
        skipped, waited_s = sum(ckpt.stats.skipped.values()), ckpt.stats.fence_wait_s
        step += 1
        blocked_s = timed(lambda: ckpt.end_step(step))[1]  # noqa: B023 - called at once
        if sum(ckpt.stats.skipped.values()) > skipped:
            time.sleep(0.1)  # no slot yet: give the sidecar time to make them
            continue
        blocked.append(blocked_s)
        if len(blocked) <= warm_up:
            continue
        began = time.perf_counter()
        if lazy:
            trainer.compute()
        trainer.optimizer.step()
        computed_s = time.perf_counter() - began
        wait_protected(coordinator_url, step)
        found["protected_s"].append(blocked_s + max(computed_s, time.perf_counter() - began))
        copies.take(found)
        step += 1
        ckpt.end_step(step)  # takes in what the fence waited
        found["fence_s"].append(ckpt.stats.fence_wait_s - waited_s)
        found["free_s"].append(blocked_s + found["fence_s"][-1])
    if lazy and ckpt.stats.lazy_snapshots < TAKES:
        raise RuntimeError(f"{ckpt.stats.lazy_snapshots} snapshots were lazy; {dict(ckpt.stats.skipped)}")
    ckpt.close()
    del found["idle_s"][0]  # the first step tells the sidecar how large an image is
    return {**found, "first_s": blocked[:1], "blocked_s": blocked[warm_up:]}


def others_way(trainer: Trainer, copies: Copies, kind: str) -> dict[str, list[float]]:
    """Save in another's way, with an update between two saves."""
    found: dict[str, list[float]] = {
        name: [] for name in ("blocked_s", "first_s", "free_s", "protected_s", "copy_s", "two_s")
    }
    with saving(kind) as save:
        for number in range(WARM_UP + TAKES):
            trainer.optimizer.step()
            took = save(trainer.state(), number)
            if number == 0:
                found["first_s"].append(took.blocked_s)
            if number >= WARM_UP:
                found["blocked_s"].append(took.blocked_s)
                found["free_s"].append(took.free_s)
                found["protected_s"] += [took.saved_s] if took.saved_s is not None else []
                copies.take(found)
    return found


if __name__ == "__main__":
    main()
