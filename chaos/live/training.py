"""Training on a cluster: torchrun agents, one a node, started by ``ckpt launch`` so that they restart reliably."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from toprope.chaos.live.cluster import Cluster, Node
from toprope.chaos.live.processes import LiveError, Process, wait_ready

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained: the script with its arguments, on ``nodes`` nodes of ``ranks`` ranks each."""

    script: Path
    arguments: tuple[str, ...]
    nodes: int
    ranks: int
    runner: tuple[str, ...] = ()
    """Put between torchrun and the script: a module that runs it (``--spoil``)."""

    def words(self) -> list[str]:
        """Return what follows torchrun's own options."""
        return [*self.runner, str(self.script), *self.arguments]


def example_script() -> Path:
    """Return the path of ``examples/gpt/train.py`` in this checkout.

    Raises:
        LiveError: there is none: this is an installation without the examples.
    """
    script = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "train.py"
    if not script.is_file():
        raise LiveError(f"{script} is not there: run this from a checkout, which has the examples")
    return script


def start_rendezvous(cluster: Cluster) -> tuple[Process, int]:
    """Start the store that the agents meet in; return it and its port."""
    ready = cluster.directory / "ready" / "rendezvous.json"
    ready.parent.mkdir(exist_ok=True)
    ready.unlink(missing_ok=True)  # of one before
    words = ["rendezvous", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    process = Process("rendezvous store", [sys.executable, "-m", "toprope", *words], log=cluster.log("rendezvous"))
    return process, int(wait_ready(process, ready, timeout_s=120.0)["port"])  # it imports torch


def start_agent(
    cluster: Cluster,
    node: Node,
    training: Training,
    *,
    rendezvous_port: int,
    restarts: int = 10,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Process:
    """Start a node's torchrun agent, which starts its ranks, and again so often when one fails."""
    options = [f"--nnodes={training.nodes}", f"--nproc-per-node={training.ranks}", f"--max-restarts={restarts}"]
    launch = ["--rendezvous", f"127.0.0.1:{rendezvous_port}"]
    words = [*options, "--rdzv-id=demo", *training.words()]
    whole = _ONE_THREAD | {"CKPT_SOCKET": str(node.socket)} | dict(env)
    log = cluster.log(f"agent-{node.name}")
    node.agent = _torchrun(f"agent of node {node.name}", launch, words, log=log, env=whole)
    return node.agent


def start_alone(training: Training, *, log: Path) -> Process:
    """Start the same world under one agent, with no cluster."""
    words = ["--standalone", f"--nproc-per-node={training.nodes * training.ranks}", *training.words()]
    return _torchrun("reference run", [], words, log=log, env=_ONE_THREAD)


def _torchrun(name: str, launch: Sequence[str], words: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Process:
    own = f"--log-dir={log.parent / 'torchrun'}"  # else a directory in /tmp for each agent, which nobody removes
    command = [sys.executable, "-m", "toprope", "launch", *launch, "--", "torchrun", own, *words]
    return Process(name, command, log=log, env=env)
