"""Probes: two who open a store see the same one, those of a copy do not, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.store.errors import UsageError
from toprope.store.objects.opening import open_store
from toprope.store.objects.probing import forget_probe, leave_probe, sees_probe


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_a_probe_is_seen_in_its_own_store_alone_and_until_it_is_forgotten(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    if kind == "directory":
        root, other = f"{tmp_path}/store", f"{tmp_path}/copy"
    else:
        root = request.getfixturevalue("s3_root")
        place, _, query = root.partition("?")
        other = f"{place}-copy?{query}"
    asks, serves, copy = open_store(root, write=True), open_store(root, write=True), open_store(other, write=True)
    probe = leave_probe(asks)
    assert sees_probe(serves, probe)
    assert not sees_probe(copy, probe)
    forget_probe(asks, probe)
    assert not sees_probe(serves, probe)
    assert list(serves.list("")) == []


def test_who_opens_a_store_to_serve_it_owns_the_directory_of_probes(tmp_path: Path) -> None:
    store = open_store(f"{tmp_path}/store", write=True)
    directory = tmp_path / "store" / "probe"
    directory.chmod(0o700)  # as is the directory of whoever serves
    made = directory.stat().st_ino
    forget_probe(store, leave_probe(store))
    assert (directory.stat().st_ino, list(directory.iterdir()), list(store.list(""))) == (made, [], [])


def test_nothing_but_a_probe_can_be_asked_for(tmp_path: Path) -> None:
    for nonce in ("", "../job/log/0", "0A", "0a/0b"):
        with pytest.raises(UsageError, match="is not lower-case hexadecimal"):
            sees_probe(open_store(str(tmp_path)), nonce)
