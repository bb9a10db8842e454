"""The C library's allocator, told to give large buffers back."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 1 << 20
"""From this size on a buffer has pages of its own. A frame that is packed or unpacked has up to 16 MiB."""
_M_MMAP_THRESHOLD = -3


def give_back_large_buffers() -> None:
    """Have the pages of a large buffer go back to the machine when it is freed, in this process from now on.

    Left alone, glibc takes the largest buffer that was ever freed for the size of a common one, and keeps some such
    buffers in the heap of each thread that has had one: a sidecar then grows by the frames that it has packed. Another
    C library than glibc is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
