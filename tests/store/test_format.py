"""A stranger reads a store by docs/format.md, with json, xxhash, zstandard and safetensors and none of our code."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard
from safetensors import safe_open
from tests.support.stores import JobBuilder, adapter_image, shard_image, small_store

from toprope.sidecar.packing import Codec
from toprope.store.objects.directory import DirectoryStore


def read_log_as_a_stranger(root: Path, job: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    prev = ""
    while (path := root / job / "log" / f"{len(records):020d}.json").exists():
        body = path.read_bytes()
        record = json.loads(body)
        assert record["prev"] == prev
        rest = {key: value for key, value in record.items() if key != "sum"}
        plain = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        assert hashlib.sha256(plain).hexdigest() == record["sum"]
        prev = hashlib.sha256(body).hexdigest()
        records.append(record)
    return records


def named_json(path: Path, sha256: str) -> dict[str, Any]:
    body = path.read_bytes()
    assert hashlib.sha256(body).hexdigest() == sha256
    value: dict[str, Any] = json.loads(body)
    return value


def image_as_a_stranger(root: Path, index: dict[str, Any]) -> bytes:
    """Put an image together out of the files in which it lies."""
    files = []
    for file in index["files"]:
        body = (root / file["key"]).read_bytes()
        if file["packed"]:
            assert (len(body), xxhash.xxh3_128_hexdigest(body)) == (file["packed"]["bytes"], file["packed"]["digest"])
            body = zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True).read()
        assert (len(body), xxhash.xxh3_128_hexdigest(body)) == (file["bytes"], file["digest"])
        files.append(body)
    parts = [index["head"], *index["tensors"]]
    for part in parts:
        stored = files[part["file"]][part["begin"] : part["end"]]
        assert xxhash.xxh3_128_hexdigest(stored) == part["digest"]
    image = b"".join(files[part["file"]][part["begin"] : part["end"]] for part in parts)
    assert (len(image), xxhash.xxh3_128_hexdigest(image)) == (index["bytes"], index["digest"])
    return image


@pytest.mark.parametrize("codec", [None, "none", "zstd"])
def test_a_stranger_finds_and_reads_the_newest_checkpoint(codec: Codec | None, tmp_path: Path) -> None:
    builder = JobBuilder(DirectoryStore(tmp_path), "gpt", codec=codec, image=adapter_image if codec else shard_image)
    builder.begin()
    for step in (10, 20, 30):
        builder.checkpoint(step)
    builder.open_attempt(ready=5, from_step=20).checkpoint(25)

    records = read_log_as_a_stranger(tmp_path, "gpt")
    head: int | None = None
    for number, record in enumerate(records):
        if record["kind"] == "READY":
            assert record["parent"] == head
            head = number
        elif record["kind"] == "ATTEMPT":
            head = record["ready"]
    assert head is not None
    ready = records[head]
    assert (ready["step"], ready["attempt"]) == (25, 2)

    name = f"a{ready['attempt']}-s{ready['step']:09d}-{ready['manifest_sha256']}.json"
    manifest = named_json(tmp_path / "gpt" / "manifests" / name, ready["manifest_sha256"])
    assert [shard["rank"] for shard in manifest["shards"]] == [0, 1]
    for shard in manifest["shards"]:
        index = named_json(tmp_path / shard["index_key"], shard["index_sha256"])
        assert len(index["files"]) == (2 if codec else 1)
        image = image_as_a_stranger(tmp_path, index)
        assert (len(image), index["digest"]) == (shard["bytes"], shard["digest"])
        (tmp_path / "image").write_bytes(image)
        with safe_open(tmp_path / "image", framework="np") as opened:
            assert opened.metadata()["attempt_uid"] == ready["attempt_uid"] == manifest["attempt_uid"]
            assert opened.get_tensor("model.weight").ravel()[0] == 25 + shard["rank"]
            document = json.loads(opened.get_tensor(opened.metadata()["document"]).tobytes())
        assert document == {"step": 25, "rank": shard["rank"]}


def test_facts_are_named_by_their_hash(tmp_path: Path) -> None:
    small_store(DirectoryStore(tmp_path), steps=(10,))
    for record in read_log_as_a_stranger(tmp_path, "job"):
        for field in ("facts_sha256", "spec_sha256"):
            if record.get(field):
                assert named_json(tmp_path / "job" / "facts" / f"{record[field]}.json", record[field])
