"""The one interface of all faults: strike, tend while it lasts, mend, and say what proves that it happened."""

from __future__ import annotations

from typing import Protocol

from toprope.chaos.scenario import Fault
from toprope.chaos.site import Site


class NotFiredError(Exception):
    """The fault could not be done; the message says why."""


class Injector(Protocol):
    """One fault, once."""

    def strike(self) -> None:
        """Do it.

        Raises:
            NotFiredError: it can't be done here and now.
            LiveError: whom it is meant for does not run.
        """

    def tend(self) -> None:
        """Go on doing it; called often while it lasts."""

    def mend(self) -> None:
        """Undo it: let go, start again."""

    def witness(self) -> str:
        """Return what proves that it happened; empty as long as nothing does."""
        ...


class Base:
    """What most faults have in common: nothing to tend and nothing to mend."""

    def __init__(self, site: Site, fault: Fault) -> None:
        self.site = site
        self.fault = fault

    def tend(self) -> None:
        """Nothing goes on."""

    def mend(self) -> None:
        """Nothing is to be mended."""

    def number(self, name: str, default: float) -> float:
        """Return a number that the fault is told in ``how``."""
        return float(self.fault.how.get(name, default))

    def word(self, name: str, default: str = "") -> str:
        """Return a word that the fault is told in ``how``."""
        return str(self.fault.how.get(name, default))
