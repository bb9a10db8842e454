"""How long training stands still for a snapshot, ours and others', as ratios to a plain copy of the same tensors.

Rounds are interleaved. In each, one trainer process trains a model whose forward and backward take a while, and takes
turns: a plain copy with one thread, our snapshot copied at once, our snapshot copied lazily, and each peer's save.
Machines differ and are noisy: read the ratios, not the times.

    python benchmarks/stall.py [--mib 192] [--rounds 3] [--only KIND ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from first import BYTES_PER_PARAMETER, EVERY, MEMORY, PARAMETERS_EACH, shared, timed, wait_protected

KINDS = ("eager", "lazy", "dcp thread", "dcp process")
TAKES = 4
COMPUTE_S = 0.3
"""How long forward and backward take together: longer than the copy."""
STEP_S = 0.02
"""The step of which a hook with nothing to do may take a thousandth."""
PROOFS_AND_SLOTS = 6
"""Snapshots until lazy copies are trusted and each slot was used once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=192, help="size of the state of the one rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="measure these ways to save")
    parser.add_argument("--json", type=Path, help="write the figures as JSON too")
    parser.add_argument("--round", nargs=2, metavar=("SOCKET", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round is not None:
        socket_path, kind = options.round
        print(json.dumps(one_round(socket_path, options.coordinator, kind=kind, mib=options.mib)))
        return
    figures = measure(mib=options.mib, rounds=options.rounds, kinds=options.only)
    show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(*, mib: int, rounds: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Run all rounds on a cluster of two nodes and return the figures."""
    from toprope.chaos.live.cluster import Cadences, running_cluster  # noqa: PLC0415 - not in the trainer's process

    cadences = Cadences(every=EVERY, local_every=64 * EVERY, object_every=64 * EVERY)
    samples: dict[str, dict[str, list[float]]] = {}
    absent: dict[str, str] = {}
    loads = []
    with (
        tempfile.TemporaryDirectory(prefix="toprope-bench-") as directory,
        running_cluster(Path(directory), job="bench", cadences=cadences) as cluster,
    ):
        words = ["--coordinator", cluster.coordinator_url, "--mib", str(mib)]
        for number in range(rounds):
            for kind in kinds:
                loads.append(os.getloadavg()[0])
                command = [sys.executable, __file__, *words, "--round", str(cluster.nodes["a"].socket), kind]
                env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
                if done.returncode:
                    absent[kind] = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                    continue
                print(f"round {number + 1} of {rounds}: {kind}", file=sys.stderr)
                for name, values in json.loads(done.stdout.splitlines()[-1]).items():
                    samples.setdefault(kind, {}).setdefault(name, []).extend(values)
    return {
        "mib": mib,
        "rounds": rounds,
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "load": statistics.median(loads)},
        "kinds": {kind: figures_of(found) for kind, found in samples.items()},
        "absent": absent,
    }


def figures_of(found: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each figure, and of the ratios of the times to the plain copy made next to them."""
    figures = {name: statistics.median(values) for name, values in found.items() if values}
    for name in ("blocked_s", "free_s", "first_s", "fence_s", "protected_s"):
        if name in figures:
            figures[name.removesuffix("_s") + "_ratio"] = figures[name] / figures["copy_s"]
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    machine = figures["machine"]
    print(
        f"state of {figures['mib']} MiB, {figures['rounds']} rounds of {TAKES}, {machine['cpus']} CPUs, "
        f"load {machine['load']:.1f}; times in ms, and as ratios to the copy of the same tensors by one thread"
    )
    names = ("copy", "blocked", "free", "first", "fence", "protected")
    print(f"{'':14}" + "".join(f"{name:>17}" for name in names))
    for kind, found in figures["kinds"].items():
        cells = []
        for name in names:
            took, ratio = found.get(f"{name}_s"), found.get(f"{name}_ratio")
            cells.append("-" if took is None else f"{took * 1e3:.1f}" + ("" if ratio is None else f" ({ratio:.2f})"))
        print(f"{kind:14}" + "".join(f"{cell:>17}" for cell in cells))
    for kind, found in figures["kinds"].items():
        if "idle_s" in found:
            share = found["idle_s"] / STEP_S
            print(f"{kind}: a step with nothing due takes {found['idle_s'] * 1e6:.1f} us, {share:.3%} of a 20 ms step")
    for kind, reason in figures["absent"].items():
        print(f"{kind}: not run: {reason}")


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

    def tensors(self) -> list[Any]:
        """Return all that a snapshot holds but for what is small."""
        return [*self.model, *(self.optimizer.state[p][key] for p in self.model for key in ("exp_avg", "exp_avg_sq"))]

    @contextmanager
    def plain_copy(self) -> Iterator[Callable[[], None]]:
        """Yield work that copies the same tensors, one after the other, into shared memory that is faulted in."""
        import torch  # noqa: PLC0415 - as above

        with shared(sum(tensor.nbytes for tensor in self.tensors())) as target:
            flat = torch.frombuffer(target, dtype=torch.float32)
            places = list(zip(flat.split(PARAMETERS_EACH), self.tensors(), strict=True))

            def work() -> None:
                with torch.no_grad():
                    for place, tensor in places:
                        place.copy_(tensor)

            work()
            yield work


def one_round(socket_path: str, coordinator_url: str, *, kind: str, mib: int) -> dict[str, list[float]]:
    """Train and save in one way; this is a trainer's process."""
    trainer = Trainer(mib)
    trainer.optimizer.step()
    with trainer.plain_copy() as copy:
        if kind.startswith("dcp"):
            return dcp_round(trainer, copy, process=kind == "dcp process")
        return own_round(trainer, copy, socket_path, coordinator_url, lazy=kind == "lazy")


def own_round(
    trainer: Trainer, copy: Callable[[], None], socket_path: str, coordinator_url: str, *, lazy: bool
) -> dict[str, list[float]]:
    """Take snapshots with the hook."""
    from toprope.trainer_hooks import Checkpointer  # noqa: PLC0415 - only a trainer needs it

    ckpt = Checkpointer(job="bench", model=trainer.model, optimizer=trainer.optimizer, socket=socket_path, lazy=lazy)
    step = restored = ckpt.restore()
    found: dict[str, list[float]] = {
        name: [] for name in ("blocked_s", "first_s", "free_s", "fence_s", "protected_s", "idle_s", "copy_s")
    }
    taken = 0
    while len(found["blocked_s"]) < TAKES:
        step += 1
        due = (step - restored) % EVERY == 0
        if not due:
            _, took_s = timed(lambda: ckpt.end_step(step))  # noqa: B023 - called at once
            if step > restored + 1:
                found["idle_s"].append(took_s)
            continue
        trainer.optimizer.step()
        skipped = sum(ckpt.stats.skipped.values())
        _, took_s = timed(lambda: ckpt.end_step(step))  # noqa: B023 - called at once
        if sum(ckpt.stats.skipped.values()) > skipped:
            time.sleep(0.2)  # no slot yet: give the sidecar time to make them
            continue
        taken += 1
        began, waited_s = time.perf_counter(), ckpt.stats.fence_wait_s
        if lazy:
            trainer.compute()
        if taken == 1:
            found["first_s"].append(took_s)
        trainer.optimizer.step()  # through the fence; the gradients stay, so the state goes on changing
        computed_s = time.perf_counter() - began
        wait_protected(coordinator_url, step)
        if taken > PROOFS_AND_SLOTS:
            found["blocked_s"].append(took_s)
            found["protected_s"].append(took_s + max(computed_s, time.perf_counter() - began))
            found["copy_s"].append(timed(copy)[1])
            step += 1
            ckpt.end_step(step)  # takes in what the fence waited
            found["fence_s"].append(ckpt.stats.fence_wait_s - waited_s)
            found["free_s"].append(took_s + found["fence_s"][-1])
    skipped_words = ", ".join(f"{reason}: {count}" for reason, count in ckpt.stats.skipped.items() if count)
    print(f"{'lazy' if lazy else 'eager'}: {ckpt.stats.lazy_snapshots} lazy; skipped: {skipped_words}", file=sys.stderr)
    ckpt.close()
    return found


def dcp_round(trainer: Trainer, copy: Callable[[], None], *, process: bool) -> dict[str, list[float]]:
    """Save with dcp.async_save: in a thread, or in a process with a stager in shared memory."""
    import torch  # noqa: PLC0415 - only a trainer needs it
    import torch.distributed as dist  # noqa: PLC0415 - as above
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - as above
    from torch.distributed.checkpoint import staging, state_dict_saver  # noqa: PLC0415 - as above

    kinds = state_dict_saver.AsyncCheckpointerType
    found: dict[str, list[float]] = {name: [] for name in ("blocked_s", "first_s", "free_s", "protected_s", "copy_s")}
    directory = Path(tempfile.mkdtemp(prefix="toprope-bench-", dir=MEMORY if MEMORY.is_dir() else None))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stager = staging.DefaultStager(staging.StagingOptions(False, process, False, False))  # noqa: FBT003 - as it comes
    try:
        for number in range(2 + TAKES):
            state = {f"t{index}": tensor.detach() for index, tensor in enumerate(trainer.tensors())}
            began = time.perf_counter()
            response: Any = dcp.async_save(
                state,
                checkpoint_id=directory / str(number),
                async_checkpointer_type=kinds.PROCESS if process else kinds.THREAD,
                async_stager=stager,
            )
            blocked_s = time.perf_counter() - began
            staged = getattr(response, "staging_completion", None)
            if staged is not None:
                staged.result()
            free_s = time.perf_counter() - began
            (getattr(response, "upload_completion", None) or response).result()
            saved_s = time.perf_counter() - began
            shutil.rmtree(directory / str(number))
            torch.manual_seed(number)
            trainer.optimizer.step()
            if number == 0:
                found["first_s"].append(blocked_s)
            if number >= 2:  # noqa: PLR2004 - both before are warm-up
                for name, took_s in (("blocked_s", blocked_s), ("free_s", free_s), ("protected_s", saved_s)):
                    found[name].append(took_s)
                found["copy_s"].append(timed(copy)[1])
    finally:
        stager.close()
        dist.destroy_process_group()
        shutil.rmtree(directory)
    return found


if __name__ == "__main__":
    main()
