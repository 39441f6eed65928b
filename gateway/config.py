"""The gateway's configuration file: every field with its unit, unknown keys refused."""

from __future__ import annotations

from datetime import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from gateway.fleet_config import DiscoveryConfig as DiscoveryConfig
from gateway.fleet_config import FleetConfig as FleetConfig
from gateway.fleet_config import ReplicaEntry as ReplicaEntry
from gateway.fleet_config import ServiceEntry as ServiceEntry
from shared.settings import Settings
from shared.tracing import TracingConfig


class ListenConfig(Settings):
    host: str = "127.0.0.1"
    """Address for tenants. 0.0.0.0 inside a container."""
    port: int = Field(8080, ge=0, le=65535)
    """TCP port for tenants; 0 takes a free one, which the ready line names."""
    body_max_bytes: int = Field(10 << 20, ge=1024)
    """A larger request body is refused with 413; of a compressed one, what it unpacks to."""
    header_max_bytes: int = Field(16 << 10, ge=1024)
    """A larger request line, header or sum of headers is refused with 431."""
    header_timeout_s: float = Field(10, gt=0)
    """A request's head, once begun, must be complete in this time; else 408."""
    body_timeout_s: float = Field(60, gt=0)
    """A request's body must be complete this long after its head; else 408."""
    failed_keys_per_min: int = Field(30, ge=1)
    """Wrong API keys an address may send; after that all it sends gets 429 for a while."""
    client_ip_header: str = ""
    """Header in which a trusted proxy names the client, as `x-forwarded-for`; empty: none."""
    keepalive_s: float = Field(75, gt=0)
    """A connection without a request is closed after this time; keep it above your proxy's."""


class AdminConfig(Settings):
    key: str = ""
    """Key of the admin API (`Authorization: Bearer`). Empty switches the admin API off."""
    host: str = "127.0.0.1"
    """Address of the admin port, when there is one of its own."""
    port: int | None = Field(None, ge=0, le=65535)
    """Own port for `/admin`; null serves it on the tenants' port (one machine only)."""


class StoreConfig(Settings):
    url: str = "redis://127.0.0.1:6379/0"
    """Redis or Valkey that holds tenants, quotas and the ledger: redis://, rediss:// or unix://PATH."""
    prefix: str = "loraplex:"
    """Key prefix, so that several fleets can share one store."""
    timeout_s: float = Field(0.05, gt=0)
    """A quota decision waits this long for the store, then falls back to a local share."""
    spool: Path = Path("loraplex-ledger.spool")
    """Ledger records wait in this file while the store is away."""


class QuotaConfig(Settings):
    local_share: float = Field(1.0, gt=0, le=1)
    """Share of each limit this gateway grants by itself while the store is away: 1 / gateways."""
    lease_s: float = Field(30.0, ge=1)
    """A killed gateway's running requests leave their tenant's concurrency after this time."""
    shadow: bool = False
    """true: limits are decided, counted in metrics and told in headers, and refuse nothing."""


class RouterConfig(Settings):
    load_factor: float = Field(1.25, ge=1)
    """c of bounded-load hashing: no replica above c times the mean in flight..."""
    load_floor: int = Field(8, ge=1)
    """...but never below this many: a bound on an idle fleet buys nothing and costs loads..."""
    load_floor_share: float = Field(0.5, ge=0, le=1)
    """...and never below this share of a replica's own places."""
    vnodes: int = Field(128, ge=1)
    """Points a replica has on the ring."""
    service_s: float = Field(0.05, gt=0)
    """Assumed wait per request ahead in a full replica, until measured."""
    host_load_s: float = Field(0.005, ge=0)
    """Assumed time to load an adapter from host memory into a slot."""
    disk_load_s: float = Field(0.15, ge=0)
    """Assumed time to load an adapter from disk into a slot."""
    hop_s: float = Field(0.002, ge=0)
    """Cost of one step along the ring away from home, so that ties go home."""


class ScheduledAdapters(Settings):
    adapters: tuple[str, ...] = Field(min_length=1)
    """Adapters that will be asked for..."""
    start: time
    """...every day from this time (HH:MM, UTC; they are brought a little before)..."""
    end: time
    """...until this one; an earlier one than `start` is the next day's."""
    rate_per_s: float = Field(gt=0)
    """...so often, each: what their share of host memory and owners follows from."""


class PlacementConfig(Settings):
    enabled: bool = True
    """Bring adapters to their owners' host memory ahead of traffic; off: requests bring them."""
    interval_s: float = Field(1, gt=0)
    """Time between two plans of who should hold what."""
    half_life_s: float = Field(300, gt=0)
    """An adapter's popularity halves in this time."""
    host_share: float = Field(0.9, gt=0, le=1)
    """Share of each replica's host memory that is planned; the rest is what requests bring."""
    grow_share: float = Field(0.5, gt=0, le=1)
    """An adapter that needs more than this share of a replica's places gets another owner..."""
    cool_s: float = Field(60, ge=0)
    """...and loses it when it has needed fewer for this long."""
    spares: int = Field(8, ge=0, le=32)
    """Most further owners of an adapter while host memory lasts: a spill finds it warm there."""
    ahead_max: int = Field(16, ge=1)
    """Orders to one replica that may be under way at once."""
    retry_s: float = Field(2, gt=0)
    """An order that had no effect is repeated after this, then after twice as long, and so on..."""
    attempts: int = Field(5, ge=1)
    """...at most this often in a row."""
    keep_s: float = Field(10, gt=0)
    """A replica is told at least this often what to keep in host memory."""
    lead_s: float = Field(30, ge=0)
    """Scheduled adapters are brought this long before their time."""
    handover_s: float = Field(30, ge=0)
    """A replica that is drained serves until others have its adapters, but no longer than this."""
    schedule: tuple[ScheduledAdapters, ...] = ()
    """Adapters known to be wanted at some time of day, as {adapters, start, end, rate_per_s}."""


class QueueConfig(Settings):
    per_tenant_max: int = Field(256, ge=1)
    """Requests one tenant may have waiting; the next is refused with 429."""
    ttl_s: float = Field(60, gt=0)
    """A request that waited this long is refused with 503."""
    input_weight: float = Field(1, gt=0)
    """Fair-queue cost of an input token."""
    output_weight: float = Field(2, gt=0)
    """Fair-queue cost of an output token."""
    warm_wait_s: float = Field(0.5, ge=0)
    """How long a request may wait for one that has its adapter; four times that if all are full."""
    reserve_share: float = Field(0.05, ge=0, le=0.5)
    """Of each replica's places (one at least, of 8 or more), kept for tenants that hold less than
    half of their fair share, or while no more wait than run less than a third of all: they need not
    wait for the next to come free. 0: none are kept..."""
    reserve_for_s: float = Field(60, gt=0)
    """...and none once a single tenant alone has asked for this long."""


class ForwardConfig(Settings):
    connect_timeout_s: float = Field(2, gt=0)
    """Limit for opening a connection to a replica."""
    first_byte_timeout_s: float = Field(300, gt=0)
    """Limit for the first byte of a reply; keep it below the clients' 600 s."""
    idle_timeout_s: float = Field(120, gt=0)
    """Limit between two bytes of a reply."""
    attempts: int = Field(3, ge=1)
    """Replicas tried before the first byte; after it nothing is retried."""
    retry_share: float = Field(0.2, ge=0)
    """Retries may be this share of the requests of the last retry_window_s..."""
    retry_floor: int = Field(50, ge=0)
    """...but this many always may be."""
    retry_window_s: float = Field(10, gt=0)
    """Time over which retries and requests are counted."""
    keepalive_s: float = Field(10, gt=0)
    """A stream that has nothing to send gets an SSE comment this often."""
    drain_s: float = Field(30, ge=0)
    """After SIGTERM running streams get this long."""
    default_max_tokens: int = Field(256, ge=1)
    """Output tokens reserved for a request that names no limit."""
    share_prefixes: bool = False
    """Let tenants share cached prompts of a model. It saves work where many send the same system
    prompt, and each can tell from `cached_tokens` what others have sent."""


class HealthConfig(Settings):
    failures: int = Field(5, ge=1)
    """So many faulty ends in a row (5xx, lost, timed out, nonsense) eject a replica..."""
    ejection_s: float = Field(5, gt=0)
    """...for this long the first time, twice as long each time after, until a trial..."""
    ejection_max_s: float = Field(60, gt=0)
    """...but never longer than this. Never is more than half of the fleet out."""
    slow_factor: float = Field(5, ge=1)
    """Too slow is a first token this many times later than the others' median..."""
    slow_s: float = Field(2, ge=0)
    """...and this much; a replica of which more than half are too slow is ejected..."""
    slow_samples: int = Field(8, ge=1)
    """...if it had at least so many streams in one window."""
    window_s: float = Field(10, gt=0)
    """Length of that window."""
    slow_start_s: float = Field(10, ge=0)
    """A fresh or readmitted replica has a tenth of its places at first, and all after this."""


class GatewayConfig(Settings):
    listen: ListenConfig = ListenConfig()
    admin: AdminConfig = AdminConfig()
    store: StoreConfig = StoreConfig()
    quota: QuotaConfig = QuotaConfig()
    fleet: FleetConfig = FleetConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    router: RouterConfig = RouterConfig()
    placement: PlacementConfig = PlacementConfig()
    queue: QueueConfig = QueueConfig()
    forward: ForwardConfig = ForwardConfig()
    health: HealthConfig = HealthConfig()
    tracing: TracingConfig = TracingConfig()
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_requests: Literal["none", "failed", "all"] = "failed"
    """Which requests leave a line in the log: who, where, tokens, times; never a prompt."""
