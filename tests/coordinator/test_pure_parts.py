"""The small decisions on their own: spec, cadence and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.coordinator import spec
from toprope.coordinator.config import check_cadence
from toprope.coordinator.serving import read_token
from toprope.coordinator.settings import Address, parse_address
from toprope.coordinator.wire import Cadence
from toprope.store.errors import UsageError


def test_a_spec_is_known_by_its_content_and_not_by_the_order_of_its_keys() -> None:
    assert spec.name({"a": 1, "b": [2]}) == spec.name({"b": [2], "a": 1})
    assert spec.name({"a": 1}) != spec.name({"a": 2})


def test_the_difference_of_two_specs_names_each_changed_leaf_and_is_not_too_long() -> None:
    old = {"model": {"w": {"dtype": "float32", "shape": [4]}, "gone": 1}, "same": 1}
    new = {"model": {"w": {"dtype": "bfloat16", "shape": [4]}}, "same": 1, "more": True}
    assert spec.diff(old, new) == '- model.gone: 1; ~ model.w.dtype: "float32" -> "bfloat16"; + more: true'
    many = spec.diff({}, {f"k{number:03}": number for number in range(100)})
    assert many.count(";") == 12
    assert many.endswith("and 88 more")


@pytest.mark.parametrize("every", [(0, 1, 1), (10, 15, 30), (10, 10, 30), (10, 20, 10), (10, 5, 5), (4, 12, 24)])
def test_a_cadence_that_does_not_nest_is_refused(every: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError):
        check_cadence(Cadence(from_step=0, every=every[0], local_every=every[1], object_every=every[2]))


def test_a_cadence_of_powers_of_two_is_fine() -> None:
    check_cadence(Cadence(from_step=0, every=3, local_every=3, object_every=24))


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text, what="--listen")


@pytest.mark.parametrize(("text", "host"), [("127.0.0.1:80", "127.0.0.1"), ("[::1]:80", "::1")])
def test_an_address_is_a_host_and_a_port(text: str, host: str) -> None:
    assert parse_address(text, what="--listen") == Address(host=host, port=80)
    assert str(parse_address(text, what="--listen")) == text


def test_a_token_file_that_is_missing_or_holds_no_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        read_token(tmp_path / "none")
    (tmp_path / "weak").write_text("secret\n")
    with pytest.raises(UsageError, match="at least 16"):
        read_token(tmp_path / "weak")
    (tmp_path / "good").write_text("a secret of some length\n")
    assert read_token(tmp_path / "good") == "a secret of some length"
