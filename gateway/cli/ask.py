"""The demo's four requests: two tenants, the base and three adapters, at once, so that one forward
pass computes them side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from gateway.cli.failure import Failure, one_failure
from gateway.cli.fleet import QUESTION, Fleet
from shared import wire
from shared.clock import monotonic

MAX_TOKENS: Final = 40
_REFRESH_PER_S: Final = 12


@dataclass(slots=True)
class Answer:
    tenant: str
    model: str
    text: str = ""
    replica: str = ""
    placement: str = ""
    queue_ms: float = 0.0
    first_token_ms: float | None = None
    total_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests_left: str = ""
    tokens_left: str = ""


def pair(tenants: Sequence[str], models: Sequence[str]) -> list[Answer]:
    """Who asks what: each tenant takes its part of the models."""
    share = -(-len(models) // len(tenants))
    return [Answer(tenants[place // share], model) for place, model in enumerate(models)]


async def ask_all(fleet: Fleet, answers: Sequence[Answer], *, live: bool) -> None:
    """Ask all at once and fill the answers as they come. Raises Failure when one fails."""
    with one_failure(), _screen(answers) if live else nullcontext():
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(_ask(fleet, answer))


async def _ask(fleet: Fleet, answer: Answer) -> None:
    """Stream one chat completion through the OpenAI SDK, filling `answer` as it comes."""
    openai = sdk()
    started = monotonic()
    key = fleet.tenants[answer.tenant]
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=key) as client:
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model=answer.model,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            answer.replica = raw.headers[wire.REPLICA]
            answer.placement = raw.headers[wire.PLACEMENT]
            answer.queue_ms = float(raw.headers[wire.QUEUE_MS])
            answer.requests_left = _left(raw.headers, "requests")
            answer.tokens_left = _left(raw.headers, "tokens")
            async for chunk in raw.parse():
                if chunk.choices and (piece := chunk.choices[0].delta.content):
                    if answer.first_token_ms is None:
                        answer.first_token_ms = 1000 * (monotonic() - started)
                    answer.text += piece
                if chunk.usage:
                    answer.prompt_tokens = chunk.usage.prompt_tokens
                    answer.completion_tokens = chunk.usage.completion_tokens
        except openai.OpenAIError as error:
            raise Failure(f"{answer.tenant} asked {answer.model}: {error}") from error
        except KeyError as error:
            raise Failure(f"{answer.model}: the reply has no header {error}") from error
    answer.total_ms = 1000 * (monotonic() - started)


def _left(headers: Mapping[str, str], of: str) -> str:
    left, limit = (int(headers[f"x-ratelimit-{word}-{of}"]) for word in ("remaining", "limit"))
    return f"{left:,} of {limit:,}"


def sdk() -> Any:
    """The `openai` package: it takes a second to import, and only the demo needs it."""
    try:
        import openai
    except ImportError:
        raise Failure("the demo needs the openai package: pip install 'loraplex[demo]'") from None
    return openai


def _screen(answers: Sequence[Answer]) -> AbstractContextManager[Any]:
    """The answers side by side, redrawn while they grow."""
    from rich.columns import Columns
    from rich.live import Live
    from rich.panel import Panel
    from rich.text import Text

    def panels() -> Columns:
        return Columns(
            [
                Panel(
                    Text(answer.text or "…"),
                    title=Text(answer.model, style="bold"),
                    subtitle=Text(f"{answer.tenant} {answer.replica}", style="dim"),
                    width=38,
                    height=10,
                )
                for answer in answers
            ]
        )

    return Live(get_renderable=panels, refresh_per_second=_REFRESH_PER_S)
