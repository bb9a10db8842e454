"""The documents between sidecar and coordinator: another version's are refused by its number."""

from __future__ import annotations

import json

import pytest
from tests.support.reigns import FakeNode

from toprope.coordinator.wire import FORMAT, DocumentError, Inventory, decode, encode


def said(**changes: object) -> bytes:
    inventory = FakeNode(name="a", job_uid="0b" * 16).say()
    fields = json.loads(encode(inventory))
    return json.dumps(fields | changes).encode()


def test_a_document_of_this_format_is_read() -> None:
    assert decode(said(), Inventory, limit=10_000).node == "a"


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_another_version_is_refused_by_its_number_before_its_fields_are_looked_at(number: int) -> None:
    with pytest.raises(DocumentError, match=f"of format {number}, and this version speaks format {FORMAT}: run the"):
        decode(said(format=number, something_new=1), Inventory, limit=10_000)


def test_a_field_that_this_format_does_not_have_is_refused() -> None:
    with pytest.raises(DocumentError, match=f"not a Inventory of format {FORMAT}: .*something_new"):
        decode(said(something_new=1), Inventory, limit=10_000)
