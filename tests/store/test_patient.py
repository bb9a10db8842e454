"""What another node has just written may not be seen yet on a file system of the network: then it is waited for."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import shard_image, small_store

from toprope.__main__ import main
from toprope.store.conformance import ObjectStoreContract
from toprope.store.errors import (
    CorruptObjectError,
    MissingObjectError,
    StoreError,
    UnavailableError,
    UnseenDirectoryError,
    UnseenObjectError,
)
from toprope.store.log.chain import read_log
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key, is_named
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import open_store
from toprope.store.objects.patient import PATIENCE_S, REST_S, PatientStore, is_networked
from toprope.store.objects.protocol import ObjectStore
from toprope.store.transfer.restore import restore

LAG_S = 5.0


class TestPatientStore(ObjectStoreContract):
    def make(self, tmp_path: Path) -> ObjectStore:
        return PatientStore(FakeStore(), patience_s=0.0)


class Clock:
    def __init__(self) -> None:
        self.at_s = 1000.0

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds

    def now_s(self) -> float:
        return self.at_s


class OtherNode(DirectoryStore):
    """The directory as a node sees it that did not write there: for a while no new file, or one without its bytes.

    It may be ``only`` those with this in their names. What was looked for and not found is remembered as missing, until
    its directory is read again.
    """

    def __init__(
        self, root: Path, clock: Clock, *, lag_s: float = LAG_S, seen: str = "missing", only: str = ""
    ) -> None:
        super().__init__(root)
        self.clock = clock
        self.until_s = clock.at_s + lag_s
        self.seen = seen
        self.only = only
        self.remembered: set[Key] = set()

    def hides(self, key: Key) -> bool:
        if is_named(key) and self.only in key and self.clock.at_s < self.until_s:
            self.remembered.add(key)
        return key in self.remembered

    def size(self, key: Key) -> int:
        if not self.hides(key):
            return super().size(key)
        if self.seen == "empty":
            return 0
        raise MissingObjectError(f"{key}: no such object")

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        if self.hides(key):
            self.refuse(key, length)
            return b""
        return super().read(key, start=start, length=length, uncached=uncached)

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        if self.hides(key):
            self.refuse(key, length)
        yield from super().stream(key, start=start, length=length)

    def refuse(self, key: Key, length: int | None) -> None:
        if self.seen == "missing":
            raise MissingObjectError(f"{key}: no such object")
        if length:
            raise CorruptObjectError(f"{key}: ends at byte 0, expected at least {length}")

    def list(self, prefix: str) -> Iterator[Key]:
        if self.clock.at_s >= self.until_s:
            self.remembered = {key for key in self.remembered if not key.startswith(prefix)}
        yield from (key for key in super().list(prefix) if not self.hides(key))


def patient(node: OtherNode) -> PatientStore:
    return PatientStore(node, sleep=node.clock.sleep, now_s=node.clock.now_s)


@pytest.mark.fault("B59")
@pytest.mark.parametrize("seen", ["missing", "empty"])
def test_what_another_node_wrote_is_verified_and_restored_as_soon_as_it_is_seen(tmp_path: Path, seen: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    small_store(DirectoryStore(root), steps=(10,))
    clock = Clock()
    store = patient(OtherNode(root, clock, seen=seen))
    state = read_log(store, "job")
    assert verify_checkpoint(store, state, state.live[-1]).damages == ()
    assert LAG_S <= clock.at_s - 1000.0 < 2 * LAG_S
    later = patient(OtherNode(root, clock, seen=seen))
    restore(later, state, to=tmp_path / "out")
    assert [path.read_bytes() for path in sorted((tmp_path / "out").glob("*.safetensors"))] == [
        shard_image(step=10, rank=rank) for rank in (0, 1)
    ]


@pytest.mark.fault("B59")
@pytest.mark.parametrize("seen", ["missing", "empty"])
def test_what_stays_unseen_is_said_to_be_so_within_a_bound_and_is_not_called_corrupt(tmp_path: Path, seen: str) -> None:
    small_store(DirectoryStore(tmp_path), steps=(10, 20))
    clock = Clock()
    store = patient(OtherNode(tmp_path, clock, lag_s=REST_S, seen=seen))
    state = read_log(store, "job")
    damages = [damage for seq in state.live for damage in verify_checkpoint(store, state, seq).damages]
    assert len(damages) == 2
    assert all("not visible yet, or removed" in damage.what for damage in damages)
    assert PATIENCE_S <= clock.at_s - 1000.0 < PATIENCE_S + LAG_S, "for all of them together"


@pytest.mark.fault("B59")
@pytest.mark.parametrize("words", [(), ("--sample", "1")])
@pytest.mark.parametrize("only", ["", ".safetensors"])
@pytest.mark.parametrize("seen", ["missing", "empty"])
def test_verify_tells_what_stays_unseen_from_what_is_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seen: str,
    only: str,
    words: tuple[str, ...],
) -> None:
    small_store(DirectoryStore(tmp_path), steps=(10, 20))

    def verified(only: str) -> tuple[int, str, str]:
        other = patient(OtherNode(tmp_path, Clock(), lag_s=REST_S, seen=seen, only=only))
        with monkeypatch.context() as there:
            there.setattr("toprope.store.cli.verify.open_store", lambda _: other)
            status = main(["verify", str(tmp_path), *words])
        return status, *capsys.readouterr()

    status, out, err = verified(only)
    assert status == UnavailableError.exit_status
    assert set(re.findall(r"^\w+", out, re.MULTILINE)) == {"UNSEEN"}
    assert out.count("not visible yet, or removed") == len(re.findall(r"^  job", out, re.MULTILINE)) > 0
    assert err.splitlines()[-1].startswith("NOT VISIBLE YET, OR REMOVED: ")
    assert "DAMAGED" not in out + err
    assert verified("of another job")[0] == 0, "where it is seen it is good"

    spoiled = next(tmp_path.glob("job/shards/**/s000000020/*.safetensors"))
    spoiled.write_bytes(spoiled.read_bytes()[:-1])
    status, out, err = verified("s000000010")
    assert status == StoreError.exit_status
    assert re.findall(r"^\w+", out, re.MULTILINE) == ["UNSEEN", "DAMAGED"]
    assert err.splitlines()[-1].startswith("DAMAGED: ")


@pytest.mark.parametrize("seen", ["missing", "empty"])
def test_restore_tells_what_stays_unseen_from_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    small_store(DirectoryStore(root), steps=(10, 20))

    def restored() -> tuple[int, str]:
        other = patient(OtherNode(root, Clock(), lag_s=REST_S, seen=seen, only=".safetensors"))
        with monkeypatch.context() as there:
            there.setattr("toprope.store.cli.checkpoints.open_store", lambda _: other)
            status = main(["restore", str(root), "--to", str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()
        return status, capsys.readouterr().err

    status, err = restored()
    assert status == UnseenObjectError.exit_status
    assert "Try again" in err
    assert err.count("not visible yet, or removed") == 2
    for manifest in root.glob("job/manifests/*"):
        manifest.write_bytes(b"{}")
    status, err = restored()
    assert status == StoreError.exit_status
    assert "Try again" not in err


def test_patience_that_was_rewarded_is_there_again_and_such_as_was_in_vain_only_later(tmp_path: Path) -> None:
    builder = small_store(DirectoryStore(tmp_path), steps=(10,))
    node = OtherNode(tmp_path, Clock())
    store = patient(node)
    (first, second) = [Key(key) for key in builder.store.list("job/shards/") if key.endswith(".safetensors")]
    assert store.size(first) > 0
    node.clock.sleep(PATIENCE_S)
    node.until_s = node.clock.at_s + LAG_S
    assert store.size(second) > 0
    unseen = Key(f"{first}x".replace("safetensorsx", "safetensors.zst"))
    for waited_s in (PATIENCE_S, 0.0):
        began_s = node.clock.at_s
        with pytest.raises(MissingObjectError):
            store.size(unseen)
        assert waited_s <= node.clock.at_s - began_s <= waited_s + LAG_S
    node.clock.sleep(REST_S)
    began_s = node.clock.at_s
    with pytest.raises(MissingObjectError):
        store.size(unseen)
    assert node.clock.at_s - began_s >= PATIENCE_S


def test_what_nobody_names_is_not_waited_for_and_damage_is_told_at_once(tmp_path: Path) -> None:
    builder = small_store(DirectoryStore(tmp_path), steps=(10,))
    node = OtherNode(tmp_path, Clock(), lag_s=0.0)
    store = patient(node)
    with pytest.raises(MissingObjectError, match="no such object"):
        store.read(Key("job/log/00000000000000000099.json"))
    key = next(key for key in builder.store.list("job/shards/") if key.endswith(".safetensors"))
    with pytest.raises(CorruptObjectError, match="ends at byte"):
        store.read(key, start=0, length=1 << 20)
    assert node.clock.at_s == 1000.0


MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:50 / /net rw,relatime shared:1 - nfs4 server:/ rw,vers=4.2
41 40 0:51 / /net/fast\\040disk rw,relatime - xfs /dev/nvme0n1 rw
42 27 0:52 / /bucket rw,relatime - fuse.mount-s3 mount-s3 rw
43 27 0:53 / /inside rw,relatime - fuse.fuse-overlayfs fuse-overlayfs rw
44 27 0:54 / /twice rw,relatime - ext4 /dev/vdb rw
45 44 0:55 / /twice rw,relatime - lustre mgs:/ rw
"""


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("/home/x", False),
        ("/net/a/b", True),
        ("/network", False),
        ("/net/fast disk/a", False),
        ("/bucket", True),
        ("/inside/a", False),
        ("/twice/a", True),
    ],
)
def test_what_is_mounted_at_a_directory_says_whether_it_is_of_the_network(
    tmp_path: Path, where: str, *, expected: bool
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert is_networked(Path(where), mounts=mounts) is expected


def test_a_store_is_patient_on_a_file_system_of_the_network_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(open_store(str(tmp_path)), DirectoryStore) is not is_networked(tmp_path)
    monkeypatch.setattr("toprope.store.objects.opening.is_networked", lambda _: True)
    assert isinstance(open_store(str(tmp_path)), PatientStore)
    assert isinstance(open_store(str(tmp_path), write=True), PatientStore)
    assert isinstance(open_store(str(tmp_path), write=True, patient=False), DirectoryStore)


@pytest.mark.fault("B59")
def test_a_directory_that_another_node_made_and_that_is_not_seen_yet_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, lag_s, made = Clock(), LAG_S, os.mkdir
    store = PatientStore(DirectoryStore(tmp_path), sleep=clock.sleep, now_s=clock.now_s)

    def taken(name: str, mode: int, *, dir_fd: int) -> None:
        """Refuse as the server does; what the other node has made is seen after a while."""
        if clock.at_s - 1000.0 >= lag_s:
            made(name, mode, dir_fd=dir_fd)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr("os.mkdir", taken)
    store.create(Key("job/shards/a"), b"body")
    assert store.read(Key("job/shards/a")) == b"body"
    assert LAG_S <= clock.at_s - 1000.0 < 2 * LAG_S

    lag_s, began_s = REST_S, clock.at_s
    with pytest.raises(UnseenDirectoryError, match=r"not visible yet: .* looked at again for 60 s; try again"):
        store.create(Key("job/other/a"), b"body")
    assert PATIENCE_S <= clock.at_s - began_s < PATIENCE_S + LAG_S
