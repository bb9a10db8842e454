"""What a checkpoint holds beside tensors, by dotted name, as far as it is plain: out of the documents of its ranks.

Settings of optimizers get the names that PyTorch's ``get_optimizer_state_dict`` gives them. Pure.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TAG = "$"
_WIDE = 1 << 63
IMPORTED = "imported"
"""The part of a document that holds the values that an import brought, by name."""
VALUES = "values"
"""The same of a checkpoint that was saved with torch.distributed.checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """Values by name, tensors that have another name in the state of an optimizer, and what was left out."""

    values: dict[str, Any]
    renamed: dict[str, str]
    left_out: tuple[str, ...]


class NotPlainError(ValueError):
    """A value is of a kind that others need not know."""


def leaves_of(documents: Sequence[Mapping[str, Any]]) -> Leaves:
    """Return what the documents of ranks hold; where several have a name, the first of them says what it is."""
    values: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    left_out: dict[str, None] = {}
    for document in documents:
        for section, part in document.items():
            for name, encoded in _named(section, part):
                if _is_tensor(encoded):
                    renamed[encoded["name"]] = name
                elif name not in values:
                    try:
                        values[name] = decode(encoded)
                    except NotPlainError:
                        left_out[name] = None
    return Leaves(values=values, renamed=renamed, left_out=tuple(left_out))


def _named(section: str, part: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - a part of a document
    if section in {IMPORTED, VALUES}:
        yield from part.items()
    elif section.partition(".")[0] == "optimizer" and isinstance(part, dict) and "groups" in part:
        for number, group in enumerate(part["groups"]):
            yield f"{section}.param_groups.{number}.params", group["params"]
            for key, value in group["settings"].items():
                yield f"{section}.param_groups.{number}.{key}", value
        for parameter, state in part["state"].items():
            for key, value in state.items():
                yield f"{section}.state.{parameter}.{key}", value


def _is_tensor(encoded: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(encoded, dict) and encoded.get(_TAG) == "tensor"


def decode(encoded: Any) -> Any:  # noqa: ANN401 - JSON, and what it stands for
    """Return the value that a document's JSON stands for.

    Raises:
        NotPlainError: it is not one of None, bool, int, float, complex, text, bytes, list, tuple and dict.
    """
    if isinstance(encoded, list):
        return [decode(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TAG not in encoded:
        return {key: decode(item) for key, item in encoded.items()}
    reader = _READERS.get(str(encoded[_TAG]))
    if reader is None:
        raise NotPlainError(f"a {encoded[_TAG]!r:.40}")
    try:
        return reader(encoded["v"])
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise NotPlainError(f"a {encoded[_TAG]!r:.40} that can't be read") from error


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(decode(item) for item in items),
    "torch.Size": lambda items: tuple(decode(item) for item in items),
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "OrderedDict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
}


def encode(value: object) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON that stands for a value in a document.

    Raises:
        NotPlainError: it is of another kind than ``decode`` returns.
    """
    if value is None or type(value) in {bool, str}:
        return value
    if type(value) is int:
        return value if -_WIDE <= value < _WIDE else {_TAG: "int", "v": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "v": struct.pack(">d", value).hex()}
    if type(value) is complex:
        return {_TAG: "complex", "v": struct.pack(">dd", value.real, value.imag).hex()}
    if type(value) is bytes:
        return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
    return _encoded_collection(value)


def _encoded_collection(value: object) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "v": [encode(item) for item in value]}
    if not isinstance(value, dict):
        raise NotPlainError(f"a {type(value).__qualname__}")
    if _TAG not in value and all(type(key) is str for key in value):
        return {key: encode(item) for key, item in value.items()}
    return {_TAG: "dict", "v": [[encode(key), encode(item)] for key, item in value.items()]}
