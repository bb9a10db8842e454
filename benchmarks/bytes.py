"""What a checkpoint weighs in the store, and what packing it costs and gains beside plain zstd and zipnn.

First a run of which one percent of the bytes change at each step, stored as a sidecar stores it. Then a state of bf16
weights with fp32 Adam moments after some updates, packed by each codec in turn on one core. zipnn is measured if
``--zipnn PYTHON`` names an interpreter that has it.

    python benchmarks/bytes.py [--mib 64] [--rounds 5] [--zipnn PYTHON] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from toprope.chaos.live.scratch import DISK, Scratch
from toprope.sidecar.object_tier import ObjectTier
from toprope.sidecar.values import Shard
from toprope.store.checkpoint.codec import pack
from toprope.store.checkpoint.incremental import Base
from toprope.store.checkpoint.ready import read_index_at
from toprope.store.digest import digest
from toprope.store.log.fold import JobState
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore

MIB = 1024 * 1024
STEPS = 5
UPDATES = 60
ZIPNN = """
import json, sys, time, zipnn
raw = open(sys.argv[1], "rb").read()
z = zipnn.ZipNN(bytearray_dtype=sys.argv[2], threads=1)
taken = []
for _ in range(int(sys.argv[3])):
    own = bytearray(raw)  # it is changed in place
    began = time.process_time(); packed = z.compress(own); middle = time.process_time()
    back = z.decompress(packed); end = time.process_time()
    assert bytes(back) == raw
    taken.append((len(packed), middle - began, end - middle))
print(json.dumps(taken))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=64, help="size of each state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--zipnn", metavar="PYTHON", help="an interpreter that has zipnn")
    parser.add_argument("--json", type=Path, help="write the figures as JSON too")
    options = parser.parse_args()
    figures: dict[str, Any] = {"adapter": adapter(options.mib * MIB)}
    print(f"one percent changes: {figures['adapter']:.2%} of a full checkpoint is stored for each further one")
    for name, raw in adam_state(options.mib * MIB).items():
        for codec, measured in measured_codecs(raw, name=name, rounds=options.rounds, zipnn=options.zipnn).items():
            figures[f"{name}: {codec}"] = measured
            ratio, pack_mb, unpack_mb = measured
            print(
                f"{name:20} {codec:16} {ratio:.3f} times smaller, packs {pack_mb:5.0f} MB/s, back {unpack_mb:5.0f} MB/s"
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def adapter(size: int) -> float:
    """Return what each further checkpoint of a run that changes one percent weighs, as a part of a full one."""
    rng = np.random.default_rng(7)
    frozen = {f"model.{n}": rng.standard_normal(size // 4 // 99, dtype=np.float32) for n in range(99)}
    with Scratch(DISK) as scratch:
        tier = _OnTheLast(DirectoryStore(scratch.path))
        sizes = []
        for step in range(1, STEPS + 1):
            trained = {"model.adapter": rng.standard_normal(size // 4 // 100, dtype=np.float32)}
            sizes.append(tier.stored(frozen | trained, step=step))
    return max(sizes[1:]) / sizes[0]


class _OnTheLast(ObjectTier):
    """Stores each image as if the one before were READY."""

    def __init__(self, store: DirectoryStore) -> None:
        super().__init__(store, "job", codec="none")
        self._objects = store
        self._state = JobState(job="job")
        self._base: Base | None = None

    def _base_of(self, shard: Shard) -> Base | None:
        return self._base if shard.step > 1 else None

    def stored(self, tensors: dict[str, np.ndarray[Any, Any]], *, step: int) -> int:
        """Store a state and return how many bytes that took, index included."""
        image = _image(tensors, step=step)
        shard = Shard(
            attempt=1, step=step, attempt_uid="01" * 16, rank=0, world=1, bytes=len(image), digest=digest(image)
        )
        receipt = self.put(shard, memoryview(image), nonce=f"{step:02x}")
        self._base = Base(seq=step, index=read_index_at(self._objects, Key(receipt.index_key)))
        return receipt.stored_bytes + self._objects.size(Key(receipt.index_key))


def _image(tensors: dict[str, np.ndarray[Any, Any]], *, step: int) -> bytes:
    document = json.dumps({"step": step}).encode()
    said = {"format": "1", "job_uid": "0b" * 16, "attempt": "1", "attempt_uid": "01" * 16, "step": str(step)}
    header: dict[str, Any] = {"__metadata__": said | {"rank": "0", "world": "1", "document": "__document__"}}
    at = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    header["__document__"] = {"dtype": "U8", "shape": [len(document)], "data_offsets": [at, at + len(document)]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-(len(text) + 8) // 16) * 16 - 8)
    return len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in tensors.values()) + document


def adam_state(size: int) -> dict[str, bytes]:
    """Return the bytes of weights in bf16 and of both moments in fp32, of ``size`` in all, after some updates."""
    count = size // 10
    rng = np.random.default_rng(11)
    weights = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
    mean, square = np.zeros(count, np.float32), np.zeros(count, np.float32)
    scale = np.exp(rng.standard_normal(count, dtype=np.float32))
    for update in range(1, UPDATES + 1):
        gradient = rng.standard_normal(count, dtype=np.float32) * scale * np.float32(1e-3)
        mean += (gradient - mean) * np.float32(0.1)
        square += (gradient * gradient - square) * np.float32(0.001)
        step = mean / (1 - 0.9**update) / (np.sqrt(square / (1 - 0.999**update)) + 1e-8)
        weights -= np.float32(3e-4) * step.astype(np.float32)
    rounded = ((weights.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    return {"bf16 weights": rounded.tobytes(), "fp32 moments": mean.tobytes() + square.tobytes()}


def measured_codecs(raw: bytes, *, name: str, rounds: int, zipnn: str | None) -> dict[str, tuple[float, float, float]]:
    """Return ratio, and MB of the raw bytes per second of one core both ways, the median of the rounds, by codec."""
    plain = zstandard.ZstdCompressor(level=1)
    codecs: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], Any]]] = {
        "zstd 1": (plain.compress, zstandard.ZstdDecompressor().decompress),
        "ours, checked": (_packed, _unpacked),
    }
    taken: dict[str, list[tuple[int, float, float]]] = {codec: [] for codec in codecs}
    for _ in range(rounds):
        for codec, (squeeze, back) in codecs.items():
            began_s = time.process_time()
            packed = squeeze(raw)
            middle_s = time.process_time()
            assert bytes(back(packed)) == raw
            taken[codec].append((len(packed), middle_s - began_s, time.process_time() - middle_s))
    if zipnn is not None:
        taken["zipnn"] = _by_zipnn(raw, name=name, rounds=rounds, python=zipnn)
    return {codec: _medians(raw, lines) for codec, lines in taken.items()}


def _packed(body: bytes) -> bytearray:
    packed = bytearray()
    pack(memoryview(body), packed.extend)
    return packed


def _unpacked(body: bytearray) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True).read()


def _by_zipnn(raw: bytes, *, name: str, rounds: int, python: str) -> list[tuple[int, float, float]]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        dtype = "bfloat16" if name.startswith("bf16") else "float32"
        command = [python, "-c", ZIPNN, file.name, dtype, str(rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [(int(size), float(there), float(back)) for size, there, back in json.loads(done.stdout)]


def _medians(raw: bytes, lines: list[tuple[int, float, float]]) -> tuple[float, float, float]:
    size = statistics.median(line[0] for line in lines)
    there, back = (statistics.median(line[at] for line in lines) for at in (1, 2))
    return len(raw) / size, len(raw) / there / 1e6, len(raw) / back / 1e6


if __name__ == "__main__":
    main()
