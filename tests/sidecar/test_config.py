"""What a sidecar refuses before it looks at the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toprope.coordinator.settings import parse_address
from toprope.sidecar.config import SidecarConfig
from toprope.store.errors import UsageError


def config(**changes: Any) -> SidecarConfig:  # noqa: ANN401 - settings of any type
    values: dict[str, Any] = {
        "job": "job",
        "node": "a",
        "coordinators": ("http://127.0.0.1:1",),
        "broker": None,
        "memory_dir": Path("/memory"),
        "local_dir": Path("/local"),
        "store": "/store",
        "socket": Path("/run/sidecar.sock"),
        "listen": parse_address("127.0.0.1:0", what="--listen"),
        "domain": {"node": "a"},
    }
    return SidecarConfig(**values | changes)


@pytest.mark.parametrize("text", ["0.0.0.0:7071", "[::]:7071"])
def test_an_address_that_names_no_host_is_refused_since_peers_are_told_it(text: str) -> None:
    with pytest.raises(UsageError, match="names no host"):
        config(listen=parse_address(text, what="--listen"), token="s" * 32)


@pytest.mark.parametrize("text", ["10.0.0.2:7071", "[fd00::2]:7071"])
def test_other_hosts_are_served_with_a_token_only(text: str) -> None:
    listen = parse_address(text, what="--listen")
    with pytest.raises(UsageError, match="--token-file"):
        config(listen=listen)
    assert str(config(listen=listen, token="s" * 32).listen) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"job": "../x"}, "job '../x' is not usable"),
        ({"node": ""}, "node '' is not usable"),
        ({"socket": Path("/" + "x" * 107)}, "has 108 bytes"),
        ({"coordinators": ("here",)}, "is not a URL"),
        ({"domain": {"rack": "r 1"}}, "domain rack=r 1 is not usable"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        config(**changes)
