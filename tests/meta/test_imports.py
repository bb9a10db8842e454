"""What an import loads: the hook is light, the services need no torch, each module stands alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.support.source import loaded_by, modules

from toprope.__main__ import PROGRAMS

SERVICE_ONLY = (
    "aiohttp",
    "aiomqtt",
    "boto3",
    "botocore",
    "iotcore",
    "msgspec",
    "prometheus_client",
    "rich",
    "typer",
    "xxhash",
)
HEAVY = ("asyncio", "torch", "numpy", "multiprocessing", *SERVICE_ONLY)

_RUN_WITHOUT = """
import importlib, json, sys
blocked, wanted = json.loads(sys.argv[1])
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
sys.meta_path.insert(0, Blocker())
for name in wanted:
    importlib.import_module(name)
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""

_EACH_ALONE = """
import gc, importlib, json, os, sys, traceback
shared, wanted = json.loads(sys.argv[1])
for name in shared:
    importlib.import_module(name)
gc.freeze()
def each(tree):
    failed = []
    for name, above in tree.items():
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            failed = [name]
            try:
                importlib.import_module(name)
                failed = each(above)
            except BaseException:
                traceback.print_exc()
            os.write(writes, json.dumps(failed).encode())
            os._exit(0)
        os.close(writes)
        with open(reads) as said:
            failed += json.load(said)
        os.waitpid(child, 0)
    return failed
print(json.dumps(each(wanted)))
"""


def _tree(names: list[str]) -> dict[str, Any]:
    """Return the modules as a tree: what is above one loads it anyway, and so may be imported where it is loaded.

    Where two load each other, neither is above the other.
    """
    names = sorted(names, key=lambda name: len(loaded_by(name)))
    trees: dict[str, dict[str, Any]] = {name: {} for name in names}
    roots: dict[str, Any] = {}
    for name in names:
        below = [one for one in names if one in loaded_by(name) and name not in loaded_by(one)]
        (trees[below[-1]] if below else roots)[name] = trees[name]
    return roots


def _python(program: str, *argument: object) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, json.dumps(argument)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout)
    assert not done.stderr or "Traceback" not in done.stderr, done.stderr
    return loaded


def without(blocked: tuple[str, ...], wanted: list[str]) -> list[str]:
    """Import these modules where those can't be had, and return what is loaded then, by its first name."""
    return _python(_RUN_WITHOUT, blocked, wanted)


def test_the_frames_and_the_package_of_the_hook_load_nothing_heavy() -> None:
    loaded = _python(
        _RUN_WITHOUT,
        (),
        ["toprope.trainer_hooks", "toprope.trainer_hooks.link.wire", "toprope.trainer_hooks.link.slot"],
    )
    assert not set(loaded) & set(HEAVY)


@pytest.mark.slow
def test_the_hook_needs_only_torch_and_the_standard_library() -> None:
    loaded = without(SERVICE_ONLY, modules("trainer_hooks"))
    assert "torch" in loaded, "the modules of the hook were not really imported"


NEED_TORCH = "toprope.store.transfer.torch_formats."
"""What writes and reads torch's own formats, for those words of ``ckpt`` that are asked for one."""


def test_store_coordinator_and_sidecar_import_without_torch() -> None:
    services = modules("store", "coordinator", "sidecar")
    _python(_RUN_WITHOUT, ("torch", "numpy"), [name for name in services if not name.startswith(NEED_TORCH)])


def test_no_word_of_ckpt_loads_torch_before_it_is_asked_for_a_format_that_needs_it() -> None:
    words = sorted({program.module for program in PROGRAMS.values()} - {"toprope.chaos.cli"})
    assert not {"torch", "numpy"} & set(_python(_RUN_WITHOUT, (), words))


def test_the_command_line_starts_without_the_service_extra() -> None:
    loaded = _python(_RUN_WITHOUT, (*SERVICE_ONLY, "torch", "numpy"), ["toprope.__main__"])
    assert "asyncio" not in loaded


@pytest.mark.slow
def test_each_module_of_the_services_imports_alone() -> None:
    third_parties = ["aiohttp", "aiomqtt", "msgspec", "prometheus_client", "pytest", "rich.console", "typer", "xxhash"]
    services = modules("store", "coordinator", "sidecar")
    wanted = [one for one in services if not one.startswith(NEED_TORCH)]
    assert _python(_EACH_ALONE, third_parties, _tree(wanted)) == []


@pytest.mark.slow
def test_each_module_of_the_hook_and_of_chaos_imports_alone() -> None:
    third_parties = ["aiohttp.web", "msgspec", "rich.console", "torch.distributed.checkpoint", "typer"]
    with_torch = [name for name in modules("store") if name.startswith(NEED_TORCH)]
    assert _python(_EACH_ALONE, third_parties, _tree([*modules("trainer_hooks", "chaos"), *with_torch])) == []
