"""Whether an upload is packed: pure, from what was measured; and the measuring, which is not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias

from toprope.store.checkpoint.codec import PackedBody, pack

Codec: TypeAlias = Literal["auto", "zstd", "none"]
CODECS: tuple[Codec, ...] = ("auto", "zstd", "none")

LEAST_RATIO = 1.05
"""What shrinks by less is not worth a reader's time."""
TELLING_BYTES = 4 * 1024 * 1024
"""An upload of less says more of the time that a request takes than of the link."""
SAMPLES = 8
SAMPLE_BYTES = 256 * 1024
_NICENESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What packing a part of a file has shown: so many times smaller, at so many bytes of the file per second."""

    ratio: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether to pack, and why."""

    pack: bool
    reason: str


def decide(sample: Sample, *, link_bytes_per_s: float) -> Decision:
    """Return whether packing and sending less takes less time than sending all."""
    mega = 1e6
    if sample.ratio < LEAST_RATIO:
        return Decision(pack=False, reason=f"it shrinks {sample.ratio:.2f} times only")
    plain_s = 1 / link_bytes_per_s
    packed_s = 1 / sample.bytes_per_s + plain_s / sample.ratio
    speeds = f"{sample.ratio:.2f} times smaller at {sample.bytes_per_s / mega:.0f} MB/s"
    link = f"the link takes {link_bytes_per_s / mega:.0f} MB/s"
    if packed_s < plain_s:
        return Decision(pack=True, reason=f"{link}, and packing makes it {speeds}")
    return Decision(pack=False, reason=f"{link}, and packing would make it {speeds}")


class Packer:
    """Packs what is uploaded if that pays, by what this job's uploads have shown. Used by many threads."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._link_bytes_per_s: float | None = None
        self._mutex = threading.Lock()

    def decide(self, raw: memoryview) -> Decision:
        """Return whether to pack a file; with ``auto`` a few places of it are tried out."""
        if self._codec != "auto":
            return Decision(pack=self._codec == "zstd", reason=f"the codec is set to {self._codec}")
        if self._link_bytes_per_s is None:
            return Decision(pack=False, reason="the link has not been measured yet")
        return decide(measure(raw), link_bytes_per_s=self._link_bytes_per_s)

    def uploaded(self, size: int, *, seconds: float) -> None:
        """Learn how long an upload took. What is known of the link moves half the way."""
        if size < TELLING_BYTES:
            return
        speed = size / max(seconds, 1e-6)
        with self._mutex:
            before = self._link_bytes_per_s
            self._link_bytes_per_s = speed if before is None else (before + speed) / 2


def measure(raw: memoryview) -> Sample:
    """Return what packing a few places of a file, spread evenly, shows."""
    stride = max(SAMPLE_BYTES, len(raw) // SAMPLES)
    taken = packed = 0
    began_s = time.perf_counter()
    for begin in range(0, len(raw), stride):
        part = raw[begin : begin + SAMPLE_BYTES]
        taken += len(part)
        packed += pack(part, lambda _: None).bytes
    seconds = time.perf_counter() - began_s
    return Sample(ratio=taken / max(1, packed), bytes_per_s=taken / max(seconds, 1e-6))


def pack_gently(raw: memoryview, write: Callable[[bytes], object]) -> PackedBody:
    """Write a file packed, by a thread that leaves the processor to whoever else wants it."""
    with ThreadPoolExecutor(1, thread_name_prefix="pack", initializer=_be_nice) as pool:
        return pool.submit(pack, raw, write).result()


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread only: Linux
