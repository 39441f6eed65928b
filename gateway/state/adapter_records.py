"""What the registry says of an adapter: whose it is, who may use it, which of its versions counts.

An adapter without a record is whatever the replicas serve, for whoever may use it by its tenant's
`models`. A record narrows that: only the owner and those in `access` may use it, and where it has a
current version its plain name means exactly that digest, on every gateway, from the change on.
Requests that run finish on the version they began with.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import orjson

from gateway.state.tenants import BadField, checked_name

VERSIONS_MAX: Final = 50
ACCESS_MAX: Final = 4096
EVERYBODY: Final = "*"

_DIGEST: Final = re.compile(r"[0-9a-f]{12,64}")
_PATH_MAX: Final = 4096
_NOTE_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    digest: str  # of the content, in hex: at least its first 12 digits
    path: str = ""  # where replicas find it, as their load call takes it; "": they have it
    note: str = ""
    created: float = 0.0  # wall seconds


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    name: str
    owner: str = ""  # a tenant; "": the operator
    access: tuple[str, ...] = (EVERYBODY,)  # tenants that may use it beside the owner
    versions: tuple[AdapterVersion, ...] = ()  # in the order in which they were added
    current: str = ""  # the digest that the plain name means; "": whichever a replica serves
    previous: str = ""  # what it meant before: where a rollback goes
    created: float = 0.0
    version: int = 0  # of the record, in the store

    @property
    def path(self) -> str:
        """Of its current version; "": it has none, or replicas have it."""
        now = self.held(self.current) if self.current else None
        return "" if now is None else now.path

    def open_to(self, tenant: str) -> bool:
        return tenant == self.owner or EVERYBODY in self.access or tenant in self.access

    def held(self, digest: str) -> AdapterVersion | None:
        """By its digest or a beginning of it that is no other's."""
        found = [one for one in self.versions if one.digest.startswith(digest)]
        return found[0] if len(found) == 1 else None


def added(record: AdapterRecord, version: AdapterVersion) -> AdapterRecord:
    """With one more version, which is current from now on. One it has already is only made so."""
    known = record.held(version.digest)
    if known is None:
        if len(record.versions) >= VERSIONS_MAX:
            raise BadField("versions", f"it has {VERSIONS_MAX} already; remove old ones first")
        record = replace(record, versions=(*record.versions, version))
        known = version
    return switched(record, known.digest)


def switched(record: AdapterRecord, digest: str) -> AdapterRecord:
    if digest == record.current:
        return record
    return replace(record, current=digest, previous=record.current)


def checked_adapter(record: AdapterRecord) -> AdapterRecord:
    """The record itself, or BadField."""
    checked_name("adapter", record.name)
    if record.owner:
        checked_name("owner", record.owner)
    if not isinstance(record.owner, str):
        raise BadField("owner", "must be a tenant's id, or empty")
    if len(record.access) > ACCESS_MAX:
        raise BadField("access", f"at most {ACCESS_MAX} tenants")
    for tenant in record.access:
        checked_name("access", tenant)
    return record


def checked_version(body: dict[str, Any], now: float) -> AdapterVersion:
    digest = body.get("digest")
    digest = digest.removeprefix("sha256:").lower() if isinstance(digest, str) else ""
    if not _DIGEST.fullmatch(digest):
        raise BadField("digest", "must be the content's digest: 12 to 64 hexadecimal digits")
    path, note = body.get("path", ""), body.get("note", "")
    if not isinstance(path, str) or len(path) > _PATH_MAX or not (path == "" or path.isprintable()):
        raise BadField(
            "path", f"must be a path as replicas know it, of at most {_PATH_MAX} letters"
        )
    if not isinstance(note, str) or len(note) > _NOTE_MAX or not (note == "" or note.isprintable()):
        raise BadField("note", f"must be one line of at most {_NOTE_MAX} letters")
    return AdapterVersion(digest, path, note, now)


def encoded_adapter(record: AdapterRecord) -> bytes:
    """Without name and version: the store keeps those beside it."""
    value = asdict(record)
    del value["name"], value["version"]
    return orjson.dumps(value)


def decoded_adapter(name: str, text: str) -> AdapterRecord:
    version, _, body = text.partition(" ")
    value = orjson.loads(body)
    value["access"] = tuple(value["access"])
    value["versions"] = tuple(AdapterVersion(**one) for one in value["versions"])
    return AdapterRecord(name=name, version=int(version), **value)
