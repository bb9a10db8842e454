"""The random streams of a trainer process: Python, NumPy, torch on the CPU and on its CUDA devices."""

from __future__ import annotations

import hashlib
import importlib
import logging
import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger("toprope")
_WORD = "I"  # 32 bits wherever torch runs


def streams(devices: Sequence[int]) -> dict[str, Any]:
    """Return the state of all streams without drawing from any. NumPy's is there if the trainer has imported it."""
    version, words, gauss_next = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "state": _as_tensor(words[:-1]), "at": words[-1], "gauss_next": gauss_next},
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state(legacy=False)
    return found


def problems(saved: dict[str, Any]) -> Iterator[str]:
    """Name each stream whose state can't be put back, having tried it on another of its kind."""
    tries: dict[str, Callable[[Any], object]] = {
        "python": lambda state: random.Random().setstate(_python_state(state)),  # noqa: S311 - never drawn from
        "torch": lambda state: torch.Generator().set_state(state),
    }
    if "numpy" in saved:
        tries["numpy"] = lambda state: importlib.import_module("numpy").random.RandomState().set_state(state)
    for name, put in tries.items():
        try:
            put(saved[name])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ImportError) as error:
            yield f"rng.{name}: not the state of a random stream: {error!r}"


def set_streams(saved: dict[str, Any], devices: Sequence[int]) -> None:
    """Put all streams where ``streams`` found them."""
    random.setstate(_python_state(saved["python"]))
    torch.set_rng_state(saved["torch"])
    for device, state in zip(devices, saved["cuda"], strict=True):
        torch.cuda.set_rng_state(state, device)
    if "numpy" in saved:
        importlib.import_module("numpy").random.set_state(saved["numpy"])


def _python_state(saved: dict[str, Any]) -> tuple[Any, ...]:
    words = array(_WORD, bytes(saved["state"].tolist()))
    return saved["version"], (*words, saved["at"]), saved["gauss_next"]


def derive_streams(seed: int | str, *, step: int, rank: int, devices: Sequence[int]) -> None:
    """Begin all streams anew, as a function of these three: for a rank that saved none, under another world.

    A stream's seed is the first 16 bytes of BLAKE2b of ``<seed>/<step>/<rank>/<stream>``, where the stream is
    ``python``, ``numpy`` (if the trainer has imported it), ``torch`` or ``cuda:<n>`` for the n-th of ``devices``;
    torch takes the first 8 of them as a little-endian number, NumPy all as four, Python all as bytes.
    """

    def drawn(stream: str) -> bytes:
        return hashlib.blake2b(f"{seed}/{step}/{rank}/{stream}".encode(), digest_size=16).digest()

    def number(stream: str) -> int:
        return int.from_bytes(drawn(stream)[:8], "little")

    random.seed(drawn("python"))
    torch.default_generator.manual_seed(number("torch"))  # not torch.manual_seed: that seeds all devices, too
    for place, device in enumerate(devices):
        torch.cuda.default_generators[device].manual_seed(number(f"cuda:{place}"))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([int.from_bytes(drawn("numpy")[at : at + 4], "little") for at in range(0, 16, 4)])
    logger.info(
        "the random streams of rank %d begin anew, from seed %r, step %d and the rank: another number of ranks saved "
        "this step",
        rank,
        seed,
        step,
    )


class Generator:
    """A generator of the user's as an object that gives its state and takes it back."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> torch.Tensor:
        """Return where the stream is."""
        return self._generator.get_state()

    def load_state_dict(self, state: torch.Tensor) -> None:
        """Put the stream there."""
        self._generator.set_state(state)


def _as_tensor(words: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(array(_WORD, words).tobytes()), dtype=torch.uint8)
