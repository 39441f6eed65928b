"""Frozen values that cross the wire between replica and gateway.

A report is a whole snapshot, never a difference: a lost or repeated report then costs freshness,
not truth. `(boot, seq)` orders them: `seq` grows by one a report within one life of the process,
and a new `boot` starts a new life whose reports replace everything known of the old one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shared.ids import AdapterId, ReplicaId


class Tier(StrEnum):
    """Where an adapter's weights are, nearest first."""

    GPU = "gpu"  # in a slot that kernels read (on a CPU replica: a slot all the same)
    HOST = "host"  # in host memory, a copy away from a slot
    DISK = "disk"  # only in the replica's store


class AdapterStatus(StrEnum):
    READY = "ready"
    LOADING = "loading"  # on its way to a slot; `tier` is where it is coming from
    FAILED = "failed"  # refused by validation; `reason` says why, and it is not routable


@dataclass(frozen=True, slots=True)
class AdapterState:
    """One adapter as one replica sees it."""

    adapter: AdapterId
    digest: str  # sha256 of the content: the adapter's version; the name may move, this may not
    tier: Tier
    status: AdapterStatus = AdapterStatus.READY
    rank: int = 0
    size_bytes: int = 0
    pinned: bool = False
    running: int = 0  # sequences that hold its slot now
    reason: str = ""
    inferred: bool = False  # the tier is the gateway's conclusion, not the replica's word


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself: the truth the router works from."""

    replica: ReplicaId
    boot: str
    seq: int
    base: str  # the name requests use for the base model
    slots: int  # adapters that fit on the GPU at once
    capacity: int  # sequences that run at once; beyond it a request waits
    running: int
    waiting: int
    pages_total: int
    pages_free: int  # what a new sequence could have, cached pages included
    max_model_len: int
    heartbeat_s: float  # the longest silence between two reports
    draining: bool = False
    merged: AdapterId | None = None  # folded into the base: it serves this adapter and nothing else
    adapters: tuple[AdapterState, ...] = ()
    pages_cached: int = 0  # of the free: they hold keys that may be wanted again
    pages_adapters: int = 0  # held by adapters, in use or idle
    max_rank: int = 0  # adapters of a higher rank are refused; 0: it does not say
    host_max: int = 0  # adapters that fit in host memory; 0: not counted
    host_bytes: int = 0  # bytes of adapters that fit in host memory; 0: not counted
    copy_bytes_per_s: float = 0.0  # measured, host memory to a slot; 0: not yet
    read_bytes_per_s: float = 0.0  # measured, disk to host memory; 0: not yet
    fetch_bytes_per_s: float = 0.0  # measured, object store to host memory; 0: not yet
    host_bytes_used: int = 0  # of copies in host memory, or on their way there
    store: str = ""  # all that this store lists and `adapters` does not name is on disk here


@dataclass(frozen=True, slots=True)
class Usage:
    """Model tokens of one request, as the engine counted them. An explicit zero is a fact."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
