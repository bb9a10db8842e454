"""SHA-256 of all that a run's future depends on: equal digests, equal futures, bit for bit."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import torch
from torch import Tensor, nn


def state_digests(model: nn.Module, optimizer: torch.optim.Optimizer, *, position: dict[str, Any]) -> dict[str, str]:
    """Return SHA-256 of ``weights``, ``optimizer``, ``rng`` streams and ``position`` (data, schedule) of this process.

    ``position`` is a document of plain values.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state[names[id(parameter)]] = dict(optimizer.state.get(parameter, {}))
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "weights": digest(dict(model.state_dict())),
        "optimizer": digest({"state": state, "groups": groups}),
        "rng": digest(rng_streams()),
        "position": digest(position),
    }


def rng_streams() -> dict[str, Any]:
    """Return the state of each random stream of this process: Python, NumPy if loaded, torch on CPU and CUDA."""
    streams: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        streams["numpy"] = [name, keys.tobytes().hex(), *rest]
    for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        streams[f"cuda:{device}"] = torch.cuda.get_rng_state(device)
    return streams


def digest(value: object) -> str:
    """Return the SHA-256 of a tree of dicts, lists, tensors and plain values, in one canonical form."""
    sha256 = hashlib.sha256()
    _feed(sha256, value)
    return sha256.hexdigest()


def _feed(sha256: hashlib._Hash, value: object) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        sha256.update(f"tensor {plain.dtype} {tuple(plain.shape)}:".encode())
        sha256.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(value, dict):
        sha256.update(f"dict {len(value)}:".encode())
        for key in sorted(value, key=str):
            sha256.update(f"{key!r}=".encode())
            _feed(sha256, value[key])
    elif isinstance(value, list | tuple):
        sha256.update(f"list {len(value)}:".encode())
        for item in value:
            _feed(sha256, item)
    else:  # repr of a float is exact
        sha256.update(f"{type(value).__name__} {json.dumps(value)};".encode())
