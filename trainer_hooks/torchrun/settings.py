"""How torchrun is started so that it restarts reliably: its words made safe, or refused with the reason. Pure.

Measured with two agents on one machine, a rank or an agent killed again and again:

- One store for rendezvous and process groups, torchrun's default: half of the restarts hang, since the survivors call
  on the dead rank's address. ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: none.
- A keep-alive of less than 3 s in all: an agent that comes back forms a world of its own.
- The store inside an agent: the job ends with that agent.
- An agent killed while the others meet, or at its last failure: torch's rendezvous ends them all (see ``meeting.py``,
  which is what the backend ``toprope`` is).

And found in torch's source: a process of ``torch.distributed.checkpoint.async_save`` listens on a port that was free
when its trainer picked it, seconds before. ``DCP_USE_PREFIX_STORE=1``: it meets the others at the store of the process
groups, which is a new one in each world here, so that it finds no addresses of the dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toprope.trainer_hooks.errors import UsageError

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DCP_USE_PREFIX_STORE": "1"}
"""What torchrun must find in its environment."""
BACKEND = "toprope"
"""The rendezvous that ``ckpt launch`` registers with torchrun: c10d, and what that lacks."""
SAFE = {"is_host": "0", "last_call_timeout": "5", "keep_alive_interval": "1", "keep_alive_max_attempt": "5"}
"""What ``--rdzv-conf`` says unless it is told otherwise: nobody hosts the store, a lost agent is missed after 5 s."""
MIN_KEEP_ALIVE_S = 3.0
MIN_LAST_CALL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user's words ask torchrun for."""

    nodes: str
    backend: str = "static"
    endpoint: str = ""
    run_id: str = "none"
    configuration: str = ""
    standalone: bool = False
    port: int | None = None
    """The port that the user picked for a single agent's ranks to meet at."""

    @property
    def alone(self) -> bool:
        """Whether one agent is all there will ever be: it can't lose another, and its store may end with it."""
        own_store = self.endpoint.rpartition(":")[2] in {"", "0"}  # at no address, or at any port
        return self.standalone or (self.nodes.rpartition(":")[2] == "1" and own_store)


def safe_words(asked: Asked, *, rendezvous: str, ours: Mapping[str, str] | None = None) -> list[str]:
    """Return torchrun's options for a rendezvous at ``rendezvous`` (``HOST:PORT``, or empty: where the words say).

    They stand for what the user's own leave out; what would be unsafe is refused. One agent hosts its own. ``ours`` is
    what our rendezvous is told beside.

    Raises:
        UsageError: the job can't be restarted reliably like this; the message says what to give.
    """
    if asked.alone and not rendezvous:
        if ours:
            raise UsageError("--leave-after and one node: nobody is left to go on without it; leave out --leave-after")
        theirs = asked.port is not None and not asked.standalone
        return [] if theirs else [f"--rdzv-backend={BACKEND}", "--rdzv-endpoint=localhost:0"]
    if asked.standalone:
        raise UsageError("--standalone and --rendezvous: give one of them")
    if asked.backend not in {"c10d", "static"}:
        raise UsageError(f"--rdzv-backend={asked.backend}: ckpt launch knows how to make c10d safe; give that or none")
    endpoint = asked.endpoint or rendezvous
    if not endpoint:
        raise UsageError("several nodes meet somewhere: give --rendezvous HOST:PORT, where `ckpt rendezvous` serves")
    if rendezvous not in {"", endpoint}:
        raise UsageError(f"--rendezvous {rendezvous} and --rdzv-endpoint={endpoint}: give one of them")
    if asked.run_id == "none":
        raise UsageError("give --rdzv-id=JOB: agents of other jobs may meet at the same store")
    whole = {**_safe_configuration(asked.configuration), **(ours or {})}
    conf = ",".join(f"{name}={value}" for name, value in whole.items())
    return [f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}"]


def _safe_configuration(text: str) -> Mapping[str, str]:
    given = dict(_pair(item) for item in text.split(",") if item.strip())
    whole = SAFE | given
    if whole["is_host"].lower() not in {"0", "false", "no"}:
        raise UsageError("--rdzv-conf: is_host=1 lets the job end with one agent; `ckpt rendezvous` is the host")
    keep_alive_s = _number(whole, "keep_alive_interval") * _number(whole, "keep_alive_max_attempt")
    if keep_alive_s < MIN_KEEP_ALIVE_S:
        raise UsageError(
            f"--rdzv-conf: keep_alive_interval x keep_alive_max_attempt is {keep_alive_s:g} s: below "
            f"{MIN_KEEP_ALIVE_S:g} s an agent that comes back forms a world of its own"
        )
    if _number(whole, "last_call_timeout") < MIN_LAST_CALL_S:
        raise UsageError(
            f"--rdzv-conf: last_call_timeout: give at least {MIN_LAST_CALL_S:g} s, or an agent is left out"
        )
    return whole


def _pair(item: str) -> tuple[str, str]:
    name, equals, value = item.strip().partition("=")
    if not equals or not name or not value:
        raise UsageError(f"--rdzv-conf: {item!r} is not NAME=VALUE")
    return name, value


def _number(configuration: Mapping[str, str], name: str) -> float:
    try:
        return float(configuration[name])
    except ValueError:
        raise UsageError(f"--rdzv-conf: {name}={configuration[name]} is not a number") from None


def without_program(words: Sequence[str]) -> list[str]:
    """Return what follows ``torchrun`` or ``python -m torch.distributed.run``.

    Raises:
        UsageError: the words are another program.
    """
    first, *rest = words or [""]
    name = first.rpartition("/")[2]
    if name == "torchrun":
        return rest
    if name.startswith("python") and rest[:2] == ["-m", "torch.distributed.run"]:
        return rest[2:]
    raise UsageError(f"{first or 'nothing'!r} is not torchrun: say `ckpt launch -- torchrun OPTIONS SCRIPT ARGUMENTS`")


def in_care(head: Sequence[str], *, program: Sequence[str], tail: Sequence[str], safe: Sequence[str]) -> list[str]:
    """Return torchrun's words for a script that ``program`` runs.

    ``head`` are the user's options, ``tail`` the script and its arguments, ``safe`` what goes before and, since the
    last word counts, also replaces what the user gave of the same name.
    """
    names = {word.partition("=")[0] for word in safe}
    return [*_dropped(head, names), *safe, "--no-python", *program, *tail]


def _dropped(head: Sequence[str], names: set[str]) -> list[str]:
    """Return the options but for those of these names, in either spelling, and flags that others stand for."""
    kept: list[str] = []
    skip = False
    for word in head:
        name = word.partition("=")[0].replace("_", "-") if word.startswith("--") else word
        if skip:
            skip = False
        elif name in names:
            skip = "=" not in word
        elif name not in {"-m", "--module", "--no-python", "--standalone"}:
            kept.append(word)
    return kept
