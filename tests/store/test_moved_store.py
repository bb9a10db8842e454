"""A store has no address inside: it is read by a relative path, after it was moved, and through a link."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.stores import small_store

from toprope.__main__ import main
from toprope.store.objects.directory import DirectoryStore


def restored(store: str, to: str) -> bytes:
    """Return the bytes of rank 0 of the newest checkpoint, restored by the command line."""
    assert main(["restore", store, "--to", to]) == 0
    return next(iter(sorted(Path(to).glob("*.safetensors")))).read_bytes()


@pytest.mark.fault("B149")
def test_the_newest_is_restored_from_a_relative_path_after_a_move_and_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    Path("store").mkdir()
    small_store(DirectoryStore(Path("store")), steps=(10, 20))
    expected = restored("store", "out")
    assert b'"step":"20"' in expected.replace(b" ", b"")
    monkeypatch.chdir(tmp_path / "here" / "below")
    assert restored("../store", "out") == expected
    Path("../store").rename(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert restored("elsewhere", "moved") == expected
    Path("link").symlink_to("elsewhere")
    assert restored("link", "linked") == expected
    monkeypatch.chdir("/")
    assert restored(str(tmp_path / "link"), str(tmp_path / "from-root")) == expected
    capsys.readouterr()


@pytest.mark.fault("B149")
def test_newest_and_best_are_records_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "store"
    root.mkdir()
    small_store(DirectoryStore(root), steps=(10, 20, 30))
    assert main(["pin", str(root), "job@10"]) == 0
    assert main(["metric", str(root), "job@10", "loss=0.1"]) == 0
    assert main(["restore", str(root), "--to", str(tmp_path / "out")]) == 0
    newest = next(iter(sorted((tmp_path / "out").glob("*.safetensors")))).read_bytes()
    assert b'"step":"30"' in newest.replace(b" ", b""), "what is best or pinned does not change what is newest"
    assert main(["ls", str(root)]) == 0
    assert "10" in capsys.readouterr().out
