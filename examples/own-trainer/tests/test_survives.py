"""Does our trainer survive? Run ``CKPT_CHAOS=chaos pytest --chaos``; without it these tests are skipped."""

from toprope.chaos.pytest_plugin import Chaos

ARGUMENTS = ("--job", "{job}", "--steps", "{steps}", "--seed", "{seed}")
WORLD = 2


def test_a_lost_node_costs_at_most_an_interval(chaos: Chaos) -> None:
    """One of the scenarios that come with Toprope, against our trainer."""
    verdict = chaos.run("kill-node", script="../train.py", arguments=ARGUMENTS, step_s=0.4)
    assert verdict.world == WORLD


def test_a_rank_that_dies_while_it_is_copied(chaos: Chaos) -> None:
    """A scenario of our own: the file names our trainer."""
    chaos.run("kill-rank-in-copy.toml", seed=3)
