"""What a trainer kept, loaded by PyTorch with no Toprope installed: model, optimizer, settings, bit for bit."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stored_state import stored

from toprope.store.checkpoint.leaves import NotPlainError, decode, encode
from toprope.store.log.chain import read_log
from toprope.store.transfer.export import Wanted, export
from toprope.trainer_hooks.capture.state import Parts

MAKE = """
import torch

def trained(seed, steps, kind):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2).bfloat16())
    model.register_buffer("wave", torch.randn(2, dtype=torch.complex128))
    if kind == "adamw":
        groups = [{"params": model[0].parameters(), "lr": torch.tensor(0.01 + seed)}, {"params": model[2].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.02 + seed, betas=(0.8, 0.9 + seed / 100), amsgrad=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + seed, momentum=0.0 if kind == "sgd" else 0.9)
    for _ in range(steps):
        model[2](model[1](model[0](torch.randn(5, 4))).bfloat16()).sum().backward()
        optimizer.step()
    return model, optimizer
"""

LOAD = (
    """
import sys; sys.modules["toprope"] = None
import warnings; warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
"""
    + MAKE
    + """
def told(value):
    import hashlib
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        return [str(value.dtype), list(value.shape), hashlib.sha256(flat.numpy().tobytes()).hexdigest()]
    return repr(value)

def tell(model, optimizer):
    import json
    state = optimizer.state_dict()
    print(json.dumps({
        "model": {name: told(one) for name, one in model.state_dict().items()},
        "state": {str(key): {name: told(one) for name, one in of.items()} for key, of in state["state"].items()},
        "groups": [{name: told(one) for name, one in group.items()} for group in state["param_groups"]],
    }))

if __name__ == "__main__":
    model, optimizer = trained(1, 2, sys.argv[2])
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    tell(model, optimizer)
"""
)


def told(value: object) -> object:
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        return [str(value.dtype), list(value.shape), hashlib.sha256(flat.numpy().tobytes()).hexdigest()]
    return repr(value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", pytest.param("momentum", marks=pytest.mark.long)])
def test_pytorch_alone_goes_on_from_what_a_trainer_kept(tmp_path: Path, kind: str) -> None:
    made: dict[str, Any] = {}
    exec(MAKE, made)
    model, optimizer = made["trained"](0, 3, kind)
    store = stored([Parts(model=model, optimizer=optimizer)], tmp_path)
    only = ("model.*", "optimizer.*")
    done = export(store, read_log(store, "job"), to=tmp_path / "dcp", wanted=Wanted(format="dcp", only=only))
    assert done.left_out == ()
    command = [sys.executable, "-c", LOAD, str(tmp_path / "dcp"), kind]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    state = optimizer.state_dict()
    assert found["model"] == {name: told(one) for name, one in model.state_dict().items()}
    assert found["state"] == {
        str(key): {name: told(one) for name, one in of.items()} for key, of in state["state"].items()
    }
    assert found["groups"] == [{name: told(one) for name, one in group.items()} for group in state["param_groups"]]


@pytest.mark.parametrize(
    "value",
    [None, True, 7, -(1 << 70), 1.5, float("inf"), 1 + 2j, "text", b"bytes", [1, (2, None)], {"a": {1: [2]}}, {"$": 1}],
)
def test_plain_values_are_kept_exactly(value: object) -> None:
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert (type(again), again) == (type(value), value)


def test_values_that_are_not_plain_are_known() -> None:
    for value in ({1, 2}, torch.float16, object()):
        with pytest.raises(NotPlainError):
            encode(value)
    unknown: list[dict[str, object]] = [
        {"$": "enum", "of": "a:b", "v": "c"},
        {"$": "int", "v": "g"},
        {"$": "float", "v": "00"},
        {"$": []},
    ]
    for encoded in unknown:
        with pytest.raises(NotPlainError):
            decode(encoded)
