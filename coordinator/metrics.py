"""The coordinator's metrics, each declared once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class Metrics:
    """The metrics of one coordinator process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.leading = Gauge(
            "toprope_coordinator_leading",
            "1 while this coordinator leads, 0 while it stands by",
            registry=self.registry,
        )
        self._of_job: list[Gauge] = []
        self._shown = True
        self.term = self._gauge("toprope_coordinator_term", "Term of this coordinator")
        self.attempt = self._gauge("toprope_attempt", "Number of the current attempt")
        self.protected_step = self._gauge("toprope_protected_step", "Newest step that is protected, 0 for none")
        self.protected_age_s = self._gauge("toprope_protected_age_seconds", "Time since a newer step became protected")
        self.ready_step = self._gauge("toprope_ready_step", "Newest step that is READY on the lineage, 0 for none")
        self.nodes_alive = self._gauge("toprope_nodes_alive", "Nodes that are heard or answer")
        self.placements_unmet = self._gauge("toprope_placements_unmet", "Nodes whose copies have no safe place")
        self.broker_connected = self._gauge("toprope_coordinator_broker_connected", "1 while the broker is connected")
        self.log_away_s = self._gauge("toprope_log_away_seconds", "Time since the job log could be read, 0 if it can")
        self.provisional = self._gauge(
            "toprope_attempt_provisional", "1 while the current attempt, opened without the log, is not in it"
        )
        self.attempts_entered = self._counter(
            "toprope_attempts_entered_total", "Attempts, opened without the log, that this coordinator put into it"
        )
        self.attempts_fenced = self._gauge(
            "toprope_attempts_fenced", "Attempts, decided without the log, that can't come into it, by this reign"
        )
        self.attempts_opened = self._counter("toprope_attempts_opened_total", "Attempts that this coordinator opened")
        self.steps_ready = self._counter("toprope_steps_ready_total", "Steps that this coordinator made READY")
        self.commits_failed = self._counter(
            "toprope_commits_failed_total", "Steps that did not become READY when tried"
        )
        self.readies_retired = self._counter(
            "toprope_readies_retired_total", "READY checkpoints that this coordinator retired by the job's policy"
        )
        self.objects_deleted = self._counter(
            "toprope_objects_deleted_total", "Objects that this coordinator deleted as garbage"
        )
        self.tidying_failed = self._counter(
            "toprope_tidying_failed_total", "Times that retention or garbage collection came to nothing"
        )
        self.requests_refused = self._counter("toprope_attempts_refused_total", "Requests for an attempt that got none")

    def show(self, *, job: bool) -> None:
        """Give the gauges of the job, or none of them: one that stands by does not know them, and 0 would be a lie."""
        if job != self._shown:
            self._shown = job
            for gauge in self._of_job:
                (self.registry.register if job else self.registry.unregister)(gauge)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(name, text, registry=self.registry)
        self._of_job.append(gauge)
        return gauge

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)
