"""``ckpt coordinator``, ``ckpt up`` and ``ckpt status``."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from toprope.coordinator import status as status_page
from toprope.coordinator import up as up_supervisor
from toprope.coordinator.adapters.mqtt import retained_url
from toprope.coordinator.basing import bring_base
from toprope.coordinator.config import COPIES_MAX, Config
from toprope.coordinator.leader import NobodyThereError
from toprope.coordinator.runtime import run
from toprope.coordinator.serving import check_ready_file, read_token
from toprope.coordinator.settings import parse_address, unwrapped
from toprope.coordinator.wire import Cadence
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.names import checked_id
from toprope.store.objects.opening import open_store

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

Job = Annotated[str, typer.Option("--job", help="Name of the job.")]
Store = Annotated[
    str, typer.Option("--store", help="The object store: a directory, file:///path or s3://bucket/prefix?...")
]
Every = Annotated[int, typer.Option("--every", help="Steps between snapshots (memory and peer).")]
LocalEvery = Annotated[
    int, typer.Option("--local-every", help="Steps between local copies: --every times a power of two.")
]
ObjectEvery = Annotated[
    int, typer.Option("--object-every", help="Steps between READY checkpoints: --local-every times a power of two.")
]
BaseAt = Annotated[
    str,
    typer.Option(
        "--base",
        metavar="[ROOT/]JOB@STEP",
        help="Start a new job from this checkpoint of another job, which is copied here if it is in another store.",
    ),
]
BaseTake = Annotated[
    Literal["all", "weights"],
    typer.Option(
        "--base-take", help="What of it: all, and training goes on after its step; or the models only, from step 1."
    ),
]
OnLogOutage = Annotated[
    Literal["wait", "proceed"],
    typer.Option(
        "--on-log-outage",
        help="When the object store is away and ranks die: proceed from memory, if all nodes agree, or wait for it.",
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the secret that peers must show. Needed off loopback.")
]


@app.command()
def coordinator(  # noqa: PLR0913 - the options of a service
    context: typer.Context,
    *,
    job: Job,
    store: Store,
    broker: Annotated[str, typer.Option("--broker", help="HOST:PORT of an MQTT broker.")] = "",
    embedded_broker: Annotated[
        bool, typer.Option("--embedded-broker", help="Run a broker in a child process.")
    ] = False,
    broker_listen: Annotated[
        str, typer.Option("--broker-listen", help="HOST:PORT of the embedded broker; port 0: any.")
    ] = "127.0.0.1:0",
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to serve HTTP on; port 0: any.")] = "127.0.0.1:0",
    every: Every = 10,
    local_every: LocalEvery = 20,
    object_every: ObjectEvery = 40,
    copies: Annotated[
        int,
        typer.Option(
            "--copies",
            min=0,
            max=COPIES_MAX,
            help="Other nodes that hold each snapshot in memory; 0: its own node alone.",
        ),
    ] = 1,
    verdict_deadline_s: Annotated[
        float, typer.Option("--verdict-deadline", help="Seconds that all ranks have for a phase of a restore.")
    ] = 300.0,
    retain: Annotated[
        str | None,
        typer.Option("--retain", help="Checkpoints to keep, as last=3,every=1000; or all. Default: as the log has it."),
    ] = None,
    base: BaseAt = "",
    base_take: BaseTake = "all",
    on_log_outage: OnLogOutage = "proceed",
    token_file: TokenFile = None,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Write {url, pid, broker} here once it serves.")
    ] = None,
) -> None:
    """Run the coordinator of a job: attempts, placement, consistent steps, READY.

    It keeps nothing of its own: killed and started again it rebuilds all from the job log and the sidecars'
    inventories. Of several one leads; the others stand by, and one of them takes its place within 15 seconds when it
    gives no sign of life. Tell the sidecars the urls of all.
    """
    config = Config(
        job=job,
        store=store,
        listen=parse_address(listen, what="--listen"),
        broker=parse_address(broker, what="--broker") if broker else None,
        embedded_broker=parse_address(broker_listen, what="--broker-listen") if embedded_broker else None,
        cadence=Cadence(from_step=0, every=every, local_every=local_every, object_every=object_every),
        token=read_token(token_file),
        ready_file=ready_file,
        copies=copies,
        verdict_deadline_s=verdict_deadline_s,
        retain=retain,
        base=base,
        base_take=base_take,
        on_log_outage=on_log_outage,
    )
    check_ready_file(ready_file)
    _log_to_stderr()
    asyncio.run(run(config, wrap=context.obj or unwrapped))


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiohttp").setLevel(logging.WARNING)


@app.command()
def up(  # noqa: PLR0913 - the options of a service
    *,
    job: Job,
    store: Store,
    node: Annotated[str, typer.Option("--node", help="Name of this node. Default: the host name.")] = "",
    directory: Annotated[
        Path, typer.Option("--dir", help="Where logs and the local tier lie, under the job's name.")
    ] = Path(".toprope"),
    memory_dir: Annotated[
        Path | None, typer.Option("--memory-dir", help="A tmpfs directory. Default: one under /dev/shm.")
    ] = None,
    every: Every = 10,
    local_every: LocalEvery = 20,
    object_every: ObjectEvery = 40,
    coordinators: Annotated[
        int, typer.Option("--coordinators", min=1, max=5, help="Coordinators; all but one stand by.")
    ] = 2,
    codec: Annotated[
        str, typer.Option("--codec", help="Pack uploads: auto (if the link is slower than packing), zstd or none.")
    ] = "auto",
    base: BaseAt = "",
    base_take: BaseTake = "all",
    on_log_outage: OnLogOutage = "proceed",
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Write {url, socket, broker, pids} here once all serve.")
    ] = None,
) -> None:
    """Start all that one machine needs: a broker, coordinators, a sidecar. Ctrl-C stops them.

    Prints the variable that a trainer needs on stdout. A child that dies is started again on its old port.
    """
    cadence = Cadence(from_step=0, every=every, local_every=local_every, object_every=object_every)
    check_ready_file(ready_file)
    name = node or socket.gethostname().lower()
    where = up_supervisor.layout(job=job, node=name, store=store, directory=directory, memory_dir=memory_dir)
    told = ["--on-log-outage", on_log_outage]
    if base:
        told += ["--base", base, "--base-take", base_take]
        bring_base(open_store(store, write=True, patient=False), job, base, say=up_supervisor.tell)
    up_supervisor.up(where, cadence, announce=ready_file, coordinators=coordinators, codec=codec, told=told)


@app.command()
def status(
    *,
    job: Annotated[str, typer.Option("--job", help="Name of the job. Needed without --coordinator.")] = "",
    coordinator_url: Annotated[
        str, typer.Option("--coordinator", metavar="URL[,URL]", help="Coordinators, any of them.")
    ] = "",
    broker: Annotated[str, typer.Option("--broker", help="HOST:PORT of the broker, which knows the URL.")] = "",
    directory: Annotated[Path, typer.Option("--dir", help="The directory of a `ckpt up` on this machine.")] = Path(
        ".toprope"
    ),
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole document as JSON.")] = False,
) -> None:
    """Say what is safe where: steps by rank and tier, nodes, alarms.

    It asks the coordinator that leads: give the URL of any, the broker that knows it, or the job of a `ckpt up` on this
    machine.
    """
    if coordinator_url:
        urls: tuple[str, ...] = tuple(url.strip() for url in coordinator_url.split(",") if url.strip())
    elif not job:
        raise UsageError("give --coordinator URL, or --job with the --broker or the --dir of its `ckpt up`")
    elif broker:
        urls = (asyncio.run(retained_url(parse_address(broker, what="--broker"), job=checked_id(job, what="job"))),)
    else:
        urls = up_supervisor.running_urls(job, directory)
    try:
        body = status_page.fetch(urls, job=job, token=read_token(token_file))
    except NobodyThereError as error:
        raise UnavailableError(f"{error}; `ckpt ls` and `ckpt show` read the store without one") from error
    if as_json:
        print(body.decode())
    else:
        status_page.show(body)
