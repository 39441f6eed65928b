"""What a tenant is: the values, the bounds they keep, and how the store writes them down.

Every way in (admin API, command line, tests) ends in `checked`, and every refusal names the field.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import orjson

from shared.ids import TenantId

NAME_BYTES_MAX: Final = 256
MODELS_MAX: Final = 4096
LIMIT_MAX: Final = 10**12  # a Lua number is still exact to a millionth there
WEIGHT_MAX: Final = 1e6
SECRET_MIN: Final = 7
SECRET_MAX: Final = 512


class RegistryError(Exception):
    """A change that was refused; `str(error)` is written for whoever asked for it."""


class BadField(RegistryError):
    """`param` names the field whose value is not allowed."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class Missing(RegistryError):
    """No such tenant or key."""


class Conflict(RegistryError):
    """It exists already, or was changed since the caller read it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Allowances of one minute, which are also the bursts. None: no limit; 0: nothing passes."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    id: TenantId
    weight: float = 1.0  # share in the fair queue
    models: tuple[str, ...] = ("*",)  # exact names of adapters and of the base, or "*" for all
    limits: Limits = Limits()
    created: float = 0.0  # wall seconds
    version: int = 0  # of the store; grows with every change and never repeats


@dataclass(frozen=True, slots=True)
class Key:
    id: str
    tenant: TenantId
    prefix: str  # of the secret: enough to recognise it, too little to use it
    created: float


def bucket_key(tenant_id: str) -> str:
    """Where the store keeps a tenant's buckets."""
    return f"quota:{tenant_id}"


def changed_limits(old: Limits, change: Limits | Mapping[str, int | None] | None) -> Limits:
    """A mapping changes the limits it names; None changes nothing."""
    if change is None or isinstance(change, Limits):
        return change or old
    for name in change:
        if name not in Limits.__slots__:
            raise BadField(f"limits.{name}", f"unknown; there are {', '.join(Limits.__slots__)}")
    return replace(old, **change)


def checked(tenant: Tenant) -> Tenant:
    """The tenant itself, or BadField."""
    checked_name("id", tenant.id)
    if "/" in tenant.id or tenant.id in (".", ".."):
        raise BadField("id", "must fit in a path of the admin API: no '/', not '.' or '..'")
    weight: Any = tenant.weight
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise BadField("weight", "must be a number")
    if not (math.isfinite(weight) and 0 < weight <= WEIGHT_MAX):
        raise BadField("weight", f"must be above 0 and at most {WEIGHT_MAX:.0f}")
    if len(tenant.models) > MODELS_MAX:
        raise BadField("models", f"at most {MODELS_MAX} names")
    for model in tenant.models:
        checked_name("models", model)
    for name, limit in asdict(tenant.limits).items():
        whole = isinstance(limit, int) and not isinstance(limit, bool)
        if limit is not None and not (whole and 0 <= limit <= LIMIT_MAX):
            raise BadField(f"limits.{name}", f"must be null or a whole number up to {LIMIT_MAX}")
    return tenant


def checked_name(param: str, name: object) -> str:
    """The name itself, or BadField: 1 to 256 bytes of UTF-8 without control characters."""
    if not isinstance(name, str) or not name:
        raise BadField(param, "must be a name that is not empty")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise BadField(param, "must be valid Unicode") from None
    if size > NAME_BYTES_MAX:
        raise BadField(param, f"may have {NAME_BYTES_MAX} bytes of UTF-8, not {size}")
    if any(unicodedata.category(letter) == "Cc" for letter in name):
        raise BadField(param, "may hold no control characters")
    return name


def checked_secret(secret: str) -> str:
    """A key that was not made here, or BadField: it must fit in a header as it is."""
    printable = secret.isascii() and secret.isprintable() and secret == secret.strip()
    if not (SECRET_MIN <= len(secret) <= SECRET_MAX and printable):
        raise BadField("secret", f"must be {SECRET_MIN} to {SECRET_MAX} printable ASCII characters")
    return secret


def encoded(tenant: Tenant) -> bytes:
    """Without id and version: the store keeps those beside it."""
    value = asdict(tenant)
    del value["id"], value["version"]
    return orjson.dumps(value)


def decoded(tenant_id: str, text: str) -> Tenant:
    version, _, body = text.partition(" ")
    value = orjson.loads(body)
    return Tenant(
        id=TenantId(tenant_id),
        weight=value["weight"],
        models=tuple(value["models"]),
        limits=Limits(**value["limits"]),
        created=value["created"],
        version=int(version),
    )
