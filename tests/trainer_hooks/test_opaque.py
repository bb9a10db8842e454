"""Values of unknown types: pickled only where both ends said so, and never unpickled when their bytes changed."""

from __future__ import annotations

import base64
import json
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar
from tests.support.tiny_trainer import METADATA, checked, load, open_image, raw, save, snapshot_file
from torch import nn

from toprope.trainer_hooks import Checkpointer, StateMismatchError, UnsupportedLeafError
from toprope.trainer_hooks.capture.state import Parts, capture

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the untyped kind is what users have
RAN: list[str] = []


class Bomb:
    """Tells when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return note, ("boom",)


def note(text: str) -> str:
    RAN.append(text)
    return text


@pytest.fixture(autouse=True)
def _nothing_ran() -> Iterator[None]:
    RAN.clear()
    yield
    RAN.clear()


def parts(extra: dict[str, Any], *, allow_pickle: bool = True, model: nn.Module | None = None) -> Parts:
    return Parts(model=model or nn.Linear(1, 1), extra=extra, allow_pickle=allow_pickle)


def test_an_unknown_leaf_comes_back_where_both_ends_allow_it(tmp_path: Path) -> None:
    odd: dict[str, Any] = {
        "pair": Pair(1, [2]),
        "deep": [(PurePosixPath("a/b"), {"x": range(3)})],
        "sparse": torch.eye(3).to_sparse(),
        "known": {"t": torch.ones(2), "n": 7},
    }
    found: dict[str, Any] = {}
    load(parts(found), save(parts(odd), tmp_path / "i"))
    assert found["pair"] == Pair(1, [2])
    assert type(found["pair"]) is Pair
    assert found["deep"] == odd["deep"]
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert found["known"]["t"].tolist() == [1.0, 1.0]


def test_only_the_leaf_that_is_unknown_is_pickled(tmp_path: Path) -> None:
    image = open_image(save(parts({"a": [1, Pair(1, 2), "text", torch.ones(2)]}), tmp_path / "i"))
    saved = image.document()["extra"]["plain"]["a"]
    assert [entry["$"] if isinstance(entry, dict) else entry for entry in saved] == [1, "pickle", "text", "tensor"]
    assert "pickle" not in json.dumps(open_image(save(parts({"a": [1, (2, 3)]}), tmp_path / "j")).document())


def test_without_it_the_leaf_is_refused_when_it_is_saved() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"^extra\.x: a .*Pair can't be kept exactly"):
        capture(parts({"x": Pair(1, 2)}, allow_pickle=False), rank=0, world=1)


def test_a_reader_that_does_not_say_the_same_unpickles_nothing_and_writes_nothing(tmp_path: Path) -> None:
    path = save(parts({"x": [Bomb()]}), tmp_path / "i")
    live: dict[str, Any] = {"x": 1}
    reader = parts(live, allow_pickle=False)
    assert isinstance(reader.model, nn.Module)
    before = [raw(parameter) for parameter in reader.model.parameters()]
    with pytest.raises(StateMismatchError, match=r"extra\.plain\.x\.0: .*pickled value.*allow_pickle=True"):
        load(reader, path)
    assert ([raw(parameter) for parameter in reader.model.parameters()], live, RAN) == (before, {"x": 1}, [])


def _with_pickle(path: Path, **changes: str) -> Path:
    image = open_image(path)
    document = image.document()
    document["extra"]["plain"]["x"].update(changes)
    tensors = {name: image.tensor(name).clone() for name in image.extents if name != "__document__"}
    return snapshot_file(path.with_name("changed"), tensors, json.dumps(document).encode(), METADATA)


@pytest.mark.parametrize("changes", [{"v": base64.b64encode(b"cos\nsystem\n").decode()}, {"sha256": "0" * 64}], ids=str)
def test_bytes_that_do_not_have_their_digest_are_not_unpickled(tmp_path: Path, changes: dict[str, str]) -> None:
    path = _with_pickle(save(parts({"x": Bomb()}), tmp_path / "i"), **changes)
    with pytest.raises(StateMismatchError, match=r"extra\.plain\.x: .*do not have its digest"):
        checked(parts({}), path)
    assert RAN == []


def test_nothing_is_unpickled_before_all_is_checked(tmp_path: Path) -> None:
    path = save(parts({"x": Bomb()}), tmp_path / "i")
    with pytest.raises(StateMismatchError, match=r"model\.weight: shape"):
        checked(parts({}, model=nn.Linear(2, 1)), path)
    assert RAN == []
    load(parts({}), path)
    assert RAN == ["boom"]


def test_what_cannot_be_pickled_either_is_refused_with_both_reasons() -> None:
    for odd in (threading.Lock(), lambda: 1):
        with pytest.raises(UnsupportedLeafError, match=r"^extra\.x: a .* can't be kept exactly.*nor can it be pickled"):
            capture(parts({"x": odd}), rank=0, world=1)


def test_a_parameter_is_never_pickled() -> None:
    model = nn.Module()
    model.register_buffer("x", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedLeafError, match=r"^model\.x: a tensor of layout torch\.sparse_coo"):
        capture(parts({}, model=model), rank=0, world=1)


def test_a_checkpointer_says_whether_it_may(memory_dir: Path) -> None:
    with FakeSidecar(memory_dir / "s") as sidecar:

        def checkpointer(extra: dict[str, Any], *, allow_pickle: bool = False) -> Checkpointer:
            return Checkpointer(
                job="j", model=nn.Linear(1, 1), extra=extra, socket=sidecar.socket_path, allow_pickle=allow_pickle
            )

        refused = checkpointer({"x": Bomb()})
        with pytest.raises(UnsupportedLeafError, match=r"extra\.x"):
            refused.restore()
        refused.close("nothing")
        allowed = checkpointer({"x": Bomb()}, allow_pickle=True)
        assert allowed.restore() == 0
        allowed.end_step(1)
        session = allowed._session
        assert session is not None
        with session._news:
            assert session._news.wait_for(lambda: bool(session.slots._free), 20)
        allowed.end_step(2)
        sidecar.wait_image(2)
        allowed.close()
        reader = checkpointer({})
        with pytest.raises(StateMismatchError, match="allow_pickle=True"):
            reader.restore()
        reader.close("nothing")
        assert RAN == []
