"""`fleet.yaml`: what an operator wants the registry to be, and how that differs from what it is.

    tenants:
      acme: {weight: 2, models: ["*"], limits: {requests_per_min: 60}}
    adapters:
      pirate: {owner: acme, access: [beta], versions: [{digest: 0123456789ab}]}
    prices:
      - {tenant: "*", model: "*", input: 0.5, output: 1.5}

A field that is given is exactly as given; one that is left out stays as it is. So `limits` names
all limits, an empty `limits` takes them all away, and no `limits` leaves them alone. What is not in
the file stays too, unless pruning was asked for: then of each section that the file has. Keys are
not in it: a secret has no place in a file that is kept. The current version of an adapter is the
last one listed, unless `current` names one. Pure: rows in, changes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.cli.limit_options import LIMITS

NO_LIMITS: Final[dict[str, Any]] = dict.fromkeys(LIMITS)
Row = Mapping[str, Any]


class _Wish(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LimitsWish(_Wish):
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    input_tokens_per_min: int | None = None
    output_tokens_per_min: int | None = None
    concurrency: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    spend_per_day: float | None = None
    spend_per_month: float | None = None


class TenantWish(_Wish):
    weight: float | None = None
    models: list[str] | None = None
    limits: LimitsWish | None = None
    adapter_limits: dict[str, LimitsWish] | None = None
    shadow: bool | None = None


class VersionWish(_Wish):
    digest: str
    path: str = ""
    note: str = ""


class AdapterWish(_Wish):
    owner: str | None = None
    access: list[str] | None = None
    versions: list[VersionWish] = []
    current: str = ""


class PriceWish(_Wish):
    tenant: str = "*"
    model: str = "*"
    input: float
    cached_input: float | None = None
    output: float


class FleetWish(_Wish):
    tenants: dict[str, TenantWish | None] | None = None
    adapters: dict[str, AdapterWish | None] | None = None
    prices: list[PriceWish] | None = Field(None)


Verb = Literal["+", "~", "-"]


@dataclass(frozen=True, slots=True)
class Change:
    verb: Verb
    kind: Literal["tenant", "adapter", "price"]
    name: str
    lines: tuple[str, ...] = ()  # what of it changes, for people
    body: Mapping[str, Any] | None = None
    version: int | None = None  # that it was read in
    versions: Sequence[VersionWish] = ()  # an adapter's, to be added
    current: str = ""  # an adapter's, to be switched to
    target: tuple[str, str] = ("", "")  # a price's tenant and model


def changes(
    wish: FleetWish,
    *,
    tenants: Sequence[Row],
    adapters: Sequence[Row],
    prices: Sequence[Row],
    prune: bool,
) -> list[Change]:
    """What must be done; nothing when the registry is as wished."""
    found: list[Change] = []
    if wish.tenants is not None:
        found += _tenants(wish.tenants, {row["id"]: row for row in tenants}, prune)
    if wish.adapters is not None:
        records = {row["adapter"]: row["record"] for row in adapters if row["record"] is not None}
        found += _adapters(wish.adapters, records, prune)
    if wish.prices is not None:
        found += _prices(wish.prices, {(row["tenant"], row["model"]): row for row in prices}, prune)
    return found


def _tenants(
    wished: Mapping[str, TenantWish | None], there: Mapping[str, Row], prune: bool
) -> Iterator[Change]:
    for name, wish in wished.items():
        given = {} if wish is None else wish.model_dump(exclude_none=True, exclude={"limits"})
        given.pop("adapter_limits", None)
        if wish is not None and wish.limits is not None:
            given["limits"] = wish.limits.model_dump()
        if (old := there.get(name)) is None:
            if wish is not None and wish.adapter_limits is not None:
                own = {model: one.model_dump() for model, one in wish.adapter_limits.items()}
                given["adapter_limits"] = own
            yield Change("+", "tenant", name, tuple(_added(given)), {"id": name, **given})
            continue
        if wish is not None and wish.adapter_limits is not None:
            # exactly these: what is not named goes away
            own = {model: one.model_dump() for model, one in wish.adapter_limits.items()}
            given["adapter_limits"] = {**dict.fromkeys(old["adapter_limits"]), **own}
        lines = tuple(_differences(given, old))
        if lines:
            yield Change("~", "tenant", name, lines, given, old["version"])
    for name in sorted(there.keys() - wished.keys()) if prune else ():
        yield Change("-", "tenant", name, version=there[name]["version"])


def _adapters(
    wished: Mapping[str, AdapterWish | None], there: Mapping[str, Row], prune: bool
) -> Iterator[Change]:
    for name, given in wished.items():
        wish = given or AdapterWish()
        old = there.get(name)
        body = wish.model_dump(exclude_none=True, include={"owner", "access"})
        held = {one["digest"] for one in old["versions"]} if old else set()
        fresh = [one for one in wish.versions if _digest(one.digest) not in held]
        wanted = _digest(wish.current or (wish.versions[-1].digest if wish.versions else ""))
        switch = wanted if wanted and (old is None or old["current"] != wanted) else ""
        lines = [*(_added(body) if old is None else _differences(body, old))]
        lines += [f"version {_digest(one.digest)[:12]}" for one in fresh]
        lines += [f"current: {(old or {}).get('current', '')[:12]} -> {switch[:12]}"] * bool(switch)
        if old is None or lines:
            yield Change(
                "+" if old is None else "~",
                "adapter",
                name,
                tuple(lines),
                body,
                None if old is None else old["version"],
                fresh,
                switch,
            )
    for name in sorted(there.keys() - wished.keys()) if prune else ():
        yield Change("-", "adapter", name, version=there[name]["version"])


def _prices(
    wished: Sequence[PriceWish], there: Mapping[tuple[str, str], Row], prune: bool
) -> Iterator[Change]:
    keys = {(wish.tenant, wish.model) for wish in wished}
    for wish in wished:
        key = (wish.tenant, wish.model)
        body = wish.model_dump(exclude={"tenant", "model"})
        if body["cached_input"] is None:
            body["cached_input"] = body["input"]
        old = there.get(key)
        lines = tuple(_added(body) if old is None else _differences(body, old))
        if lines:
            verb: Verb = "+" if old is None else "~"
            yield Change(verb, "price", " ".join(key), lines, body, target=key)
    for key in sorted(there.keys() - keys) if prune else ():
        yield Change("-", "price", " ".join(key), target=key)


def _added(given: Row, under: str = "") -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _added(value, f"{under}{name}.")
        elif value is not None:
            yield f"{under}{name}: {_text(value)}"


def _differences(given: Row, old: Row, under: str = "") -> Iterator[str]:
    """Of what is given, what is not so already."""
    for name, value in given.items():
        was = old.get(name)
        if isinstance(value, Mapping):
            base = NO_LIMITS if was is None else was
            yield from _differences(value, base, f"{under}{name}.")
        elif value is None and isinstance(was, Mapping):
            yield f"{under}{name}: taken away"
        elif value != was:
            yield f"{under}{name}: {_text(was)} -> {_text(value)}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _digest(text: str) -> str:
    return text.removeprefix("sha256:").lower()
