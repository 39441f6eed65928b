"""PeftConfig: the part of `adapter_config.json` that changes what the adapter computes.

Rule: a key that is absent, null, false, empty or at PEFT's default is ignored, known or not; one
that is set and not computed here is a refusal that names it. Nothing is dropped in silence.

The scaling of a module of rank r is `alpha / r`, or `alpha / sqrt(r)` with rsLoRA, where r and
alpha may come from a pattern: PEFT takes the first key that matches `(.*\\.)?(key)$` on the
module's path. Patterns are regular expressions of whoever uploaded them, so only those that cannot
make a backtracking matcher run away are taken.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from replica.engine.bad_adapter import BadAdapter

CONFIG_FILE: Final = "adapter_config.json"

_DEFAULT_RANK: Final = 8  # PEFT's own defaults, for keys that old versions left out
_DEFAULT_ALPHA: Final = 8

_COMPUTED: Final = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
)
_DECIDED_BY_TENSORS: Final = frozenset(
    {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        *{"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"},
        *{"inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core"},
        *{"loftq_config", "eva_config", "corda_config", "qalora_group_size"},
        *{"runtime_config", "ensure_weight_tying", "merge_weights"},
    }
)
"""Keys of training and provenance. `fan_in_fan_out` lies about the base's matrix, not about A, B;
what the initialisation configs did to the base is refused through `init_lora_weights`."""

_BASE_UNCHANGED: Final = frozenset({"gaussian", "orthogonal", "eva", "mica"})
_BASE_CHANGED: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_HEADS: Final = frozenset({"classifier", "score", "qa_outputs"})

_PATTERNS_MAX: Final = 1024
_PATTERN_MAX_CHARS: Final = 200
_REGEXES_MAX: Final = 64
_QUANTIFIERS_MAX: Final = 2
_GROUPS_MAX: Final = 4
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.\\]*")
_RUNAWAY: Final = re.compile(r"[)][*+?{]|\(\?|\\[1-9]")


Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True)
class Pattern(Generic[Value]):
    key: str
    regex: re.Pattern[str]
    value: Value


@dataclass(frozen=True, slots=True)
class PeftConfig:
    rank: int
    alpha: float
    rslora: bool
    rank_pattern: tuple[Pattern[int], ...]  # in the file's order: the first match counts
    alpha_pattern: tuple[Pattern[float], ...]
    target_modules: frozenset[str] | None  # None: a regular expression or a shorthand
    layers: frozenset[int] | None  # None: all
    bias: str | None  # which biases it says it trained; None: none

    @classmethod
    def parse(cls, text: bytes, names: Collection[str]) -> PeftConfig:
        """`names` are the files of the folder; raises BadAdapter."""
        return cls.of(load_config(text), names)

    @classmethod
    def of(cls, raw: Mapping[str, Any], names: Collection[str]) -> PeftConfig:
        """The same from the parsed object."""
        _check_kind(raw, names)
        _check_features(raw)
        return cls(
            rank=_rank(raw.get("r", _DEFAULT_RANK), "r"),
            alpha=_alpha(raw.get("lora_alpha", _DEFAULT_ALPHA), "lora_alpha"),
            rslora=_flag(raw, "use_rslora"),
            rank_pattern=_patterns(raw, "rank_pattern", _rank),
            alpha_pattern=_patterns(raw, "alpha_pattern", _alpha),
            target_modules=_targets(raw.get("target_modules")),
            layers=_layers(raw.get("layers_to_transform")),
            bias=_bias(raw.get("bias")),
        )

    def rank_of(self, path: str) -> int:
        """The rank the module at `path` should have."""
        return _first_match(self.rank_pattern, path, self.rank)

    def scaling_of(self, path: str, rank: int) -> float:
        alpha = _first_match(self.alpha_pattern, path, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def names_module(self, path: str, layer: int) -> bool:
        """Whether PEFT would attach tensors to `path`: it passes over all others in silence."""
        if self.layers is not None and layer not in self.layers:
            return False
        targets = self.target_modules
        return targets is None or any(path == t or path.endswith(f".{t}") for t in targets)

    def canonical(self) -> bytes:
        """What the digest covers: equal bytes for configs that compute the same."""
        ranks = [(pattern.key, pattern.value) for pattern in self.rank_pattern]
        alphas = [(pattern.key, pattern.value) for pattern in self.alpha_pattern]
        fields = [self.rank, self.alpha, self.rslora, ranks, alphas]
        return json.dumps(fields, separators=(",", ":")).encode()


def load_config(text: bytes) -> dict[str, Any]:
    """Raises BadAdapter `bad_config` for anything but a JSON object."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadAdapter(
            "bad_config", f"adapter_config.json is not JSON ({error}): save it again", CONFIG_FILE
        ) from error
    if not isinstance(raw, dict):
        raise BadAdapter(
            "bad_config", "adapter_config.json is not an object: save it with PEFT", CONFIG_FILE
        )
    return raw


def _check_kind(raw: Mapping[str, Any], names: Collection[str]) -> None:
    kind = raw.get("peft_type")
    if kind is None:
        if "lora_parameters" in raw or "adapters.safetensors" in names:
            raise BadAdapter(
                "not_peft_config:mlx",
                "this is an MLX adapter: convert it to PEFT's layout (A and B transposed, and "
                "lora_alpha = scale * r)",
                "peft_type",
            )
        raise BadAdapter(
            "not_peft_config",
            "no peft_type: save the adapter with PEFT's save_pretrained",
            "peft_type",
        )
    if kind != "LORA":
        raise BadAdapter(
            f"unsupported_peft_type:{kind}",
            f"peft_type {kind}: only LORA is served; train a LoRA, or merge this one into a base",
            "peft_type",
        )


def _check_features(raw: Mapping[str, Any]) -> None:
    saved = raw.get("modules_to_save")
    if saved:
        if isinstance(saved, list) and any(head in saved for head in _HEADS):
            task = raw.get("task_type") or "SEQ_CLS"
            raise _unsupported(f"unsupported_task:{task}", "modules_to_save", "a classifier head")
        raise _unsupported(
            "unsupported_feature:modules_to_save", "modules_to_save", json.dumps(saved)[:200]
        )
    _check_init(raw.get("init_lora_weights"))
    known = _COMPUTED | _DECIDED_BY_TENSORS | _WITHOUT_EFFECT
    known |= {"modules_to_save", "bias", "init_lora_weights"}
    for key, value in raw.items():
        if key not in known and value not in (None, False, 0, "", [], {}):
            raise _unsupported(f"unsupported_feature:{key}", key, json.dumps(value)[:80])


def _check_init(init: Any) -> None:
    if init is None or isinstance(init, bool):
        return
    if isinstance(init, str) and init in _BASE_UNCHANGED:
        return
    if isinstance(init, str) and init.startswith(_BASE_CHANGED):
        raise BadAdapter(
            f"requires_modified_base:{init}",
            f"{init} changed the base while training: convert the adapter to plain LoRA",
            "init_lora_weights",
        )
    raise _unsupported("unsupported_feature:init_lora_weights", "init_lora_weights", str(init)[:80])


def _unsupported(code: str, param: str, value: str) -> BadAdapter:
    message = f"{param} is set ({value}) and not computed here: train without it"
    return BadAdapter(code, message, param)


def _bias(value: Any) -> str | None:
    if value in (None, False, "", "none"):
        return None
    if not isinstance(value, str):
        raise BadAdapter("bad_config:bias", f"bias: none, all or lora_only, not {value!r}", "bias")
    return value


def _rank(value: Any, param: str) -> int:
    if type(value) is not int or value < 1:
        raise BadAdapter(
            f"bad_config:{param}", f"{param}: a rank is 1 or more, not {value!r}", param
        )
    return value


def _alpha(value: Any, param: str) -> float:
    """Zero is refused too: an adapter without effect would be served as the base, unnoticed."""
    try:
        alpha = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        alpha = math.inf
    if not math.isfinite(alpha) or alpha == 0:
        raise BadAdapter(
            f"bad_config:{param}", f"{param}: a finite number but zero, not {value!r}", param
        )
    return alpha


def _flag(raw: Mapping[str, Any], param: str) -> bool:
    value = raw.get(param) or False
    if not isinstance(value, bool):
        raise BadAdapter(f"bad_config:{param}", f"{param}: true or false, not {value!r}", param)
    return value


def _targets(value: Any) -> frozenset[str] | None:
    return frozenset(str(item) for item in value) if isinstance(value, list) and value else None


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = [value] if type(value) is int else value
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise BadAdapter(
            "bad_config:layers_to_transform",
            "a layer index or a list of them",
            "layers_to_transform",
        )
    return frozenset(layers)


def _patterns(
    raw: Mapping[str, Any], param: str, parse: Callable[[Any, str], Value]
) -> tuple[Pattern[Value], ...]:
    items = raw.get(param) or {}
    if not isinstance(items, dict) or len(items) > _PATTERNS_MAX:
        raise BadAdapter(f"bad_config:{param}", f"an object of at most {_PATTERNS_MAX} keys", param)
    if sum(not _PLAIN.fullmatch(key) for key in items) > _REGEXES_MAX:
        raise BadAdapter(f"bad_config:{param}", "write out the module names instead", param)
    return tuple(Pattern(key, _regex(key, param), parse(items[key], param)) for key in items)


def _regex(key: str, param: str) -> re.Pattern[str]:
    """Few repetitions, none of a group: then one module path is matched quickly, whatever it is."""
    quantifiers = sum(key.count(mark) for mark in "*+?{")
    tame = (
        len(key) <= _PATTERN_MAX_CHARS
        and quantifiers <= _QUANTIFIERS_MAX
        and key.count("(") <= _GROUPS_MAX
        and not _RUNAWAY.search(key)
    )
    try:
        if tame:
            with warnings.catch_warnings():  # `[[` is read as PEFT reads it, today's way
                warnings.simplefilter("ignore", FutureWarning)
                return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError):
        pass
    raise BadAdapter(
        f"bad_config:{param}", f"{key[:80]!r}: write out the module names instead", param
    )


def _first_match(patterns: tuple[Pattern[Value], ...], path: str, default: Value) -> Value:
    for pattern in patterns:
        if pattern.regex.match(path):
            return pattern.value
    return default
