"""Training on a cluster: torchrun agents, one a node, set so that they restart reliably."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toprope.chaos.live.cluster import Cluster, Node
from toprope.chaos.live.processes import LiveError, Process, wait_ready

# torchrun reuses one store over restarts without this, and the survivors then call on the dead peer's address
_SEPARATE_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_RENDEZVOUS = "is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
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
    arguments = [sys.executable, "-m", "toprope.chaos.live.rendezvous", str(ready)]
    process = Process("rendezvous store", arguments, log=cluster.log("rendezvous"))
    return process, int(wait_ready(process, ready, timeout_s=120.0)["port"])  # it imports torch


def start_agent(
    cluster: Cluster, node: Node, training: Training, *, rendezvous_port: int, restarts: int = 10
) -> Process:
    """Start a node's torchrun agent, which starts its ranks, and again so often when one fails."""
    options = [f"--nnodes={training.nodes}", f"--nproc-per-node={training.ranks}", f"--max-restarts={restarts}"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{rendezvous_port}", "--rdzv-id=demo"]
    options += [f"--rdzv-conf={_RENDEZVOUS}"]
    env = _ONE_THREAD | _SEPARATE_STORES | {"CKPT_SOCKET": str(node.socket)}
    node.agent = _torchrun(
        f"agent of node {node.name}", options, training.words(), cluster.log(f"agent-{node.name}"), env
    )
    return node.agent


def start_alone(training: Training, *, log: Path) -> Process:
    """Start the same world under one agent, with no cluster."""
    options = ["--standalone", f"--nproc-per-node={training.nodes * training.ranks}"]
    return _torchrun("reference run", options, training.words(), log, _ONE_THREAD | _SEPARATE_STORES)


def _torchrun(name: str, options: Sequence[str], words: Sequence[str], log: Path, env: dict[str, str]) -> Process:
    own = f"--log-dir={log.parent / 'torchrun'}"  # else a directory in /tmp for each agent, which nobody removes
    return Process(name, [sys.executable, "-m", "torch.distributed.run", own, *options, *words], log=log, env=env)
