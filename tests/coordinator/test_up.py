"""What ``ckpt up`` starts: command lines that a user could have typed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from toprope.__main__ import main
from toprope.coordinator.up import Child, ChildError, Layout, Supervisor, commands, layout, not_serving
from toprope.coordinator.wire import Cadence
from toprope.store.errors import NoStoreError
from toprope.store.objects.s3_errors import translated

PORTS = {"broker": 1, "coordinator": 2, "sidecar": 3}


@pytest.mark.parametrize("codec", ["auto", "zstd", "none"])
def test_the_codec_goes_to_the_sidecar_and_to_nobody_else(codec: str, tmp_path: Path) -> None:
    where = layout(job="gpt", node="a", store=str(tmp_path), directory=tmp_path, memory_dir=tmp_path)
    cadence = Cadence(from_step=0, every=1, local_every=1, object_every=1)
    lines = commands(where, cadence, ports=PORTS, codec=codec)
    at = lines["sidecar"].index("--codec")
    assert lines["sidecar"][at + 1] == codec
    assert not any("--codec" in line for name, line in lines.items() if name != "sidecar")


@pytest.mark.parametrize("given", ["wait", "proceed", None])
def test_what_to_do_while_the_log_is_away_goes_to_the_coordinators_and_to_nobody_else(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, list[str]]] = []

    def note(where: Layout, cadence: Cadence, *, told: Sequence[str], codec: str, **_: object) -> None:
        started.append(commands(where, cadence, ports=PORTS, codec=codec, told=told))

    monkeypatch.setattr("toprope.coordinator.up.up", note)
    option = [] if given is None else ["--on-log-outage", given]
    assert main(["up", "--job", "gpt", "--store", str(tmp_path), "--dir", str(tmp_path), *option]) == 0
    (lines,) = started
    at = lines["coordinator"].index("--on-log-outage")
    assert lines["coordinator"][at + 1] == (given or "proceed")
    assert not any("--on-log-outage" in line for name, line in lines.items() if name != "coordinator")


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


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "SignatureDoesNotMatch", "refuses access .*: check the credentials"),
        (404, "NoSuchBucket", "no such bucket"),
    ],
)
def test_up_ends_with_the_reason_where_the_store_has_never_taken_a_coordinator(
    tmp_path: Path, status: int, code: str, said: str
) -> None:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = translated(ClientError(answer, "PutObject"), what="probe", where="s3://b")
    assert isinstance(error, NoStoreError)
    with pytest.raises(ChildError, match=f"stopped for good: .*{said}") as one:
        bury(tmp_path, status=NoStoreError.exit_status, last=f"ckpt: {error}")
    assert one.value.exit_status == 4


def test_up_waits_for_a_store_that_is_only_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bury(tmp_path, status=4, last="ckpt: job/log/0.json: no answer from store s3://base (ReadTimeoutError)")
    assert "ended with status 4: job/log/0.json: no answer from store s3://base" in capsys.readouterr().err


def test_up_that_ends_because_nobody_serves_says_what_the_coordinator_waits_for(tmp_path: Path) -> None:
    (tmp_path / "coordinator.log").write_text("once\nwaits for the object store: no answer\n")
    (tmp_path / "broker.log").write_text("listens\n")
    children = [Child(name=name, command=[], log=tmp_path / f"{name}.log") for name in ("broker", "coordinator")]
    said = "do not serve after 60 s (the coordinator says: waits for the object store: no answer)"
    assert f"{said}; see {tmp_path}" in str(not_serving(children, tmp_path))
    (tmp_path / "coordinator.log").write_text("")
    assert str(not_serving(children, tmp_path)).endswith(f"after 60 s; see {tmp_path}")


@pytest.mark.parametrize(
    ("all_served", "status", "last", "said"),
    [
        (
            True,
            4,
            REFUSED,
            "ended with status 4: store s3://b refuses access (403 SignatureDoesNotMatch): check the credentials",
        ),
        (True, 5, "Traceback\nOSError: too many files", "ended with status 5: OSError: too many files"),
        (True, 5, "", "ended with status 5"),
        (False, 5, "ckpt: no luck", "ended with status 5: no luck"),
    ],
    ids=["refused later", "unforeseen", "without a word", "not refused, before it served"],
)
def test_a_child_that_is_started_again_has_its_last_words_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, last: str, said: str, *, all_served: bool
) -> None:
    bury(tmp_path, status=status, last=last, all_served=all_served)
    log = tmp_path / "coordinator.log"
    assert capsys.readouterr().err == f"ckpt up: the coordinator {said}; starting it again in 0.5 s (log: {log})\n"
