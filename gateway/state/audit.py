"""Who changed what: one event beside each change of the registry, or of the list of replicas that
joined, written by the same script.

So there is no change without its event, and no event without its change. The store keeps the last
`EVENTS_MAX`. An event never holds a secret: of a key it names the id.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

import orjson

EVENTS: Final = "events"
EVENTS_MAX: Final = 10_000

actor: ContextVar[str] = ContextVar("actor", default="gateway")
"""Who asked for what is being changed; the admin API says it for each call."""


def event(action: str, subject: str, at: float, **detail: Any) -> bytes:
    """`action` is such as `tenant.changed`; `subject` is what it was done to."""
    return orjson.dumps(
        {"at": at, "actor": actor.get(), "action": action, "subject": subject, "detail": detail},
        default=str,
    )


def shown(entry_id: str, fields: dict[str, str]) -> dict[str, Any]:
    """An entry of the stream as the admin API shows it."""
    return {"id": entry_id, **orjson.loads(fields["event"])}
