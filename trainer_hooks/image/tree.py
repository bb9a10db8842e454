"""State as a typed JSON document with its tensors set apart.

``encode`` walks a value and returns the text of JSON in which each value keeps its exact type; ``decode`` is the
inverse, of what the text says. Plain JSON values stand for themselves; everything else is an object whose ``$`` names
its type. Tensors are handed to a callback, which returns the text that stands for them in the document, and may be one
that it has written before. What can't be kept exactly is refused by name.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, TypeAlias, TypeVar, cast

import torch

from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError
from toprope.trainer_hooks.image import opaque

Json: TypeAlias = Any
"""What ``json`` reads and writes; checked by ``decode``."""

_T = TypeVar("_T")
to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
MAX_DEPTH = 64
_TAG = "$"
_WIDE = 1 << 63  # integers from here on are written in hexadecimal: other JSON readers would round them
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set)}


@dataclass(slots=True)
class Encoder:
    """Encodes values; ``on_tensor(name, tensor)`` returns the text of the JSON object that stands for a tensor.

    With ``allow_pickle`` a leaf that can't be kept exactly is pickled.
    """

    on_tensor: Callable[[str, torch.Tensor], str]
    allow_pickle: bool = False

    def encode(self, name: str, value: object, depth: int = 0) -> str:  # noqa: PLR0911 - one line for each kind
        """Return the text of the JSON of a value; ``name`` is its dotted path.

        Raises:
            UnsupportedLeafError: it, or a value in it, can't be kept exactly.
        """
        if depth > MAX_DEPTH:
            raise UnsupportedLeafError.at(name, f"nested deeper than {MAX_DEPTH} levels, or in itself")
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._leaf(name, value, self.on_tensor)
        if kind is str:
            return _text(name, value)  # type: ignore[arg-type]
        if value is None or kind is bool:
            return _CONSTANTS[value]  # type: ignore[index]
        if kind is int:
            return _int(value)  # type: ignore[arg-type]
        if kind is float:
            return _float(value)  # type: ignore[arg-type]
        if kind is list:
            return self._items(name, value, depth)  # type: ignore[arg-type]
        if kind is dict:
            return self._dict(name, value, depth)  # type: ignore[arg-type]
        return self._tagged(name, value, depth)

    def _items(self, name: str, items: Iterable[object], depth: int) -> str:
        return _array(self.encode(f"{name}.{index}", item, depth + 1) for index, item in enumerate(items))

    def _dict(self, name: str, value: dict[Any, object], depth: int) -> str:
        if _TAG in value or set(map(type, value)) - {str}:
            return object_of({_TAG: '"dict"', "v": self._pairs(name, value, depth)})
        members = [f"{_text(name, key)}:{self.encode(f'{name}.{key}', item, depth + 1)}" for key, item in value.items()]
        return f"{{{','.join(members)}}}"

    def _pairs(self, name: str, value: dict[Any, Any], depth: int) -> str:
        return _array(
            f"[{self.encode(f'{name}.{key!r} (key)', key, depth + 1)},{self.encode(f'{name}.{key}', item, depth + 1)}]"
            for key, item in value.items()
        )

    def _tagged(self, name: str, value: object, depth: int) -> str:
        tag = _SEQUENCES.get(type(value))
        if tag is not None:
            return object_of({_TAG: quoted(tag), "v": self._items(name, value, depth)})  # type: ignore[arg-type]
        match value:
            case OrderedDict() if type(value) is OrderedDict:
                return object_of({_TAG: '"OrderedDict"', "v": self._pairs(name, value, depth)})
            case Counter() if type(value) is Counter:
                return object_of({_TAG: '"Counter"', "v": self._pairs(name, value, depth)})
            case defaultdict() if type(value) is defaultdict:
                made = to_json(_factory_name(name, value))
                return object_of({_TAG: '"defaultdict"', "of": made, "v": self._pairs(name, value, depth)})
            case deque() if type(value) is deque:
                most = to_json(value.maxlen)
                return object_of({_TAG: '"deque"', "maxlen": most, "v": self._items(name, value, depth)})
            case _:
                return self._leaf(name, value, _leaf)

    def _leaf(self, name: str, value: _T, exactly: Callable[[str, _T], str]) -> str:
        try:
            return exactly(name, value)
        except UnsupportedLeafError as refusal:
            if not self.allow_pickle:
                raise
            return to_json(opaque.pickled(value, refusal))


def object_of(members: Mapping[str, str]) -> str:
    """Return the JSON object that has these members, each given as the text of its JSON."""
    return f"{{{','.join([f'{quoted(key)}:{text}' for key, text in members.items()])}}}"


def _array(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"


_CONSTANTS = {None: "null", True: "true", False: "false"}


def _text(name: str, value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedLeafError.at(name, "text with a lone surrogate, which UTF-8 can't hold") from error
    return quoted(value)


def _int(value: int) -> str:
    return str(value) if -_WIDE <= value < _WIDE else to_json({_TAG: "int", "v": hex(value)})


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else to_json({_TAG: "float", "v": struct.pack(">d", value).hex()})


def _factory_name(name: str, value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    for known, kind in _FACTORIES.items():
        if factory is kind:
            return known
    raise UnsupportedLeafError.at(name, f"a defaultdict whose factory is not one of {', '.join(_FACTORIES)}")


def _leaf(name: str, value: object) -> str:
    return to_json(_leaf_object(name, value))


def _leaf_object(name: str, value: object) -> dict[str, Json]:
    match value:
        case bytes() if type(value) is bytes:
            return {_TAG: "bytes", "v": _base64(value)}
        case bytearray() if type(value) is bytearray:
            return {_TAG: "bytearray", "v": _base64(value)}
        case complex() if type(value) is complex:
            return {_TAG: "complex", "v": struct.pack(">dd", value.real, value.imag).hex()}
        case torch.dtype():
            return {_TAG: "torch.dtype", "v": str(value).removeprefix("torch.")}
        case torch.device():
            return {_TAG: "torch.device", "v": str(value)}
        case _:
            return _enum_leaf(name, value) if isinstance(value, enum.Enum) else _numpy_leaf(name, value)


def _enum_leaf(name: str, value: enum.Enum) -> dict[str, Json]:
    kind = type(value)
    of = f"{kind.__module__}:{kind.__qualname__}"
    if _enum_class(of) is not kind or kind.__members__.get(value.name or "") is not value:
        raise UnsupportedLeafError.at(name, f"a {_full_name(value)} that is no named member of a class at module level")
    return {_TAG: "enum", "of": of, "v": value.name}


def _enum_class(of: str) -> enum.EnumType | None:
    """Return an enumeration of a module that is loaded already: a checkpoint must not make anything run."""
    module, _, name = of.partition(":")
    found = vars(sys.modules.get(module, object)).get(name)
    return found if isinstance(found, enum.EnumType) else None


def _enum_member(value: dict[str, Json]) -> enum.Enum:
    kind = _enum_class(value["of"])
    if kind is None:
        raise ValueError(f"{value['of']} is no enumeration that this process has loaded")
    return cast("enum.Enum", kind.__members__[value["v"]])


def _numpy_leaf(name: str, value: object) -> dict[str, Json]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        dtype = value.dtype
        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            raise UnsupportedLeafError.at(name, f"a {_full_name(value)}, a subclass of numpy.ndarray")
        if dtype.kind not in "biufcSU" or dtype.metadata is not None:
            raise UnsupportedLeafError.at(name, f"a NumPy value of dtype {dtype}; numbers, bool and text can be kept")
        tag = "ndarray" if type(value) is numpy.ndarray else "numpy"
        return {_TAG: tag, "dtype": dtype.str, "shape": list(value.shape), "v": _base64(value.tobytes())}
    raise UnsupportedLeafError.at(
        name,
        f"a {_full_name(value)} can't be kept exactly; keep it as None, bool, int, float, str, bytes, list, tuple, "
        "dict, set, deque, enum, NumPy array or tensor, or give an object with state_dict() and load_state_dict()",
    )


_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "torch.Size"}


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes documents; ``on_tensor(entry)`` returns the tensor that an encoder's JSON object stands for.

    ``on_pickle`` makes a value of pickled bytes; without it they are refused.
    """

    on_tensor: Callable[[dict[str, Json]], torch.Tensor]
    on_pickle: Callable[[bytes], Any] | None = None

    def decode(self, value: Json, name: str = "the state") -> Any:  # noqa: ANN401 - any value that can be kept
        """Return the value that was encoded; ``name`` is its dotted path.

        Raises:
            StateMismatchError: it is not what ``Encoder`` writes; the message has its path.
        """
        if isinstance(value, list):
            return [self.decode(item, f"{name}.{index}") for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return {key: self.decode(item, f"{name}.{key}") for key, item in value.items()}
        try:
            return self._tagged(value[_TAG], value, name)
        except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
            raise StateMismatchError(
                f"{name}: the checkpoint holds a value that this version can't read: {error!r}"
            ) from error

    def _tagged(self, tag: str, value: dict[str, Json], name: str) -> Any:  # noqa: ANN401 - any value that can be kept
        if tag in {"tensor", "pickle"}:
            return self.on_tensor(value) if tag == "tensor" else self._unpickled(value, name)
        scalar = _SCALARS.get(tag)
        if scalar is not None:
            return scalar(value["v"])
        special = _SPECIAL.get(tag)
        if special is not None:
            return special(value)
        items = self.decode(value["v"], name)
        if tag == "deque":
            return deque(items, maxlen=value["maxlen"])
        if tag == "defaultdict":
            return defaultdict(None if value["of"] is None else _FACTORIES[value["of"]], _as_pairs(items))
        return _COLLECTIONS[tag](items)

    def _unpickled(self, value: dict[str, Json], name: str) -> Any:  # noqa: ANN401 - whatever was pickled
        if self.on_pickle is None:
            raise StateMismatchError(
                f"{name}: the checkpoint has a pickled value, and unpickling runs what it says; if you trust whoever "
                "wrote it, make the Checkpointer with allow_pickle=True"
            )
        return self.on_pickle(opaque.body_of(value))


def _as_pairs(items: list[list[Any]]) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in items]


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "torch.dtype": _torch_dtype,
    "torch.device": torch.device,
}
_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "torch.Size": torch.Size,
    "dict": lambda items: dict(_as_pairs(items)),
    "OrderedDict": lambda items: OrderedDict(_as_pairs(items)),
    "Counter": lambda items: Counter(dict(_as_pairs(items))),
}


def _numpy_value(value: dict[str, Json]) -> Any:  # noqa: ANN401 - an array or a scalar
    import numpy as np  # noqa: PLC0415 - only a trainer that used NumPy has such values

    array = np.frombuffer(base64.b64decode(value["v"]), dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    return array.copy() if value[_TAG] == "ndarray" else array[()]


_SPECIAL: dict[str, Callable[[dict[str, Json]], Any]] = {
    "ndarray": _numpy_value,
    "numpy": _numpy_value,
    "enum": _enum_member,
}
