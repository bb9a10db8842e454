"""What a sidecar counts. Declared once, here; ``/metrics`` serves them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

SNAPSHOTS = Counter("toprope_snapshots_total", "Snapshots sealed and hashed", ["rank"], registry=REGISTRY)
SKIPS = Counter("toprope_skips_total", "Due steps without a snapshot", ["rank"], registry=REGISTRY)
SHOUTS = Counter("toprope_alarms_total", "Events that cost protection, by kind", ["kind"], registry=REGISTRY)
STORED_BYTES = Counter("toprope_stored_bytes_total", "Bytes stored, by tier", ["tier"], registry=REGISTRY)
SERVED_BYTES = Counter("toprope_served_bytes_total", "Bytes of copies sent to peers", registry=REGISTRY)
RECEIVED_BYTES = Counter("toprope_received_bytes_total", "Bytes of copies received from peers", registry=REGISTRY)
SCRUBBED_BYTES = Counter(
    "toprope_scrubbed_bytes_total", "Bytes of copies hashed again, by tier", ["tier"], registry=REGISTRY
)
STORE_SECONDS = Histogram("toprope_store_seconds", "Time to store one shard, by tier", ["tier"], registry=REGISTRY)
COPIES = Gauge("toprope_copies", "Verified copies that this node holds, by tier", ["tier"], registry=REGISTRY)
MEMORY_BYTES = Gauge("toprope_memory_bytes", "Bytes of this job's files in memory", registry=REGISTRY)
MEMORY_ROOM_BYTES = Gauge(
    "toprope_memory_room_bytes", "Bytes that they may take: what is set, or is there", registry=REGISTRY
)
TRAINERS = Gauge("toprope_trainers", "Trainers that are connected", registry=REGISTRY)
BROKER_UP = Gauge("toprope_broker_connected", "1 while the broker is connected", registry=REGISTRY)
COORDINATOR_UP = Gauge("toprope_coordinator_reached", "1 if the last request got an answer", registry=REGISTRY)
PROTECTED_STEP = Gauge("toprope_protected_step", "Newest protected step, as the coordinator says", registry=REGISTRY)
READY_STEP = Gauge("toprope_ready_step", "Newest READY step, as the coordinator says", registry=REGISTRY)
