"""One checkpoint is named as ROOT/JOB@STEP wherever one can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.stores import shard_image, small_store

from toprope.__main__ import main
from toprope.store.errors import UsageError
from toprope.store.log.chain import read_log
from toprope.store.objects.directory import DirectoryStore
from toprope.store.places import parse_place, parse_range, selected


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a store of two jobs, so that one must be named."""
    (root := tmp_path / "root").mkdir()
    small_store(DirectoryStore(root), steps=(10, 20), name="gpt")
    small_store(DirectoryStore(root), steps=(10, 20), name="vit")
    return root


def test_the_words_that_read_take_it_and_read_that_checkpoint_alone(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = f"{root}/vit@10"
    assert main(["show", at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["step"] == 10
    assert main(["verify", at, "--json"]) == 0
    assert [(one["job"], one["step"]) for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [("vit", 10)]
    assert main(["restore", at, "--to", str(tmp_path / "out")]) == 0
    first = tmp_path / "out" / "rank-00000-of-00002.safetensors"
    assert first.read_bytes() == shard_image(step=10, rank=0)
    assert main(["export", at, str(tmp_path / "weights"), "--only", "model.*", "--per-rank"]) == 0
    assert "exported step 10 of job vit" in capsys.readouterr().out
    (target := tmp_path / "other").mkdir()
    assert main(["copy", at, str(target)]) == 0
    copied = read_log(DirectoryStore(target), "vit")
    assert [ready.step for ready in copied.readies.values()] == [10]
    assert main(["verify", str(target)]) == 0


@pytest.mark.parametrize("more", [["--job", "gpt"], ["--step", "20"]], ids=["job", "step"])
@pytest.mark.parametrize("word", ["show", "verify"])
def test_job_or_step_given_beside_it_is_wrong_use(
    root: Path, word: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, f"{root}/vit@10", *more]) == 64
    assert "leave out --job and --step" in capsys.readouterr().err


def test_a_root_that_names_no_checkpoint_is_a_root() -> None:
    for root in ("store", "/a/b@c", "s3://bucket/prefix?endpoint=http://h:1"):
        assert selected(root, "gpt", 10) == (root, "gpt", 10)
    assert selected("s3://b/p/gpt@10?region=x", None, None) == ("s3://b/p?region=x", "gpt", 10)


@pytest.mark.parametrize(
    ("end", "what"),
    [
        ("gpt@x", "'x' is no step: give JOB@STEP"),
        ("gpt@", "'' is no step"),
        ("gpt@10..20", "is a range: give one step"),
        ("GPT@10", "job 'GPT' is not usable"),
    ],
)
def test_a_path_that_seems_to_name_a_checkpoint_and_does_not_is_wrong_use(
    root: Path, capsys: pytest.CaptureFixture[str], end: str, what: str
) -> None:
    for word in ("show", "verify"):
        assert main([word, f"{root}/{end}"]) == 64
        (line,) = capsys.readouterr().err.splitlines()
        assert what in line
        assert f"there is no directory {root}/{end}" in line


def test_a_store_whose_name_ends_so_is_a_store(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root.rename(there := root.with_name("me@host"))
    assert main(["verify", str(there)]) == 0
    there.rename(root)
    assert main(["verify", str(there), "--job", "gpt"]) == 4
    assert "can't be reached" in capsys.readouterr().err


def test_a_range_is_no_place() -> None:
    assert parse_range("gpt@10") == ("gpt", 10, None)
    assert parse_range("gpt@10..20") == ("gpt", 10, 20)
    assert parse_range("gpt@10..") == ("gpt", 10, -1)
    assert parse_place("gpt@10") == ("gpt", 10)
    for text in ("gpt@10..20", "gpt", "@10", "gpt@", "GPT@10", "gpt@ten"):
        with pytest.raises(UsageError):
            parse_place(text)
