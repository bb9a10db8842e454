"""What ``ckpt up`` starts: command lines that a user could have typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toprope.coordinator.up import Child, ChildError, Supervisor, commands, layout
from toprope.coordinator.wire import Cadence

PORTS = {"broker": 1, "coordinator": 2, "sidecar": 3}


@pytest.mark.parametrize("codec", ["auto", "zstd", "none"])
def test_the_codec_goes_to_the_sidecar_and_to_nobody_else(codec: str, tmp_path: Path) -> None:
    where = layout(job="gpt", node="a", store=str(tmp_path), directory=tmp_path, memory_dir=tmp_path)
    cadence = Cadence(from_step=0, every=1, local_every=1, object_every=1)
    lines = commands(where, cadence, ports=PORTS, codec=codec)
    at = lines["sidecar"].index("--codec")
    assert lines["sidecar"][at + 1] == codec
    assert not any("--codec" in line for name, line in lines.items() if name != "sidecar")


def bury(tmp_path: Path, *, status: int, last: str, all_served: bool = False) -> None:
    """Let the coordinator of an ``up`` end that says this in the end; its log has words of an earlier one."""
    log = tmp_path / "coordinator.log"
    log.write_text("ckpt: what an earlier one has said\n")
    code = f"import sys; sys.stderr.write({last!r}); sys.exit({status})"
    child = Child(name="coordinator", command=[sys.executable, "-S", "-c", code], log=log)
    supervisor = Supervisor(children=[child], all_served=all_served)
    supervisor.watch(0.0)
    assert child.process is not None
    child.process.wait(30)
    supervisor.watch(0.0)


REFUSED = "ckpt: store s3://b refuses access (403 SignatureDoesNotMatch): check the credentials"


def test_up_ends_with_the_reason_where_the_store_has_never_taken_a_coordinator(tmp_path: Path) -> None:
    with pytest.raises(
        ChildError, match=r"stopped for good: store s3://b refuses access .*: check the credentials"
    ) as one:
        bury(tmp_path, status=4, last=REFUSED)
    assert one.value.exit_status == 4


@pytest.mark.parametrize(
    ("status", "last", "said"),
    [
        (
            4,
            REFUSED,
            "ended with status 4: store s3://b refuses access (403 SignatureDoesNotMatch): check the credentials",
        ),
        (5, "Traceback\nOSError: too many files", "ended with status 5: OSError: too many files"),
        (5, "", "ended with status 5"),
    ],
    ids=["refused later", "unforeseen", "without a word"],
)
def test_a_child_that_is_started_again_has_its_last_words_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, last: str, said: str
) -> None:
    bury(tmp_path, status=status, last=last, all_served=True)
    log = tmp_path / "coordinator.log"
    assert capsys.readouterr().err == f"ckpt up: the coordinator {said}; starting it again in 0.5 s (log: {log})\n"
