"""What a process has done with is not kept: large buffers that were freed, heaps of threads, garbage that got old."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, text=True)
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
