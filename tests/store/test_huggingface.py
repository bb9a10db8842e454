"""What a trainer kept, exported and loaded by transformers itself: the same logits, bit for bit.

transformers is no dependency: where it isn't installed these tests are skipped, and docs/results/store.md says how they
were run.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.stored_state import stored

from toprope.store.log.chain import read_log
from toprope.store.transfer.export import Wanted, export
from toprope.trainer_hooks.capture.state import Parts

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
STEPS, VOCABULARY = 3, 61
SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
"""A model whose head is a weight of its own, and one whose head is its embedding."""


@pytest.fixture
def transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("transformers", reason="transformers is not installed (docs/results/store.md)")
    assert isinstance(found, ModuleType)
    return found


def trained(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model after a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch = torch.randint(0, VOCABULARY, (2, 12))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval(), optimizer


def logits_of(model: torch.nn.Module) -> bytes:
    batch = torch.arange(24).reshape(2, 12) % VOCABULARY
    with torch.no_grad():
        found = model(input_ids=batch).logits
    return bytes(found.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", SMALL)
def test_an_export_gives_transformers_the_same_logits(
    tmp_path: Path, transformers: ModuleType, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, **SMALL[kind])
    made = partial(transformers.AutoModelForCausalLM.from_config, config, dtype=dtype)
    model, optimizer = trained(made())
    before = logits_of(model)
    store = stored([Parts(model=model, optimizer=optimizer)], tmp_path)
    wanted = Wanted(only=("model.*",), prefix_strip="model.", max_shard_bytes=20_000)
    done = export(store, read_log(store, "job"), to=tmp_path / "out", wanted=wanted)
    assert len(done.files) > 2, "several files and their index"
    config.save_pretrained(tmp_path / "out")
    load = transformers.AutoModelForCausalLM.from_pretrained
    again, told = load(tmp_path / "out", local_files_only=True, dtype=dtype, output_loading_info=True)
    assert {name: list(found) for name, found in told.items() if found} == {}
    assert {name: one.dtype for name, one in again.state_dict().items()} == {
        name: one.dtype for name, one in model.state_dict().items()
    }
    assert logits_of(again.eval()) == before
    assert logits_of(made().eval()) != before, "it is the weights that make them"
