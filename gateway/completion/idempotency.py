"""`Idempotency-Key`: of several requests of a tenant with one key, one is run and billed.

The key is taken in the store for a day, so this holds across gateways. A second request with it is
a 409 that names the first one, while that runs and after it was answered: answers are the tenant's
and are not kept, so none is repeated. A request that was not answered in full (refused, failed, or
its client left) lets go of the key, so that a retry runs. While the store is away keys are not
looked at: a request is then worth more than the guard against its double.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Final

from gateway.errors import BadRequest, KeyReused
from gateway.store.redis import Store, StoreAway
from shared import tasks
from shared.ids import RequestId, TenantId

_log = logging.getLogger(__name__)

HEADER: Final = "Idempotency-Key"
KEY_MAX: Final = 255
_KEPT_S: Final = 24 * 3600


class Idempotency:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(self, tenant: TenantId, key: str, request: RequestId) -> Claim:
        """Raises KeyReused, or BadRequest for what can be no key."""
        if not (0 < len(key) <= KEY_MAX and key.isprintable()):
            raise BadRequest(f"{HEADER} must have 1 to {KEY_MAX} characters.", param=HEADER)
        # Of one length whatever it holds, and no tenant can write another's.
        name = hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode(errors="replace")).hexdigest()
        claim = Claim(self._store, f"idempotency:{name}", request)
        holder = await claim.take(_KEPT_S)
        if holder:
            raise KeyReused(
                f"This {HEADER} was used by request {holder}, which is running or was answered; "
                "a new request needs a new key."
            )
        return claim


class Claim:
    """One request's hold on its key."""

    def __init__(self, store: Store, name: str, request: RequestId) -> None:
        self._store = store
        self._name = name
        self._request = request

    async def take(self, seconds: int) -> str:
        """Who held it before; "" for nobody, also when the store cannot be asked."""
        try:
            holder = await self._store.script("claim", [self._name], [self._request, seconds])
        except StoreAway as error:
            _log.warning("idempotency key not looked at", extra={"why": str(error)})
            return ""
        return bytes(holder).decode()

    def release(self) -> None:
        """Let go, behind the request's back; what fails here the key's time cures."""
        tasks.spawn(self._let_go(), name="idempotency")

    async def _let_go(self) -> None:
        await self.take(0)
