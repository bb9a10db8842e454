"""Plain tensors that the user says are the same on all ranks: that they are on all, and that they are the same.

No snapshot looks at this: one would only see what its own rank has. All ranks compare digests once, at the end of the
first step of an attempt, before anything of it is saved.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence

import torch

from toprope.trainer_hooks.capture.modules import model_state, optimizer_names
from toprope.trainer_hooks.capture.names import of_all
from toprope.trainer_hooks.capture.optimizers import owned, with_state
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.launch import World

_MAX_NAMED = 20


def check_on_all(world: World, parts: Parts) -> None:
    """Check that what was declared is on all ranks, in one form; all of them ask at once.

    Raises:
        UsageError: it is not, or a pattern names nothing; the same on all ranks.
    """
    if not parts.replicated:
        return
    model = model_state(parts.models(), world=1)
    mine = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in model.declared(parts.replicated).items()}
    unused = [pattern for pattern in parts.replicated if not model.declared((pattern,))]
    several = of_all(world, {"forms": mine, "unused": unused})
    never = sorted(set.intersection(*({*one["unused"]} for one in several)))
    if never:
        raise UsageError(f"replicated: {', '.join(never)} names no plain parameter or buffer of any rank")
    _refuse([one["forms"] for one in several], "is not on all ranks in one form")


def check_equal(world: World, parts: Parts, step: int) -> None:
    """Check that what was declared has the same values on all ranks, optimizer state too; all of them ask at once.

    Raises:
        UsageError: it has not; the same on all ranks.
    """
    if parts.replicated:
        _refuse(of_all(world, digests(parts)), f"differs between ranks after step {step}")


def digests(parts: Parts) -> dict[str, str]:
    """Return the SHA-256 of each declared tensor of this rank and of the optimizer state that is stored with it."""
    model = model_state(parts.models(), world=1)
    declared = model.declared(parts.replicated)
    found = {f"model.{name}": _digest(tensor) for name, tensor in declared.items()}
    for section, optimizer in parts.optimizers().items():
        if owned(optimizer, model.params) is not None:
            continue  # ZeRO gives each rank other state
        names = optimizer_names(optimizer, model.params)
        for parameter, state in with_state(optimizer).state.items():
            name = names[id(parameter)]
            for key, value in state.items() if name in declared else ():
                if isinstance(value, torch.Tensor):
                    found[f"{section}.state.{name}.{key}"] = _digest(value)
    return found


def _refuse(several: Sequence[Mapping[str, str]], what: str) -> None:
    """Raise if these, one of each rank, do not say the same under each name."""
    names = sorted({name for one in several for name in one})
    wrong = {name: ranks for name in names if (ranks := _unlike_the_first(several, name))}
    if wrong:
        named = [f"{name} (unlike rank 0: {', '.join(wrong[name])})" for name in [*wrong][:_MAX_NAMED]]
        more = f", and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise UsageError(
            f"replicated: {', '.join(named)}{more}: {what}. Leave out of replicated=[...] what each rank has of its own"
        )


def _unlike_the_first(several: Sequence[Mapping[str, str]], name: str) -> list[str]:
    return [str(rank) for rank, one in enumerate(several) if one.get(name) != several[0].get(name)]


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    count = plain.numel() * plain.element_size()
    body = (ctypes.c_char * count).from_address(plain.data_ptr()) if count else b""
    return hashlib.sha256(body).hexdigest()
