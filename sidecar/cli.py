"""``ckpt sidecar``: flags to config, config to the runtime."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from toprope.coordinator.serving import check_ready_file, read_token
from toprope.coordinator.settings import parse_address, unwrapped
from toprope.sidecar.config import SidecarConfig, default_node, parse_domain
from toprope.sidecar.packing import Codec
from toprope.sidecar.runtime import run
from toprope.sidecar.threads import parse_cpus
from toprope.sidecar.values import RESTORE_PATIENCE_S
from toprope.store.sizes import KIBI

_MEBI = KIBI * KIBI

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def sidecar(  # noqa: PLR0913 - one parameter for each flag
    context: typer.Context,
    *,
    job: Annotated[str, typer.Option(help="Name of the training job.")],
    memory_dir: Annotated[Path, typer.Option(help="Directory in a tmpfs for slots and peer copies.")],
    local_dir: Annotated[Path, typer.Option(help="Directory on this node's disk for the local tier.")],
    store: Annotated[str, typer.Option(help="The object store: a directory, file:///path or s3://bucket/prefix?...")],
    coordinator: Annotated[str, typer.Option(help="URL of the coordinator; several with commas.")],
    node: Annotated[str | None, typer.Option(help="Name of this node; default: the host's name.")] = None,
    broker: Annotated[
        str | None, typer.Option(help="HOST:PORT of the MQTT broker; without one all goes by HTTP.")
    ] = None,
    socket: Annotated[Path | None, typer.Option(help="Unix socket for trainers.", envvar="CKPT_SOCKET")] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT for peers, health and metrics.")] = "127.0.0.1:0",
    domain: Annotated[list[str] | None, typer.Option(help="Failure domain label, such as rack=r1.")] = None,
    memory: Annotated[int | None, typer.Option(min=1, help="Most bytes of memory to use.")] = None,
    state_size: Annotated[int | None, typer.Option(min=1, help="Bytes of one rank's state: checked to fit.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on this node, for --state-size.")] = 1,
    copies: Annotated[int, typer.Option(min=0, help="Peer copies held here for each own rank.")] = 1,
    codec: Annotated[
        str, typer.Option(help="Pack uploads: auto (if the link is slower than packing), zstd or none.")
    ] = "auto",
    peer_bandwidth: Annotated[
        float | None, typer.Option(min=1.0, metavar="MIB", help="MiB a second at which copies are received, at most.")
    ] = None,
    scrub_bandwidth: Annotated[
        float, typer.Option(min=0.1, metavar="MIB", help="MiB a second at which copies are hashed again for damage.")
    ] = 50.0,
    nice: Annotated[
        int, typer.Option(min=0, max=19, help="How nice hashing and copying are to the trainers of this node.")
    ] = 5,
    cpus: Annotated[str, typer.Option(help="Processors for hashing and copying, as 0-3,8. Default: all.")] = "",
    stall_timeout: Annotated[
        float,
        typer.Option(help="Seconds that a transfer between nodes may stand still, until another source is tried."),
    ] = 5.0,
    use_deadline: Annotated[
        float, typer.Option(help="Seconds that a peer may use a copy, beside what its size takes; more than the above.")
    ] = 30.0,
    restore_patience: Annotated[
        float,
        typer.Option(
            help="Seconds that the sources of a restore are tried again; more than the above, and less than the "
            "coordinator's --verdict-deadline."
        ),
    ] = RESTORE_PATIENCE_S,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds that it serves on after SIGTERM, until all is safe elsewhere.")
    ] = 25.0,
    token_file: Annotated[Path | None, typer.Option(help="File with the job's token; needed off loopback.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Where to write url and pid once it serves.")] = None,
) -> None:
    """Serve one node: slots for its trainers, copies in memory, on disk, at peers and in the object store."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s %(message)s"
    )
    name = node if node is not None else default_node()
    config = SidecarConfig(
        job=job,
        node=name,
        coordinators=tuple(url.strip() for url in coordinator.split(",") if url.strip()),
        broker=parse_address(broker, what="--broker") if broker is not None else None,
        memory_dir=memory_dir,
        local_dir=local_dir,
        store=store,
        socket=socket if socket is not None else Path("/run/toprope") / job / "sidecar.sock",
        listen=parse_address(listen, what="--listen"),
        domain=parse_domain(domain or [], node=name),
        memory_bytes=memory,
        state_size=state_size,
        ranks=ranks,
        copies=copies,
        codec=cast("Codec", codec),
        peer_bytes_per_s=peer_bandwidth * _MEBI if peer_bandwidth is not None else None,
        scrub_bytes_per_s=scrub_bandwidth * _MEBI,
        nice=nice,
        cpus=parse_cpus(cpus),
        token=read_token(token_file),
        ready_file=ready_file,
        grace_s=grace,
        stall_timeout_s=stall_timeout,
        use_deadline_s=use_deadline,
        restore_patience_s=restore_patience,
    )
    check_ready_file(ready_file)
    asyncio.run(run(config, wrap=context.obj or unwrapped))
