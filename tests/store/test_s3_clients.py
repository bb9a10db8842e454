"""How a client of S3 is made."""

from __future__ import annotations

import gc
from typing import Any

import botocore.session
import pytest

from toprope.store.objects.s3_clients import Clients
from toprope.store.objects.s3_location import parse_location


def test_the_collector_rests_while_a_client_is_made_and_not_while_credentials_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[tuple[str, bool]] = []

    class Noted(botocore.session.Session):
        def get_credentials(self) -> Any:  # noqa: ANN401 - botocore types it nowhere
            if not noted:  # it keeps what it has found
                noted.append(("looked for", gc.isenabled()))
            return super().get_credentials()

        def create_client(self, *words: Any, **more: Any) -> Any:  # noqa: ANN401 - as above
            noted.append(("made", gc.isenabled()))
            return super().create_client(*words, **more)

    monkeypatch.setattr(botocore.session, "Session", Noted)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    Clients(location=parse_location("s3://bucket/?region=us-east-1")).current()
    assert noted == [("looked for", True), ("made", False)]
    assert gc.isenabled()
