"""Intake: a read body to the tokens and sequences that it asks for, or the reason why not.

Everything that needs the base is checked here, before the engine hears of the request: the chat
template and the vocabulary, the context's length, a schema's grammar. Long texts and grammars are
worked on by another thread, for they would hold up everybody's tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from replica.chat_template import ChatTemplate
from replica.core.sequence import Sampling, Sequence
from replica.echo import Echo, offsets
from replica.errors import BadRequest, ContextTooLong, Unsupported
from replica.grammar import Grammars, JsonGrammar
from replica.protocol import ChatRequest, CompletionRequest, GenerationRequest
from replica.text import Vocabulary
from replica.tool_calls import ToolCalls
from shared.clock import Clock
from shared.ids import AdapterId

_LONG_TEXT_CHARS: Final = 16_384

Tokens = tuple[int, ...]


class Intake:
    """`length_max` is the longest sequence, answer included; `choices_max` bounds a request."""

    def __init__(
        self,
        *,
        vocabulary: Vocabulary,
        vocab_size: int,
        template: ChatTemplate,
        grammars: Grammars,
        length_max: Callable[[], int],
        choices_max: int,
        clock: Clock,
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._template = template
        self._grammars = grammars
        self._length_max = length_max
        self._choices_max = choices_max
        self._clock = clock

    async def sequences(
        self, reply_id: str, body: GenerationRequest, adapter: AdapterId | None, salt: str
    ) -> list[Sequence]:
        """`candidates` for each prompt, in order. Raises BadRequest.

        `salt` is the fleet's word on who shares cached keys with whom; no field of a body has one.
        """
        prompts = await self._prompts(body)
        opened = len(prompts) * body.candidates
        if opened > self._choices_max:
            field = "n" if body.candidates == body.n else "best_of"
            raise BadRequest(
                f"`{field}`: {len(prompts)} prompts times {body.candidates} are {opened} choices; "
                f"at most {self._choices_max} are allowed.",
                param=field,
            )
        for token, _ in body.logit_bias:
            self._known(token, "logit_bias")
        for token in body.stop_token_ids:
            self._known(token, "stop_token_ids")
        grammar = await self._grammar(body)
        now = self._clock()
        sequences: list[Sequence] = []
        for prompt in prompts:
            room = self._room(body, len(prompt))
            for choice in range(body.candidates):
                own = grammar.copy() if grammar is not None else None
                seq_id = f"{reply_id}-{len(sequences)}"
                sampling = _sampling(body, room, choice)
                sequences.append(Sequence(seq_id, adapter, prompt, sampling, now, own, salt))
        return sequences

    async def echoes(self, body: GenerationRequest, sequences: list[Sequence]) -> list[Echo]:
        """For each sequence the prompt, where the reply is to begin with it."""
        if not isinstance(body, CompletionRequest) or not body.echo:
            return [Echo() for _ in sequences]
        echoes: list[Echo] = []
        tokens: Tokens
        places: list[int]
        for prompt, first in zip(body.prompt, sequences[:: body.candidates], strict=True):
            text = prompt if isinstance(prompt, str) else self._vocabulary.decode(prompt)
            tokens, places = (), []
            if body.scores_prompt:
                tokens = first.prompt
                places = await asyncio.to_thread(offsets, self._vocabulary, text, tokens)
            echoes += [Echo(text, tokens, places) for _ in range(body.candidates)]
        return echoes

    def tool_calls(self, body: GenerationRequest) -> ToolCalls | None:
        """A reader of calls for one choice; None where a reply is text and nothing else."""
        if not isinstance(body, ChatRequest) or not self._template.marks_calls:
            return None
        names = [tool["function"]["name"] for tool in body.offered_tools]
        if not names:
            return None
        return ToolCalls(names, parallel=body.parallel_tool_calls)

    async def _prompts(self, body: GenerationRequest) -> list[Tokens]:
        if isinstance(body, ChatRequest):
            return [await self._encode(self._chat(body), special=False)]
        assert isinstance(body, CompletionRequest)
        return [
            await self._encode(prompt, special=True)
            if isinstance(prompt, str)
            else tuple(self._known(token, "prompt") for token in prompt)
            for prompt in body.prompt
        ]

    def _chat(self, body: ChatRequest) -> str:
        tools = body.offered_tools
        if tools and not self._template.knows_tools:
            raise Unsupported(
                "`tools`: the chat template of this base has no place for tools, so the model "
                "would not hear of them.",
                param="tools",
            )
        if tools and not body.parallel_tool_calls and not self._template.marks_calls:
            raise Unsupported(
                "`parallel_tool_calls`: calls of this base come as text, and are not counted.",
                param="parallel_tool_calls",
            )
        return self._template.render(
            [message.plain() for message in body.messages],
            tools=tools,
            add_generation_prompt=body.add_generation_prompt,
            extra=body.chat_template_kwargs,
        )

    async def _encode(self, text: str, *, special: bool) -> Tokens:
        if len(text) > _LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._vocabulary.encode, text, special=special)
        return self._vocabulary.encode(text, special=special)

    def _known(self, token: int, field: str) -> int:
        if not 0 <= token < self._vocab_size:
            raise BadRequest(
                f"`{field}`: {token} is no token of this model; they are 0 to "
                f"{self._vocab_size - 1}.",
                param=field,
            )
        return token

    async def _grammar(self, body: GenerationRequest) -> JsonGrammar | None:
        """One to copy for each sequence."""
        field = body.schema_field
        if not field:
            return None
        schema = getattr(body, field)
        return await asyncio.to_thread(self._grammars.compile, schema, param=field)

    def _room(self, body: GenerationRequest, prompt_tokens: int) -> int:
        """Tokens this request may draw after its prompt."""
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        if prompt_tokens == 0:
            raise BadRequest(f"`{field}`: has no tokens.", param=field)
        limit = self._length_max()
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
        if body.min_tokens > room:
            raise ContextTooLong(
                f"`min_tokens`: {body.min_tokens} is more than the {room} tokens that this "
                f"model's context has left.",
                param="min_tokens",
            )
        return room if wanted is None else max(wanted, 1)  # of none, one is drawn and dropped


def _sampling(body: GenerationRequest, room: int, choice: int) -> Sampling:
    """Without a seed the dice come from the system at admission, one throw a choice."""
    seed = int.from_bytes(os.urandom(8)) if body.seed is None else body.seed + choice
    ranks = body.candidates > body.n  # the best of them are found by their log-probabilities
    return Sampling(
        max_tokens=room,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=seed,
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        prompt_logprobs=body.scores_prompt,
        logprobs=0 if body.top_wanted is None and ranks else body.top_wanted,
    )
