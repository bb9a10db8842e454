"""The pages keep up with the code: each word, metric, error and decision is written down."""

from __future__ import annotations

import re
import typing

import pytest
from tests.support.source import ROOT, load_program

from toprope.__main__ import PROGRAMS
from toprope.sidecar.values import Alarm

from_code = load_program("docs/from_code.py")


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_each_word_of_ckpt_is_in_the_reference_and_in_the_readme() -> None:
    words = set(PROGRAMS)
    reference = set(re.findall(r"^## ckpt (\w[\w-]*)$", _page("reference/cli.md"), re.MULTILINE))
    readme = set(re.findall(r"`ckpt (\w[\w-]*)", (ROOT / "README.md").read_text()))
    assert reference == words
    assert words <= readme


def test_each_word_has_a_help_text_of_its_own() -> None:
    texts = {word: (command.help or "").strip() for word, command in from_code.commands().items()}
    assert all(texts.values()), texts
    assert len(set(texts.values())) == len(texts)


def test_each_option_says_what_it_means() -> None:
    silent = [
        f"ckpt {word}: {parameter.name}"
        for word, command in from_code.commands().items()
        for parameter in command.params
        if not getattr(parameter, "hidden", False) and not (getattr(parameter, "help", None) or "").strip()
    ]
    assert silent == []


@pytest.mark.parametrize("package", ["sidecar", "coordinator"])
def test_each_metric_is_documented_and_well_named(package: str) -> None:
    rows = from_code.declared_metrics(f"toprope.{package}.metrics")
    assert rows, "no metric was found: has the form of the declarations changed?"
    page = _page("reference/metrics.md")
    for name, kind, _, meaning in rows:
        assert name in page
        assert meaning
        assert re.fullmatch(r"`toprope_[a-z0-9_]+`", name), name
        assert kind != "counter" or name.endswith("_total`"), name


def test_each_kind_of_alarm_is_explained_to_whoever_is_woken_by_it() -> None:
    section = _page("guides/operations.md").partition("toprope_alarms_total{kind=...}")[2].partition("Killing and")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`([a-z-]+)`", "".join(cells))) == sorted(typing.get_args(Alarm))


@pytest.mark.parametrize(
    ("module", "root"), [("toprope.store.errors", "CkptError"), ("toprope.trainer_hooks.errors", "HookError")]
)
def test_each_error_is_documented(module: str, root: str) -> None:
    page = _page("reference/errors.md")
    kinds = [kind for _, kind in from_code.tree_of_errors(module, root)]
    assert kinds
    for kind in kinds:
        assert f"`{kind.__name__}`" in page
        assert kind.__doc__


def test_decisions_are_numbered_without_a_gap_and_say_how_to_notice_a_mistake() -> None:
    pages = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [page.name[:3] for page in pages] == [f"{number:03d}" for number in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text()
        assert text.startswith(f"# {page.name[:3]}: ")
        assert [word for word in ("**Context.**", "**Decision.**", "**What we gave up.**") if word not in text] == []
        assert "**How we would notice.**" in text, page.name


OPEN_ISSUES = {"3", "4", "5"}
"""Whose scenarios may still wait for their test: an issue that is closed is no reason any more."""


def wrong_excuses(known: set[str], covered: set[str], excused: dict[str, str], open_issues: set[str]) -> list[str]:
    """Say which scenarios have neither a test nor a reason, or a reason that holds no longer."""
    named = {fault: set(re.findall(r"issue (\d+)", reason)) for fault, reason in excused.items()}
    return [
        *(f"{fault}: a test is marked with it, and it is not in docs/faults.txt" for fault in sorted(covered - known)),
        *(f"{fault}: has a reason, and it is not in docs/faults.txt" for fault in sorted(set(excused) - known)),
        *(
            f"{fault}: has a test now; take its line out of faults_without_test.txt"
            for fault in sorted(covered & set(excused))
        ),
        *(f"{fault}: has neither a test nor a reason" for fault in sorted(known - covered - set(excused))),
        *(f"{fault}: waits for an issue that is closed" for fault in sorted(named) if named[fault] - open_issues),
        *(f"{fault}: its reason says nothing" for fault, reason in sorted(excused.items()) if len(reason.split()) < 3),
    ]


def test_each_fault_of_the_list_has_a_test_or_a_reason() -> None:
    known, covered, excused = from_code.known_faults(), from_code.covered_faults(), from_code.excused_faults()
    assert wrong_excuses(set(known), set(covered), excused, OPEN_ISSUES) == []


def test_no_fault_is_excused_twice() -> None:
    for name in ("faults.txt", "faults_without_test.txt"):
        ids = [line.split(" ", 1)[0] for line in _page(name).splitlines()]
        assert sorted(ids) == sorted(set(ids)), name
        assert ids == sorted(ids, key=lambda fault: int(fault[1:])), name


@pytest.mark.parametrize(
    ("covered", "excused", "said"),
    [
        ({"B1", "B9"}, {"B2": "needs a GPU here"}, "B9: a test is marked with it, and it is not"),
        ({"B1"}, {"B2": "needs a GPU here", "B9": "needs a GPU here"}, "B9: has a reason, and it is not"),
        ({"B1", "B2"}, {"B2": "needs a GPU here"}, "B2: has a test now"),
        ({"B1"}, {}, "B2: has neither a test nor a reason"),
        ({"B1"}, {"B2": "not built yet: issue 2"}, "B2: waits for an issue that is closed"),
        ({"B1"}, {"B2": "later"}, "B2: its reason says nothing"),
    ],
)
def test_what_is_wrong_with_the_list_of_faults_is_named(covered: set[str], excused: dict[str, str], said: str) -> None:
    (found,) = wrong_excuses({"B1", "B2"}, covered, excused, {"3"})
    assert found.startswith(said)


def test_links_between_files_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


SERVICE_ERRORS = {
    "CkptError": 1,
    "FencedError": 1,
    "UsageError": 64,
    "UnavailableError": 4,
    "NoStoreError": 4,
    "ThrottledError": 4,
    "UnseenDirectoryError": 4,
    "NothingToVerifyError": 3,
    "StoreError": 2,
    "AlreadyExistsError": 2,
    "MissingObjectError": 2,
    "UnseenObjectError": 4,
    "CorruptObjectError": 2,
    "LogCorruptError": 2,
}
HOOK_ERRORS = {
    "HookError": 1,
    "PreemptedError": 143,
    "RestoreError": 1,
    "SidecarUnavailableError": 1,
    "SupersededError": 1,
    "UsageError": 64,
    "SpecMismatchError": 64,
    "StateMismatchError": 64,
    "UnsupportedLeafError": 64,
    "WorldMismatchError": 64,
}


@pytest.mark.parametrize(
    ("module", "root", "agreed"),
    [
        ("toprope.store.errors", "CkptError", SERVICE_ERRORS),
        ("toprope.trainer_hooks.errors", "HookError", HOOK_ERRORS),
    ],
)
def test_error_names_and_exit_statuses_are_as_agreed(module: str, root: str, agreed: dict[str, int]) -> None:
    """Scripts match on them: a change is a breaking one."""
    assert {kind.__name__: kind.exit_status for _, kind in from_code.tree_of_errors(module, root)} == agreed
