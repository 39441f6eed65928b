"""`loraplex chat`: talk to a model, streaming, as a tenant does."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import httpx
import orjson
import typer

from gateway.cli.client import DEFAULT_GATEWAY, GatewayOption, refused, unreachable
from gateway.cli.failure import Failure
from gateway.cli.home import Home
from shared.data_dir import default_data_dir
from shared.framing import Lines

API_KEY_ENVIRONMENT: Final = "LORAPLEX_API_KEY"
_FIRST_BYTE_S: Final = 300.0
_STREAM_END: Final = b"data: [DONE]"

Message = dict[str, str]


def chat(
    model: Annotated[str, typer.Argument(help="An adapter's name, or the base's.")],
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it a conversation.")
    ] = None,
    gateway: GatewayOption = "",
    key: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            envvar=API_KEY_ENVIRONMENT,
            help="The tenant's key. Default: one that `up` made here.",
        ),
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is always the same.")] = 0.0,
) -> None:
    """Talk to a model: one answer, or a conversation until Ctrl-D."""
    url, secret = _address(gateway, key)
    settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    with httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {secret}"},
        timeout=httpx.Timeout(10, read=_FIRST_BYTE_S),
        trust_env=False,
    ) as http:
        if prompt is not None:
            _say(http, settings, [{"role": "user", "content": prompt}])
        else:
            _converse(http, settings)


def _address(gateway: str, key: str) -> tuple[str, str]:
    home = Home(default_data_dir())
    url = gateway or home.running().get("url", DEFAULT_GATEWAY)
    secret = key or next(iter(home.keys().tenants.values()), "")
    if not secret:
        raise Failure(
            f"no API key. Give --key or set {API_KEY_ENVIRONMENT}; "
            "`loraplex tenant key-create TENANT` makes one."
        )
    return url.rstrip("/"), secret


def _converse(http: httpx.Client, settings: dict[str, Any]) -> None:
    messages: list[Message] = []
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            messages.append({"role": "user", "content": line})
            answer = _say(http, settings, messages)
            messages.append({"role": "assistant", "content": answer})


def _say(http: httpx.Client, settings: dict[str, Any], messages: list[Message]) -> str:
    """Print the answer as it comes, and return it."""
    body = {**settings, "messages": messages, "stream": True}
    answer, ended, lines = "", False, Lines()
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if not reply.is_success:
                reply.read()
                raise refused(reply)
            for data in reply.iter_bytes():
                for line in lines.feed(data):
                    ended = ended or line == _STREAM_END
                    piece = _piece(line)
                    answer += piece
                    print(piece, end="", flush=True)
    except httpx.HTTPError as error:
        raise unreachable(str(http.base_url), error) from error
    finally:
        print()
    if not ended:
        raise Failure("the stream ended early; the answer may be incomplete. Ask again.")
    return answer


def _piece(line: bytes) -> str:
    """The text in one SSE line, if it has any. Raises Failure on an error event."""
    if not line.startswith(b"data: {"):
        return ""
    event = orjson.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise Failure(f"the stream broke off: {event['error'].get('message')}")
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")
