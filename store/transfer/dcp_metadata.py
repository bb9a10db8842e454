"""The ``.metadata`` of a PyTorch DCP directory, read without unpickling: nothing that it names is imported or called.

It is a pickle. Of the instructions of that format only those are followed that build plain values; what would make an
object of a class is kept as the name of the class and what it was to be made of, and only known names are taken.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from toprope.store.errors import CorruptObjectError

MAX_BYTES = 256 * 1024 * 1024
_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    f"{_DCP}.metadata Metadata",
    f"{_DCP}.metadata TensorStorageMetadata",
    f"{_DCP}.metadata BytesStorageMetadata",
    f"{_DCP}.metadata TensorProperties",
    f"{_DCP}.metadata ChunkStorageMetadata",
    f"{_DCP}.metadata MetadataIndex",
    f"{_DCP}.metadata StorageMeta",
    f"{_DCP}.metadata _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem _StorageInfo",
    f"{_DCP}.filesystem _StoragePrefix",
    "torch Size",
    "torch.serialization _get_layout",
    "pathlib PosixPath",
    "pathlib PurePosixPath",
    "pathlib WindowsPath",
    "pathlib._local PosixPath",
    "pathlib._local WindowsPath",
    "collections OrderedDict",
    "builtins getattr",  # with which Python 3.11.0 to 3.11.3 pickles members of enums; kept as a name, never called
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A block of a tensor: where it lies in it, and where in which file of the directory its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor, with torch's name of its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpValue:
    """What is not a tensor: a file that ``torch.save`` wrote, inside a file of the directory."""

    name: str
    file: str
    begin: int
    bytes: int


@dataclass(slots=True)
class _Made:
    """What would have been an object: the name of its class, what it was to be called with, and its state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


_MARK = object()


def read_metadata(body: bytes, *, name: str) -> tuple[tuple[DcpTensor, ...], tuple[DcpValue, ...]]:
    """Return the tensors and the other values that ``.metadata`` describes, by name. ``name`` is for messages.

    Raises:
        CorruptObjectError: it is damaged, too long, or names something that does not belong there.
    """
    if len(body) > MAX_BYTES:
        raise _wrong(name, f"{len(body)} bytes; at most {MAX_BYTES}")
    try:
        metadata = _Machine(name).run(body)
        places = {_place_of(index): info.state for index, info in metadata.state["storage_data"].items}
        described = dict(metadata.state["state_dict_metadata"].items)
        tensors, values = [], []
        for key in sorted(described):
            if described[key].name.endswith(" TensorStorageMetadata"):
                tensors.append(_tensor(key, described[key].state, places, name=name))
            else:
                values.append(_value(key, places[key, None], name=name))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _wrong(name, f"it can't be read: {error!r:.200}") from error
    return tuple(tensors), tuple(values)


def _place_of(index: _Made) -> tuple[str, tuple[int, ...] | None]:
    offset = index.state.get("offset")
    return index.state["fqn"], None if offset is None else _size(offset)


def _size(made: _Made) -> tuple[int, ...]:
    if made.name != "torch Size" or not all(type(one) is int and one >= 0 for one in made.arguments[0]):
        raise ValueError("a size that is none")
    return tuple(made.arguments[0])


def _tensor(
    key: str, state: Mapping[str, Any], places: Mapping[tuple[str, Any], Mapping[str, Any]], *, name: str
) -> DcpTensor:
    dtype = state["properties"].state[0]
    if type(dtype) is not _Named:
        raise ValueError(f"the dtype of {key[:80]!r}")
    chunks = []
    for chunk in state["chunks"]:
        offsets, sizes = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
        file, begin, size = _where(places[key, offsets], name=name)
        chunks.append(Chunk(offsets=offsets, sizes=sizes, file=file, begin=begin, bytes=size))
    return DcpTensor(name=key, dtype=dtype.name, shape=_size(state["size"]), chunks=tuple(chunks))


def _value(key: str, info: Mapping[str, Any], *, name: str) -> DcpValue:
    file, begin, size = _where(info, name=name)
    return DcpValue(name=key, file=file, begin=begin, bytes=size)


def _where(info: Mapping[str, Any], *, name: str) -> tuple[str, int, int]:
    file, begin, size = info["relative_path"], info["offset"], info["length"]
    if type(file) is not str or PurePosixPath(file).name != file or file in {"", ".", ".."} or "\0" in file:
        raise _wrong(name, f"it names the file {file!r:.200}, which is not one of its directory")
    if info.get("transform_descriptors"):
        raise _wrong(name, f"{file} was transformed by an extension ({info['transform_descriptors']!r:.80})")
    if type(begin) is not int or type(size) is not int or begin < 0 or size < 0:
        raise _wrong(name, f"it gives a place in {file} that is none")
    return file, begin, size


@dataclass(slots=True)
class _Items:
    """A dict, whose keys need not be hashable."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


class _Machine:
    """Follows the instructions, one method for each kind of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, body: bytes) -> Any:  # noqa: ANN401 - whatever was built
        file = io.BytesIO(body)
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise _wrong(self._name, "it has no end")

    def _step(self, op: str, argument: Any) -> None:  # noqa: ANN401 - as the instruction has it
        push = self._stack.append
        if op in {"PROTO", "FRAME"}:
            return
        if op in _LITERALS:
            push(argument)
        elif op in _CONSTANTS:
            push(_CONSTANTS[op])
        elif op == "MARK":
            push(_MARK)
        elif op in {"EMPTY_DICT", "EMPTY_LIST"}:
            push(_Items() if op == "EMPTY_DICT" else [])
        elif op in {"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"}:
            self._memo[len(self._memo) if op == "MEMOIZE" else argument] = self._stack[-1]
        elif op in {"BINGET", "LONG_BINGET", "GET"}:
            push(self._memo[argument])
        else:
            self._build(op, argument)

    def _build(self, op: str, argument: Any) -> None:  # noqa: ANN401 - as the instruction has it
        pop, push = self._stack.pop, self._stack.append
        if op in {"TUPLE1", "TUPLE2", "TUPLE3"}:
            taken = [pop() for _ in range(int(op[-1]))]
            push(tuple(reversed(taken)))
        elif op == "TUPLE":
            push(tuple(self._marked()))
        elif op in {"APPEND", "APPENDS"}:
            more = [pop()] if op == "APPEND" else self._marked()
            self._top(list).extend(more)
        elif op in {"SETITEM", "SETITEMS"}:
            flat = [pop(), pop()][::-1] if op == "SETITEM" else self._marked()
            self._top(_Items).items.extend(zip(flat[::2], flat[1::2], strict=True))
        elif op in {"STACK_GLOBAL", "GLOBAL"}:
            push(self._named(" ".join([pop(), pop()][::-1]) if op == "STACK_GLOBAL" else argument))
        elif op in {"REDUCE", "NEWOBJ"}:
            arguments, made = pop(), pop()
            push(_Made(made.name, tuple(arguments)) if type(made) is _Named else self._refuse(op))
        elif op == "BUILD":
            state = _plain(pop())
            self._top(_Made).state = state
        else:
            self._refuse(op)

    def _top(self, kind: type[Any]) -> Any:  # noqa: ANN401 - of that kind
        return self._stack[-1] if type(self._stack[-1]) is kind else self._refuse("a value of another kind")

    def _marked(self) -> list[Any]:
        at = max(place for place, value in enumerate(self._stack) if value is _MARK)
        taken = self._stack[at + 1 :]
        del self._stack[at:]
        return taken

    def _named(self, name: str) -> _Named:
        if name in _KNOWN:
            return _Named(name)
        module, _, rest = name.partition(" ")
        if module == "torch" and rest.isidentifier():
            return _Named(rest)  # a dtype: a word, which whoever knows the dtypes looks up
        raise _wrong(self._name, f"it names {name[:200]!r}, which does not belong there")

    def _refuse(self, what: str) -> Any:  # noqa: ANN401 - never returns
        raise _wrong(self._name, f"it has the instruction {what[:40]}, which does not belong there")


_LITERALS = {
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "SHORT_BINBYTES", "BINBYTES",
}  # fmt: skip
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value
    """Return a state whose keys are text as a dict."""
    if type(value) is _Items and all(type(key) is str for key, _ in value.items):
        return dict(value.items)
    return value


def _wrong(name: str, why: str) -> CorruptObjectError:
    return CorruptObjectError(f"{name}: not the metadata of a DCP directory: {why}")
