"""Requests that generate: `/v1/chat/completions` and `/v1/completions`, streamed or not.

The order is: read and refuse what is wrong with the request (400), name the model (404), turn it
into tokens and refuse what does not fit (400), be admitted (503). Only then does the engine hear of
it. A stream's status line waits for the first token, so that whatever fails before it is a real
HTTP error; after `keepalive_s` without one the stream begins with a comment, and what fails then is
an error event, after which the stream closes without `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final

from aiohttp import web

from replica.answer import Answer, GrowingChoice
from replica.config import ReplicaConfig
from replica.core.sequence import Sequence
from replica.echo import Echo
from replica.edge import check_fleet, json_response, read_object, trace_of
from replica.errors import AdapterLost, OnlyMerged, ReplicaError, UnknownModel
from replica.front import Front
from replica.intake import Intake
from replica.journal import Journal, Told
from replica.protocol import ChatRequest, CompletionRequest, GenerationRequest, parse_generation
from replica.replies import Reply
from replica.source import PASSING
from replica.text import GrowingText, Vocabulary
from shared.clock import wall
from shared.ids import AdapterId
from shared.logs import request_id
from shared.wire import ADAPTER_VERSION, CACHE_SALT, REQUEST_ID

_SSE: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Handlers:
    """`look` looks for adapters that came since the last look."""

    def __init__(
        self,
        *,
        config: ReplicaConfig,
        front: Front,
        vocabulary: Vocabulary,
        intake: Intake,
        journal: Journal,
        look: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = config
        self._front = front
        self._vocabulary = vocabulary
        self._intake = intake
        self._journal = journal
        self._look = look

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._told(request, ChatRequest)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._told(request, CompletionRequest)

    async def _told(
        self, request: web.Request, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> web.StreamResponse:
        with self._journal.telling(request.path, trace_of(request)) as told:
            body: GenerationRequest = parse_generation(kind, await read_object(request))
            return await self._answer(request, body, told)

    async def _adapter(self, model: str) -> AdapterId | None:
        """The adapter that `model` names, None for the base. Raises UnknownModel or OnlyMerged.

        The base of a merged replica is its adapter.
        """
        if merged := self._config.merged:
            if model != merged:
                raise OnlyMerged(model, merged)
            return None
        if model == self._config.base_name:
            return None
        if not self._front.servable(model):
            await self._look()
        if not self._front.servable(model):
            state = self._front.adapters.get(model)
            if state is not None and state.reason.partition(":")[0] in PASSING:
                raise AdapterLost(
                    f"The adapter `{model}` cannot be read at the moment; try again.", param="model"
                )
            raise UnknownModel(model)
        return AdapterId(model)

    async def _answer(
        self, request: web.Request, body: GenerationRequest, told: Told
    ) -> web.StreamResponse:
        adapter = await self._adapter(body.model)
        told.adapter = body.model
        reply = Reply(
            chat=isinstance(body, ChatRequest),
            model=body.model,
            created=int(wall()),
            with_usage=body.stream and body.stream_options.include_usage,
            spell=None if body.top_wanted is None else self._vocabulary.spell,
        )
        sequences = await self._intake.sequences(reply.id, body, adapter, self._salt(request))
        echoes = await self._intake.echoes(body, sequences)
        with self._front.generate(sequences) as generation:
            answer = Answer(
                reply=reply,
                base_name=self._config.base_name,
                generation=generation,
                choices=[
                    self._choice(index, seq, body, echo)
                    for index, (seq, echo) in enumerate(zip(sequences, echoes, strict=True))
                ],
                keepalive_s=self._config.keepalive_s,
                n=body.n,
                candidates=body.candidates,
                include_usage=body.stream_options.include_usage,
                continuous_usage=body.stream_options.continuous_usage_stats,
            )
            told.sequences = sequences
            try:
                if body.stream:
                    return await _stream(request, answer, told)
                response = json_response(await answer.whole())
                response.headers[ADAPTER_VERSION] = answer.digest or ""
                return response
            finally:
                told.usage, told.digest = answer.usage, answer.digest or ""

    def _salt(self, request: web.Request) -> str:
        """Raises NotPermitted when somebody else than the fleet brings one."""
        salt = request.headers.get(CACHE_SALT, "")
        if salt:
            check_fleet(request, self._config.fleet_token)
        return salt

    def _choice(
        self, index: int, seq: Sequence, body: GenerationRequest, echo: Echo
    ) -> GrowingChoice:
        text = GrowingText(
            self._vocabulary,
            stops=body.stop,
            skip_special=body.skip_special_tokens,
            min_tokens=body.min_tokens,
        )
        prompt_tokens = len(seq.prompt) if index % body.candidates == 0 else 0
        tools, silent = self._intake.tool_calls(body), body.tokens_max == 0
        return GrowingChoice(index, seq.id, text, prompt_tokens, echo, silent, tools)


async def _stream(request: web.Request, answer: Answer, told: Told) -> web.StreamResponse:
    """A ReplicaError before the first piece is the caller's to answer."""
    response: web.StreamResponse | None = None
    try:
        async with aclosing(answer.stream()) as blobs:
            async for blob in blobs:
                if response is None:
                    response = web.StreamResponse(headers=_SSE)
                    response.headers[REQUEST_ID] = request_id.get()
                    if answer.digest is not None:
                        response.headers[ADAPTER_VERSION] = answer.digest
                    await response.prepare(request)
                await response.write(blob)
    except ReplicaError as error:
        if response is None:
            raise
        told.broke(error)
        await response.write(error.event())
    assert response is not None, "a stream has at least its end"
    await response.write_eof()
    return response
