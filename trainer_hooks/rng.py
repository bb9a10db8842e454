"""The random streams of a trainer process: Python, NumPy, torch on the CPU and on its CUDA devices."""

from __future__ import annotations

import importlib
import random
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import torch

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


def set_streams(saved: dict[str, Any], devices: Sequence[int]) -> None:
    """Put all streams where ``streams`` found them."""
    python = saved["python"]
    words = array(_WORD, bytes(python["state"].tolist()))
    random.setstate((python["version"], (*words, python["at"]), python["gauss_next"]))
    torch.set_rng_state(saved["torch"])
    for device, state in zip(devices, saved["cuda"], strict=True):
        torch.cuda.set_rng_state(state, device)
    if "numpy" in saved:
        importlib.import_module("numpy").random.set_state(saved["numpy"])


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
