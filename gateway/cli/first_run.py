"""What a first `loraplex up` makes for its user: an admin key and two tenants with a key each.

A later run finds them and leaves them alone: limits an operator has changed since stay changed.
Only what is gone is made again, for example after the store's folder was removed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

import httpx

from gateway.cli.client import Address, Admin, NotFound
from gateway.cli.home import Home

TENANTS: Final[dict[str, dict[str, Any]]] = {
    "acme": {"weight": 2, "limits": {"requests_per_min": 120, "tokens_per_min": 60_000}},
    "globex": {"weight": 1, "limits": {"requests_per_min": 60, "tokens_per_min": 30_000}},
}


class FirstRun:
    def __init__(self, home: Home, say: Callable[[str], None]) -> None:
        self._home = home
        self._keys = home.keys()
        self._say = say

    def admin_key(self) -> str:
        """This machine's own, made once."""
        if not self._keys.admin:
            self._keys.admin = f"lpa-{secrets.token_urlsafe(24)}"
            self._home.save_keys(self._keys)
        return self._keys.admin

    def tenants(self, url: str, address: Address) -> dict[str, str]:
        """Tenant -> key that works, for every tenant of `TENANTS`. Blocks; raises Failure."""
        with Admin(address) as admin:
            for tenant, settings in TENANTS.items():
                _ensure(admin, tenant, settings)
                if not _works(url, self._keys.tenants.get(tenant, "")):
                    self._say(f"making a key for tenant {tenant}")
                    made = admin.post(f"tenants/{tenant}/keys")
                    self._keys.tenants[tenant] = made["secret"]
                    self._home.save_keys(self._keys)
        return {tenant: self._keys.tenants[tenant] for tenant in TENANTS}


def _ensure(admin: Admin, tenant: str, settings: dict[str, Any]) -> None:
    try:
        admin.get(f"tenants/{tenant}")
    except NotFound:
        admin.post("tenants", {"id": tenant, **settings})


def _works(url: str, key: str) -> bool:
    if not key:
        return False
    reply = httpx.get(
        f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False
    )
    return reply.status_code != 401
