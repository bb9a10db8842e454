"""The directory store: the contract, and what only files can get wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from toprope.store.conformance import ObjectStoreContract
from toprope.store.digest import CHUNK_BYTES, digest, digest_of_file, digest_of_object
from toprope.store.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    MissingObjectError,
    UnavailableError,
    UsageError,
)
from toprope.store.names import Key, key_parts
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import absolute_root, open_store, sweep_uploads
from toprope.store.objects.protocol import STREAM_BYTES, ObjectStore

KEY = Key("job/log/0.json")


class TestDirectoryStore(ObjectStoreContract):
    def make(self, tmp_path: Path) -> ObjectStore:
        return DirectoryStore(tmp_path)


class TestDirectoryStoreOnTmpfs(ObjectStoreContract):
    @pytest.fixture
    def tmp_path(self, memory_dir: Path) -> Path:
        return memory_dir

    def make(self, tmp_path: Path) -> ObjectStore:
        return DirectoryStore(tmp_path)


def _names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Recorder:
    """Writes down which system calls of ``os`` the store makes, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.calls: list[str] = []
        for name in names:
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def _recorded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if name == "fsync":
                kind = "directory" if Path(f"/proc/self/fd/{args[0]}").is_dir() else "file"
                self.calls.append(f"fsync {kind}")
            else:
                self.calls.append(name)
            return function(*args, **kwargs)

        return call


def test_create_syncs_the_file_before_the_link_and_the_directory_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.create(KEY, b"makes the directories")
    recorder = Recorder(monkeypatch, "fsync", "link")
    store.create(Key("job/log/1.json"), b"x")
    assert recorder.calls == ["fsync file", "link", "fsync directory"]


def test_new_directories_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, "fsync", "link", "mkdir")
    DirectoryStore(tmp_path).create(KEY, b"x")
    made = ["mkdir", "fsync directory"]
    assert recorder.calls == [*made, *made, "fsync file", "link", "fsync directory"]


def test_of_ever_more_directories_it_is_not_kept_for_ever_that_they_were_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toprope.store.objects.directory._MAX_SYNCED", 8)
    store = DirectoryStore(tmp_path)
    for step in range(20):
        store.create(Key(f"job/shards/{step}/0"), b"x")
        assert len(store._synced) <= 8
    recorder = Recorder(monkeypatch, "fsync")
    store.create(Key("job/shards/0/1"), b"y")
    assert recorder.calls.count("fsync directory") > 1, "it was forgotten, and is synced again"
    assert len(list(store.list("job/"))) == 21


def test_a_loser_and_an_uncached_reader_sync_the_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.create(KEY, b"x")
    recorder = Recorder(monkeypatch, "fsync")
    with pytest.raises(AlreadyExistsError):
        store.create(KEY, b"y")
    assert recorder.calls == ["fsync file", "fsync directory"]
    store.read(KEY, uncached=True)
    assert recorder.calls == ["fsync file", "fsync directory", "fsync directory"]


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_write_that_fails_leaves_no_object_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = DirectoryStore(tmp_path)
    store.create(KEY, b"makes the directories")

    def fail(*_: object, **__: object) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(UnavailableError, match=r"^job/log/1\.json: No space left on device in store .*; make room"):
            store.create(Key("job/log/1.json"), b"x")
    assert _names_in(tmp_path / "job" / "log") == ["0.json"]


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create(KEY, b"x")
    shutil.rmtree(tmp_path / "job")
    store.create(KEY, b"y")
    assert store.read(KEY) == b"y"


def test_a_directory_that_is_removed_in_mid_create_is_no_missing_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)

    def remove(*_: object, **__: object) -> object:
        shutil.rmtree(tmp_path / "job")
        raise FileNotFoundError(errno.ENOENT, "")

    monkeypatch.setattr(os, "link", remove)
    with pytest.raises(UnavailableError, match="was removed"):
        store.create(KEY, b"x")


def test_more_than_is_read_at_once_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    store.create(KEY, bytes(102))
    monkeypatch.setattr("toprope.store.objects.protocol.MAX_WHOLE_BYTES", 100)
    for start in (0, 1):
        with pytest.raises(CorruptObjectError, match="at most 100 are read at once"):
            store.read(KEY, start=start)
    assert (len(store.read(KEY, start=2)), len(store.read(KEY, length=102))) == (100, 102)


def test_temporaries_are_no_objects(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create(KEY, b"x")
    (tmp_path / "job" / "log" / ".tmp-00").write_bytes(b"left by a crash")
    assert list(store.list("")) == [KEY]


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "a/../b", "..", "a//b", "a/.tmp-1", "a/\0", "a/%2e", "a\n", "a" * 201]
)
def test_a_key_that_could_lead_out_is_refused(tmp_path: Path, key: str) -> None:
    store = DirectoryStore(tmp_path)
    for use in (lambda: store.create(Key(key), b""), lambda: store.read(Key(key)), lambda: store.size(Key(key))):
        with pytest.raises(UsageError, match="is not a key"):
            use()
    assert _names_in(tmp_path) == []


def test_the_parts_of_a_key() -> None:
    assert key_parts("a/b.c/-d_E") == ("a", "b.c", "-d_E")


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "job").mkdir(parents=True)
    (root / "job" / "shards").symlink_to(outside)
    (root / "job" / "secret").symlink_to(outside / "secret")
    store = DirectoryStore(root)
    for key in ("job/shards/secret", "job/secret"):
        with pytest.raises(CorruptObjectError, match="not a plain file"):
            store.read(Key(key))
    with pytest.raises(CorruptObjectError):
        store.create(Key("job/shards/new"), b"")
    with pytest.raises(AlreadyExistsError):
        store.create(Key("job/secret"), b"overwritten")
    assert list(store.list("")) == []
    assert _names_in(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_what_is_no_plain_file_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "job" / "directory").mkdir(parents=True)
    os.mkfifo(tmp_path / "job" / "pipe")
    store = DirectoryStore(tmp_path)
    for key in ("job/directory", "job/pipe"):
        with pytest.raises(CorruptObjectError, match="not a plain file"):
            store.read(Key(key))


def test_a_root_that_is_gone_is_unavailable_and_not_empty(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "gone")
    for use in (
        lambda: store.read(KEY),
        lambda: store.create(KEY, b""),
        lambda: store.size(KEY),
        lambda: list(store.list("")),
    ):
        with pytest.raises(UnavailableError, match="gone"):
            use()
    assert not (tmp_path / "gone").exists()


def test_a_store_is_opened_by_path_or_file_url(tmp_path: Path) -> None:
    made = tmp_path / "a store"
    open_store(str(made), write=True).create(KEY, b"x")
    assert open_store(str(made)).read(KEY) == b"x"
    assert open_store(f"file://{str(made).replace(' ', '%20')}").read(KEY) == b"x"
    assert _names_in(made) == ["job", "probe"]


def test_a_missing_root_is_unavailable_to_readers_and_usage_to_writers(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="nowhere"):
        open_store(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="nowhere/store"):
        open_store(str(tmp_path / "nowhere" / "store"), write=True)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnavailableError, match="not a directory"):
        open_store(str(tmp_path / "file"))


@pytest.mark.parametrize("root", ["s3:bucket", "http://x/", "", "file:relative", "a\0b", "file://host/x"])
def test_a_store_that_this_version_does_not_know_is_refused(root: str) -> None:
    with pytest.raises(UsageError, match="is not usable"):
        open_store(root, write=True)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EROFS])
def test_a_file_system_without_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object, **__: object) -> object:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(UsageError, match="hard links"):
        open_store(str(tmp_path), write=True)
    assert _names_in(tmp_path) == []


def test_a_link_that_replaces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda *_, **__: None)
    with pytest.raises(UsageError):
        open_store(str(tmp_path), write=True)


def test_digests_of_the_same_bytes_are_equal_however_they_are_read(tmp_path: Path) -> None:
    body = os.urandom(CHUNK_BYTES) + b"odd tail"
    store = DirectoryStore(tmp_path)
    store.create(KEY, body)
    expected = digest(body)
    assert digest(memoryview(bytearray(body))) == expected
    assert digest_of_file(tmp_path / KEY) == expected
    assert digest_of_object(store, KEY) == expected
    assert digest_of_object(store, KEY, uncached=True) == expected
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"
    with pytest.raises(MissingObjectError):
        digest_of_object(store, Key("job/none"))


def test_a_long_range_is_streamed_in_order_and_one_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    body = os.urandom(3 * STREAM_BYTES)
    store = DirectoryStore(tmp_path)
    store.create(KEY, body)
    pieces = list(map(bytes, store.stream(KEY, start=5, length=len(body) - 9)))
    assert b"".join(pieces) == body[5:-4]
    assert max(map(len, pieces)) <= STREAM_BYTES
    stream = store.stream(KEY, start=0, length=len(body))
    assert next(stream) == body[:STREAM_BYTES]
    os.truncate(tmp_path / KEY, STREAM_BYTES)
    with pytest.raises(CorruptObjectError, match=rf"ends at byte {STREAM_BYTES}"):
        next(stream)


def test_a_root_means_the_same_from_every_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_root("here/store") == str(tmp_path / "here/store")
    assert absolute_root("/there/store") == "/there/store"
    for url in ("s3://bucket/prefix?region=x", "file:///there/store"):
        assert absolute_root(url) == url


def test_what_dead_writers_left_is_swept_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create(Key("job/shards/a1/x"), b"kept")
    (tmp_path / "job/shards/a1/.tmp-dead").write_bytes(b"half a shard")
    (tmp_path / "job/shards/.hidden").write_bytes(b"not ours")
    alive = tmp_path / "job/shards/a1/.tmp-alive"
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert sweep_uploads(str(tmp_path), "job") == ("job/shards/a1/.tmp-dead",)
        assert alive.exists()
    assert sweep_uploads(str(tmp_path), "job") == ("job/shards/a1/.tmp-alive",)
    assert _names_in(tmp_path / "job/shards") == [".hidden", "a1"]
    assert store.read(Key("job/shards/a1/x")) == b"kept"


def test_a_temporary_file_is_locked_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, swept = DirectoryStore(tmp_path), []
    fsync = os.fsync

    def sweeping(descriptor: int) -> None:
        if (tmp_path / "job/shards").is_dir():
            swept.append(store.sweep_temporaries("job/"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sweeping)
    store.create(Key("job/shards/x"), b"whole")
    assert swept
    assert set(swept) == {()}
    assert store.read(Key("job/shards/x")) == b"whole"


def test_directories_that_a_deletion_leaves_empty_go_and_those_of_the_job_stay(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create(Key("job/shards/a1/s1/x"), b"")
    store.create(Key("job/shards/a2/s1/x"), b"")
    store.delete([Key("job/shards/a1/s1/x")])
    assert _names_in(tmp_path / "job/shards") == ["a2"]
    store.delete([Key("job/shards/a2/s1/x")])
    assert _names_in(tmp_path / "job") == ["shards"]
    store.create(Key("job/shards/a1/s1/y"), b"again")
    assert list(store.list("")) == ["job/shards/a1/s1/y"]
