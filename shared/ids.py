"""Names that must not be mixed up. All are plain strings on the wire."""

from typing import NewType

TenantId = NewType("TenantId", str)
"""Who pays: the key of quotas, fairness and the bill."""

AdapterId = NewType("AdapterId", str)
"""The name a request's `model` gives; the base model has a name too, but is not an adapter."""

ReplicaId = NewType("ReplicaId", str)
"""A stable name (`replica-3`), never an address: the ring hashes it, so a restart moves nothing."""

RequestId = NewType("RequestId", str)
"""One request through the gateway; the idempotency key of its ledger record."""
