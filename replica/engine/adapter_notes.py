"""AdapterNotes: what is odd about an upload that can be served all the same.

A note changes nothing of what is computed: it tells the owner what was passed over, or what the
adapter was made for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_QUANTISED: Final = re.compile(
    r"(?i)(?:^|[-_/.])(bnb|nf4|fp4|[48]-?bit|int[48]|gptq|awq)(?:$|[-_/.])"
)
_LOCAL: Final = re.compile(r"^(/|\.|~|[A-Za-z]:\\)|\.\.|/snapshots/")
_TEMPLATES: Final = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Note:
    code: str
    message: str
    param: str | None = None


def notes(raw: Mapping[str, Any], names: Collection[str], tensors: Collection[str]) -> list[Note]:
    """`raw` is the config, `names` the folder's files, `tensors` the keys of the weights."""
    return [*_of_targets(raw, tensors), *_of_base(raw), *_of_task(raw), *_of_files(names)]


def _of_targets(raw: Mapping[str, Any], tensors: Collection[str]) -> Iterator[Note]:
    targets = raw.get("target_modules")
    if not isinstance(targets, list) or not tensors:
        return
    paths = {name.partition(".lora_")[0] for name in tensors}
    for target in dict.fromkeys(map(str, targets)):
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            yield Note(
                "target_without_weights",
                f"target_modules names {target}, and the file has nothing for it: it changes "
                "nothing there",
                "target_modules",
            )


def _of_base(raw: Mapping[str, Any]) -> Iterator[Note]:
    key, base = "base_model_name_or_path", raw.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        yield Note("base_unnamed", "the config names no base: only shapes could be compared", key)
        return
    if _LOCAL.search(base):
        yield Note(
            "base_is_a_path",
            f"{base} is a place on another machine, which is never opened: only shapes could be "
            "compared",
            key,
        )
    if _QUANTISED.search(base):
        yield Note(
            "quantised_base",
            f"trained on {base}, a quantised base: compare its answers on this one before it "
            "serves (loraplex adapter eval)",
            key,
        )


def _of_task(raw: Mapping[str, Any]) -> Iterator[Note]:
    task = raw.get("task_type")
    if task != "CAUSAL_LM":
        yield Note(
            "task_type",
            f"task_type is {task!r}; it is served as a causal language model",
            "task_type",
        )


def _of_files(names: Collection[str]) -> Iterator[Note]:
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl")))
    if pickles:
        yield Note("ignored_pickles", f"never opened: {', '.join(pickles[:10])}", pickles[0])
    templates = [name for name in _TEMPLATES if name in names]
    if templates:
        yield Note(
            "ignored_tokenizer",
            f"the base's own tokenizer and chat template are used, not {', '.join(templates)}",
            templates[0],
        )
