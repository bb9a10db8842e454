"""Tensors of torch from bytes, and bytes from tensors: exact, whatever the dtype."""

from __future__ import annotations

import ctypes

import torch

from toprope.store.errors import CorruptObjectError, UsageError

_SAFETENSORS: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _SAFETENSORS.items()}


def dtype_of(stored: str, true_dtype: str | None) -> torch.dtype:
    """Return the dtype of a stored tensor: safetensors' name of it, unless torch's name of it is given.

    Raises:
        CorruptObjectError: this torch has no such dtype.
    """
    return _SAFETENSORS[stored] if true_dtype is None else dtype_named(true_dtype)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of this name in torch.

    Raises:
        CorruptObjectError: this torch has none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptObjectError(f"dtype {name[:80]!r}: torch {torch.__version__} has no such dtype")
    return found


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], str | None]:
    """Return how a tensor is stored: safetensors' dtype and the shape; if it has none, as bytes, and the true dtype."""
    name = _NAMES.get(dtype)
    if name is not None:
        return name, shape, None
    return "U8", (*shape, dtype.itemsize), str(dtype).removeprefix("torch.")


def tensor_from(body: bytes | bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of these bytes."""
    if not body:
        return torch.empty(shape, dtype=dtype)
    own = body if isinstance(body, bytearray) else bytearray(body)
    return torch.frombuffer(own, dtype=torch.uint8).view(dtype).reshape(shape)


def copy_bytes(tensor: torch.Tensor, into: memoryview, *, name: str) -> None:
    """Write the bytes of a tensor, in row-major order.

    Raises:
        UsageError: it is not a plain tensor.
    """
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.layout is not torch.strided:
        raise UsageError(
            f"{name}: a {type(tensor).__qualname__} of layout {tensor.layout}; only plain tensors are taken"
        )
    if tensor.is_quantized:
        raise UsageError(f"{name}: a quantized tensor; only plain tensors are taken")
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    assert len(into) == whole.numel() * whole.dtype.itemsize
    if len(into):
        source = (ctypes.c_char * len(into)).from_address(whole.data_ptr())
        into[:] = memoryview(source).cast("B")
