"""A restored state: all checks first, then the values, each in place."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from toprope.trainer_hooks.capture import rng
from toprope.trainer_hooks.capture.modules import ModelState, model_state, optimizer_names
from toprope.trainer_hooks.capture.optimizers import owned, with_state
from toprope.trainer_hooks.capture.spread import (
    LayoutError,
    Mesh,
    Spread,
    as_dtensor,
    block_of,
    join,
    local_of,
    mesh_of,
    spread_from,
    spread_of,
)
from toprope.trainer_hooks.capture.state import FORMAT, Parts, Stateful, as_stateful, model_devices
from toprope.trainer_hooks.errors import StateMismatchError, WorldMismatchError
from toprope.trainer_hooks.image import opaque
from toprope.trainer_hooks.image.inplace import can_hold, overwrite
from toprope.trainer_hooks.image.shard import Extent, Image
from toprope.trainer_hooks.image.tree import Decoder, Json

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("toprope")
_MAX_NAMED = 20
EXTRA_STATE = "model (extra state) "
_NOTHING = torch.empty(0)
_TOLD = (bool, int, float, str)
"""A setting of the trainer's that a restore changes is said, such as the number of accumulated micro-batches."""


class AtHand(Protocol):
    """A shard, or what stands for one, of which each tensor that the document names is at hand."""

    @property
    def extents(self) -> Mapping[str, Extent]:
        """Return dtype and shape of each tensor."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of ``extents``; it may alias what holds it."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked state, ready to be applied."""

    document: dict[str, Json]
    images: Mapping[int, AtHand]
    parts: Parts
    model: ModelState
    rank: int
    meshes: Mapping[Mesh, DeviceMesh]
    """The meshes that the trainer's own tensors are spread over."""
    left: frozenset[str] = frozenset()
    """What is left as it is: sections of which each rank has its own, in a checkpoint of other ranks; and with
    ``partial`` what the checkpoint does not have, under the name by which a refusal would say so."""

    def tensor(self, entry: dict[str, Json]) -> torch.Tensor:
        """Return what this rank holds of the tensor of a document entry; it aliases the image."""
        return self.images[entry["rank"]].tensor(entry["name"])

    def spread(self, entry: dict[str, Json]) -> Spread | None:
        """Return how the tensor of an entry was spread; None when it was not.

        Raises:
            StateMismatchError: the document does not say it in a way that can be read.
        """
        value = entry.get("spread")
        return None if value is None else spread_from(value, self.document.get("meshes", []), rank=self.rank)

    def joined(
        self, entry: dict[str, Json], local: torch.Tensor, stride: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Return the tensor of an entry, of which this rank holds ``local``."""
        spread = self.spread(entry)
        return local if spread is None else join(local, self.meshes[spread.mesh], spread, stride)

    def values(self, value: Json) -> Any:  # noqa: ANN401 - any value that can be kept
        """Return a part of the document as values of its own; its tensors lie where they lay when saved."""
        return self.decoder(self._copy).decode(value)

    def decoder(self, on_tensor: Callable[[dict[str, Json]], torch.Tensor]) -> Decoder:
        """Return a decoder that unpickles only if the trainer allowed it."""
        return Decoder(on_tensor, opaque.unpickle if self.parts.allow_pickle else None)

    def _copy(self, entry: dict[str, Json]) -> torch.Tensor:
        return self.joined(entry, self.tensor(entry).clone().to(entry["device"]))


def check(parts: Parts, images: Mapping[int, Image], *, rank: int, world: int) -> Loaded:
    """Return the state in these images after checking that each name, shape, dtype and key is the trainer's.

    Raises:
        WorldMismatchError: another number of ranks saved it.
        StateMismatchError: it does not fit; the message lists what is missing, unexpected or different.
    """
    return checked(opened(parts, images, rank=rank, world=world))


def opened(parts: Parts, images: Mapping[int, Image], *, rank: int, world: int) -> Loaded:
    """Return the state in these images, of which only the layout is checked.

    Raises:
        WorldMismatchError: another number of ranks saved it.
        StateMismatchError: another version of this package did.
    """
    document = images[rank].document()
    if document.get("format") != FORMAT:
        raise StateMismatchError(f"state of format {document.get('format')}; this version reads format {FORMAT}")
    if document["world"] != world:
        raise WorldMismatchError(f"the checkpoint was saved by {document['world']} ranks and this job has {world}")
    model = model_state(parts.models(), world=world)
    return Loaded(document, images, parts, model, rank, _meshes(model))


def needed(document: dict[str, Json]) -> dict[int, set[str]]:
    """Return the tensors that a document speaks of, by the rank that stored them."""
    found: dict[int, set[str]] = {}
    for entry in entries_of(document):
        found.setdefault(entry["rank"], set()).add(entry["name"])
    return found


def assembled(
    parts: Parts, model: ModelState, document: dict[str, Json], held: AtHand, *, rank: int, left: frozenset[str]
) -> Loaded:
    """Return the state that was put together for this rank, not checked yet."""
    return Loaded(document, {rank: held}, parts, model, rank, _meshes(model), left)


def checked(loaded: Loaded) -> Loaded:
    """Return the state after all checks.

    Raises:
        StateMismatchError: it does not fit; the message lists what is missing, unexpected or different.
    """
    problems = [*entry_problems(loaded), *_section_problems(loaded)]
    if not problems:
        problems = [*_value_problems(loaded)]
    if not problems:
        problems = [*_model_problems(loaded), *_optimizer_problems(loaded), *_extra_problems(loaded)]
    if not problems:
        problems = [*_mesh_problems(loaded)]
    if problems:
        raise misfit(problems)
    return loaded


def misfit(problems: Sequence[str]) -> StateMismatchError:
    """Return the error for these problems."""
    more = [f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else []
    return StateMismatchError(
        "the checkpoint does not fit this trainer, and nothing was written: "
        + "; ".join([*problems[:_MAX_NAMED], *more])
    )


def _meshes(model: ModelState) -> dict[Mesh, DeviceMesh]:
    tensors = (as_dtensor(tensor) for tensor in (*model.params.values(), *model.buffers.values()))
    return {mesh_of(tensor.device_mesh): tensor.device_mesh for tensor in tensors if tensor is not None}


def entry_problems(loaded: Loaded) -> Iterable[str]:
    """Name each tensor of the document that is not in an image at hand."""
    for entry in entries_of(loaded.document):
        image = loaded.images.get(entry["rank"])
        if image is None:
            yield f"{entry['name']}: the shard of rank {entry['rank']} was not given"
        elif entry["name"] not in image.extents:
            yield f"{entry['name']}: not in the shard of rank {entry['rank']}"


def _value_problems(loaded: Loaded) -> Iterable[str]:
    """Name each section with a value that can't be read; nothing is unpickled yet."""
    trial = Decoder(lambda _: _NOTHING, (lambda _: None) if loaded.parts.allow_pickle else None)
    for name, value in loaded.document.items():
        try:
            trial.decode(value, name)
        except StateMismatchError as error:
            yield str(error)
            return
    if "rng" not in loaded.left:
        yield from rng.problems(Decoder(loaded.tensor).decode(loaded.document["rng"], "rng"))


def _mesh_problems(loaded: Loaded) -> Iterable[str]:
    """Name each tensor that was spread over a mesh that no parameter here is on, or that is not the block it should."""
    for entry in entries_of(loaded.document):
        spread, found = loaded.spread(entry), loaded.images[entry["rank"]].extents[entry["name"]].shape
        if spread is None:
            continue
        held = tuple(end - begin for begin, end in block_of(spread))
        if spread.mesh not in loaded.meshes:
            over = f"over ranks {list(spread.mesh.ranks)} as {spread.mesh.shape}"
            yield f"{entry['name']}: spread {over} in the checkpoint, and no parameter here is on that mesh"
        elif found != held:
            yield f"{entry['name']}: stored with shape {found}, expected {held}"


def entries_of(value: Json) -> Iterable[dict[str, Json]]:
    """Yield what a document says of each tensor."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            if item.get("$") == "tensor":
                yield item
            else:
                pending.extend(item.values())


def _section_problems(loaded: Loaded) -> Iterable[str]:
    given = {"model", "rng", "format", "world", *loaded.parts.stateful()}
    given |= {"meshes", *loaded.parts.optimizers()}
    given |= {"extra"} if loaded.parts.extra is not None else set()
    return _key_problems(loaded, "", {"meshes", *loaded.document}, given)


def _key_problems(loaded: Loaded, prefix: str, saved: set[str], live: set[str]) -> Iterable[str]:
    for name in sorted(live - saved):
        if f"{prefix}{name}" not in loaded.left:
            yield f"{prefix}{name}: missing in the checkpoint"
    for name in sorted(saved - live):
        yield f"{prefix}{name}: in the checkpoint, unexpected here"


def _model_problems(loaded: Loaded) -> Iterable[str]:
    saved, model = loaded.document["model"], loaded.model
    for section, live in (("params", kept_by_name(model)), ("buffers", model.buffers)):
        yield from _key_problems(loaded, "model.", set(saved[section]), set(live))
        for name in sorted(set(saved[section]) & set(live)):
            yield from _form_problems(loaded, f"model.{name}", saved[section][name], live[name])
    yield from _key_problems(loaded, EXTRA_STATE, set(saved["extra_state"]), set(model.extras))
    if model.gathered:
        yield (
            f"model: FSDP has {model.gathered} parameters gathered; restore before the first forward pass, or call "
            "reshard() first"
        )
    if saved["tied"] != model.tied:
        yield f"model: tied parameters are {saved['tied']} in the checkpoint and {model.tied} here"
    devices = len(model_devices(model)) if "rng" in loaded.left else len(loaded.document["rng"]["cuda"] or ())
    if devices != len(model_devices(model)):
        yield f"rng.cuda: streams of {devices} devices in the checkpoint, {len(model_devices(model))} here"


def kept_by_name(model: ModelState) -> dict[str, torch.Tensor]:
    """Return what is kept of each parameter."""
    return {name: model.kept(name) for name in model.params}


def _form_problems(loaded: Loaded, name: str, entry: dict[str, Json], live: torch.Tensor) -> Iterable[str]:
    extent = loaded.images[entry["rank"]].extents[entry["name"]]
    shape, spread, dtensor = extent.shape, loaded.spread(entry), as_dtensor(live)
    if spread is not None or dtensor is not None:
        if (problem := _spread_problem(spread, live, rank=loaded.rank)) is not None:
            yield f"{name}: {problem}"
        shape = tuple(live.shape) if spread is None else spread.shape
    flat = loaded.model.flat.get(name.removeprefix("model."))
    if entry.get("flat") != (None if flat is None or dtensor is not None else [flat.offset, flat.whole]):
        yield f"{name}: another part of what FSDP flattened than here; the wrapping or the number of ranks differs"
    if shape != tuple(live.shape):
        yield f"{name}: shape {shape} in the checkpoint, {tuple(live.shape)} here"
    if extent.dtype != live.dtype:
        yield f"{name}: {extent.dtype} in the checkpoint, {live.dtype} here"
    local = local_of(live)
    if (extent.shape, extent.dtype) == (tuple(local.shape), local.dtype):
        saved = loaded.images[entry["rank"]].tensor(entry["name"])
        if not can_hold(local, saved):
            yield f"{name}: elements that share their memory here have several values in the checkpoint"


def _spread_problem(saved: Spread | None, live: torch.Tensor, *, rank: int) -> str | None:
    """Say how a tensor of the checkpoint and the trainer's are spread, if not in the same way."""
    dtensor = as_dtensor(live)
    if saved is None or dtensor is None:
        kinds = ["a plain tensor" if one is None else "a DTensor" for one in (saved, dtensor)]
        return f"{kinds[0]} in the checkpoint, {kinds[1]} here"
    try:
        here = spread_of(dtensor, rank=rank)
    except LayoutError as error:
        return f"a DTensor here that {error}"
    if (saved.mesh, saved.placements) == (here.mesh, here.placements):
        return None
    there, where = (
        f"{', '.join(one.placements)} over ranks {list(one.mesh.ranks)} as {one.mesh.shape}" for one in (saved, here)
    )
    return f"spread {there} in the checkpoint, {where} here"


def _optimizer_problems(loaded: Loaded) -> Iterable[str]:
    for section, optimizer in loaded.parts.optimizers().items():
        if section in loaded.left:
            continue
        names = optimizer_names(optimizer, loaded.model.params)
        saved, live = loaded.document[section], optimizer.param_groups
        if len(saved["groups"]) != len(live):
            yield f"{section}: {len(saved['groups'])} groups in the checkpoint, {len(live)} here"
            continue
        for number, (saved_group, group) in enumerate(zip(saved["groups"], live, strict=True)):
            if saved_group["params"] != [names[id(parameter)] for parameter in group["params"]]:
                yield f"{section} group {number}: other parameters, or in another order"
            yield from _key_problems(
                loaded, f"{section} group {number} ", set(saved_group["settings"]), set(group) - {"params"}
            )
        if saved.get("owned") != owned(optimizer, loaded.model.params):
            yield f"{section}: ZeRO gave this rank other parameters than here, or only one of both is ZeRO"


def _extra_problems(loaded: Loaded) -> Iterable[str]:
    extra = loaded.parts.extra
    if extra is None or "extra" in loaded.left:
        return
    saved = loaded.document["extra"]
    if isinstance(extra, MutableMapping) != ("plain" in saved):
        yield "extra: a dict in one of checkpoint and trainer, an object with state_dict() in the other"
    elif isinstance(extra, MutableMapping):
        stateful = {name for name, value in extra.items() if as_stateful(value) is not None}
        yield from _key_problems(loaded, "extra (with state_dict) ", set(saved["stateful"]), stateful)
        yield from _key_problems(loaded, "extra.", set(saved["plain"]), {*saved["plain"], *extra} - stateful)


def apply(loaded: Loaded) -> None:
    """Write the state into the trainer. The random streams come last, for others may draw from them."""
    parts, document = loaded.parts, loaded.document
    with torch.no_grad():
        for section, live in (("params", kept_by_name(loaded.model)), ("buffers", loaded.model.buffers)):
            for name, entry in document["model"][section].items():
                overwrite(local_of(live[name]), loaded.tensor(entry))
        for name, value in document["model"]["extra_state"].items():
            loaded.model.extras[name].set_extra_state(loaded.values(value))
        for name, optimizer in parts.optimizers().items():
            if name not in loaded.left:
                _apply_optimizer(loaded, name, optimizer)
    _apply_stateful(loaded)
    if parts.extra is not None and "extra" not in loaded.left:
        _apply_extra(loaded, parts.extra)
    if "rng" not in loaded.left:
        streams = Decoder(lambda entry: loaded.tensor(entry).clone()).decode(document["rng"])
        rng.set_streams(streams, model_devices(loaded.model))


def _apply_stateful(loaded: Loaded) -> None:
    parts, document = loaded.parts, loaded.document
    if parts.dataloader is not None and "dataloader" not in loaded.left:
        # A loader may draw a seed when it makes its iterator, which an uninterrupted run did long ago. Asking that of
        # torchdata for its state makes the iterator now, before the random streams are put where they belong.
        parts.dataloader.load_state_dict(loaded.values(document["dataloader"]))
        parts.dataloader.state_dict()
    for name, part in parts.stateful().items():
        if name != "dataloader" and name not in loaded.left:
            part.load_state_dict(loaded.values(document[name]))


def _apply_optimizer(loaded: Loaded, section: str, optimizer: torch.optim.Optimizer) -> None:
    """Set the state itself: ``load_state_dict`` would cast it to the dtypes of the parameters."""
    saved, states = loaded.document[section], with_state(optimizer).state
    for saved_group, group in zip(saved["groups"], optimizer.param_groups, strict=True):
        for key, value in loaded.values(saved_group["settings"]).items():
            group[key] = _graft(group[key], value)
        for name, parameter in zip(saved_group["params"], group["params"], strict=True):
            if name not in loaded.document["model"]["params"]:
                continue  # left alone, and so is its state
            if name not in saved["state"]:
                states.pop(parameter, None)
                continue
            place = _device_rule(group, parameter, loaded.document["model"]["params"][name]["device"])
            fresh = loaded.decoder(_placed(loaded, loaded.model.kept(name), place)).decode(saved["state"][name])
            state = states[parameter]
            grafted = {key: _graft(state.get(key), value) for key, value in fresh.items()}
            state.clear()
            state.update(grafted)


def _device_rule(group: dict[str, Any], parameter: torch.Tensor, saved_on: str) -> Callable[[dict[str, Json]], Any]:
    """Return where an entry of optimizer state belongs; step counters stay on the CPU unless kernels want them."""

    def place(entry: dict[str, Json]) -> torch.device:
        if entry["device"] != "cpu":
            return parameter.device
        counter = entry["name"].endswith(".step") and not (group.get("capturable") or group.get("fused"))
        return torch.device("cpu") if counter or saved_on != "cpu" else parameter.device

    return place


def _placed(
    loaded: Loaded, parameter: torch.Tensor, place: Callable[[dict[str, Json]], torch.device]
) -> Callable[[dict[str, Json]], torch.Tensor]:
    local = local_of(parameter)

    def tensor(entry: dict[str, Json]) -> torch.Tensor:
        saved, device, spread = loaded.tensor(entry), place(entry), loaded.spread(entry)
        if saved.shape != local.shape:
            return loaded.joined(entry, saved.clone().to(device))
        fresh = torch.empty_like(local, dtype=saved.dtype, device=device, requires_grad=False)
        overwrite(fresh, saved)
        alike = spread is not None and spread.shape == tuple(parameter.shape)
        return loaded.joined(entry, fresh, parameter.stride() if alike else None)

    return tensor


def _apply_extra(loaded: Loaded, extra: Stateful | MutableMapping[str, Any]) -> None:
    saved = loaded.document["extra"]
    if not isinstance(extra, MutableMapping):
        extra.load_state_dict(loaded.values(saved["whole"]))
        return
    for name, value in saved["plain"].items():
        live, restored = extra.get(name), loaded.values(value)
        if name in extra and isinstance(live, _TOLD) and isinstance(restored, _TOLD) and live != restored:
            logger.info("extra.%s was %.80r here and is %.80r now, as in the checkpoint", name, live, restored)
        extra[name] = _graft(live, restored)
    for name, value in saved["stateful"].items():
        part = as_stateful(extra[name])
        assert part is not None, "checked before"
        part.load_state_dict(loaded.values(value))


def _graft(live: Any, saved: Any) -> Any:  # noqa: ANN401 - any value that can be kept
    """Return the saved value, in the live tensor, dict, list or deque where that can hold it: others may share it."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if not _holds(live, saved):
            return saved
        overwrite(local_of(live), local_of(saved))
        return live
    if type(live) is not type(saved):
        return saved
    if isinstance(live, dict):
        grafted = {key: _graft(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(grafted)
        return live
    if isinstance(live, list) or (isinstance(live, deque) and live.maxlen == saved.maxlen):
        old = [*live, *([None] * max(0, len(saved) - len(live)))]
        grafted_items = [_graft(before, value) for before, value in zip(old, saved, strict=False)]
        live.clear()
        live.extend(grafted_items)
        return live
    return saved


def _holds(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Say whether a tensor can take the values of another in place."""
    there, here = as_dtensor(live), as_dtensor(saved)
    if there is not None and here is not None:
        if (there.device_mesh, there.placements) != (here.device_mesh, here.placements):
            return False
    elif type(live) not in {torch.Tensor, torch.nn.Parameter} or here is not None:
        return False
    return live.shape == saved.shape and live.dtype == saved.dtype and can_hold(local_of(live), local_of(saved))
