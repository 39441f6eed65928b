"""Requests that generate: `/v1/chat/completions` and `/v1/completions`, streamed or not.

The order is: read and refuse what is wrong with the request (400), name the model (404), turn it
into tokens and refuse what does not fit (400), be admitted (503). Only then does the engine hear of
it. A stream's status line waits for the first token, so that whatever fails before it is a real
HTTP error; after `keepalive_s` without one the stream begins with a comment, and what fails then is
an error event, after which the stream closes without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final

from aiohttp import web

from replica.answer import Answer, GrowingChoice
from replica.chat_template import ChatTemplate
from replica.config import ReplicaConfig
from replica.core.sequence import Sampling, Sequence
from replica.edge import json_response, read_object
from replica.errors import BadRequest, ContextTooLong, ReplicaError, UnknownModel
from replica.front import Front
from replica.protocol import ChatRequest, CompletionRequest, GenerationRequest, parse_generation
from replica.replies import Reply
from replica.text import GrowingText, Vocabulary
from shared.clock import Clock, monotonic, wall
from shared.ids import AdapterId
from shared.logs import request_id
from shared.wire import ADAPTER_VERSION, REQUEST_ID

_LONG_TEXT_CHARS: Final = 16_384
"""Longer text is encoded on another thread, for it would hold up everybody's tokens."""

_SSE: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

Tokens = tuple[int, ...]


class Handlers:
    """`look` looks for adapters that came since the last look."""

    def __init__(
        self,
        *,
        config: ReplicaConfig,
        front: Front,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        vocab_size: int,
        look: Callable[[], Awaitable[None]],
        clock: Clock = monotonic,
    ) -> None:
        self._config = config
        self._front = front
        self._vocabulary = vocabulary
        self._template = template
        self._vocab_size = vocab_size
        self._look = look
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = parse_generation(ChatRequest, await read_object(request))
        adapter = await self._adapter(body.model)
        text = self._template.render(
            [message.plain() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            extra=body.chat_template_kwargs,
        )
        tokens = await self._encode(text, special=False)
        return await self._answer(request, body, adapter, [tokens], field="messages")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = parse_generation(CompletionRequest, await read_object(request))
        adapter = await self._adapter(body.model)
        prompts = [
            await self._encode(prompt, special=True)
            if isinstance(prompt, str)
            else self._checked(prompt)
            for prompt in body.prompt
        ]
        return await self._answer(request, body, adapter, prompts, field="prompt")

    async def _adapter(self, model: str) -> AdapterId | None:
        """The adapter that `model` names, None for the base. Raises UnknownModel."""
        if model == self._config.base_name:
            return None
        if not self._front.servable(model):
            await self._look()
        if not self._front.servable(model):
            raise UnknownModel(model)
        return AdapterId(model)

    async def _encode(self, text: str, *, special: bool) -> Tokens:
        if len(text) > _LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._vocabulary.encode, text, special=special)
        return self._vocabulary.encode(text, special=special)

    def _checked(self, tokens: list[int]) -> Tokens:
        wrong = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise BadRequest(
                f"`prompt`: {wrong} is no token of this model; they are 0 to "
                f"{self._vocab_size - 1}.",
                param="prompt",
            )
        return tuple(tokens)

    async def _answer(
        self,
        request: web.Request,
        body: GenerationRequest,
        adapter: AdapterId | None,
        prompts: list[Tokens],
        *,
        field: str,
    ) -> web.StreamResponse:
        opened = len(prompts) * body.n
        if opened > self._config.choices_max:
            raise BadRequest(
                f"`n`: {len(prompts)} prompts times {body.n} are {opened} choices; at most "
                f"{self._config.choices_max} are allowed.",
                param="n",
            )
        reply = Reply(
            chat=isinstance(body, ChatRequest),
            model=body.model,
            created=int(wall()),
            with_usage=body.stream and body.stream_options.include_usage,
        )
        sequences = self._sequences(reply.id, body, adapter, prompts, field)
        with self._front.generate(sequences) as generation:
            answer = Answer(
                reply=reply,
                base_name=self._config.base_name,
                generation=generation,
                choices=[self._choice(at, seq, body) for at, seq in enumerate(sequences)],
                keepalive_s=self._config.keepalive_s,
                include_usage=body.stream_options.include_usage,
                continuous_usage=body.stream_options.continuous_usage_stats,
            )
            if body.stream:
                return await _stream(request, answer)
            response = json_response(await answer.whole())
            response.headers[ADAPTER_VERSION] = answer.digest or ""
            return response

    def _sequences(
        self,
        reply_id: str,
        body: GenerationRequest,
        adapter: AdapterId | None,
        prompts: list[Tokens],
        field: str,
    ) -> list[Sequence]:
        now = self._clock()
        sequences: list[Sequence] = []
        for prompt in prompts:
            room = self._room(body, len(prompt), field)
            for choice in range(body.n):
                sampling = self._sampling(body, room, choice)
                seq_id = f"{reply_id}-{len(sequences)}"
                sequences.append(Sequence(seq_id, adapter, prompt, sampling, now))
        return sequences

    def _room(self, body: GenerationRequest, prompt_tokens: int, field: str) -> int:
        """Tokens this request may draw after its prompt."""
        if prompt_tokens == 0:
            raise BadRequest(f"`{field}`: has no tokens.", param=field)
        limit = self._front.report.max_model_len
        room = limit - prompt_tokens
        wanted = body.tokens_max
        if room < 1 or (wanted or 0) > room:
            named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            asked = "" if wanted is None else f" and {wanted} in the completion"
            raise ContextTooLong(
                f"This model's maximum context length is {limit} tokens. Your request has "
                f"{prompt_tokens} in the {field}{asked}. Reduce one of them.",
                param=field if room < 1 else named,
            )
        return wanted or room

    def _sampling(self, body: GenerationRequest, room: int, choice: int) -> Sampling:
        """Without a seed the dice come from the system at admission, one throw a choice."""
        seed = int.from_bytes(os.urandom(8)) if body.seed is None else body.seed + choice
        return Sampling(
            max_tokens=room,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=seed,
            stop_token_ids=frozenset(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
        )

    def _choice(self, index: int, seq: Sequence, body: GenerationRequest) -> GrowingChoice:
        text = GrowingText(self._vocabulary, stops=body.stop, skip_special=body.skip_special_tokens)
        prompt_tokens = len(seq.prompt) if index % body.n == 0 else 0
        return GrowingChoice(index, seq.id, text, prompt_tokens)


async def _stream(request: web.Request, answer: Answer) -> web.StreamResponse:
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
        await response.write(error.event())
    assert response is not None, "a stream has at least its end"
    await response.write_eof()
    return response
