"""What a replay sends for an arrival, and with whose key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

from loadtests.outcome import Outcome
from loadtests.trace import Arrival, BadTrace


def request_body(row: Outcome, arrival: Arrival) -> dict[str, Any]:
    """A completion of exactly the lengths the trace says; `a ` is about one token."""
    return {
        "model": row.adapter,
        # Begins with its number, so that no two prompts share a prefix.
        "prompt": f"{row.number} " + "a " * (arrival.prompt_tokens - 1),
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def keys_of(path: Path | None, tenants: set[str]) -> dict[str, str]:
    """Tenant to API key; without a file LORAPLEX_KEY is everybody's. Raises BadTrace."""
    shared = os.environ.get("LORAPLEX_KEY", "")
    try:
        given = {} if path is None else orjson.loads(path.read_bytes())
        keys = {tenant: str(given.get(tenant, shared)) for tenant in tenants}
    except (OSError, ValueError, AttributeError) as error:
        raise BadTrace(f"--keys {path}: {error}") from error
    if missing := sorted(tenant for tenant, key in keys.items() if not key):
        raise BadTrace(f"no key for {missing[0]}: name it in --keys, or set LORAPLEX_KEY")
    return keys
