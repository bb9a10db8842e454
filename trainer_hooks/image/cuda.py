"""All that is done with CUDA devices when a snapshot is taken: pinned slots, a stream for copies, and waiting for it.

Everything here does nothing in a process without a CUDA device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from toprope.trainer_hooks.image.copying import lies_in_order, sample_place

_cuda: Any = torch.cuda  # parts of it are untyped
logger = logging.getLogger("toprope")
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process
_streams: dict[int, torch.cuda.Stream] = {}


class Pin:
    """Memory registered as pinned for as long as this object lives, so that devices copy into it by themselves."""

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._runtime: Any = _cuda.cudart() if _cuda.is_initialized() else None
        self.held = self._runtime is not None and int(self._runtime.cudaHostRegister(address, size, _PORTABLE)) == 0
        if self._runtime is not None and not self.held:
            logger.warning("a slot of %d bytes can't be pinned; copies from the device into it are slower", size)

    def release(self) -> None:
        """Give the memory back; it must not be unmapped before."""
        if self.held:
            self._runtime.cudaHostUnregister(self._address)
            self.held = False


def devices_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the CUDA devices of these tensors, in order."""
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})


def at_rest(devices: Iterable[int]) -> None:
    """Wait for all that was asked of these devices, on whatever stream."""
    for device in devices:
        torch.cuda.synchronize(device)


@contextmanager
def copying(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Wait until the devices of these tensors are at rest; copies made inside are done when this ends."""
    devices = devices_of(tensors)
    at_rest(devices)
    with beside(devices):
        yield


@contextmanager
def beside(devices: Iterable[int]) -> Iterator[None]:
    """Ask each device for what is done inside on a stream of its own, beside what trains; it is done when this ends.

    The tensors are kept alive until then, so that no allocator needs to be told of the second stream.
    """
    streams = [_stream(device) for device in devices]
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
        for stream in streams:
            stream.synchronize()


def _stream(device: int) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = _cuda.Stream(device)
    return _streams[device]


def capturing() -> bool:
    """Say whether the current stream is being captured into a graph, which will run without Python."""
    return _cuda.is_initialized() and bool(_cuda.is_current_stream_capturing())


def has(tensors: Iterable[torch.Tensor]) -> bool:
    """Say whether one of these is on a CUDA device."""
    return any(tensor.is_cuda for tensor in tensors)


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is on a CUDA device and its logical values lie there one after the other."""
    return tensor.is_cuda and lies_in_order(tensor)


@dataclass(frozen=True, slots=True)
class DeviceMove:
    """A copy of a contiguous tensor of a device, which it keeps alive, into a place of its dtype and shape."""

    to: torch.Tensor
    source: torch.Tensor

    def run(self) -> None:
        """Ask the device for the copy, on the current stream."""
        self.to.copy_(self.source, non_blocking=True)

    def same(self) -> bool:
        """Say whether both sides have the same bytes."""
        return torch.equal(_bytes(self.to).to(self.source.device), _bytes(self.source))

    def sample(self, turn: int) -> Callable[[], bool]:
        """Keep some of the bytes as they are now; return what says whether both sides have them then."""
        begin, count = sample_place(self.source.nbytes, turn)
        place = slice(begin, begin + count)
        golden = _bytes(self.source)[place].clone()

        def sound() -> bool:
            copied = _bytes(self.to)[place].to(golden.device)
            return torch.equal(golden, copied) and torch.equal(golden, _bytes(self.source)[place])

        return sound


def sampled(moves: Iterable[DeviceMove], turn: int) -> Callable[[], bool]:
    """Keep some bytes of each source as they are now; return what says whether both sides of all have them then."""
    checks = [move.sample(turn) for move in moves]
    return lambda: all(check() for check in checks)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
