"""PeftKey: a tensor's name in an upload, resolved to a module of the base.

Every tensor must resolve: one that is passed over is a change of the model that nobody notices is
missing. Names are taken as PEFT saves them, with the wrappers' residue that training leaves behind
(`_orig_mod.`, `module.`, `_fsdp_wrapped_module.`), with or without `base_model.model.`, and with an
adapter's name inside, as long as it is one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from replica.engine.bad_adapter import BadAdapter
from replica.engine.model_config import ModelConfig

_RESIDUE: Final = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module"})
_PREFIX: Final = "base_model.model."
_TEXT_MODELS: Final = (
    ("model.language_model.layers.", "model.layers."),
    ("language_model.model.layers.", "model.layers."),
)
"""Where multimodal wrappers keep the same text model; the library moved it between versions."""

_LORA: Final = re.compile(
    r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<module>[A-Za-z0-9_.]+)"
    r"\.lora_(?P<half>[AB])(?:\.(?P<name>[^.]+))?\.weight"
)

_FOREIGN: Final = (
    (
        r"(^|\.)lora_(unet|te\d?)_|\.lora_(up|down)\.|\.alpha$",
        "base_mismatch",
        "a diffusion model's",
    ),
    (r"\.adapter\.linear_(in|out)", "foreign_key_scheme:megatron", "Megatron's"),
    (r"\.attn\.\w+\.lora_[ab]\.", "foreign_key_scheme:torchtune", "torchtune's"),
    (r"\.lora_[ab]$", "foreign_key_scheme:mlx", "MLX's"),
)
_REFUSED: Final = (
    (r"lora_magnitude_vector", "unsupported_feature:use_dora"),
    (r"lora_embedding_[AB]|embed_tokens\.lora_", "unsupported_module:embed_tokens"),
    (r"lm_head\.lora_|lm_head\.base_layer", "unsupported_module:lm_head"),
    (r"modules_to_save", "unsupported_feature:modules_to_save"),
    (r"token_adapter|trainable_tokens", "unsupported_feature:trainable_token_indices"),
    (r"lora_B\.([^.]+\.)?bias$", "unsupported_feature:lora_bias"),
    (r"(^|\.)(score|classifier|qa_outputs)\.", "unsupported_task:SEQ_CLS"),
    (r"\.bias$", "unsupported_feature:bias"),
    (r"base_layer\.weight$|(embed_tokens|lm_head|norm)\.weight$", "modified_base_weights"),
)


@dataclass(frozen=True, slots=True)
class PeftKey:
    tensor: str  # as it stands in the file
    path: str  # of the module, as PEFT's patterns saw it
    layer: int
    module: str  # inside a layer of the base: `self_attn.q_proj`
    half: Literal["A", "B"]
    name: str  # the adapter's name inside, or ""


def resolve(tensors: Iterable[str], config: ModelConfig) -> list[PeftKey]:
    """Every tensor's key, in the order of their names; raises BadAdapter if one has none."""
    names = sorted(tensors)
    keys = [_key(name) for name in names]
    unmatched = [name for name, key in zip(names, keys, strict=True) if key is None]
    if unmatched:
        raise BadAdapter(
            "unmatched_keys",
            f"no module of the base is meant by {_some(unmatched)}; save with PEFT on this base",
            unmatched[0],
        )
    found = [key for key in keys if key is not None]
    _check_modules(found, config)
    if len({key.name for key in found}) > 1:
        raise BadAdapter(
            "multiple_adapters",
            f"adapters {sorted({key.name for key in found})} in one file: save each by itself",
        )
    return found


def _key(tensor: str) -> PeftKey | None:
    bare = ".".join(part for part in tensor.split(".") if part not in _RESIDUE)
    bare = bare.removeprefix(_PREFIX)
    name = bare
    for theirs, ours in _TEXT_MODELS:
        if bare.startswith(theirs):
            name = ours + bare.removeprefix(theirs)
    if match := _LORA.fullmatch(name):
        path = bare[: bare.index(".lora_")]
        half: Literal["A", "B"] = "A" if match["half"] == "A" else "B"
        return PeftKey(
            tensor, path, int(match["layer"]), match["module"], half, match["name"] or ""
        )
    for pattern, code in _REFUSED:
        if re.search(pattern, bare):
            raise BadAdapter(code, f"{tensor} is not computed here", tensor)
    for pattern, code, whose in _FOREIGN:
        if re.search(pattern, bare):
            raise BadAdapter(
                code, f"{tensor} is {whose} naming: export the adapter to PEFT", tensor
            )
    return None


def _check_modules(keys: list[PeftKey], config: ModelConfig) -> None:
    known = {module for group in config.groups for module in group.modules}
    unknown = sorted({key.module for key in keys} - known)
    if unknown:
        raise BadAdapter(
            "unknown_module",
            f"the base has no {_some(unknown)}; it has {_some(sorted(known))}",
            next(key.tensor for key in keys if key.module == unknown[0]),
        )
    deepest = max(keys, key=lambda key: key.layer, default=None)
    if deepest is not None and deepest.layer >= config.num_layers:
        raise BadAdapter(
            "base_mismatch",
            f"the adapter has a layer {deepest.layer}, the base has {config.num_layers} layers",
            deepest.tensor,
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
