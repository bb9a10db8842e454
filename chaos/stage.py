"""What many runs share: warm processes that fork ranks and services, and the undisturbed runs to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from toprope.chaos.journal import Final, read_finals
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import become_subreaper
from toprope.chaos.live.ranks import World
from toprope.chaos.live.training import example_script
from toprope.chaos.scenario import Loaded, Workload
from toprope.store.errors import UsageError

WATCH = "toprope.chaos.watch:main"
_GPT = ("--job", "{job}", "--steps", "{steps}", "--seed", "{seed}", "--size", "tiny", "--out", "{out}")
REFERENCE_S_MAX, REFERENCE_S_MAX_A_STEP = 600.0, 0.2


@dataclass(slots=True)
class Stage:
    """Use it in a ``with``: at its end nothing of it runs."""

    trainers: ForkServer = field(init=False)
    services: ForkServer = field(init=False)
    _references: dict[tuple[object, ...], tuple[Final, ...]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        become_subreaper()
        self.trainers = ForkServer("toprope.chaos.watch", "torch._dynamo", "toprope.trainer_hooks.checkpointer")
        modules = (
            "toprope.sidecar.cli",
            "toprope.coordinator.cli",
            "toprope.chaos.killpoints",
            "toprope.chaos.live.proxy",
        )
        self.services = ForkServer(*modules)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.trainers.__exit__(kind, error, at)
        self.services.__exit__(kind, error, at)

    @property
    def launch(self) -> ForkedServices:
        """What starts services."""
        return ForkedServices(self.services)

    def reference(self, loaded: Loaded, job: str, seed: int, directory: Path) -> tuple[Final, ...]:
        """Return the final state of the same training, undisturbed and without Toprope."""
        topology, workload = loaded.scenario.topology, loaded.scenario.workload
        known = (str(loaded.directory), workload.script, workload.arguments, workload.steps, topology.world, job, seed)
        if known not in self._references:
            world = World(
                server=self.trainers,
                directory=directory,
                arguments=watched(loaded, job, seed, directory / "run", reference=True),
                world=topology.world,
                target=WATCH,
                tells_out=False,
            )
            world.start()
            try:
                world.finish(timeout_s=REFERENCE_S_MAX + REFERENCE_S_MAX_A_STEP * workload.steps)
            finally:
                world.stop()
            self._references[known] = read_finals(world.out)
        return self._references[known]


def watched(loaded: Loaded, job: str, seed: int, out: Path, *, reference: bool = False) -> tuple[str, ...]:
    """Return what the watch of a rank is called with."""
    workload = loaded.scenario.workload
    values = {"job": job, "steps": str(workload.steps), "seed": str(seed), "out": str(out.with_name("script"))}
    values["step_s"] = "0" if reference else f"{workload.step_s:g}"
    arguments = workload.arguments if workload.script else (*_GPT, *workload.arguments)
    for name, value in values.items():
        arguments = tuple(word.replace(f"{{{name}}}", value) for word in arguments)
    pace = () if reference else ("--step-s", values["step_s"])
    return (str(out), *(("--reference",) if reference else ()), *pace, str(script_of(loaded)), *arguments)


def script_of(loaded: Loaded) -> Path:
    """Return the training script.

    Raises:
        UsageError: it is not there.
    """
    workload: Workload = loaded.scenario.workload
    if not workload.script:
        return example_script()
    path = (loaded.directory / workload.script).absolute()
    if not path.is_file():
        raise UsageError(f"workload.script: {path} is no file; its path is relative to the scenario's file")
    return path
