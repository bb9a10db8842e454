"""Scenarios as data: who trains where, what is done to them and when, and which promise that attacks.

A scenario is a TOML file. ``load`` gives one of those that are shipped by its name, or one of a user by its path.
"""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from toprope.chaos.promises import PROMISES
from toprope.store.errors import UsageError
from toprope.store.names import checked_id

ANY = "any"
"""The fault that is drawn, each time anew, from those in ``how.among``, which are separated by semicolons."""
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Topology(_Part, frozen=True, kw_only=True):
    """Nodes with the ranks of each; the store; every how many steps a snapshot goes to which tier.

    ``launcher``: who starts the ranks, all again when one has died: we ourselves, or torchrun, an agent on each node.

    ``coordinator``: what else the coordinator is told on its command line. ``memory_mib``: how large each node's memory
    is, a tmpfs of its own; ``disk_mib``: how large its disk is, and that of a store in a directory, ext4 in a file.
    Both take root; 0: they share what this machine has.
    """

    nodes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("a", "b")
    ranks: _Positive = 1
    launcher: Literal["own", "torchrun"] = "own"
    store: Literal["directory", "s3"] = "directory"
    every: _Positive = 4
    local_every: _Positive = 4
    object_every: _Positive = 8
    coordinator: tuple[str, ...] = ()
    memory_mib: Annotated[int, msgspec.Meta(ge=0)] = 0
    disk_mib: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def world(self) -> int:
        """How many ranks train."""
        return len(self.nodes) * self.ranks

    def node_of(self, rank: int) -> str:
        """Return the node that a rank sits on."""
        return self.nodes[rank // self.ranks]


class Workload(_Part, frozen=True, kw_only=True):
    """A training script that uses the hook; empty: the GPT in ``examples``.

    In ``arguments`` ``{job}``, ``{steps}``, ``{seed}``, ``{step_s}`` and ``{out}`` (a directory) are filled in.
    ``step_s`` is how long a step takes at least: the script is told, or it is slowed down.
    """

    script: str = ""
    arguments: tuple[str, ...] = ()
    steps: _Positive = 40
    step_s: _Seconds = 0.1


class Fault(_Part, frozen=True, kw_only=True):
    """One fault: what is done to whom, when, and for how long.

    ``do`` is a word of ``ckpt chaos list --faults``, ``target`` whom it is done to. It comes when a rank has ended step
    ``at_step``, or ``at_s`` seconds after training began (of two numbers: one between them, drawn from the seed); while
    the process ``of`` is in the phase ``during`` (about ``at_step``, if that is given too); or again and again, every
    ``mtbf_s`` seconds on average. It is mended after ``for_s`` seconds. ``how`` has what else it needs to know.
    """

    do: str
    target: str = ""
    at_step: int | tuple[int, int] | None = None
    at_s: float | tuple[float, float] | None = None  # msgspec 0.23 crashes on bounds of a number beside a tuple
    during: str = ""
    of: str = ""
    mtbf_s: _Seconds | None = None
    for_s: _Seconds = 1.0
    how: dict[str, str | int | float] = {}

    def drawn(self, chance: random.Random) -> Fault:
        """Return it with one step or time to come at, and as the one of several that it is to be."""
        drawn = self
        if isinstance(drawn.at_step, tuple):
            drawn = msgspec.structs.replace(drawn, at_step=chance.randint(*drawn.at_step))
        if isinstance(drawn.at_s, tuple):
            drawn = msgspec.structs.replace(drawn, at_s=round(chance.uniform(*drawn.at_s), 3))
        if drawn.do == ANY:
            do, _, target = chance.choice(drawn.words()).partition(" ")
            drawn = msgspec.structs.replace(drawn, do=do, target=target, how={})
        return drawn

    def words(self) -> list[str]:
        """Return what it may be, each as a kind and a target."""
        if self.do != ANY:
            return [f"{self.do} {self.target}".strip()]
        return [one.strip() for one in str(self.how.get("among", "")).split(";")]

    @property
    def trigger(self) -> str:
        """When it comes, in words."""
        if self.during:
            step = f", about step {self.at_step}" if self.at_step is not None else ""
            return f"during {self.during}{step}"
        if isinstance(self.at_step, tuple):
            return f"after a step from {self.at_step[0]} to {self.at_step[1]}"
        if self.at_step is not None:
            return f"after step {self.at_step}"
        if self.mtbf_s is not None:
            return f"every {self.mtbf_s:g} s on average"
        times = self.at_s if isinstance(self.at_s, tuple) else (self.at_s or 0.0,)
        return f"at {' to '.join(f'{at_s:g}' for at_s in times)} s"


class Bounds(_Part, frozen=True, kw_only=True):
    """What is still good: seconds that ``end_step`` may take, from a blow to the next new step, and to the last READY.

    ``protected_s``: from the end of a fault or a restart until a newer step is protected.

    ``restarts``: how often the world may be started again; without it, as often as a fault hit the trainer.
    ``lost_steps``: how many may be lost at a restart; without it, what the cadence and what was protected allow.
    """

    stall_s: _Seconds = 1.0
    recovered_s: _Seconds = 60.0
    ready_s: _Seconds = 30.0
    protected_s: _Seconds = 20.0
    restarts: int | None = None
    lost_steps: int | None = None


class Expected(_Part, frozen=True, kw_only=True):
    """What must be seen.

    ``told`` has ``process: words``, a regular expression that must be found in the log of that process since the first
    fault. ``damaged``: objects were damaged on purpose, and verifying must say so.
    """

    told: tuple[str, ...] = ()
    damaged: bool = False


class Scenario(_Part, frozen=True, kw_only=True):
    """A scenario. ``attacks`` names the promises that it was made to break; all others are judged as well.

    ``label``: only what says ``chaos`` is broken.
    """

    name: str
    about: str
    attacks: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    label: str = ""
    fault: Annotated[tuple[Fault, ...], msgspec.Meta(min_length=1)]
    topology: Topology = Topology()
    workload: Workload = Workload()
    bounds: Bounds = Bounds()
    expected: Expected = Expected()

    def check(self) -> None:
        """Check what the types do not say.

        Raises:
            UsageError: a name or a combination can't be used.
        """
        checked_id(self.name, what="name")
        unknown = [promise for promise in self.attacks if promise not in PROMISES]
        if unknown:
            raise UsageError(f"attacks: no promise is called {unknown[0]!r}; there are: {', '.join(PROMISES)}")
        for number, fault in enumerate(self.fault, start=1):
            _check_fault(fault, self.workload, what=f"fault {number}, {fault.do!r}")


def _check_fault(fault: Fault, workload: Workload, *, what: str) -> None:
    ways = [fault.at_s is not None, fault.mtbf_s is not None, bool(fault.during or fault.at_step is not None)]
    if sum(ways) != 1:
        raise UsageError(f"{what}: say once when it comes: at_step, at_s, during (with or without at_step) or mtbf_s")
    if bool(fault.during) != bool(fault.of):
        raise UsageError(f"{what}: during and of go together: the phase, and the process that is in it")
    first_s, last_s = fault.at_s if isinstance(fault.at_s, tuple) else (fault.at_s or 0.0, fault.at_s or 0.0)
    if not 0.0 <= first_s <= last_s:
        raise UsageError(f"{what}: at_s {first_s:g} to {last_s:g}: give seconds from 0 on, the smaller number first")
    begin, end = fault.at_step if isinstance(fault.at_step, tuple) else (fault.at_step or 1, fault.at_step or 1)
    if not 1 <= begin <= end <= workload.steps:
        raise UsageError(f"{what}: at_step {begin} to {end} is not within the {workload.steps} steps of the workload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A scenario and the directory that its script's path is relative to."""

    scenario: Scenario
    directory: Path


def shipped() -> tuple[str, ...]:
    """Return the names of the scenarios that come with this package."""
    found = (Path(one.name) for one in _shipped_files().iterdir())
    return tuple(sorted(path.stem for path in found if path.suffix == ".toml"))


def load(name_or_file: str) -> Loaded:
    """Return a scenario by name or path.

    Raises:
        UsageError: there is none, or it can't be used; the message says where.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
        return Loaded(scenario=parse(path.read_text(), what=str(path)), directory=path.absolute().parent)
    if name_or_file not in shipped():
        raise UsageError(f"no scenario is called {name_or_file!r}; give one of {', '.join(shipped())}, or a .toml file")
    text = _shipped_files().joinpath(f"{name_or_file}.toml").read_text()
    return Loaded(scenario=parse(text, what=name_or_file), directory=Path.cwd())


def parse(text: str, *, what: str) -> Scenario:
    """Return the scenario in this text.

    Raises:
        UsageError: it is none; the message names ``what`` and the place in it.
    """
    try:
        scenario = msgspec.convert(tomllib.loads(text), Scenario)
        scenario.check()
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{what}: not TOML: {error}") from error
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{what}: {error}") from error
    return scenario


def _shipped_files() -> resources.abc.Traversable:
    return resources.files("toprope.chaos") / "scenarios"
