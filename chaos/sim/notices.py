"""Histories in which ranks are told that they are to be ended, as by SIGTERM or a cloud's notice, beside all else."""

from __future__ import annotations

import asyncio

from toprope.chaos.sim import nemesis
from toprope.chaos.sim.world import World


async def rage(world: World) -> None:
    """Let all the troubles of a history happen, and meanwhile notices, now and then to several ranks at once."""
    rng = world.loop.rng
    raging = world.loop.create_task(nemesis.rage(world))
    while not raging.done():
        await asyncio.sleep(rng.uniform(1.0, 8.0))
        if world.launch is None:
            continue
        ranks = world.launch.ranks
        told = rng.sample(ranks, rng.randint(1, len(ranks)))
        for rank in told:
            world.loop.outside(rng.uniform(0.0, 1.5), rank.notice)
    await raging
