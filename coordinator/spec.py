"""What the state depends on, as one canonical text, and how two of them differ, for people. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toprope.store.checkpoint.manifest import sha256

_LINES_MAX = 12


def encode(spec: Mapping[str, Any]) -> bytes:
    """Return the one encoding of a spec."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def name(spec: Mapping[str, Any]) -> str:
    """Return the SHA-256 by which a spec is known."""
    return sha256(encode(spec))


def diff(old: object, new: object) -> str:
    """Return how ``new`` differs from ``old``: as ``differences``, in one line that is not too long."""
    lines = differences(old, new)
    more = len(lines) - _LINES_MAX
    return "; ".join([*lines[:_LINES_MAX], *([f"and {more} more"] if more > 0 else [])])


def differences(old: object, new: object) -> list[str]:
    """Return how ``new`` differs from ``old``: a line for each leaf that is changed (~), gone (-) or there now (+)."""
    before, after = dict(_leaves(old, "")), dict(_leaves(new, ""))
    lines = []
    for path in sorted({*before, *after}):
        if path not in after:
            lines.append(f"- {path}: {before[path]}")
        elif path not in before:
            lines.append(f"+ {path}: {after[path]}")
        elif before[path] != after[path]:
            lines.append(f"~ {path}: {before[path]} -> {after[path]}")
    return lines


def _leaves(value: object, path: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and (value or not path):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key], f"{path}.{key}" if path else str(key))]
    if isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        return [leaf for at, item in enumerate(value) for leaf in _leaves(item, f"{path}[{at}]")]
    return [(path, json.dumps(value, ensure_ascii=False))]
