"""What a sidecar refuses before it looks at the machine."""

from __future__ import annotations

import math
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
        ({"stall_timeout_s": 0.0}, "--stall-timeout 0 is not usable: give more than 0, or"),
        (
            {"stall_timeout_s": 30.0},
            "--use-deadline 30 is not usable: give more than the 30 seconds of --stall-timeout",
        ),
        ({"use_deadline_s": 300.0}, "--restore-patience 240 is not usable: give more than the 300 seconds of --use"),
        ({"restore_patience_s": 20.0}, "--restore-patience 20 is not usable: give more than the 30 seconds of --use"),
        ({"restore_patience_s": 241.0}, "--restore-patience 241 is not usable: give at most 240 seconds"),
        ({"stall_timeout_s": math.nan}, "--stall-timeout nan is not usable"),
    ],
)
@pytest.mark.fault("B113")
def test_time_limits_in_an_order_in_which_the_outer_ends_before_the_inner_are_refused(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        config(**changes)


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
