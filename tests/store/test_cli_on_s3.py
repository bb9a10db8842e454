"""The command line over buckets: on a real server, and on a strict one that gives two keys a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.stores import small_store
from tests.support.strict_s3 import SECRET_KEY, Rule, StrictS3

from toprope.__main__ import main
from toprope.store.objects.opening import open_store


@pytest.mark.parametrize("server", ["strict", "real"])
def test_ls_show_verify_and_restore_read_a_bucket(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], server: str
) -> None:
    root = request.getfixturevalue("s3_root") if server == "real" else strict_root(request.getfixturevalue("strict"))
    small_store(open_store(root, write=True), steps=(10, 20), name="gpt")
    assert main(["ls", root, "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [10, 20]
    assert main(["show", root, "--step", "20"]) == 0
    assert "model.weight" in capsys.readouterr().out
    assert main(["show", root, "--files"]) == 0
    files = capsys.readouterr().out.splitlines()
    assert len(files) == len(set(files)) > 10
    assert main(["verify", root]) == 0
    assert "all good: 2 checkpoints" in capsys.readouterr().err
    assert main(["restore", root, "--to", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


def strict_root(server: StrictS3) -> str:
    server.page = 2
    return server.root("team/runs")


def test_verify_finds_what_is_damaged_on_a_later_page(strict: StrictS3, capsys: pytest.CaptureFixture[str]) -> None:
    root = strict_root(strict)
    small_store(open_store(root, write=True), steps=(10, 20, 30))
    key = next(key for key in sorted(strict.objects, reverse=True) if key.endswith("safetensors"))
    body = bytearray(strict.objects[key].body)
    body[len(body) // 2] ^= 4
    strict.objects[key].body = bytes(body)
    strict.objects[key].checksum = ""  # the store itself does not notice
    assert main(["verify", root]) == 2
    out, err = capsys.readouterr()
    assert key.removeprefix("team/runs/") in out
    assert "DAMAGED: 1 finding, 1 of 3" in err


@pytest.mark.usefixtures("no_waiting")
def test_what_is_wrong_with_a_bucket_is_one_line_and_its_status(
    strict: StrictS3, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = strict.root().replace("s3://bucket/", "s3://bucket-2/")
    for root, status in ((missing, 4), ("s3://Bucket", 64), (strict.root(endpoint="http://127.0.0.1:9"), 4)):
        assert main(["ls", root]) == status
        assert len(capsys.readouterr().err.splitlines()) == 1
    strict.rules.append(Rule(operation="ListObjectsV2", fault="403 AccessDenied", times=99))
    assert main(["verify", strict.root()]) == 4
    err = capsys.readouterr().err
    assert "refuses access (403 AccessDenied)" in err
    assert SECRET_KEY not in err


@pytest.mark.parametrize("server", ["strict", "real"])
def test_pin_and_gc_change_a_bucket(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], server: str
) -> None:
    root = request.getfixturevalue("s3_root") if server == "real" else strict_root(request.getfixturevalue("strict"))
    store = open_store(root, write=True)
    small_store(store, steps=(10, 20, 30, 40), name="gpt")
    assert main(["pin", root, "gpt@10"]) == 0
    assert main(["job", "retain", root, "last=1"]) == 0
    capsys.readouterr()
    before = set(store.list("gpt/"))
    assert main(["gc", root, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    gone = before - set(store.list("gpt/"))
    assert {one["key"] for one in done["garbage"]["condemned"]} == gone
    assert {key.partition("s0000000")[2][:2] for key in gone} == {"20"}
    assert main(["verify", root]) == 0
    assert "all good: 3 checkpoints" in capsys.readouterr().err
