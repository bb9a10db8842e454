"""One launch of the job: which rank this process is, and what the ranks tell each other once, before they train.

Messages go through the job's own process group as byte tensors with JSON inside, their lengths first: the object
collectives of torch would unpickle what they receive.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from toprope.trainer_hooks.errors import UsageError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks of the job."""

    rank: int
    size: int

    def broadcast(self, message: Any) -> Any:  # noqa: ANN401 - JSON
        """Return rank 0's message on every rank."""
        if self.size == 1:
            return message
        body = json.dumps(message).encode() if self.rank == 0 else b""
        length = torch.tensor([len(body)], dtype=torch.int64, device=_device())
        distributed.broadcast(length, src=0)
        buffer = _bytes_tensor(body, int(length.item()))
        distributed.broadcast(buffer, src=0)
        return json.loads(bytes(buffer.cpu().tolist()))

    def gather(self, message: Any) -> list[Any]:  # noqa: ANN401 - JSON
        """Return the messages of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [message]
        body = json.dumps(message).encode()
        length = torch.tensor([len(body)], dtype=torch.int64, device=_device())
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        distributed.all_gather(lengths, length)
        counts = [int(count.item()) for count in lengths]
        mine = _bytes_tensor(body, max(counts))
        buffers = [torch.zeros_like(mine) for _ in range(self.size)]
        distributed.all_gather(buffers, mine)
        return [json.loads(bytes(buffer[:count].cpu().tolist())) for buffer, count in zip(buffers, counts, strict=True)]


def _bytes_tensor(body: bytes, length: int) -> torch.Tensor:
    assert length <= MAX_MESSAGE_BYTES
    return torch.frombuffer(bytearray(body.ljust(max(length, 1), b" ")), dtype=torch.uint8).to(_device())


def _device() -> torch.device:
    backend = str(distributed.get_backend_config())
    return torch.device("cpu" if "cpu" in backend or "gloo" in backend else f"cuda:{torch.cuda.current_device()}")


def this_world() -> World:
    """Return this process's rank and the size of the default process group; one rank when there is none.

    Raises:
        UsageError: the launcher started several ranks and the process group has not been made yet.
    """
    if distributed.is_available() and distributed.is_initialized():
        return World(distributed.get_rank(), distributed.get_world_size())
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1":
        raise UsageError(
            f"WORLD_SIZE is {launched} and there is no process group; call torch.distributed.init_process_group() "
            "before you make the Checkpointer"
        )
    return World(0, 1)


_launch_ids: dict[int, str] = {}
_rounds: dict[int, int] = {}


def own_launch_id() -> str:
    """Return 128 random bits of the operating system, drawn once per process; rank 0's name the launch."""
    return _launch_ids.setdefault(os.getpid(), os.urandom(16).hex())


def next_round() -> int:
    """Return 0, then 1, and so on: a launch that restores again, in one process, asks for another attempt."""
    _rounds[os.getpid()] = _rounds.get(os.getpid(), -1) + 1
    return _rounds[os.getpid()]


def versions() -> dict[str, str]:
    """Return what runs here, for the record: versions, image, and the launcher's own count of restarts."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "toprope": _own_version(),
        "driver": _driver_version(),
        "image": os.environ.get("CKPT_IMAGE", ""),
        "launcher_restarts": os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
    }
    return {name: version for name, version in found.items() if version}


def _own_version() -> str:
    try:
        return importlib.metadata.version("toprope")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver_version() -> str:
    if not torch.cuda.is_available():
        return ""
    return f"cuda {torch.version.cuda}, driver {_driver_number()}"


def _driver_number() -> int:
    read: Any = vars(torch._C)["_cuda_getDriverVersion"]  # noqa: SLF001 - there is no public name for it
    return int(read())
