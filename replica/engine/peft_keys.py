"""PeftKey: a tensor's name in an upload, resolved to a module of the base.

Every tensor must resolve: one that is passed over is a change of the model that nobody notices is
missing. Names are taken as PEFT saves them, with the wrappers' residue that training leaves behind
(`_orig_mod.`, `module.`, `_fsdp_wrapped_module.`), with or without `base_model.model.`, and with an
adapter's name inside, as long as it is one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
        r"(^|\.)lora_(unet|te\d?)_|\.lora_(up|down)\.|\.alpha$"
        r"|(^|\.)(down|up)_blocks\.|\.to_[qkv]\.",
        "base_mismatch",
        "a diffusion model's",
    ),
    (
        r"(^|\.)(transformer\.(h|layer)|(bert|distilbert|roberta|electra|deberta|esm)\.|gpt_neox\."
        r"|(encoder|decoder)\.block\.)",
        "base_mismatch",
        "another architecture's",
    ),
    (r"\.adapter\.linear_(in|out)", "foreign_key_scheme:megatron", "Megatron's"),
    (r"\.attn\.\w+\.lora_[ab]\.", "foreign_key_scheme:torchtune", "torchtune's"),
    (r"^layers\.\d+\.(attention\.w|feed_forward\.w)", "foreign_key_scheme:mistral", "Mistral's"),
    (r"\.lora_[ab]$", "foreign_key_scheme:mlx", "MLX's"),
)
"""Who else writes such files, told by any one of their names."""

_OTHER_TOWER: Final = re.compile(r"(^|\.)(vision|visual|audio|multi_modal|text_projection)\w*\.")
"""The parts of a multimodal model that no text base has."""

_REFUSED: Final = (
    (r"lora_magnitude_vector", "unsupported_feature:use_dora"),
    (r"lora_embedding_[AB]|embed_tokens\.lora_", "unsupported_module:embed_tokens"),
    (r"lm_head\.lora_", "unsupported_module:lm_head"),
    (r"modules_to_save", "unsupported_feature:modules_to_save"),
    (r"token_adapter|trainable_tokens", "unsupported_feature:trainable_token_indices"),
    (r"lora_B\.([^.]+\.)?bias$", "unsupported_feature:lora_bias"),
    (r"(^|\.)(score|classifier|qa_outputs)\.", "unsupported_task:SEQ_CLS"),
    (r"\.bias$", "unsupported_feature:bias"),
    (r"base_layer\.weight$|norm\.weight$", "modified_base_weights"),
)
_TABLES: Final = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "embed_tokens.base_layer.weight": "model.embed_tokens.weight",
    "model.embed_tokens.base_layer.weight": "model.embed_tokens.weight",
    "lm_head.base_layer.weight": "lm_head.weight",
}
"""The base's two tables of a row a token, which PEFT saves along by itself on some occasions."""


@dataclass(frozen=True, slots=True)
class PeftKey:
    tensor: str  # as it stands in the file
    path: str  # of the module, as PEFT's patterns saw it
    layer: int
    module: str  # inside a layer of the base: `self_attn.q_proj`
    half: Literal["A", "B"]
    name: str  # the adapter's name inside, or ""


@dataclass(frozen=True, slots=True)
class PeftKeys:
    halves: list[PeftKey]  # in the order of their names
    tables: dict[str, str]  # tensor in the file -> the base's table that it must equal


def resolve(tensors: Iterable[str], config: ModelConfig) -> PeftKeys:
    """What every tensor is for; raises BadAdapter if one is for nothing that is computed here."""
    names = sorted(tensors)
    keys = {name: _bare(name) for name in names}
    _check_scheme(keys)
    tables = {name: _TABLES[bare] for name, bare in keys.items() if bare in _TABLES}
    found = {name: _key(name, bare) for name, bare in keys.items() if name not in tables}
    unmatched = [name for name, key in found.items() if key is None]
    if unmatched:
        elsewhere = all(_OTHER_TOWER.search(keys[name]) for name in unmatched)
        raise BadAdapter(
            "unknown_module" if elsewhere else "unmatched_keys",
            f"no module of the base is meant by {_some(unmatched)}; save with PEFT on this base",
            unmatched[0],
            tensors=unmatched,
        )
    halves = [key for key in found.values() if key is not None]
    _check_modules(halves, config)
    if len({key.name for key in halves}) > 1:
        raise BadAdapter(
            "multiple_adapters",
            f"adapters {sorted({key.name for key in halves})} in one file: save each by itself",
            halves[-1].tensor,
        )
    return PeftKeys(halves, tables)


def _bare(tensor: str) -> str:
    bare = ".".join(part for part in tensor.split(".") if part not in _RESIDUE)
    return bare.removeprefix(_PREFIX)


def _check_scheme(keys: Mapping[str, str]) -> None:
    for tensor, bare in keys.items():
        for pattern, code, whose in _FOREIGN:
            if re.search(pattern, bare):
                raise BadAdapter(
                    code,
                    f"{tensor} is {whose} naming: export the adapter to PEFT for this base",
                    tensor,
                )


def _key(tensor: str, bare: str) -> PeftKey | None:
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
            raise BadAdapter(code, f"{tensor} is not computed here: train without it", tensor)
    return None


def _check_modules(keys: list[PeftKey], config: ModelConfig) -> None:
    known = {module for group in config.groups for module in group.modules}
    unknown = sorted({key.module for key in keys} - known)
    if unknown:
        tensors = [key.tensor for key in keys if key.module in unknown]
        raise BadAdapter(
            "unknown_module",
            f"the base has no {_some(unknown)}; it has {_some(sorted(known))}: train on those",
            tensors[0],
            tensors=tensors,
        )
    deepest = max(keys, key=lambda key: key.layer, default=None)
    if deepest is not None and deepest.layer >= config.num_layers:
        raise BadAdapter(
            "base_mismatch",
            f"the adapter has a layer {deepest.layer}, the base has {config.num_layers} layers: "
            "train on this base",
            deepest.tensor,
            tensors=[key.tensor for key in keys if key.layer >= config.num_layers],
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
