"""What an import loads: the hook is light, the services need no torch, each module stands alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.support.source import modules

from toprope.__main__ import PROGRAMS

SERVICE_ONLY = ("aiohttp", "aiomqtt", "boto3", "iotcore", "msgspec", "prometheus_client", "rich", "typer", "xxhash")
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
import importlib, json, os, sys, traceback
shared, wanted = json.loads(sys.argv[1])
for name in shared:
    importlib.import_module(name)
failed = []
for name in wanted:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(name)
print(json.dumps(failed))
"""


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


def test_the_frames_and_the_package_of_the_hook_load_nothing_heavy() -> None:
    loaded = _python(
        _RUN_WITHOUT, (), ["toprope.trainer_hooks", "toprope.trainer_hooks.wire", "toprope.trainer_hooks.slot"]
    )
    assert not set(loaded) & set(HEAVY)


@pytest.mark.slow
def test_the_hook_needs_only_torch_and_the_standard_library() -> None:
    loaded = _python(_RUN_WITHOUT, SERVICE_ONLY, modules("trainer_hooks"))
    assert "torch" in loaded, "the modules of the hook were not really imported"


NEED_TORCH = "toprope.store.torch_formats."
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
    assert _python(_EACH_ALONE, third_parties, [one for one in services if not one.startswith(NEED_TORCH)]) == []


@pytest.mark.slow
def test_each_module_of_the_hook_and_of_chaos_imports_alone() -> None:
    third_parties = ["msgspec", "rich.console", "torch", "typer"]
    with_torch = [name for name in modules("store") if name.startswith(NEED_TORCH)]
    assert _python(_EACH_ALONE, third_parties, [*modules("trainer_hooks", "chaos"), *with_torch]) == []
