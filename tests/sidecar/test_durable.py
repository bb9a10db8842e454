"""A shard of the local tier is durable before it is called so, by the calls of the system; zeros are no shard."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sidecar.test_fetching import BODY, DIGEST, OBJECT, UID, FakePeers, staging, stored
from tests.sidecar.test_files import memory_in

from toprope.sidecar.adapters.files import Disk
from toprope.sidecar.local_tier import LocalTier
from toprope.sidecar.values import Shard, Way

SHARD = Shard(attempt=1, step=1, attempt_uid=UID, rank=0, world=1, bytes=len(BODY), digest=DIGEST)
TRACED = "openat,write,fsync,fdatasync,rename,renameat,renameat2"
STORES = """
import sys
from pathlib import Path
from tests.sidecar.test_durable import BODY, SHARD, Disk, LocalTier

LocalTier(Path(sys.argv[1]), Disk()).store(SHARD, memoryview(BODY), nonces=("aa", "bb"))
print("durable", flush=True)
"""


def calls_of(log: str, directory: Path) -> list[str]:
    """Return what was done to files of a directory, in order and in words, and when it was said to be durable."""
    told = []
    for line in log.splitlines():
        if ', "durable' in line:
            told.append("durable")
        elif str(directory) in line and (call := re.search(r"\b(write|fsync|fdatasync|rename\w*)\(", line)):
            rest = line[call.end() :].replace(f"{directory}/", "")
            what = "directory" if f"<{directory}>" in line else "file" if "tmp." in rest else "?"
            told.append(f"{call[1].removesuffix('2').removesuffix('at')} {what}")
    return [one for at, one in enumerate(told) if at == 0 or told[at - 1] != one]


@pytest.mark.slow
@pytest.mark.fault("B54")
def test_a_shard_is_synced_before_it_is_named_and_its_directory_before_it_is_told_of(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    directory, log = tmp_path / "local", tmp_path / "log"
    directory.mkdir()
    traced = ["strace", "-f", "-y", "-e", f"trace={TRACED}", "-o", str(log), sys.executable, "-c", STORES]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([*traced, str(directory)], cwd=root, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr[:200]}")
    assert done.stdout == "durable\n", done.stderr
    one = ["write file", "fsync file", "rename file", "fsync directory"]
    assert calls_of(log.read_text(), directory) == [*one, *one, "durable"]  # the shard, then its receipt


@pytest.mark.fault("B54")
@pytest.mark.parametrize("length", [0, len(BODY)], ids=["no length", "zeros"])
def test_a_file_of_the_right_name_that_holds_nothing_is_reported_and_another_tier_used(
    memory_dir: Path, tmp_path: Path, length: int
) -> None:
    path = LocalTier(tmp_path, Disk()).store(SHARD, memoryview(BODY), nonces=("aa", "bb"))
    memory = memory_in(memory_dir)
    local = Way(kind="here", tier="local", path=str(path))
    assert staging(memory, FakePeers(), stored(BODY), local, OBJECT)() == ("local", BODY)
    path.write_bytes(b"")
    os.truncate(path, length)
    (said,) = LocalTier(tmp_path, Disk()).scan()
    assert isinstance(said, str)
    assert f"{path} is not used: its digest is " in said or f"it has 0 bytes; its receipt says {len(BODY)}" in said
    assert staging(memory, FakePeers(), stored(BODY), local, OBJECT)() == ("object", BODY)
