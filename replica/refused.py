"""Fields that a request must not have, whatever their value, or unless it asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

import orjson

from replica.errors import BadRequest, Unsupported

WEIGHT_FIELDS: Final = frozenset(
    {
        "adapter",
        "adapter_id",
        "adapter_source",
        "cache_namespace",
        "cache_salt",
        "extra_key",
        "id_slot",
        "lora",
        "lora_adapter",
        "lora_id",
        "lora_int_id",
        "lora_modules",
        "lora_name",
        "lora_path",
        "lora_request",
        "merged_adapters",
    }
)
"""Ways other servers have of choosing weights or cache. Here `model` alone does."""

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "regex": ("",),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stop_regex": ([], ""),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known and not done, with the values (besides null) that ask for nothing. What the one endpoint
does and the other does not is here too: a request's own fields come first."""


def refuse(raw: Mapping[str, Any], *, own: Set[str]) -> None:
    """`own` are the fields that this kind of request does have. Raises BadRequest."""
    for field, value in raw.items():
        if value is None:
            continue
        if field in WEIGHT_FIELDS:
            raise BadRequest(
                f"`{field}` is not allowed: `model` alone selects weights and cache.",
                param=field,
                code="field_not_allowed",
            )
        if field in _NEUTRAL and field not in own and not _asks_for_nothing(field, value):
            raise Unsupported(f"`{field}` is not supported by this replica.", param=field)


def _asks_for_nothing(field: str, value: Any) -> bool:
    encoded = orjson.dumps(value)  # 0 and False are equal in Python, not in JSON
    return any(encoded == orjson.dumps(neutral) for neutral in _NEUTRAL[field])
