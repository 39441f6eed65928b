"""What a tenant is: the values, the bounds they keep, and how the store writes them down.

Every way in (admin API, command line, tests) ends in `checked`, and every refusal names the field.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import orjson

from shared.ids import TenantId

NAME_BYTES_MAX: Final = 256
MODELS_MAX: Final = 4096
LIMIT_MAX: Final = 10**12  # a Lua number is still exact to a millionth there
SPEND_MAX: Final = 10**6  # of money; in nano-units a Lua number is still exact there
ADAPTER_LIMITS_MAX: Final = 256
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
    """What is allowed, each by itself. None: no limit; 0: nothing passes.

    Of a minute it is also the burst. Days and months are those of UTC.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None  # input and output together
    input_tokens_per_min: int | None = None
    output_tokens_per_min: int | None = None
    concurrency: int | None = None  # requests that run or wait at once
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    spend_per_day: float | None = None  # money, in the unit of the price table
    spend_per_month: float | None = None


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Tenant:
    id: TenantId
    weight: float = 1.0  # share in the fair queue
    models: tuple[str, ...] = ("*",)  # exact names of adapters and of the base, or "*" for all
    limits: Limits = NO_LIMITS
    adapter_limits: Mapping[str, Limits] = field(default_factory=dict)  # beside `limits`, by name
    shadow: bool = False  # limits are counted and told, and refuse nothing
    created: float = 0.0  # wall seconds
    version: int = 0  # of the store; grows with every change and never repeats


@dataclass(frozen=True, slots=True)
class Key:
    id: str
    tenant: TenantId
    prefix: str  # of the secret: enough to recognise it, too little to use it
    created: float
    expires: float | None = None  # wall seconds: after it the key is worthless


def bucket_key(tenant_id: str) -> str:
    """Where the store keeps a tenant's buckets."""
    return f"quota:{tenant_id}"


def budget_key(tenant_id: str, window: str) -> str:
    """Where it keeps what the tenant has used in a day or month, such as 2026-11-29 or 2026-11."""
    return f"budget:{tenant_id}:{window}"


def lease_key(tenant_id: str, model: str) -> str:
    """Where it keeps the tenant's running requests, of one model or (empty) of all."""
    return f"leases:{len(tenant_id)}:{tenant_id}:{model}"


LimitsChange = Limits | Mapping[str, float | None]


def changed_limits(old: Limits, change: LimitsChange | None, *, param: str = "limits") -> Limits:
    """A mapping changes the limits it names; None changes nothing."""
    if change is None or isinstance(change, Limits):
        return change or old
    for name in change:
        if name not in Limits.__slots__:
            raise BadField(f"{param}.{name}", f"unknown; there are {', '.join(Limits.__slots__)}")
    return replace(old, **change)  # type: ignore[arg-type]  # `checked` looks at the values


def changed_adapter_limits(
    old: Mapping[str, Limits], change: Mapping[str, LimitsChange | None] | None
) -> Mapping[str, Limits]:
    """The adapters it names: null takes all limits of one away."""
    if change is None:
        return old
    new = dict(old)
    for name, limits in change.items():
        if limits is None:
            new.pop(name, None)
        else:
            param = f"adapter_limits.{name}"
            new[name] = changed_limits(new.get(name, NO_LIMITS), limits, param=param)
    return new


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
    _check_limits("limits", tenant.limits)
    if len(tenant.adapter_limits) > ADAPTER_LIMITS_MAX:
        raise BadField("adapter_limits", f"at most {ADAPTER_LIMITS_MAX} adapters")
    for model, limits in tenant.adapter_limits.items():
        checked_name("adapter_limits", model)
        _check_limits(f"adapter_limits.{model}", limits)
    if not isinstance(tenant.shadow, bool):
        raise BadField("shadow", "must be true or false")
    return tenant


def _check_limits(param: str, limits: Limits) -> None:
    for name, limit in asdict(limits).items():
        if limit is None:
            continue
        money = name.startswith("spend")
        most = SPEND_MAX if money else LIMIT_MAX
        number = isinstance(limit, int | float if money else int) and not isinstance(limit, bool)
        if not (number and 0 <= limit <= most):
            what = "a number" if money else "a whole number"
            raise BadField(f"{param}.{name}", f"must be null or {what} up to {most}")


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
        adapter_limits={
            name: Limits(**limits) for name, limits in value.get("adapter_limits", {}).items()
        },
        shadow=value.get("shadow", False),
        created=value["created"],
        version=int(version),
    )
