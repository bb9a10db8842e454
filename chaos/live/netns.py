"""Network namespaces as nodes: each its own interface, address and kernel settings, on a bridge; links that misbehave.

It takes root, ``ip``, ``tc`` and ``nft``. All names hold the process id of their maker. Namespaces outlive a maker that
was killed; whoever makes the next network removes those of dead makers first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeAlias

Way: TypeAlias = Literal["in", "out"]
INTERFACE = "eth0"
"""What a node's interface is called inside."""
_PLACE = Path("/run/netns")
_NAME = re.compile(r"toprope-(\d+)-([a-z0-9]{1,4})")
_CLONE_NEWNET = 0x40000000
_HOOKS: dict[Way, str] = {"in": "input", "out": "output"}
_MAX_NODES = 200
_BURST = "32kbit"


class NoNetworkError(Exception):
    """There can be no namespaces here; the message says why."""


def why_not() -> str:
    """Return why namespaces can't be made here, empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool, path=_path()) is None]
    return f"not installed: {', '.join(missing)} (Debian: iproute2, nftables)" if missing else ""


def enter(name: str) -> None:
    """Move this thread, and the threads that it will start, into a namespace."""
    with (_PLACE / name).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter network namespace {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetNode:
    """A namespace that is a node."""

    name: str
    namespace: str
    outside: str
    """Its end of the link at the bridge."""
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What goes before a command that is to run inside."""
        return ("ip", "netns", "exec", self.namespace)

    # Faults: each undone by ``heal``

    def cut(self) -> None:
        """Take the link down: nothing comes and nothing goes."""
        _run("ip", "link", "set", self.outside, "down")

    def cut_way(self, way: Way) -> None:
        """Drop what comes (``in``) or what goes (``out``), and not the other."""
        self._filter(way, "drop")

    def lose(self, percent: int) -> None:
        """Drop that share of all packets that come and go, by chance."""
        for way in _HOOKS:
            self._filter(way, f"numgen random mod 100 < {percent} drop")

    def slow(self, kbit_per_s: int) -> None:
        """Let no more than that go out."""
        limit = ("rate", f"{kbit_per_s}kbit", "burst", _BURST, "latency", "400ms")
        _run(*self.inside, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limit)

    def heal(self) -> None:
        """Let all come and go again."""
        _run("ip", "link", "set", self.outside, "up")
        _run(*self.inside, "tc", "qdisc", "del", "dev", INTERFACE, "root", may_fail=True)
        _run(*self.inside, "nft", "flush", "table", "inet", "toprope")

    def dropped(self) -> int:
        """Return how many packets the filters have dropped since the last ``heal``."""
        listed = _run(*self.inside, "nft", "list", "table", "inet", "toprope")
        return sum(int(count) for count in re.findall(r"counter packets (\d+)", listed))

    def _filter(self, way: Way, verdict: str) -> None:
        limited, _, word = verdict.rpartition(" ")
        names = f"{'iifname' if way == 'in' else 'oifname'} {INTERFACE}"
        _run(*self.inside, "nft", f"add rule inet toprope {way} {names} {limited} counter {word}")


@dataclass(slots=True)
class Network:
    """A bridge, and nodes on it; this process is at ``address``. Use it in a ``with``."""

    nodes: dict[str, NetNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if reason := why_not():
            raise NoNetworkError(reason)
        sweep()
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.address}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")

    @property
    def address(self) -> str:
        """The address of this process, where services run that no node takes along."""
        return f"{self._subnet}.254"

    def add(self, name: str) -> NetNode:
        """Make a node; its name is up to four letters and digits."""
        namespace = f"toprope-{os.getpid()}-{name}"
        assert _NAME.fullmatch(namespace), name
        assert len(self.nodes) < _MAX_NODES, "an address each"
        outside = f"tv{os.getpid()}{name}"
        address = f"{self._subnet}.{len(self.nodes) + 1}"
        node = NetNode(name=name, namespace=namespace, outside=outside, address=address)
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _run("ip", "link", "set", outside, "master", self._bridge, "up")
        for setting in ("net.ipv6.conf.all.disable_ipv6=1", "net.ipv4.tcp_syn_retries=2", "net.ipv4.tcp_retries2=6"):
            _run(*node.inside, "sysctl", "-q", "-w", setting, may_fail=True)
        _run(*node.inside, "ip", "link", "set", "lo", "up")
        _run(*node.inside, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
        _run(*node.inside, "ip", "link", "set", INTERFACE, "up")
        _run(*node.inside, "nft", "add table inet toprope")
        for way, hook in _HOOKS.items():
            _run(*node.inside, "nft", f"add chain inet toprope {way} {{ type filter hook {hook} priority 0; }}")
        self.nodes[name] = node
        return node

    def remove(self) -> None:
        """Remove all. Processes that still run inside keep their namespace, without a link."""
        _sweep(lambda pid: pid == os.getpid())

    @property
    def _bridge(self) -> str:
        return f"tb{os.getpid()}"

    @property
    def _subnet(self) -> str:
        pid = os.getpid()
        return f"10.{64 + (pid >> 8) % 128}.{pid % 256}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def sweep() -> None:
    """Remove what makers have left that are dead."""
    _sweep(lambda pid: not Path(f"/proc/{pid}").exists())


def _sweep(is_whose: Callable[[int], bool]) -> None:
    for name, pid in _namespaces():
        if is_whose(pid):
            _run("ip", "netns", "delete", name, may_fail=True)  # its link goes with it
    for path in Path("/sys/class/net").glob("t[bv]*"):
        found = re.match(r"t[bv](\d+)", path.name)
        if found is not None and is_whose(int(found[1])):
            _run("ip", "link", "delete", path.name, may_fail=True)


def _namespaces() -> Iterator[tuple[str, int]]:
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(_PLACE.iterdir()):
            if (found := _NAME.fullmatch(path.name)) is not None:
                yield path.name, int(found[1])


def _run(*command: str, may_fail: bool = False) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"PATH": _path()})
    if done.returncode != 0 and not may_fail:
        raise NoNetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _path() -> str:
    return f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
