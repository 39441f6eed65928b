"""A fleet that runs on this machine, as its user meets it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from gateway.cli.client import Address, Admin
from gateway.cli.failure import Failure
from gateway.cli.home import Home
from shared.clock import monotonic
from shared.data_dir import default_data_dir

_READY_WAIT_S: Final = 30.0
_POLL_S: Final = 0.1
QUESTION: Final = "Describe the sea."


@dataclass(frozen=True, slots=True)
class Fleet:
    url: str
    admin_address: Address
    tenants: dict[str, str]  # name -> key
    base: str
    adapters: Path
    replicas: tuple[str, ...]
    home: Home

    def admin(self) -> Admin:
        return Admin(self.admin_address)

    async def wait_until_ready(self) -> None:
        """Until the gateway is ready and has heard every replica. Raises Failure."""
        deadline = monotonic() + _READY_WAIT_S
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                reply = await http.get(f"{self.url}/readyz")
                if reply.status_code == 200 and await asyncio.to_thread(self._all_replicas):
                    return
                if monotonic() > deadline:
                    raise Failure(
                        f"the gateway was not ready in {_READY_WAIT_S:g} s: "
                        f"{_what_lacks(reply.json())}. Its log is in {self.home.logs}."
                    )
                await asyncio.sleep(_POLL_S)

    def models(self) -> list[str]:
        """What the first tenant may use: the base, then the adapters by name."""
        key = next(iter(self.tenants.values()))
        reply = httpx.get(
            f"{self.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False
        )
        names = [model["id"] for model in reply.raise_for_status().json()["data"]]
        return sorted(names, key=lambda name: (name != self.base, name))

    def curl(self, model: str, key: str) -> str:
        """A line to paste."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 40,
            "temperature": 0,
        }
        return (
            f"curl {self.url}/v1/chat/completions -H 'Authorization: Bearer {key}' "
            f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
        )

    def card(self) -> str:
        """The ready block."""
        models = self.models()
        keys = [f"  key of {name:<9} {key}" for name, key in self.tenants.items()]
        first_key = next(iter(self.tenants.values()))
        return "\n".join(
            (
                f"loraplex ready on {self.url}",
                "",
                f"  OpenAI base URL  {self.url}/v1",
                f"  models           {', '.join(models)}",
                *keys,
                f"  admin            `{self._command()} tenant list`, and `--help` for more",
                f"  adapters         {self.adapters}",
                "                   (drop a PEFT folder in there: it is served within seconds)",
                f"  data             {self.home.root} (LORAPLEX_DATA moves it)",
                f"  logs             {self.home.logs}",
                "",
                f"  {self.curl(models[-1], first_key)}",
                "",
                "Ctrl-C drains and ends.",
            )
        )

    def _command(self) -> str:
        """What to type for `loraplex` where this was started, so that it finds this fleet."""
        typed = "loraplex" if shutil.which("loraplex") else os.path.relpath(sys.argv[0])
        usual = self.home.root == default_data_dir()
        return typed if usual else f"LORAPLEX_DATA={self.home.root} {typed}"

    def _all_replicas(self) -> bool:
        with self.admin() as admin:
            seen = admin.get("replicas")["data"]
        return len(seen) >= len(self.replicas) and all(one["state"] == "up" for one in seen)


def _what_lacks(detail: dict[str, Any]) -> str:
    """An answer of /readyz in words."""
    if detail["store"]["away"]:
        return f"it cannot reach the store ({detail['store']['reason']})"
    if not detail["registry"]["loaded"]:
        return "it has not read its tenants from the store"
    states = (f"{one['id']} is {one['state']}" for one in detail["replicas"])
    return ", ".join(states) or "it knows no replica"
