"""``ckpt declare-dead``: what only a person can know, told to the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

import typer

from toprope.coordinator.cli_common import TokenFile
from toprope.coordinator.leader import ask_leader
from toprope.coordinator.serving import read_token
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
    """Tell the coordinator that leads.

    Raises:
        UsageError: the token is wrong, or there is no such node.
        UnavailableError: none that leads answers.
    """
    answer = ask_leader(urls, f"/v1/nodes/{node}/dead", method="PUT", token=token)
    if answer.status == HTTPStatus.NOT_FOUND:
        raise UsageError(f"the coordinator at {answer.url}: {answer.text}")
    if answer.status != HTTPStatus.NO_CONTENT:
        raise UnavailableError(f"the coordinator at {answer.url} answered {answer.status}: {answer.text}")
