"""Upload and download of one large object, ours beside the aws CLI, s3transfer and rclone, on the same S3 server.

Each transfer is a process of its own, from a file in shared memory (as a slot is) to a file there. The server,
SeaweedFS, is started anew for each round; within a round all take turns, in an order that moves on by one from round to
round. All download the same object, the one that s3transfer uploaded. What was uploaded and what was downloaded is
compared with the source, outside of the time. Besides the time, three things are told of each: processor seconds of the
client and of the server, and the most anonymous memory that it had. Where the server takes most of the processor, it
bounds them all alike: then read the processor seconds. The time holds a process's start.

    python benchmarks/store.py [--mib 4096] [--rounds 5] [--ways up down] [--aws PATH] [--crt PYTHON] [--json FILE]

The aws CLI is looked for at ``--aws`` (it pins a botocore of its own: install it in an environment of its own), rclone
on the PATH; who is not there does not take part. ``--crt`` is a Python that has ``awscrt``: that client takes no port,
so the server is at port 80 then, for which one has to be root.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
BUCKET = "bench"
WAYS = ("up", "down")
CLIENTS = ("ours", "s3transfer", "aws", "rclone", "crt")
_HTTP_PORT = 80
_BASELINE = "s3transfer"
_LOOK_EVERY_S = 0.02
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One transfer."""

    client: str
    way: str
    seconds: float
    client_cpu_s: float
    server_cpu_s: float
    peak_anonymous_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=4096, help="size of the object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="up, down or both")
    parser.add_argument("--aws", default="aws", help="the aws CLI")
    parser.add_argument("--crt", default="", help="a Python that has awscrt")
    parser.add_argument("--json", type=Path, help="write the figures as JSON too")
    parser.add_argument("--transfer", nargs=4, metavar=("CLIENT", "WAY", "ROOT", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.transfer is not None:
        transfer(*options.transfer)
        return
    samples: list[Sample] = []
    ways = tuple(way for way in WAYS if way in options.ways)
    with contextlib.suppress(KeyboardInterrupt):  # the rounds that are done count
        for found in measure(mib=options.mib, rounds=options.rounds, ways=ways, aws=options.aws, crt=options.crt):
            samples += found
            figures = figures_of(samples, mib=options.mib)
            show(figures)
            if options.json is not None:
                every = [asdict(one) for one in samples]
                options.json.write_text(json.dumps(figures | {"samples": every}, indent=2) + "\n")


def measure(*, mib: int, rounds: int, ways: tuple[str, ...], aws: str, crt: str) -> Iterator[list[Sample]]:
    """Run all rounds, and yield the samples of each."""
    from toprope.chaos.live.scratch import Scratch  # noqa: PLC0415 - not in the process of a transfer

    programs = {"aws": aws, "rclone": "rclone", "crt": crt}
    clients = [client for client in CLIENTS if client not in programs or shutil.which(programs[client])]
    print(f"clients: {', '.join(clients)}", file=sys.stderr)
    with Scratch() as memory:
        source = memory.path / "source"
        digest = make_source(source, mib=mib)
        for number in range(rounds):
            turns = clients[number % len(clients) :] + clients[: number % len(clients)]
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            yield one_round(turns, source, ways=ways, digest=digest, aws=aws, crt=crt)


def make_source(path: Path, *, mib: int) -> str:
    """Write random bytes, and return their digest."""
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(mib):
            block = os.urandom(MIB)
            hasher.update(block)
            file.write(block)
    return hasher.hexdigest()


def one_round(
    turns: list[str], source: Path, *, ways: tuple[str, ...], digest: str, aws: str, crt: str
) -> list[Sample]:
    """Let each client upload and then each download, or one of these, from a fresh server."""
    from toprope.chaos.live.s3_server import running_s3  # noqa: PLC0415 - not in the process of a transfer
    from toprope.chaos.live.scratch import DISK, Scratch  # noqa: PLC0415 - as above

    samples = []
    target = source.with_name("target")
    with (
        Scratch(DISK) as disk,
        running_s3(disk.path, port=_HTTP_PORT if "crt" in turns else None) as server,
    ):
        server.make_bucket(BUCKET)
        env = os.environ | server.environment
        env.pop("AWS_CA_BUNDLE", None)  # rclone refuses it
        for way, file in (("up", source), ("down", target)):
            # What all download has to be there, though it may be that nobody measures how it came.
            for client in turns if way in ways else [_BASELINE] if way == "up" else []:
                root = server.root(BUCKET, client if way == "up" else _BASELINE)
                command = _command(client, way, root=root, endpoint=server.endpoint, file=file, aws=aws, crt=crt)
                sample = timed(command, client=client, way=way, env=env, server_pid=server.process.pid)
                samples += [sample] if way in ways else []
                if way == "down":
                    check(file, digest, client)
                    file.unlink()
                else:
                    check_object(root, digest, client)
    return samples


def _command(  # noqa: PLR0913 - what a command line consists of
    client: str, way: str, *, root: str, endpoint: str, file: Path, aws: str, crt: str = ""
) -> list[str]:
    key = f"{_BASELINE if way == 'down' else client}/job/object"
    ours, theirs = str(file), f"{BUCKET}/{key}"
    if client == "aws":
        places = [ours, f"s3://{theirs}"] if way == "up" else [f"s3://{theirs}", ours]
        return [aws, "s3", "cp", "--quiet", "--endpoint-url", endpoint, "--region", "us-east-1", *places]
    if client == "crt":
        host = endpoint.removeprefix("http://").removesuffix(f":{_HTTP_PORT}")
        return [crt, str(Path(__file__).with_name("crt_client.py")), way, host, f"/{theirs}", ours]
    if client == "rclone":
        remote = (
            f":s3,provider=Other,env_auth=true,endpoint='{endpoint}',region=us-east-1,force_path_style=true:{theirs}"
        )
        places = [ours, remote] if way == "up" else [remote, ours]
        tuned = ["--s3-chunk-size", "16M", "--s3-upload-concurrency", "8", "--multi-thread-streams", "8"]
        return ["rclone", "copyto", "--config", os.devnull, "--s3-no-check-bucket", *tuned, *places]
    return [sys.executable, __file__, "--transfer", client, way, root, ours]


def timed(command: list[str], *, client: str, way: str, env: dict[str, str], server_pid: int) -> Sample:
    """Run a transfer and watch it."""
    before = _cpu_s(server_pid)
    began = time.perf_counter()
    process = subprocess.Popen(command, env=env)
    peak: list[float] = [0.0]
    watching = threading.Thread(target=_watch, args=(process.pid, peak))
    watching.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    watching.join()
    if process.returncode:
        raise SystemExit(f"{client} {way} failed with status {process.returncode}: {' '.join(command)}")
    return Sample(
        client=client,
        way=way,
        seconds=seconds,
        client_cpu_s=usage.ru_utime + usage.ru_stime,
        server_cpu_s=_cpu_s(server_pid) - before,
        peak_anonymous_mib=peak[0],
    )


def _watch(pid: int, peak: list[float]) -> None:
    while (anonymous := _anonymous_mib(pid)) is not None:
        peak[0] = max(peak[0], anonymous)
        time.sleep(_LOOK_EVERY_S)


def _anonymous_mib(pid: int) -> float | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return None


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


def check(path: Path, digest: str, client: str) -> None:
    """Fail unless a file has the bytes that were uploaded."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise SystemExit(f"{client} downloaded other bytes: {found}, expected {digest}")


def check_object(root: str, digest: str, client: str) -> None:
    """Fail unless the store has the bytes that a client was to upload: read with boto3, whoever wrote them."""
    from toprope.chaos.live.s3_server import ACCESS_KEY, SECRET_KEY  # noqa: PLC0415 - not in the process of a transfer

    hasher = hashlib.sha256()
    with _their_client(root, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY) as reading:
        body = reading.get_object(Bucket=BUCKET, Key=f"{client}/job/object")["Body"]
        for chunk in body.iter_chunks(MIB):
            hasher.update(chunk)
    if hasher.hexdigest() != digest:
        raise SystemExit(f"{client} uploaded other bytes: {hasher.hexdigest()}, expected {digest}")


def transfer(client: str, way: str, root: str, path: str) -> None:
    """Be the process of one transfer."""
    act: dict[tuple[str, str], Callable[[str, Path], None]] = {
        ("ours", "up"): our_upload,
        ("ours", "down"): our_download,
        ("s3transfer", "up"): their_upload,
        ("s3transfer", "down"): their_download,
    }
    act[client, way](root, Path(path))


def our_upload(root: str, path: Path) -> None:
    """Put a file as a sidecar puts a slot: from its mapping."""
    from toprope.store.names import Key  # noqa: PLC0415 - only this process needs it
    from toprope.store.objects.opening import open_store  # noqa: PLC0415 - as above

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        open_store(root).create(Key("job/object"), memoryview(mapped))


def our_download(root: str, path: Path) -> None:
    """Get an object as a restore stages it: each range through a buffer of its thread into a new file in memory."""
    from toprope.sidecar.filling import Filling  # noqa: PLC0415 - only this process needs it
    from toprope.store.checkpoint.files import write_image  # noqa: PLC0415 - as above
    from toprope.store.checkpoint.manifest import File, Head, Index  # noqa: PLC0415 - as above
    from toprope.store.names import Key  # noqa: PLC0415 - as above
    from toprope.store.objects.opening import open_store  # noqa: PLC0415 - as above

    def no_room(more: int, reason: str) -> SystemExit:
        return SystemExit(f"{path}: no room for {more} bytes: {reason}")

    store, key = open_store(root), Key("job/object")
    size = store.size(key)
    index = Index(
        job_uid="",
        attempt=1,
        attempt_uid="",
        step=1,
        rank=0,
        world=1,
        bytes=size,
        digest="",
        head=Head(file=0, begin=0, end=size, digest=""),
        files=(File(key=key, bytes=size, digest=""),),
        tensors=(),
    )
    with path.open("w+b") as file:
        file.truncate(size)
        filling = Filling(file.fileno(), no_room=no_room, view=lambda: memoryview(b""))
        write_image(store, index, filling.write)


@contextlib.contextmanager
def _their_client(root: str, **credentials: str) -> Iterator[Any]:
    import boto3  # noqa: PLC0415 - only this process needs it
    from botocore.config import Config  # noqa: PLC0415 - as above

    from toprope.store.objects.s3_location import parse_location  # noqa: PLC0415 - as above

    config = Config(s3={"addressing_style": "path"})
    endpoint = parse_location(root).endpoint
    yield boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config, **credentials)


def their_upload(root: str, path: Path) -> None:
    """Put a file with ``upload_file``, which is s3transfer."""
    with _their_client(root) as client:
        client.upload_file(str(path), BUCKET, f"{_BASELINE}/job/object")


def their_download(root: str, path: Path) -> None:
    """Get an object with ``download_file``, which is s3transfer."""
    with _their_client(root) as client:
        client.download_file(BUCKET, f"{_BASELINE}/job/object", str(path))


def figures_of(samples: list[Sample], *, mib: int) -> dict[str, Any]:
    """Return medians for each way and client, and each client's speed as a share of the best one's."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for way in dict.fromkeys(one.way for one in samples):
        of_way = [one for one in samples if one.way == way]
        medians = {
            client: {
                name: statistics.median(getattr(one, name) for one in of_way if one.client == client)
                for name in ("seconds", "client_cpu_s", "server_cpu_s", "peak_anonymous_mib")
            }
            for client in CLIENTS
            if any(one.client == client for one in of_way)
        }
        best = min(row["seconds"] for row in medians.values())
        rows[way] = {
            client: row | {"mib_s": mib / row["seconds"], "of_best": best / row["seconds"]}
            for client, row in medians.items()
        }
    return {"mib": mib, "cpus": os.cpu_count(), "rows": rows}


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{figures['mib']} MiB, medians, {figures['cpus']} CPUs")
    print(f"{'':16} {'MiB/s':>7} {'of best':>8} {'client CPU s':>13} {'server CPU s':>13} {'anonymous MiB':>14}")
    for way, clients in figures["rows"].items():
        for client, row in clients.items():
            print(
                f"{way:5} {client:10} {row['mib_s']:7.0f} {row['of_best']:8.2f} {row['client_cpu_s']:13.2f} "
                f"{row['server_cpu_s']:13.2f} {row['peak_anonymous_mib']:14.0f}"
            )


if __name__ == "__main__":
    main()
