"""Which words torchrun is given in place of the user's, and which are refused."""

from __future__ import annotations

import pytest

from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.torchrun.settings import Asked, in_care, safe_words, without_program

SAFE = "--rdzv-conf=is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5"


def elastic(**more: str) -> Asked:
    return Asked(**{"nodes": "1:2", "run_id": "job", **more})  # type: ignore[arg-type]


def test_several_nodes_meet_at_the_store_of_nobody() -> None:
    assert safe_words(elastic(), rendezvous="h:1") == ["--rdzv-backend=toprope", "--rdzv-endpoint=h:1", SAFE]
    assert safe_words(elastic(endpoint="h:1"), rendezvous="") == safe_words(elastic(), rendezvous="h:1")


@pytest.mark.parametrize(
    "asked",
    [
        Asked(nodes="1"),
        Asked(nodes="1:1"),
        Asked(nodes="1", endpoint="localhost:0"),
        Asked(nodes="1:2", standalone=True),
    ],
)
def test_one_node_hosts_its_own_rendezvous(asked: Asked) -> None:
    assert safe_words(asked, rendezvous="") == ["--rdzv-backend=toprope", "--rdzv-endpoint=localhost:0"]


def test_one_node_whose_port_was_picked_is_left_as_it_is() -> None:
    assert safe_words(Asked(nodes="1", port=29500), rendezvous="") == []


def test_what_the_user_sets_safely_stays() -> None:
    words = safe_words(elastic(configuration="last_call_timeout=9, keep_alive_interval=2"), rendezvous="h:1")
    assert words[-1] == "--rdzv-conf=is_host=0,last_call_timeout=9,keep_alive_interval=2,keep_alive_max_attempt=5"


@pytest.mark.parametrize(
    ("asked", "rendezvous", "message"),
    [
        (elastic(), "", "give --rendezvous"),
        (elastic(run_id="none"), "h:1", "--rdzv-id"),
        (elastic(backend="etcd-v2"), "h:1", "c10d"),
        (elastic(endpoint="h:2"), "h:1", "give one of them"),
        (Asked(nodes="1", standalone=True), "h:1", "give one of them"),
        (elastic(configuration="is_host=1"), "h:1", "ends? with one agent|end with one agent"),
        (elastic(configuration="keep_alive_max_attempt=2"), "h:1", "2 s: below 3 s an agent"),
        (elastic(configuration="last_call_timeout=1"), "h:1", "last_call_timeout: give at least 5 s"),
        (elastic(configuration="last_call_timeout=soon"), "h:1", "not a number"),
        (elastic(configuration="soon"), "h:1", "not NAME=VALUE"),
    ],
)
def test_what_would_not_restart_reliably_is_refused(asked: Asked, rendezvous: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        safe_words(asked, rendezvous=rendezvous)


def test_the_script_is_put_into_care_and_its_arguments_are_left_alone() -> None:
    head = ["--nnodes=1:2", "--rdzv_conf", "join_timeout=9", "-m", "--rdzv-backend=static", "--standalone"]
    head += ["--max-restarts", "3"]
    words = in_care(head, program=["python", "-u", "-m"], tail=["train", "-m", "--rdzv-conf=x"], safe=[SAFE])
    assert words == [
        *("--nnodes=1:2", "--rdzv-backend=static", "--max-restarts", "3", SAFE, "--no-python"),
        *("python", "-u", "-m", "train", "-m", "--rdzv-conf=x"),
    ]


def test_the_program_is_torchrun() -> None:
    assert without_program(["/usr/bin/torchrun", "--nnodes=1", "a.py"]) == ["--nnodes=1", "a.py"]
    assert without_program(["python3", "-m", "torch.distributed.run", "a.py"]) == ["a.py"]
    for other in ([], ["python", "a.py"], ["deepspeed", "a.py"]):
        with pytest.raises(UsageError, match="not torchrun"):
            without_program(other)
