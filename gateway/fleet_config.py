"""The part of the gateway's file that says who the fleet is: listed, looked up, or joining."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.settings import Settings


class ReplicaKind(Settings):
    kind: Literal["native", "openai", "vllm", "sglang", "lorax", "trtllm"] = "native"
    """What runs there; openai: any server of the OpenAI API. The rest is for others than native."""
    models: tuple[str, ...] = ()
    """Adapters it serves beside those it lists; "*": every name is passed on to it."""
    slots: int = Field(0, ge=0)
    """Adapters its GPU holds at once, where it does not tell; 0: unknown, each counts as loaded."""
    host_slots: int = Field(0, ge=0)
    """Adapters its host memory holds, those of the GPU included; 0: all that it was given."""
    deploy: tuple[str, ...] | None = None
    """Adapters of the registry that are loaded there, by name or pattern (`acme-*`); null: all
    that have a path, once every replica's base is known, or named here, and they have the same."""
    api_key: str = ""
    """Sent to it as `Authorization: Bearer`, when it wants a key."""
    base: str = ""
    """Name of its base model; empty: the first model it lists."""
    capacity: int = Field(64, ge=1)
    """Requests it runs at once; more wait in the gateway, where turns are fair."""
    first_byte_timeout_s: float | None = Field(None, gt=0)
    """Its own limit for the first byte of a reply; null: that of `forward`."""
    idle_timeout_s: float | None = Field(None, gt=0)
    """Its own limit between two bytes of a reply; null: that of `forward`."""

    def takes(self, bases: int) -> Callable[[str], bool]:
        """Whether an adapter of the registry belongs there, in a fleet of so many bases."""
        if (patterns := self.deploy) is None:
            return lambda adapter: bases <= 1
        return lambda adapter: any(fnmatchcase(adapter, pattern) for pattern in patterns)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kind == "trtllm" and self.models:
            raise ValueError(
                "models: trtllm-serve would answer them from the base; give each a version with a "
                "path in the registry"
            )
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key: must be printable ASCII, since it is sent as a header")
        return self


class ReplicaEntry(ReplicaKind):
    id: str
    """Stable name: the ring hashes it."""
    url: str
    """http://HOST:PORT of the replica."""


class ServiceEntry(ReplicaKind):
    srv: str = Field(min_length=1, max_length=253)
    """SRV name of a headless service, `_PORT._tcp.SERVICE.NAMESPACE.svc`: each target is a replica,
    named by its first label (a StatefulSet's pod), at the target's port."""


class FleetConfig(Settings):
    replicas: tuple[ReplicaEntry, ...] = ()
    """The replicas this gateway routes to, as {id, url, kind, models, base, capacity}."""
    token: str = ""
    """Fleet token that the replicas ask for, when they have one set."""
    silence_heartbeats: float = Field(3.0, ge=1)
    """A replica silent for this many of its heartbeats is lost."""
    probe_s: float = Field(1.0, gt=0)
    """A lost replica is asked for reports at least this often."""


def address_of(text: str) -> tuple[str, int]:
    """Of `ADDRESS`, `ADDRESS:PORT` or `[ADDRESS]:PORT`. Raises ValueError."""
    host, port = text, "53"
    if text.startswith("[") or text.count(":") == 1:
        host, _, port = text.rpartition(":")
    return str(ip_address(host.strip("[]"))), int(port)


class DiscoveryConfig(Settings):
    services: tuple[ServiceEntry, ...] = ()
    """Services whose pods are replicas too: {srv: _http._tcp.NAME.NAMESPACE.svc, kind, …}."""
    interval_s: float = Field(5, gt=0)
    """They are looked up this often; a fleet that is scaled is followed within this time."""
    timeout_s: float = Field(2, gt=0)
    """Limit of one look-up with all its addresses; one that fails changes nothing."""
    nameservers: tuple[str, ...] = ()
    """ADDRESS or ADDRESS:PORT of the DNS servers to ask; empty: those of /etc/resolv.conf."""
    lease_s: float = Field(15, ge=1)
    """A replica that joined with the fleet token says so again within this time, or is no longer
    named. Joining is off while `fleet.token` is empty."""
    forget_s: float = Field(600, ge=0)
    """A replica that is silent and that nothing names any more leaves the ring after this time;
    one that had said that it drains, at once. One that reports is never dropped."""
    members_max: int = Field(256, ge=1)
    """Replicas of the fleet, however they were found; more are not taken in."""

    @field_validator("nameservers")
    @classmethod
    def _addresses(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            address_of(text)
        return texts
