"""The admin API and the tenants' API over HTTP, with errors that say what to do next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Final

import httpx
import typer

from gateway.cli.failure import Failure
from gateway.cli.home import Home
from shared.data_dir import default_data_dir

GATEWAY_ENVIRONMENT: Final = "LORAPLEX_GATEWAY"
ADMIN_KEY_ENVIRONMENT: Final = "LORAPLEX_ADMIN_KEY"
DEFAULT_GATEWAY: Final = "http://127.0.0.1:8080"
_TIMEOUT_S: Final = 30.0

GatewayOption = Annotated[
    str,
    typer.Option(
        "--gateway",
        metavar="URL",
        envvar=GATEWAY_ENVIRONMENT,
        help=f"The gateway to ask. Default: the fleet `up` runs here, else {DEFAULT_GATEWAY}.",
    ),
]


class NotFound(Failure):
    """404: there is no such thing; some callers then make it."""


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    key: str


def admin_address(gateway: str = "") -> Address:
    """Where the admin API is, and its key: option, environment, then what `up` wrote."""
    home = Home(default_data_dir())
    url = gateway or home.running().get("admin_url", DEFAULT_GATEWAY)
    key = os.environ.get(ADMIN_KEY_ENVIRONMENT) or home.keys().admin
    if not key:
        raise Failure(
            f"no admin key. Set {ADMIN_KEY_ENVIRONMENT}, or run this where `loraplex up` runs "
            f"(it keeps one in {home.keys_file})."
        )
    return Address(url.rstrip("/"), key)


class Admin:
    """`with Admin(address) as admin: admin.get("tenants")`; paths are below /admin/v1/."""

    def __init__(self, address: Address) -> None:
        self._url = address.url
        self._http = httpx.Client(
            base_url=f"{address.url}/admin/v1/",
            headers={"Authorization": f"Bearer {address.key}"},
            timeout=_TIMEOUT_S,
            trust_env=False,
        )

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: str | None) -> Any:
        present = {name: value for name, value in query.items() if value is not None}
        return self._call("GET", path, params=present)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, version: int | None = None
    ) -> Any:
        return self._call("POST", path, json=body or {}, headers=_if_match(version))

    def patch(self, path: str, body: Mapping[str, Any], *, version: int | None = None) -> Any:
        """With `version` only what has still that version is changed."""
        return self._call("PATCH", path, json=body, headers=_if_match(version))

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("PUT", path, json=body)

    def delete(self, path: str, *, version: int | None = None) -> Any:
        return self._call("DELETE", path, headers=_if_match(version))

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        try:
            reply = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error
        if reply.is_success:
            return reply.json() if reply.content else None
        raise refused(reply)


def _if_match(version: int | None) -> dict[str, str]:
    return {} if version is None else {"If-Match": f'"{version}"'}


def admin(gateway: str = "") -> Admin:
    return Admin(admin_address(gateway))


def unreachable(url: str, error: httpx.HTTPError) -> Failure:
    if isinstance(error, httpx.ConnectError):
        return Failure(
            f"no gateway answers on {url}. Start one with `loraplex up`, or name another with "
            f"--gateway URL or {GATEWAY_ENVIRONMENT}."
        )
    return Failure(f"{url} did not answer as it should: {type(error).__name__}: {error}")


def refused(reply: httpx.Response) -> Failure:
    """An HTTP error of the gateway in one line."""
    message, param = _error_text(reply)
    if reply.status_code == 401:
        return Failure(f"the key was refused: {message}")
    text = f"{message} (field `{param}`)" if param else message
    return NotFound(text) if reply.status_code == 404 else Failure(text)


def _error_text(reply: httpx.Response) -> tuple[str, str | None]:
    try:
        error = reply.json()["error"]
        return str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        return f"HTTP {reply.status_code} from {reply.url}: {reply.text[:200]!r}", None
