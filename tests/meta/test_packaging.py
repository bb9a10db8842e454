"""The view in ``src/toprope`` and the wheel that is built from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from tests.support.source import PACKAGES, ROOT

import toprope

VIEW = ROOT / "src" / "toprope"


def test_the_view_is_five_relative_links_and_three_files() -> None:
    links = {path.name: str(path.readlink()) for path in VIEW.iterdir() if path.is_symlink()}
    assert links == {package: f"../../{package}" for package in PACKAGES}
    files = {path.name for path in VIEW.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed"}


def test_no_package_folder_is_importable_by_its_bare_name_when_installed() -> None:
    program = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    done = subprocess.run(
        [sys.executable, "-c", program, *PACKAGES],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_version_is_said_once_and_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == toprope.__version__


def test_the_base_install_depends_on_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    assert {"service", "dev"} <= set(project["optional-dependencies"])


@pytest.mark.slow
def test_the_wheel_holds_each_module_once_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", *PACKAGES):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source],
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    python = sorted(name for name in names if name.endswith(".py"))
    wanted = [f"toprope/{path.relative_to(ROOT)}" for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert python == sorted([*wanted, "toprope/__init__.py", "toprope/__main__.py"])
    assert "toprope/py.typed" in names
    scenarios = {f"toprope/{path.relative_to(ROOT)}" for path in (ROOT / "chaos" / "scenarios").iterdir()}
    assert {name for name in names if name.endswith(".toml")} == scenarios != set()
    outside = [name for name in names if not name.startswith(("toprope/", "toprope-"))]
    assert outside == []


def test_each_pinned_package_installs_on_the_oldest_python_that_is_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = f"{project['requires-python'].removeprefix('>=')}.0"
    pins = [line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    wanted = {name: metadata(name)["Requires-Python"] for name in pins}
    assert len(wanted) > 50
    assert {name: python for name, python in wanted.items() if python and oldest not in SpecifierSet(python)} == {}
