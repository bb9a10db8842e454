"""Writing values into a tensor that is there already, whatever its strides."""

from __future__ import annotations

import torch


def overwrite(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy values into a tensor of the same shape and dtype; it keeps its strides and its storage."""
    target = live.detach()
    for dimension, (size, stride) in enumerate(zip(live.shape, live.stride(), strict=True)):
        if stride == 0 and size > 1:  # an expanded tensor: torch refuses to write one place several times
            target, saved = target.narrow(dimension, 0, 1), saved.narrow(dimension, 0, 1)
    if live.dtype.itemsize == 1:  # as bytes: not every float8 and float4 can be copied everywhere
        target, saved = target.view(torch.uint8), saved.view(torch.uint8)
    with torch.no_grad():
        target.copy_(saved)


def can_hold(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Say whether a tensor of the same shape and dtype can take these values, of which some may share their place."""
    if not _may_overlap(live):
        return True
    extent = 1 + sum((size - 1) * stride for size, stride in zip(live.shape, live.stride(), strict=True))
    tried = torch.empty(extent, dtype=live.dtype).as_strided(live.shape, live.stride())
    overwrite(tried, saved)
    return torch.equal(_bytes(tried), _bytes(saved))


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Say whether two elements may lie in one place. Sorted by stride, each dimension must step over those before."""
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
