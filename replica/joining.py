"""A replica that no list and no DNS names: it announces itself to a gateway, again and again.

    join    POST, with the fleet token; again three times within the lease it was given
    leave   DELETE, once it drains: gateways forget it when its reports end

Through the store every gateway hears of it, so any one's address will do, or a load balancer's. A
gateway that is away, or says no, costs nothing but time: what replicas and gateways say to each
other goes over the report stream, which a lease that has run out does not end.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final
from urllib.parse import quote

import aiohttp
import orjson

from shared.wire import FLEET_TOKEN, JOIN_PATH

_log = logging.getLogger(__name__)

ANSWER_S: Final = 5.0
"""A gateway answers in this time, or counts as away."""

RETRY_S: Final = 5.0
_RENEWALS: Final = 3
"""In one lease: two may be lost."""


class NotJoined(Exception):
    """A gateway's word, or why there was none."""


class Joining:
    def __init__(self, *, gateway: str, token: str, name: str, url: str) -> None:
        self._address = gateway.rstrip("/") + JOIN_PATH
        self._headers = {FLEET_TOKEN: token}
        self._name = name
        self._url = url

    async def run(self) -> None:
        """Until cancelled. What goes wrong is logged when it begins, and when it is over."""
        trouble = "not joined yet"
        async with self._session() as http:
            while True:
                try:
                    lease_s = await self._join(http)
                except NotJoined as error:
                    if str(error) != trouble:
                        trouble = str(error)
                        told = {"gateway": self._address, "why": trouble}
                        _log.warning("not joined; it is tried again", extra=told)
                    await asyncio.sleep(RETRY_S)
                else:
                    if trouble:
                        told = {"gateway": self._address, "replica": self._name, "url": self._url}
                        _log.info("joined", extra=told)
                    trouble = ""
                    await asyncio.sleep(lease_s / _RENEWALS)

    async def leave(self) -> None:
        """Say so once. Unheard, the lease ends by itself."""
        address = f"{self._address}/{quote(self._name, safe='')}"
        try:
            async with (
                self._session() as http,
                http.delete(address, params={"url": self._url}) as reply,
            ):
                await _checked(reply)
        except (NotJoined, aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            _log.warning("left without a word", extra={"why": str(error) or type(error).__name__})

    async def _join(self, http: aiohttp.ClientSession) -> float:
        """How long it holds, in seconds."""
        body = {"id": self._name, "url": self._url}
        try:
            async with http.post(self._address, json=body) as reply:
                answer = await _checked(reply)
                return float(str(answer["lease_s"]))
        except (aiohttp.ClientError, OSError) as error:
            raise NotJoined(f"no answer: {str(error) or type(error).__name__}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise NotJoined(f"no answer of a gateway: {error!r}") from error

    def _session(self) -> aiohttp.ClientSession:
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        return aiohttp.ClientSession(headers=self._headers, timeout=limit)


async def _checked(reply: aiohttp.ClientResponse) -> dict[str, object]:
    """Raises NotJoined with the gateway's own reason."""
    try:
        said = orjson.loads(await reply.read() or b"{}")
    except orjson.JSONDecodeError:
        said = None  # a proxy's page, perhaps
    answer: dict[str, object] = said if isinstance(said, dict) else {}
    if reply.status >= 400:
        error = answer.get("error")
        why = error.get("message") if isinstance(error, dict) else reply.reason
        raise NotJoined(f"status {reply.status}: {why}")
    return answer
