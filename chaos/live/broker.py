"""An MQTT broker for one machine: mosquitto when it is installed, else the embedded one."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from toprope.chaos.live.processes import Process, wait_until

_CONFIGURATION = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
set_tcp_nodelay true
max_queued_messages 0
log_dest stderr
user {user}
"""


def start_broker(*, port: int, directory: Path, log: Path) -> Process:
    """Start a broker on a loopback port and return it once it accepts connections."""
    process = Process("broker", _command(port, directory), log=log)
    wait_until(lambda: _listens(port), what=f"the broker listens on port {port}", timeout_s=15, alive=[process])
    return process


def _command(port: int, directory: Path) -> list[str]:
    mosquitto = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if mosquitto is None:
        return [sys.executable, "-m", "toprope.coordinator.adapters.broker", f"127.0.0.1:{port}"]
    configuration = directory / f"mosquitto-{port}.conf"
    user = "root" if os.geteuid() == 0 else "mosquitto"  # root: a changed user would clear our death signal
    configuration.write_text(_CONFIGURATION.format(port=port, user=user))
    return [mosquitto, "-c", str(configuration)]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
