"""The four figures of the first benchmark, each as a ratio to raw work on the same bytes in the same run.

Rounds are interleaved: in each, a fresh trainer process restores from its node's memory, then takes snapshots that are
protected by a second node; between them the same bytes are copied and sent over loopback by the plainest code there
is. Machines differ and are noisy: read the ratios, not the times.

    python benchmarks/first.py [--mib 192] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EVERY = 32
SNAPSHOTS = 8  # more than there are slots: the first use of each also maps its pages
MEMORY = Path("/dev/shm")  # noqa: S108 - the tmpfs that slots are made for
PARAMETERS_EACH = 1024 * 1024
BYTES_PER_PARAMETER = 12  # float32: weight and two moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=192, help="size of the state of the one rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures as JSON too")
    parser.add_argument("--round", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        receive(options.receive)
    elif options.round is not None:
        print(json.dumps(one_round(options.round, options.coordinator, mib=options.mib)))
    else:
        figures = measure(mib=options.mib, rounds=options.rounds)
        show(figures)
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(*, mib: int, rounds: int) -> dict[str, Any]:
    """Run all rounds on a cluster of two nodes and return the figures."""
    from toprope.chaos.live.cluster import Cadences, running_cluster  # noqa: PLC0415 - not in the trainer's process
    from toprope.chaos.live.scratch import DISK, Scratch  # noqa: PLC0415 - as above

    cadences = Cadences(every=EVERY, local_every=8 * EVERY, object_every=8 * EVERY)
    samples: list[dict[str, Any]] = []
    with (
        Scratch(DISK) as scratch,
        running_cluster(scratch.path, job="bench", cadences=cadences) as cluster,
    ):
        for number in range(rounds + 1):  # the first has nothing to restore
            words = ["--round", str(cluster.nodes["a"].socket), "--coordinator", cluster.coordinator_url]
            command = [sys.executable, __file__, *words, "--mib", str(mib)]
            env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env)
            samples.append(json.loads(done.stdout))
            print(f"round {number} of {rounds}", file=sys.stderr)
    return figures_of(samples, mib=mib)


def figures_of(samples: list[dict[str, Any]], *, mib: int) -> dict[str, Any]:
    """Return each figure with its times and its ratio, medians over all rounds."""

    def median(name: str, *, of: list[dict[str, Any]]) -> float:
        return statistics.median(value for sample in of for value in sample[name])

    restored = [sample for sample in samples if sample["restored_step"] > 0]
    rows = {
        "blocked in end_step with a snapshot / plain memory copy": ("blocked_s", "copy_s", samples),
        "seal to protected / raw loopback transfer": ("protected_s", "loopback_s", samples),
        "restore from memory / plain memory copy": ("restore_s", "copy_s", restored),
    }
    figures = {
        name: {"s": median(ours, of=of), "raw_s": median(raw, of=of), "ratio": median(ours, of=of) / median(raw, of=of)}
        for name, (ours, raw, of) in rows.items()
    }
    idle_us = median("idle_s", of=samples) * 1e6
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    return {
        "mib": mib,
        "rounds": len(restored),
        "skipped": sum(sample["skipped"] for sample in samples),
        "machine": machine,
        "figures": figures,
        "end_step_without_snapshot_us": idle_us,
    }


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    print(f"state of {figures['mib']} MiB, median of {figures['rounds']} rounds, {figures['machine']['cpus']} CPUs")
    print(f"{'':58} {'ours ms':>9} {'raw ms':>9} {'ratio':>7}")
    for name, figure in figures["figures"].items():
        print(f"{name:58} {figure['s'] * 1e3:9.1f} {figure['raw_s'] * 1e3:9.1f} {figure['ratio']:7.2f}")
    print(f"{'end_step on a step without a snapshot':58} {figures['end_step_without_snapshot_us']:9.1f} us")


def one_round(socket_path: str, coordinator_url: str, *, mib: int) -> dict[str, Any]:
    """Restore, take snapshots, and do the raw work between them; this is a trainer's process."""
    import torch  # noqa: PLC0415 - only a trainer needs it

    from toprope.trainer_hooks import Checkpointer  # noqa: PLC0415 - as above

    blocks = max(1, mib * 1024 * 1024 // (PARAMETERS_EACH * BYTES_PER_PARAMETER))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(PARAMETERS_EACH)) for _ in range(blocks)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ckpt = Checkpointer(job="bench", model=model, optimizer=optimizer, socket=socket_path)
    restored, restore_s = timed(ckpt.restore)
    found: dict[str, list[float]] = {
        name: [] for name in ("blocked_s", "copy_s", "loopback_s", "protected_s", "idle_s")
    }
    state_bytes = blocks * PARAMETERS_EACH * BYTES_PER_PARAMETER
    step = restored
    with raw_copy(state_bytes) as copy, raw_loopback(state_bytes) as loopback:
        while len(found["protected_s"]) < SNAPSHOTS:
            step += 1
            before = ckpt.stats.snapshots
            if (step - restored) % EVERY == 0 or step == restored + 1:
                for parameter in model:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            _, took_s = timed(lambda: ckpt.end_step(step))  # noqa: B023 - called at once
            if ckpt.stats.snapshots == before:
                if step > restored + 1 and (step - restored) % EVERY:
                    found["idle_s"].append(took_s)
                elif (step - restored) % EVERY == 0:
                    time.sleep(0.1)  # no slot yet: give the sidecar time to make them
                continue
            _, protected_s = timed(lambda: wait_protected(coordinator_url, step))  # noqa: B023 - called at once
            found["blocked_s"].append(took_s)
            found["protected_s"].append(protected_s)
            found["copy_s"].append(timed(copy)[1])
            found["loopback_s"].append(timed(loopback)[1])
    ckpt.close()
    return {
        **found,
        "restored_step": restored,
        "restore_s": [restore_s],
        "skipped": sum(ckpt.stats.skipped.values()),
    }


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what the work returned and the seconds that it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def wait_protected(coordinator_url: str, step: int) -> None:
    """Return once the coordinator says that the step is protected."""
    from toprope.chaos.live.ask import get_desired  # noqa: PLC0415 - not needed by the receiver

    deadline = time.monotonic() + 60
    while (desired := get_desired(coordinator_url)) is None or desired.protected_step < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"step {step} was not protected within 60 s")
        time.sleep(0.001)


@contextmanager
def raw_copy(size: int) -> Iterator[Callable[[], None]]:
    """Yield work that copies ``size`` bytes into shared memory that is mapped and faulted in."""
    import numpy as np  # noqa: PLC0415 - not needed by the receiver

    with shared(size) as target:
        into = np.frombuffer(target, dtype=np.uint8)
        source = np.full(size, 7, dtype=np.uint8)
        np.copyto(into, source)
        yield lambda: np.copyto(into, source)


@contextmanager
def raw_loopback(size: int) -> Iterator[Callable[[], None]]:
    """Yield work that sends ``size`` bytes to another process, which receives them into shared memory."""
    command = [sys.executable, __file__, "--receive", str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        port = int(receiver.stdout.readline())
        with shared(size) as source, socket.create_connection(("127.0.0.1", port)) as connection:

            def send() -> None:
                connection.sendall(source)
                connection.recv(1)

            send()
            yield send


def receive(size: int) -> None:
    """Receive ``size`` bytes into shared memory, answer with one byte, and again, until the sender is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server, shared(size) as target:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection, memoryview(target) as view:
            while True:
                at = 0
                while at < size:
                    count = connection.recv_into(view[at:])
                    if count == 0:
                        return
                    at += count
                connection.sendall(b"\0")


@contextmanager
def shared(size: int) -> Iterator[mmap.mmap]:
    """Yield faulted-in shared memory; it is unmapped when nothing refers to it any more."""
    with tempfile.TemporaryFile(dir=MEMORY if MEMORY.is_dir() else None) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        yield mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


if __name__ == "__main__":
    main()
