"""``ckpt``, whose agent dies at the worst moment: the others have counted it, and it has not answered them."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from torch.distributed.elastic.rendezvous import RendezvousInfo

from toprope.__main__ import main
from toprope.trainer_hooks.torchrun.meeting import Meeting


def die(_: Meeting, __: RendezvousInfo) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    Meeting._agreed = die  # type: ignore[assignment,method-assign]
    sys.exit(main(sys.argv[1:]))
