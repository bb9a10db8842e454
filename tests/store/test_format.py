"""A stranger reads a store by docs/format.md, with the standard library and safetensors and none of our code."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tests.support.stores import small_store

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


def test_a_stranger_finds_and_reads_the_newest_checkpoint(tmp_path: Path) -> None:
    builder = small_store(DirectoryStore(tmp_path), steps=(10, 20, 30), name="gpt")
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
        (file,) = index["files"]
        body = (tmp_path / file["key"]).read_bytes()
        assert len(body) == file["bytes"] == shard["bytes"]
        weight = next(tensor for tensor in index["tensors"] if tensor["name"] == "model.weight")
        values = struct.unpack("<6f", body[weight["begin"] : weight["end"]])
        assert values[0] == 25 + shard["rank"]
        with safe_open(tmp_path / file["key"], framework="np") as opened:
            assert opened.metadata()["attempt_uid"] == ready["attempt_uid"] == manifest["attempt_uid"]
            assert opened.get_tensor("model.weight").ravel().tolist() == list(values)
            document = json.loads(opened.get_tensor(opened.metadata()["document"]).tobytes())
        assert document == {"step": 25, "rank": shard["rank"]}


def test_facts_are_named_by_their_hash(tmp_path: Path) -> None:
    small_store(DirectoryStore(tmp_path), steps=(10,))
    for record in read_log_as_a_stranger(tmp_path, "job"):
        for field in ("facts_sha256", "spec_sha256"):
            if record.get(field):
                assert named_json(tmp_path / "job" / "facts" / f"{record[field]}.json", record[field])
