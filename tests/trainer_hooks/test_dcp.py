"""Upstream's own scenarios with our writer and reader in the place of the stock ones, which run beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar, Peer
from tests.support.tiny_trainer import METADATA, open_image, snapshot_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from toprope.trainer_hooks import SupersededError, UsageError
from toprope.trainer_hooks.dcp import Attempt, StorageReader, StorageWriter, step_of
from toprope.trainer_hooks.dcp.content import contents_of
from toprope.trainer_hooks.errors import StateMismatchError
from toprope.trainer_hooks.image.shard import Image, Piece
from toprope.trainer_hooks.launch import World
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import SlotState, read_page, write_page

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, Any]


@pytest.fixture
def sidecar(memory_dir: Path) -> Iterator[FakeSidecar]:
    with FakeSidecar(memory_dir / "s") as fake:
        yield fake


class Kind(Protocol):
    """A way to save and load: the stock one or ours."""

    def save(self, step: int, state: State, **more: Any) -> None: ...  # noqa: ANN401 - as torch takes it

    def async_save(self, step: int, state: State) -> Future[Any]: ...

    def load(self, state: State, **more: Any) -> None: ...  # noqa: ANN401 - as torch takes it


class Stock:
    """The file system writer and reader of torch."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.step = directory, 0

    def _writer(self, step: int) -> FileSystemWriter:
        self.step = step
        return FileSystemWriter(self.directory / f"step-{step}")

    def save(self, step: int, state: State, **more: Any) -> None:  # noqa: ANN401 - as torch takes it
        save(state, storage_writer=self._writer(step), **more)

    def async_save(self, step: int, state: State) -> Future[Any]:
        found = async_save(state, storage_writer=self._writer(step))
        assert isinstance(found, Future)
        return found

    def load(self, state: State, **more: Any) -> None:  # noqa: ANN401 - as torch takes it
        load(state, storage_reader=FileSystemReader(self.directory / f"step-{self.step}"), **more)


class Ours:
    """Our writer and reader; what is loaded is loaded by another launch."""

    def __init__(self, sidecar: FakeSidecar) -> None:
        self.sidecar = sidecar
        self.attempt: Attempt | None = None
        self.writer: StorageWriter | None = None

    def launch(self) -> Attempt:
        self.close()
        self.attempt = Attempt(job="j", socket=self.sidecar.socket_path)
        return self.attempt

    def begun(self, **more: Any) -> StorageWriter:  # noqa: ANN401 - as the writer takes it
        attempt = self.launch()
        attempt.begin()
        self.writer = StorageWriter(attempt, **{"timeout_s": 20.0, **more})
        return self.writer

    def save(self, step: int, state: State, **more: Any) -> None:  # noqa: ANN401 - as torch takes it
        save(state, checkpoint_id=f"step-{step}", storage_writer=self.writer or self.begun(), **more)

    def async_save(self, step: int, state: State) -> Future[Any]:
        found = async_save(state, checkpoint_id=f"step-{step}", storage_writer=self.writer or self.begun())
        assert isinstance(found, Future)
        return found

    def load(self, state: State, **more: Any) -> None:  # noqa: ANN401 - as torch takes it
        load(state, storage_reader=StorageReader(self.launch()), **more)

    def now(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def close(self) -> None:
        if self.attempt is not None:
            self.attempt.close()


@pytest.fixture
def ours(sidecar: FakeSidecar) -> Iterator[Ours]:
    kind = Ours(sidecar)
    yield kind
    kind.close()


@pytest.fixture(params=["stock", "ours"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    found: Kind = Stock(tmp_path) if request.param == "stock" else request.getfixturevalue("ours")
    return found


def nested() -> State:
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.tensor(2.5), "none": torch.empty(0, 3)},
        "list": [torch.ones(2), {"n": 7}, torch.tensor([True, False])],
        "values": {"step": 3, "lr": 0.1, "name": "x", "betas": (0.9, 0.99), "off": None, "big": 1 << 70, "raw": b"\0x"},
        "pair": (torch.full((2,), 4.0), "beside a tensor"),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "wide": torch.ones(2, dtype=torch.complex128),
    }


def blank(value: Any) -> Any:  # noqa: ANN401 - any state
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else 0


def same(one: Any, other: Any) -> bool:  # noqa: ANN401 - any state
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# Upstream's scenarios


def test_nested_containers_come_back_as_they_were(kind: Kind) -> None:
    state = nested()
    kind.save(3, state)
    found = blank(state)
    kind.load(found)
    assert same(found, nested())


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        one_step(model, optimizer, number)
    return model, optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.arange(20.0).reshape(5, 4).roll(number)).square().sum().backward()
    optimizer.step()


def test_model_and_optimizer_go_on_as_if_they_had_not_ended(kind: Kind) -> None:
    model, optimizer = trained(1, 2)
    weights, moments = get_state_dict(model, optimizer)
    kind.save(2, {"model": weights, "optimizer": moments})
    other, its = trained(2, 1)
    weights, moments = get_state_dict(other, its)
    state: State = {"model": weights, "optimizer": moments}
    kind.load(state)
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for one, its_optimizer in ((model, optimizer), (other, its)):
        one_step(one, its_optimizer, 2)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert its.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


class Counter:
    def __init__(self, at: int) -> None:
        self.at = torch.tensor(at)

    def state_dict(self) -> State:
        return {"at": self.at}

    def load_state_dict(self, state: State) -> None:
        self.at = state["at"]


def test_an_object_with_a_state_of_its_own_is_given_it_back(kind: Kind) -> None:
    kind.save(1, {"counter": Counter(5)})
    counter = Counter(0)
    kind.load({"counter": counter})
    assert int(counter.at) == 5


def test_a_part_is_loaded_and_the_rest_left_alone(kind: Kind) -> None:
    kind.save(1, nested())
    found: State = {"model": {"w": torch.zeros(3, 4)}}
    kind.load(found)
    assert torch.equal(found["model"]["w"], nested()["model"]["w"])


def test_a_key_that_was_not_saved_is_an_error_unless_a_partial_load_is_asked_for(kind: Kind) -> None:
    kind.save(1, {"a": torch.ones(2)})
    found = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: b"):
        kind.load(dict(found))
    kind.load(found, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (found["a"].tolist(), found["b"].tolist()) == ([1, 1], [0, 0])


def test_another_shape_is_an_error_and_another_dtype_is_converted(kind: Kind) -> None:
    kind.save(1, {"a": torch.tensor([1.0, 2.0])})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        kind.load({"a": torch.zeros(3)})
    found = {"a": torch.zeros(2, dtype=torch.int8)}
    kind.load(found)
    assert found["a"].tolist() == [1, 2]


def test_an_asynchronous_save_is_of_the_moment_of_the_call(kind: Kind) -> None:
    state: State = {"a": torch.ones(1000), "n": 1}
    saving = kind.async_save(1, state)
    state["a"].fill_(7)
    saving.result()
    kind.async_save(2, {"a": torch.full((1000,), 2.0), "n": 2}).result()
    found: State = {"a": torch.zeros(1000), "n": 0}
    kind.load(found)
    assert (found["a"].unique().tolist(), found["n"]) == ([2.0], 2)


def test_a_tensor_that_is_a_view_is_saved_as_what_it_shows(kind: Kind) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    kind.save(1, {"t": whole.t(), "part": whole[1:, ::2], "wide": torch.ones(1).expand(4)})
    found = {"t": torch.zeros(4, 3), "part": torch.zeros(2, 2), "wide": torch.zeros(4)}
    kind.load(found)
    assert same(found, {"t": whole.t(), "part": whole[1:, ::2], "wide": torch.ones(4)})


def test_a_plan_that_is_cached_is_used_for_other_values(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        monkeypatch.setattr(SavePlanner, name, {})  # torch keeps plans by the planner's class, whoever wrote
    for step in (1, 2):
        kind.save(step, {"a": torch.full((2,), float(step))}, planner=DefaultSavePlanner(enable_plan_caching=True))
    found = {"a": torch.zeros(2)}
    kind.load(found)
    assert found["a"].tolist() == [2, 2]


# What is ours


def test_a_shard_keeps_the_names_of_torch_and_no_pickle(ours: Ours, sidecar: FakeSidecar, tmp_path: Path) -> None:
    ours.save(3, nested())
    (tmp_path / "image").write_bytes(sidecar.wait_image(3))
    image = open_image(tmp_path / "image")
    assert {"model.w", "list.0", "half"} <= set(image.extents)
    assert image.document()["values"]["values.betas"] == {"$": "tuple", "v": [0.9, 0.99]}
    assert image.document()["paths"]["list.1.n"] == ["list", 1, "n"]
    assert image.metadata["step"] == "3"


def test_each_tier_is_asked_to_take_the_step(ours: Ours, sidecar: FakeSidecar) -> None:
    sidecar.lend_again = False
    ours.save(7, {"a": torch.ones(1)})
    pages = [read_page(path) for path in sidecar.slot(0, 0).page.parent.glob("*.page")]
    assert [page.step for page in pages if page.asked] == [7]


class Odd:
    """A value of a type that nobody knows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


def test_a_value_that_can_not_be_kept_is_refused_by_name_and_the_next_step_is_saved(
    ours: Ours, sidecar: FakeSidecar
) -> None:
    with pytest.raises(CheckpointException, match=r"odd: a .*Odd can't be kept exactly"):
        ours.save(5, {"a": torch.ones(1), "odd": Odd()})
    sidecar.wait(lambda: any(isinstance(frame, wire.Skipped) and frame.step == 5 for frame in sidecar.heard))
    ours.save(6, {"a": torch.ones(1)})
    assert sorted(sidecar.images) == [(6, 0)]


def test_a_pickled_value_loads_only_where_both_ends_allow_it(ours: Ours) -> None:
    ours.begun(allow_pickle=True)
    ours.save(1, {"odd": Odd()})
    found: State = {"odd": 0}
    with pytest.raises(CheckpointException, match="unpickling runs what it says"):
        ours.load(found)
    load(found, storage_reader=StorageReader(ours.launch(), allow_pickle=True))
    assert found["odd"] == Odd()


class Shouting(DefaultSavePlanner):
    """A planner of somebody's own, which makes its own bytes."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002, ANN401 - torch's signature
        return super().transform_object(write_item, object.upper() if isinstance(object, str) else object)


def test_what_a_planner_of_ones_own_makes_is_kept_as_it_is_if_that_is_allowed(ours: Ours) -> None:
    with pytest.raises(CheckpointException, match="bytes of a planner of your own"):
        ours.save(1, {"name": "x"}, planner=Shouting())
    ours.writer = StorageWriter(ours.now(), allow_pickle=True)
    ours.save(2, {"name": "x"}, planner=Shouting())
    found = {"name": ""}
    load(found, storage_reader=StorageReader(ours.launch(), allow_pickle=True))
    assert found["name"] == "X"


def test_a_job_that_stands_at_a_step_does_not_begin_afresh_in_silence(ours: Ours) -> None:
    ours.save(4, {"a": torch.ones(1)})
    attempt = ours.launch()
    assert (attempt.step, attempt.is_new) == (4, False)
    with pytest.raises(UsageError, match="stands at step 4 and nothing was loaded"):
        attempt.begin()
    found = {"a": torch.zeros(1)}
    with pytest.raises(CheckpointException, match=r"stands at step 4, .* 'step-3' is another one"):
        load(found, checkpoint_id="step-3", storage_reader=StorageReader(attempt))
    load(found, storage_reader=StorageReader(attempt))
    load({"a": torch.zeros(1)}, checkpoint_id="step-4", storage_reader=StorageReader(attempt))
    attempt.begin()
    with pytest.raises(CheckpointException, match=r"load before begin\(\)"):
        load(found, storage_reader=StorageReader(attempt))


def test_a_new_job_has_nothing_to_load_and_saves_nothing_before_it_begins(ours: Ours) -> None:
    attempt = ours.launch()
    with pytest.raises(CheckpointException, match="this is a new job"):
        load({"a": torch.zeros(1)}, storage_reader=StorageReader(attempt))
    ours.writer = StorageWriter(attempt)
    with pytest.raises(CheckpointException, match=r"call begin\(\)"):
        ours.save(1, {"a": torch.zeros(1)})


def test_each_save_has_a_step_of_its_own(ours: Ours) -> None:
    ours.save(2, {"a": torch.zeros(1)})
    for step in (1, 2):
        with pytest.raises(CheckpointException, match=rf"step {step} can't be saved after step 2"):
            ours.save(step, {"a": torch.zeros(1)})
    with pytest.raises(CheckpointException, match="checkpoint_id None names no step"):
        save({"a": torch.zeros(1)}, storage_writer=StorageWriter(ours.now()))


@pytest.mark.parametrize("given", ["70", "step-70", "runs/a/step-70/", Path("x/70")])
def test_a_checkpoint_id_names_its_step(given: str | Path) -> None:
    assert step_of(given) == step_of(70) == 70


@pytest.mark.parametrize("given", [0, "", "step-", "last", "step--1", "7a", "step-07", "1" * 19])
def test_a_checkpoint_id_that_names_no_step_is_refused(given: str | int) -> None:
    with pytest.raises(UsageError, match=re.escape(f"checkpoint_id {given!r} names no step")):
        step_of(given)


def test_a_level_that_there_is_not_is_refused(ours: Ours) -> None:
    with pytest.raises(UsageError, match="wait_for='nothing' is no level; give one of memory, protected, ready"):
        StorageWriter(ours.launch(), wait_for="nothing")


@pytest.mark.parametrize("level", ["protected", "ready"])
def test_a_save_ends_when_the_step_is_as_safe_as_asked_for(ours: Ours, sidecar: FakeSidecar, level: Any) -> None:  # noqa: ANN401 - a level
    ours.begun(wait_for=level, timeout_s=1.0)
    with pytest.raises(CheckpointException, match=rf"step 1 is safe in 'memory' and not '{level}' in time"):
        ours.save(1, {"a": torch.zeros(1)})
    attempt = sidecar.rounds[-1].attempt
    of_another = {"protected": 9, "ready": 9}
    sidecar.say_desired(attempt=1, uid="another", schedule=attempt.schedule, **of_another)
    with pytest.raises(CheckpointException, match="step 2 is safe in 'memory'"):
        ours.save(2, {"a": torch.zeros(1)})
    sidecar.say_desired(attempt=1, uid=attempt.uid, schedule=attempt.schedule, **{level: 3})
    ours.save(3, {"a": torch.zeros(1)})


class NeverHashes(FakeSidecar):
    """Lends slots and looks at none of them."""

    def _take(self, peer: Peer, frame: wire.Sealed) -> None:
        pass


class Drops(FakeSidecar):
    """Finds that no slot holds what it should."""

    def _take(self, peer: Peer, frame: wire.Sealed) -> None:
        path = self.slot(self._rank(peer), frame.slot).page
        write_page(path, replace(read_page(path), state=SlotState.EMPTY))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Drops, "was not hashed by the sidecar in time"),
        (NeverHashes, "was not hashed by the sidecar in time"),
        (FakeSidecar, "no free slot of [0-9]+ bytes in time"),
    ],
)
def test_what_is_not_saved_is_an_error_or_a_warning_as_wished(
    memory_dir: Path, caplog: pytest.LogCaptureFixture, made: Callable[[Path], FakeSidecar], said: str
) -> None:
    with made(memory_dir / "s") as fake:
        fake.lend = type(fake) is not FakeSidecar
        ours = Ours(fake)
        ours.begun(timeout_s=1.0)
        with pytest.raises(CheckpointException, match=said):
            ours.save(1, {"a": torch.zeros(1)})
        ours.writer = StorageWriter(ours.now(), timeout_s=1.0, strict=False)
        ours.save(2, {"a": torch.zeros(1)})
        assert re.search(said, caplog.text)
        assert "step 2 was not saved: ranks 0 skipped it" in caplog.text
        fake.wait(lambda: [f.step for f in fake.heard if isinstance(f, wire.Skipped)] == [1, 2])
        ours.close()


def test_a_slot_that_can_not_be_written_is_given_back(ours: Ours, sidecar: FakeSidecar) -> None:
    sidecar.lend_again = False
    ours.save(1, {"a": torch.zeros(1)})
    for number in range(3):
        page = sidecar.slot(0, number).page
        page.unlink()
        page.symlink_to("/nowhere/page")
    with pytest.raises(CheckpointException, match="step 2 was not saved: the slot can't be written"):
        ours.save(2, {"a": torch.zeros(1)})
    sidecar.wait(lambda: (2, SlotState.EMPTY) in sidecar.states, timeout_s=5.0)


def test_a_state_that_has_grown_gets_larger_slots(ours: Ours, sidecar: FakeSidecar) -> None:
    ours.save(1, {"a": torch.zeros(10)})
    ours.save(2, {"a": torch.ones(200_000)})
    found = {"a": torch.zeros(200_000)}
    ours.load(found)
    assert bool((found["a"] == 1).all())


def test_a_launch_that_was_replaced_saves_no_more(ours: Ours, sidecar: FakeSidecar) -> None:
    ours.save(1, {"a": torch.zeros(1)})
    attempt = sidecar.rounds[-1].attempt
    sidecar.say_desired(attempt=2, uid="another", schedule=attempt.schedule)
    session = ours.now()._entry.session
    with session._news:
        assert session._news.wait_for(lambda: session.desired is not None and session.desired.attempt == 2, 20)
    with pytest.raises(CheckpointException, match="attempt 2 of the job was opened after this one") as raised:
        ours.save(2, {"a": torch.zeros(1)})
    assert isinstance(raised.value.failures[0][0], SupersededError)


def test_a_source_that_can_not_be_had_is_struck_off_when_it_is_looked_at(ours: Ours, sidecar: FakeSidecar) -> None:
    for step in (1, 2):
        ours.save(step, {"a": torch.full((1,), float(step))})
    sidecar.spoil_staged = lambda known: "it does not verify" if known.attempt.from_step == 2 else ""
    found = {"a": torch.zeros(1)}
    ours.load(found)
    assert found["a"].tolist() == [1.0]


def test_a_writer_goes_on_in_the_process_that_it_is_handed_to_and_not_in_its_own(ours: Ours) -> None:
    ours.save(1, {"a": torch.zeros(1)})
    made, (attempt,) = StorageWriter(ours.now()).__reduce__()
    slots = ours.now()._entry.session.slots
    assert slots._locked
    resume, given = attempt.__reduce__()
    assert not slots._locked, "the other process could lock none of its slots"
    resumed = resume(*given)
    assert resumed is resume(*given)
    with pytest.raises(CheckpointException, match="no sidecar"):
        save({"a": torch.zeros(1)}, checkpoint_id="2", storage_writer=StorageWriter(attempt, timeout_s=0.1))
    save({"a": torch.ones(1)}, checkpoint_id="2", storage_writer=made(resumed))
    resumed.close()
    found = {"a": torch.zeros(1)}
    ours.load(found)
    assert found["a"].tolist() == [1.0]


def test_a_launch_that_has_begun_holds_the_lock_of_a_slot_before_it_saves(ours: Ours, sidecar: FakeSidecar) -> None:
    """The first save may be a thousand steps away; a lock says until then that this world lives."""
    ours.begun()
    slots = ours.now()._entry.session.slots
    sidecar.wait(lambda: len(slots._locked) == sidecar.slot_count)
    ours.save(1, {"a": torch.arange(1 << 20, dtype=torch.float32)})
    found = {"a": torch.zeros(1 << 20)}
    ours.load(found)
    assert torch.equal(found["a"], torch.arange(1 << 20, dtype=torch.float32))


def test_an_attempt_that_has_not_begun_is_not_handed_over(ours: Ours) -> None:
    with pytest.raises(UsageError, match=r"call begin\(\) before an attempt is handed"):
        ours.launch().__reduce__()


def test_ranks_that_do_not_all_save_the_same_step_are_refused(ours: Ours) -> None:
    writer = ours.begun()
    plan = SavePlan([], storage_data=3)
    with pytest.raises(UsageError, match="2 of the 1 ranks of the job save"):
        writer.prepare_global_plan([plan, plan])
    with pytest.raises(UsageError, match="use_collectives=False"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(UsageError, match="no process_group that has other ranks"):
        writer.set_up_storage_writer(True, rank=1)
    ours.now()._world = World(0, 2)
    with pytest.raises(UsageError, match="the ranks save different steps: 3, 4"):
        writer.prepare_global_plan([plan, SavePlan([], storage_data=4)])


def shard(path: Path, tensor: torch.Tensor, offset: int, rank: int = 0) -> Image:
    document = json.dumps({"format": 1, "values": {}, "renamed": {}, "paths": {}}).encode()
    return open_image(snapshot_file(path, {"a": tensor}, document, METADATA, {"a": Piece((4,), (offset,))}))


def test_a_tensor_of_which_a_piece_is_missing_or_there_twice_is_not_loaded(ours: Ours, tmp_path: Path) -> None:
    ours.save(1, {"a": torch.zeros(4)})
    reader, two = StorageReader(ours.launch()), torch.ones(2)
    for offsets, said in (((0,), "the shards hold 2 of the 4 elements"), ((0, 1), "the same elements twice")):
        shards = {at: shard(tmp_path / f"{offsets}-{at}", two, offset) for at, offset in enumerate(offsets)}
        reader._contents = contents_of(shards)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({"a": torch.zeros(4)}, reader._contents.metadata())
        with pytest.raises(StateMismatchError, match=rf"a: .*{said}"):
            reader.read_data(planner.create_local_plan(), planner)


def test_replicas_that_several_ranks_stored_are_one_and_forms_that_differ_are_refused(tmp_path: Path) -> None:
    first, again = shard(tmp_path / "0", torch.ones(2), 0), shard(tmp_path / "1", torch.ones(2), 0)
    assert len(contents_of({0: first, 1: again}).wholes["a"].stored) == 1
    with pytest.raises(StateMismatchError, match=r"a: torch.int64 \(4,\) on rank 1 of the checkpoint"):
        contents_of({0: first, 1: shard(tmp_path / "2", torch.ones(2, dtype=torch.int64), 2)})


def test_a_shard_that_the_hook_saved_is_refused(tmp_path: Path) -> None:
    image = open_image(snapshot_file(tmp_path / "0", {"a": torch.ones(2)}, b'{"format": 1, "model": {}}'))
    with pytest.raises(StateMismatchError, match="shard of rank 0 was not saved with torch"):
        contents_of({0: image})
