"""A coordinator under a fleet of many nodes: what it decides reaches each of them, and is right."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tests.support.source import ROOT

from toprope.store.checkpoint.ready import read_manifest
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store


@pytest.mark.slow
def test_every_node_of_many_knows_what_is_protected_and_what_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scale = importlib.import_module("scale")
    words = ["--nodes", "150", "--ranks-per-node", "2", "--every", "0.8", "--snapshots", "4", "--object-every", "4"]
    figures = scale.measure(scale.parser().parse_args(words), tmp_path)  # it waits until each node knows each decision
    assert (figures["nodes"], figures["ranks"]) == (150, 300)
    for kind in ("protected_s", "ready_s"):
        assert 0.0 < figures[kind]["decided"]["p50"] <= figures[kind]["decided since held"]["p50"]
    assert [line for line in figures["warnings"] if "given no attempt: unavailable" not in line] == []
    assert figures["bytes_each"]["desired"] < 3000 < figures["bytes_each"]["whole document"]
    store = open_store(str(tmp_path / "store"), write=False)
    state = read_log(store, scale.JOB)
    assert [ready.step for ready in state.readies.values()] == [4 * scale.STEPS]
    manifest, _ = read_manifest(store, state, next(iter(state.readies)))
    assert [shard.rank for shard in manifest.shards] == list(range(300))
