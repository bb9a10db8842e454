"""``ckpt declare-dead``: what only a person can know, told to the coordinator."""

from __future__ import annotations

import http
from collections.abc import Sequence
from typing import Annotated

import typer

from toprope.coordinator.cli_common import TokenFile
from toprope.coordinator.serving import read_token
from toprope.coordinator.status import asked
from toprope.store.cli.shared import put
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.names import checked_id

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(name="declare-dead")
def declare_dead(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name, as `ckpt status` has it.")],
    *,
    coordinator_url: Annotated[
        str, typer.Option("--coordinator", metavar="URL[,URL]", help="Coordinators, any of them.")
    ],
    token_file: TokenFile = None,
) -> None:
    """Say that a node is dead, so that a restore without the log need not wait for it to agree.

    It counts until the coordinator that leads is replaced, for the life of the node that the current attempt knows:
    with other memory it is there again. Say it only of a machine that is off: one that still trains would train for
    nothing.
    """
    urls = [url.strip() for url in coordinator_url.split(",") if url.strip()]
    if not urls:
        raise UsageError("give --coordinator URL")
    declare(urls, checked_id(node, what="node"), token=read_token(token_file))
    put(f"node {node} is taken for dead")


def declare(urls: Sequence[str], node: str, *, token: str) -> None:
    """Tell the coordinator that leads, or the one that it points to.

    Raises:
        UsageError: the token is wrong, or there is no such node.
        UnavailableError: none that leads answers.
    """
    failures: list[str] = []
    waiting = list(urls)
    while waiting:
        url = waiting.pop(0)
        try:
            status, body, leader = asked(url, token, method="PUT", path=f"/v1/nodes/{node}/dead")
        except UnavailableError as error:
            failures.append(str(error))
            continue
        if status == http.HTTPStatus.NO_CONTENT:
            return
        if status == http.HTTPStatus.UNAUTHORIZED:
            raise UsageError(f"the coordinator at {url} wants its token: give --token-file")
        if status == http.HTTPStatus.NOT_FOUND:
            raise UsageError(f"the coordinator at {url}: {body[:2000].decode(errors='replace').strip()}")
        failures.append(f"the coordinator at {url} answered {status}: {body[:200].decode(errors='replace').strip()}")
        if leader and leader not in (*urls, *waiting):
            waiting.append(leader)
            urls = (*urls, leader)
    raise UnavailableError("; ".join(failures))
