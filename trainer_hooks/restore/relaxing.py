"""What ``restore(partial=True)`` leaves alone and ``restore(cast=True)`` casts, and the report of it.

Both change what is checked, not how: the checks and the writing are those of every restore, of a document without what
is left alone, and of shards whose tensors have the trainer's dtypes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from toprope.trainer_hooks.capture.state import as_stateful
from toprope.trainer_hooks.image.shard import Extent
from toprope.trainer_hooks.image.tree import Json
from toprope.trainer_hooks.restore.apply import EXTRA_STATE, AtHand, Loaded, entries_of, entry_problems, kept_by_name

_MAX_NAMED = 20
_COUNTED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a restore may do beyond bringing back what was saved."""

    partial: bool = False
    cast: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a restore did beyond bringing back what was saved, by name, on this rank.

    ``missing`` is not in the checkpoint and was left as it was. ``unexpected`` is only in the checkpoint, and was not
    taken. ``cast`` has both dtypes of each.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return it for the log, with the first names of each kind."""
        kinds = (
            (self.missing, "missing in the checkpoint, left as they were"),
            (self.unexpected, "in the checkpoint only, not taken"),
            (self.cast, "cast"),
        )
        return [f"{len(names)} {what}: {_named(names)}" for names, what in kinds if names]


def _named(names: Collection[str]) -> str:
    return ", ".join([*names][:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")


def relaxed(loaded: Loaded, allowed: Allowed, *, unexpected: Iterable[str] = ()) -> tuple[Loaded, Report]:
    """Return the state without what is left alone and with the trainer's dtypes, as far as that is allowed.

    ``unexpected`` is what the checkpoint has beyond the document of ``loaded``, which is not checked yet.
    """
    report = Report(unexpected=tuple(sorted(unexpected)))
    if next(iter(entry_problems(loaded)), None) is not None:
        return loaded, report  # as the checks will say
    if allowed.partial:
        pruned = _Pruned(loaded, list(report.missing), list(report.unexpected))
        loaded = pruned.made()
        report = Report(tuple(sorted(pruned.missing)), tuple(sorted(pruned.unexpected)))
    if allowed.cast:
        loaded, casts = _cast(loaded)
        report = replace(report, cast=tuple(sorted(casts)))
    return loaded, report


# Partial


@dataclass(slots=True)
class _Pruned:
    """A document of which only what the trainer has remains; what it lacks is ``left`` alone."""

    loaded: Loaded
    missing: list[str]
    unexpected: list[str]
    left: set[str] = field(default_factory=set)

    def made(self) -> Loaded:
        parts, document = self.loaded.parts, {**self.loaded.document}
        document["model"] = self._model(document["model"])
        for section in (*parts.optimizers(), *parts.stateful(), *(["extra"] if parts.extra is not None else [])):
            if section not in document and section not in self.loaded.left:
                self._leave(section)
        for section, optimizer in parts.optimizers().items():
            if section in document:
                groups: list[Json] = document[section]["groups"]
                document[section] = {
                    **document[section],
                    "groups": self._groups(section, groups, [set(group) for group in optimizer.param_groups]),
                }
        if "extra" in document and "plain" in document["extra"] and isinstance(parts.extra, Mapping):
            document["extra"] = self._extra(document["extra"], parts.extra)
        return replace(self.loaded, document=document, left=self.loaded.left | self.left)

    def _leave(self, name: str) -> None:
        self.missing.append(name)
        self.left.add(name)

    def _common(self, prefix: str, saved: Mapping[str, Json], live: Collection[str]) -> dict[str, Json]:
        for name in sorted(set(live) - set(saved)):
            self._leave(f"{prefix}{name}")
        self.unexpected += [f"{prefix}{name}" for name in sorted(set(saved) - set(live))]
        return {name: value for name, value in saved.items() if name in live}

    def _model(self, saved: dict[str, Json]) -> dict[str, Json]:
        model = self.loaded.model
        new = {name: first for name, first in model.tied.items() if f"model.{name}" not in self.unexpected}
        return {
            "params": self._common("model.", saved["params"], model.params),
            "buffers": self._common("model.", saved["buffers"], model.buffers),
            "extra_state": self._common(EXTRA_STATE, saved["extra_state"], model.extras),
            "tied": {**new, **saved["tied"]},
        }

    def _groups(self, section: str, saved: list[Json], live: list[set[str]]) -> list[Json]:
        """Return the groups with the settings that both have; those of another kind of optimizer are left alone."""
        wanted = [keys - {"params"} for keys in live]
        both = list(zip(saved, wanted, strict=False))
        if any(set(group["settings"]) - keys and keys - set(group["settings"]) for group, keys in both):
            self.unexpected.append(section)
            self._leave(section)
            return saved
        found = []
        for number, (group, keys) in enumerate(both):
            prefix = f"{section} group {number} "
            if not group["settings"]:
                self.missing.append(prefix.rstrip())
                self.left |= {f"{prefix}{key}" for key in keys}
            settings = self._common(prefix, group["settings"], keys) if group["settings"] else {}
            found.append({**group, "settings": settings})
        return found

    def _extra(self, saved: dict[str, Json], extra: Mapping[str, object]) -> dict[str, Json]:
        stateful = {name for name, value in extra.items() if as_stateful(value) is not None}
        plain = {*saved["plain"], *extra} - stateful
        return {
            "plain": self._common("extra.", saved["plain"], plain),
            "stateful": self._common("extra (with state_dict) ", saved["stateful"], stateful),
        }


# Cast


@dataclass(frozen=True, slots=True)
class _Cast:
    """A shard of which some tensors have other dtypes than they were stored with."""

    held: AtHand
    dtypes: Mapping[str, torch.dtype]

    @property
    def extents(self) -> Mapping[str, Extent]:
        """Return dtype and shape of each tensor."""
        return {
            name: replace(extent, dtype=self.dtypes.get(name, extent.dtype))
            for name, extent in self.held.extents.items()
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, cast."""
        values = self.held.tensor(name)
        return values.to(self.dtypes[name]) if name in self.dtypes else values


def _cast(loaded: Loaded) -> tuple[Loaded, tuple[str, ...]]:
    dtypes: dict[int, dict[str, torch.dtype]] = {}
    said: list[str] = []
    for entry, dtype in _wanted(loaded):
        rank, name = entry["rank"], entry["name"]
        if name in dtypes.setdefault(rank, {}):
            continue
        dtypes[rank][name] = dtype
        saved = loaded.images[rank].extents[name].dtype
        lost = _became_infinite(loaded.images[rank].tensor(name), dtype)
        said.append(f"{name}: {saved} to {dtype}" + (f", {lost} of its values became infinite" if lost else ""))
    images = {rank: _Cast(held, dtypes[rank]) if rank in dtypes else held for rank, held in loaded.images.items()}
    return replace(loaded, images=images), tuple(said)


def _wanted(loaded: Loaded) -> Iterable[tuple[dict[str, Json], torch.dtype]]:
    """Yield each entry that is to be cast, and to what: optimizer state goes with its parameter if it was like it."""
    saved = loaded.document["model"]
    for section, live in (("params", kept_by_name(loaded.model)), ("buffers", loaded.model.buffers)):
        for name in sorted(set(saved[section]) & set(live)):
            entry, here = saved[section][name], live[name].dtype
            extent = loaded.images[entry["rank"]].extents[entry["name"]]
            if extent.dtype == here or not _castable(extent.dtype, here):
                continue
            yield entry, here
            for optimizer in loaded.parts.optimizers() if section == "params" else ():
                for other in entries_of(loaded.document.get(optimizer, {}).get("state", {}).get(name)):
                    there = loaded.images[other["rank"]].extents[other["name"]]
                    if there.dtype == extent.dtype and there.shape == extent.shape and not _counts(other):
                        yield other, here


def _counts(entry: dict[str, Json]) -> bool:
    return str(entry["name"]).endswith(".step")


def _castable(saved: torch.dtype, here: torch.dtype) -> bool:
    """Say whether both hold numbers of one kind, real or complex; whole numbers would wrap round."""
    alike = (saved.is_floating_point and here.is_floating_point) or (saved.is_complex and here.is_complex)
    try:
        torch.zeros(1, dtype=saved).to(here)
    except (RuntimeError, NotImplementedError):  # torch can't cast this pair
        return False
    return alike


def _became_infinite(values: torch.Tensor, dtype: torch.dtype) -> int:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    lost = 0
    for part in torch.split(values.reshape(-1), _COUNTED_AT_ONCE):
        lost += int((part.to(wide).isfinite() & ~part.to(dtype).to(wide).isfinite()).sum())
    return lost
