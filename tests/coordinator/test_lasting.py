"""What a process has done with is not kept: large buffers that were freed, heaps of threads, garbage that got old."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from toprope.coordinator import runtime as coordinator
from toprope.coordinator.config import Config
from toprope.coordinator.settings import Address
from toprope.coordinator.wire import Cadence
from toprope.sidecar import runtime as sidecar
from toprope.sidecar.config import SidecarConfig

FRAME_BYTES = 16 << 20
OWN_KIB = """
import sys
from pathlib import Path
from toprope.coordinator.serving import give_back_large_buffers, settle

def own_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
"""
BUFFERS = f"""
{OWN_KIB}
if sys.argv[1] == "told":
    give_back_large_buffers()
before = own_kib()
small = []
for _ in range(3):
    first, second = b"x" * {FRAME_BYTES}, b"y" * {FRAME_BYTES}
    small.append(b"z" * 100_000)  # lies above them in a heap, and lives on
    del first, second
print(own_kib() - before)
"""
THREADS, THREAD_BYTES = 8, 1 << 20
HEAPS = f"""
{OWN_KIB}
import threading

if sys.argv[1] == "told":
    give_back_large_buffers()
turn = threading.Barrier({THREADS + 1})

def work():
    for number in range({THREADS}):
        turn.wait()
        if number == mine.index(threading.current_thread()):
            pieces = [b"x" * 10_000 for _ in range({THREAD_BYTES} // 10_000)]
            last = b"y" * 10_000  # lies above them in a heap, and lives on
            del pieces
        turn.wait()
    turn.wait()

mine = [threading.Thread(target=work) for _ in range({THREADS})]
for thread in mine:
    thread.start()
before = own_kib()
for _ in range({THREADS}):
    turn.wait()
    turn.wait()
print(own_kib() - before)
turn.wait()
"""
KNOTS = 200
GARBAGE = f"""
{OWN_KIB}
import gc
from collections import deque

class Knot:
    alive = 0

    def __init__(self):
        self.itself = self
        Knot.alive += 1

    def __del__(self):
        Knot.alive -= 1

imported = [[number] for number in range(100_000)]
gc.collect()
if sys.argv[1] == "told":
    settle()
gc.set_threshold(70)  # a tenth of what is usual, as all numbers here are small
recent, most = deque(maxlen={KNOTS}), 0
for _ in range(400 * {KNOTS}):
    recent.append(Knot())
    most = max(most, Knot.alive)
print(most)
"""


def figure(program: str, *words: str) -> int:
    """Return what a program prints, which is a number."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, text=True, env=env)
    return int(done.stdout)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
"""What glibc does, and what is seen of it."""
ways = pytest.mark.parametrize(("told", "kept"), [("told", False), ("left alone", True)])


@ways
def test_a_process_does_not_keep_the_large_buffers_that_it_has_freed(told: str, *, kept: bool) -> None:
    kib = figure(BUFFERS, told)
    assert (kib * 1024 > FRAME_BYTES // 2) is kept, kib


@ways
def test_its_threads_do_not_each_keep_a_heap_as_large_as_they_needed_once(told: str, *, kept: bool) -> None:
    kib = figure(HEAPS, told)
    assert (kib * 1024 > THREADS * THREAD_BYTES // 2) is kept, kib


@ways
def test_its_garbage_is_not_let_grow_with_what_was_there_at_its_start(told: str, *, kept: bool) -> None:
    most = figure(GARBAGE, told)
    assert (most > 40 * KNOTS) is kept, most


ANYWHERE = Address(host="127.0.0.1", port=0)


def coordinates(directory: Path, _memory: Path) -> Coroutine[object, object, None]:
    config = Config(
        job="job",
        store=str(directory / "store"),
        listen=ANYWHERE,
        broker=None,
        embedded_broker=None,
        cadence=Cadence(from_step=0, every=1, local_every=1, object_every=1),
        token="",
        ready_file=directory / "ready",
    )
    return coordinator.run(config)


def serves_a_node(directory: Path, memory: Path) -> Coroutine[object, object, None]:
    config = SidecarConfig(
        job="job",
        node="a",
        coordinators=("http://127.0.0.1:9",),
        broker=None,
        memory_dir=memory,
        local_dir=directory / "local",
        store=str(directory / "store"),
        socket=memory / "sidecar.sock",
        listen=ANYWHERE,
        domain={"node": "a"},
        ready_file=directory / "ready",
    )
    return sidecar.run(config)


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Put back the handlers of the signals that a service takes for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize(("module", "service"), [(coordinator, coordinates), (sidecar, serves_a_node)])
def test_a_service_does_so_before_it_serves(
    tmp_path: Path,
    memory_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    service: Callable[[Path, Path], Coroutine[object, object, None]],
) -> None:
    called: list[str] = []
    monkeypatch.setattr(module, "give_back_large_buffers", lambda: called.append("give back"))
    monkeypatch.setattr(module, "settle", lambda: called.append("settle"))

    def serves(*_: object) -> None:
        called.append("serves")
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(module, "write_ready_file", serves)
    asyncio.run(service(tmp_path, memory_dir))
    assert called == ["give back", "settle", "serves"]
