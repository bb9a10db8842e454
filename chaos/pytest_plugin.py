"""The pytest plugin: ``def test_survives(chaos): chaos.run("kill-node")``, in your project, against your trainer.

Tests that use ``chaos`` are skipped unless pytest is told ``--chaos``, and then the environment and the scenario must
agree (``CKPT_CHAOS=chaos``, ``label = "chaos"``): processes are killed and disks filled. ``--chaos-reports DIR`` keeps
JSON, JUnit XML and a page of HTML of each run there. Nothing but pytest is loaded before a test asks for a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from toprope.chaos.scenario import Loaded
    from toprope.chaos.verdict import Verdict

FLAG = "--chaos"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("chaos", "break things on purpose (toprope)")
    group.addoption(FLAG, action="store_true", help="run the tests that break things; needs CKPT_CHAOS=chaos as well")
    group.addoption("--chaos-reports", metavar="DIR", default="", help="keep the reports of each run in this directory")


class Chaos:
    """What the fixture ``chaos`` gives."""

    def __init__(self, request: pytest.FixtureRequest, judge: Callable[[Loaded, int], Verdict], reports: Path) -> None:
        self._request = request
        self._judge = judge
        self._reports = reports

    def run(
        self,
        scenario: str | Path,
        *,
        seed: int = 1,
        script: str | Path = "",
        arguments: Sequence[str] = (),
        steps: int = 0,
        step_s: float = 0.0,
    ) -> Verdict:
        """Run a scenario, by name or file, and fail the test unless all that was attacked held; return the verdict.

        ``script`` is your trainer with its ``arguments``, in place of the scenario's: both paths are relative to the
        test's file. In the arguments ``{job}``, ``{steps}``, ``{seed}`` and ``{out}`` are filled in. ``steps``: how
        many to train, and ``step_s`` how long one takes at least, in place of the scenario's: a busy machine that is
        hurried skips snapshots, and then more is lost.
        """
        try:
            from toprope.chaos.live.processes import LiveError  # noqa: PLC0415 - nothing is loaded before
            from toprope.chaos.reports.files import write_reports  # noqa: PLC0415 - nothing is loaded before
            from toprope.store.errors import CkptError  # noqa: PLC0415 - nothing is loaded before
        except ModuleNotFoundError as error:
            _fail(f"chaos needs the package {error.name!r}: install toprope[service]")
        try:
            loaded = self._loaded(scenario, script=script, arguments=arguments, steps=steps, step_s=step_s)
            verdict = self._judge(loaded, seed)
        except (CkptError, LiveError) as error:
            _fail(f"chaos: {error}")
        stem = re.sub(r"[^A-Za-z0-9._]+", "-", f"{self._request.node.name}-{verdict.scenario}-seed{seed}")
        html = self._reports / f"{stem}.html"
        write_reports(verdict, json=html.with_suffix(".json"), junit_xml=html.with_suffix(".xml"), html=html)
        self._attach(verdict, html)
        if not verdict.good:
            _fail(_told(verdict, html))
        return verdict

    def _loaded(
        self, scenario: str | Path, *, script: str | Path, arguments: Sequence[str], steps: int, step_s: float
    ) -> Loaded:
        import msgspec  # noqa: PLC0415 - nothing is loaded before

        from toprope.chaos.scenario import load  # noqa: PLC0415 - nothing is loaded before

        here = self._request.path.parent
        loaded = load(str(here / scenario) if str(scenario).endswith(".toml") else str(scenario))
        changes: dict[str, object] = {}
        if script:
            changes |= {"script": str(here / script), "arguments": tuple(arguments)}
        if steps:
            changes["steps"] = steps
        if step_s:
            changes["step_s"] = step_s
        workload = msgspec.structs.replace(loaded.scenario.workload, **changes)
        changed = msgspec.structs.replace(loaded.scenario, workload=workload)
        changed.check()
        return type(loaded)(scenario=changed, directory=loaded.directory)

    def _attach(self, verdict: Verdict, html: Path) -> None:
        self._request.node.user_properties.append(("chaos report", str(html)))
        for name, value in verdict.figures.items():
            self._request.node.user_properties.append((f"{verdict.scenario} {name}", f"{value:g}"))


def _told(verdict: Verdict, html: Path) -> str:
    """Return what a person needs to know of a verdict that is not good, in a few lines."""
    from toprope.chaos.reports.words import fault_of, headline, plain  # noqa: PLC0415 - nothing is loaded before

    lines = [f"{verdict.scenario}, seed {verdict.seed}: {headline(verdict)}"]
    for promise in verdict.promises:
        if promise.outcome == "broken" or (promise.attacked and promise.outcome == "not judged"):
            lines.append(f"  {promise.outcome}: {promise.name}: {promise.says}")
            lines += [f"    {line}" for line in promise.evidence]
    lines += [f"  did not fire: {fault_of(one)}, {one.trigger}: {one.witness}" for one in verdict.unfired]
    lines.append(f"  the whole story: {html}")
    return plain("\n".join(lines))


def _fail(text: str) -> NoReturn:
    pytest.fail(text, pytrace=False)


@pytest.fixture(scope="session")
def chaos_judge() -> Iterator[Callable[[Loaded, int], Verdict]]:
    """What runs a scenario and judges it. All tests of a session share its warm processes."""
    with ExitStack() as stack:
        stages: list[object] = []

        def judge(loaded: Loaded, seed: int) -> Verdict:
            from rich.console import Console  # noqa: PLC0415 - nothing is loaded before

            from toprope.chaos.live.scratch import DISK, Scratch  # noqa: PLC0415 - nothing is loaded before
            from toprope.chaos.permit import permit  # noqa: PLC0415 - nothing is loaded before
            from toprope.chaos.progress import Progress  # noqa: PLC0415 - nothing is loaded before
            from toprope.chaos.running import Order, run  # noqa: PLC0415 - nothing is loaded before
            from toprope.chaos.stage import Stage  # noqa: PLC0415 - nothing is loaded before

            allowed = permit(flag=True, label=loaded.scenario.label)
            allowed.check(f"chaos-{loaded.scenario.name}")
            if not stages:
                stages.append(stack.enter_context(Stage()))
            stage = stages[0]
            assert isinstance(stage, Stage)
            with Scratch(DISK) as scratch, Progress(Console(stderr=True)) as say:
                return run(Order(loaded=loaded, seed=seed, permit=allowed, directory=scratch.path), stage, say)

        yield judge


@pytest.fixture
def chaos(request: pytest.FixtureRequest, tmp_path: Path) -> Chaos:
    """Break a training job on purpose: ``chaos.run("kill-node")``."""
    if not request.config.getoption(FLAG):
        pytest.skip(f"this breaks things on purpose: run pytest {FLAG}, with CKPT_CHAOS=chaos in the environment")
    wanted = str(request.config.getoption("--chaos-reports"))
    reports = request.config.rootpath / wanted if wanted else tmp_path
    return Chaos(request, request.getfixturevalue("chaos_judge"), reports)
