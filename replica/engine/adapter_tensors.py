"""AdapterTensors: what every tensor of an upload is for, by names and shapes alone.

Law: each tensor is half of a pair that attaches to one module of the base, or a table that must
equal the base's own; each pair is whole, of the rank that the config gives it, and fits its module.
What is left over is a refusal. Nothing is read here but the header's entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from replica.engine.bad_adapter import BadAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.peft_config import PeftConfig
from replica.engine.peft_keys import PeftKey, PeftKeys, resolve
from replica.engine.safetensors_header import TensorEntry

_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})

_TENSORS_MAX_TIMES: Final = 8
"""Room for what is refused by its own reason: biases, magnitudes, other towers."""

Module = tuple[int, str]
"""A linear module of the base: layer, and name inside the layer."""


@dataclass(frozen=True, slots=True)
class ModulePair:
    """A and B of one module, as the header describes them."""

    A: TensorEntry
    B: TensorEntry
    scaling: float

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    pairs: Mapping[Module, ModulePair]
    tables: Mapping[str, TensorEntry]  # by the base's name of what each must equal

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @classmethod
    def of(
        cls,
        entries: Mapping[str, TensorEntry],
        config: PeftConfig,
        model: ModelConfig,
        max_rank: int,
    ) -> AdapterTensors:
        """Raises BadAdapter for the first tensor that does not fit."""
        _check_number(entries, model)
        _check_kinds(entries)
        keys = resolve(entries, model)
        _check_complete(config)
        _check_attachment(keys, config)
        _check_tables(keys, entries, model)
        pairs = _pair(keys.halves, entries, config)
        _check_shapes(pairs, keys.halves, model)
        tensors = cls(pairs, {base: entries[name] for name, base in keys.tables.items()})
        if tensors.rank > max_rank:
            raise rank_exceeds(tensors.rank, max_rank)
        return tensors


def rank_exceeds(rank: int, max_rank: int) -> BadAdapter:
    return BadAdapter(
        "rank_exceeds_max",
        f"rank {rank} is over this replica's {max_rank}: train with a lower r, or raise "
        "max_lora_rank",
        "r",
    )


def _check_number(entries: Mapping[str, TensorEntry], model: ModelConfig) -> None:
    """Before anything is done for each of them: a header may name hundreds of thousands."""
    modules = model.num_layers * sum(len(group.modules) for group in model.groups)
    limit = _TENSORS_MAX_TIMES * modules
    if len(entries) > limit:
        raise BadAdapter(
            "too_large",
            f"the file has {len(entries)} tensors; an adapter of this base has {2 * modules} at "
            "most: save the adapter alone, without the base",
        )


def _check_kinds(entries: Mapping[str, TensorEntry]) -> None:
    if not any(entry.end > entry.start for entry in entries.values()):
        raise BadAdapter(
            "empty_weights",
            "no tensor has an element: gather the weights before saving (ZeRO-3), and save again",
        )
    for tensor, entry in sorted(entries.items()):
        if entry.dtype not in _FLOATS:
            raise BadAdapter(
                "bad_dtype",
                f"{tensor} is {entry.dtype}: save it as float32, float16 or bfloat16",
                tensor,
            )


def _check_complete(config: PeftConfig) -> None:
    if config.bias is not None:  # biases that are in the file have been refused by their names
        raise BadAdapter(
            "incomplete_weights",
            f"bias is {config.bias}, but no bias is in the file: train with bias none",
            "bias",
        )


def _check_attachment(keys: PeftKeys, config: PeftConfig) -> None:
    if not keys.halves:
        raise BadAdapter("empty_weights", "no lora_A and lora_B are in the file: save with PEFT")
    left_out = [key for key in keys.halves if not config.names_module(key.path, key.layer)]
    if left_out:
        raise BadAdapter(
            "unmatched_keys",
            f"{left_out[0].tensor} is in the file, but target_modules and layers_to_transform "
            "leave its module out, so that PEFT would pass over it: name it there, or drop it",
            left_out[0].tensor,
            tensors=[key.tensor for key in left_out],
        )


def _check_tables(keys: PeftKeys, entries: Mapping[str, TensorEntry], model: ModelConfig) -> None:
    for tensor, base in keys.tables.items():
        shape = entries[tensor].shape
        if shape[1:] == (model.hidden_size,) and shape[0] != model.vocab_size:
            raise BadAdapter(
                "vocab_mismatch",
                f"{tensor} has {shape[0]} rows, the base {model.vocab_size}: train without adding "
                "or resizing tokens",
                tensor,
            )
        if shape != (model.vocab_size, model.hidden_size):
            raise BadAdapter(
                "base_mismatch",
                f"{tensor} is {list(shape)}, the base's {base} "
                f"{[model.vocab_size, model.hidden_size]}: this is another base's adapter",
                tensor,
            )


def _pair(
    keys: list[PeftKey], entries: Mapping[str, TensorEntry], config: PeftConfig
) -> dict[Module, ModulePair]:
    halves: dict[Module, dict[str, PeftKey]] = {}
    for key in keys:
        pair = halves.setdefault((key.layer, key.module), {})
        if key.half in pair:
            raise BadAdapter(
                "duplicate_keys",
                f"{key.tensor} and {pair[key.half].tensor} are one: save again",
                key.tensor,
            )
        pair[key.half] = key
    pairs = {}
    for module, pair in sorted(halves.items()):
        if len(pair) == 1:
            (key,) = pair.values()
            raise BadAdapter(
                "missing_pair",
                f"{key.tensor} has no other half: save the adapter again",
                key.tensor,
            )
        A, B = entries[pair["A"].tensor], entries[pair["B"].tensor]
        rank = A.shape[0] if A.shape else 0
        wanted = config.rank_of(pair["A"].path)
        if rank != wanted:
            raise BadAdapter(
                "rank_config_mismatch",
                f"{pair['A'].tensor} has rank {rank}, adapter_config.json says {wanted}: "
                "take both files from one save",
                pair["A"].tensor,
                tensors=[half.tensor for half in pair.values()],
            )
        pairs[module] = ModulePair(A, B, config.scaling_of(pair["A"].path, rank))
    return pairs


def _check_shapes(
    pairs: Mapping[Module, ModulePair], keys: list[PeftKey], model: ModelConfig
) -> None:
    widths = {
        module: (group.in_features, out)
        for group in model.groups
        for module, out in zip(group.modules, group.out_features, strict=True)
    }
    wrong = []
    for (layer, module), pair in pairs.items():
        inside, out = widths[module]
        if pair.A.shape != (pair.rank, inside) or pair.B.shape != (out, pair.rank):
            wrong.append((layer, module))
    if wrong:
        layer, module = wrong[0]
        pair, (inside, out) = pairs[wrong[0]], widths[module]
        raise BadAdapter(
            "base_mismatch" if len(wrong) == len(pairs) else "shape_mismatch",
            f"layer {layer} {module}: A is {list(pair.A.shape)} and B {list(pair.B.shape)}, "
            f"the base takes [r, {inside}] and [{out}, r]: train on this base",
            next(key.tensor for key in keys if (key.layer, key.module) == wrong[0]),
            tensors=[key.tensor for key in keys if (key.layer, key.module) in wrong],
        )
