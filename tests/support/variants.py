"""The sixty forms in which adapters are really uploaded, as a table: row, what, upload, verdict.

Rows are numbered by the survey they come from (118 configs of 94 public repositories, and issues of
PEFT, vLLM, SGLang, TensorRT-LLM). A row without a code must load and compute what was worked out
by hand; `peft` says that PEFT itself opens the folder as it is, and must agree too.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft_upload import PREFIX, SEVEN, PeftUpload, upload
from torch import Tensor

from replica.engine.model_config import ModelConfig

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
EMBED, HEAD = f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90\n"


@dataclass(frozen=True)
class Base:
    config: ModelConfig
    tensors: dict[str, Tensor]


Make = Callable[[Base], PeftUpload]


@dataclass(frozen=True)
class Variant:
    row: int
    what: str
    make: Make
    code: str | None = None
    peft: bool = False

    def __str__(self) -> str:
        return re.sub(r"[^A-Za-z0-9=.]+", "-", f"{self.row}-{self.what}-{self.code or 'loads'}")


def _plain(**recipe: Any) -> Make:
    return lambda base: upload(base.config, **recipe)


def _config(row: int, code: str | None = None, peft: bool = True, /, **keys: Any) -> Variant:
    """The plain adapter with these keys of its config set."""

    def make(base: Base) -> PeftUpload:
        made = upload(base.config)
        made.config |= keys
        return made

    return Variant(row, json.dumps(keys)[1:-1], make, code, peft and code is None)


def _without(row: int, what: str, code: str | None, keep: dict[str, Any]) -> Variant:
    """The whole config is this."""

    def make(base: Base) -> PeftUpload:
        made = upload(base.config)
        made.config = dict(keep)
        return made

    return Variant(row, what, make, code)


def _edit(
    row: int,
    what: str,
    code: str | None,
    change: Callable[[PeftUpload, Base], object],
    *,
    peft: bool = False,
    **recipe: Any,
) -> Variant:
    def make(base: Base) -> PeftUpload:
        made = upload(base.config, **recipe)
        change(made, base)
        return made

    return Variant(row, what, make, code, peft)


def _renamed(row: int, what: str, code: str | None, old: str, new: str, **recipe: Any) -> Variant:
    def change(made: PeftUpload, _: Base) -> None:
        made.rename(lambda name: re.sub(old, new, name))

    return _edit(row, what, code, change, **recipe)


def _added(row: int, name: str, shape: tuple[int, ...], code: str, **recipe: Any) -> Variant:
    def change(made: PeftUpload, _: Base) -> None:
        made.tensors[name] = torch.ones(shape)

    return _edit(row, f"with {name.removeprefix(PREFIX)}", code, change, **recipe)


def _beside(row: int, *names: str, content: bytes = b"\x80\x04.") -> Variant:
    def change(made: PeftUpload, _: Base) -> None:
        made.files |= dict.fromkeys(names, content)

    return _edit(row, f"beside {names[0]}", None, change, peft=True)


def _file(row: int, what: str, code: str, name: str, content: bytes) -> Variant:
    """With this in place of one of its files."""
    return _edit(row, what, code, lambda made, _: made.files.update({name: content}))


def _weights(row: int, what: str, code: str, content: bytes | None, name: str = "") -> Variant:
    """With this file, or none, in place of its weights."""

    def change(made: PeftUpload, _: Base) -> None:
        made.weights = None
        if content is not None:
            made.files[name or "adapter_model.safetensors"] = content

    return _edit(row, what, code, change)


def _cast(row: int, dtype: torch.dtype) -> Variant:
    def change(made: PeftUpload, _: Base) -> None:
        made.tensors = {name: tensor.to(dtype) for name, tensor in made.tensors.items()}
        made.pairs = {
            path: (a.to(dtype).float(), b.to(dtype).float()) for path, (a, b) in made.pairs.items()
        }

    return _edit(row, str(dtype), None, change)


def _spoiled(
    row: int, what: str, code: str, part: str, change: Callable[[Tensor], Tensor]
) -> Variant:
    def spoil(made: PeftUpload, _: Base) -> None:
        made.tensors = {n: change(t) if part in n else t for n, t in made.tensors.items()}

    return _edit(row, what, code, spoil)


def _table(row: int, name: str, code: str | None, change: float = 0.0) -> Variant:
    """With a full copy of the base's embedding or head."""

    def add(made: PeftUpload, base: Base) -> None:
        made.tensors[name] = base.tensors[name.removeprefix(PREFIX)] + change

    return _edit(row, f"{name.removeprefix(PREFIX)} + {change}", code, add)


def _drop(made: PeftUpload, _: Base) -> None:
    del made.tensors[f"{Q0}.lora_B.weight"]


def _in_subfolder(made: PeftUpload, _: Base) -> None:
    made.weights, made.config = None, None
    made.files = {"checkpoint-5/adapter_config.json": b"{}"}


def _huge(made: PeftUpload, _: Base) -> None:
    made.grown_bytes = 671 << 20


def _hub(made: PeftUpload, _: Base, raw: bytes) -> None:
    made.weights = None
    made.files = {"adapter_config.json": raw, "pytorch_adapter.bin": b"\x80"}


def _by_layer(path: str) -> float:
    """Row 6's alphas by hand: 3 for q of layer 1, rank 4; 8 else, v of rank 9."""
    return (
        3 / 4 if path == "model.layers.1.self_attn.q_proj" else 8 / (9 if "v_proj" in path else 4)
    )


PATHS = [f"model.layers.{layer}.self_attn.{m}_proj" for layer in (0, 1) for m in "qv"]
UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:q_proj|v_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn)\.(?:(?:q_proj|v_proj)))"
)
NULLS = dict.fromkeys(
    [
        *("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
        *("arrow_config", "lora_ga_config", "kasa_config"),
    ]
)
ADAPTER_HUB = {"architecture": "lora", "alpha": 8, "r": 8, "attn_matrices": ["q", "v"]}
MLX = {"lora_parameters": {"rank": 8, "scale": 20.0}, "num_layers": 16, "fine_tune_type": "lora"}


def _load() -> Iterator[Variant]:
    both = partial(Variant, peft=True)
    for targets in (SEVEN, ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "v_proj")):
        yield both(1, f"{len(targets)} modules", _plain(targets=targets))
    for r in (16, 8, 64, 32, 4):
        yield both(2, f"r={r}", _plain(r=r))
    for r in (1, 2, 10):
        yield both(3, f"r={r}", _plain(r=r))
    for alpha in (8, 4, 16, 1, 2, 0.5, 6.4, 64, 128):
        yield both(4, f"alpha={alpha}", _plain(alpha=alpha))
    yield both(5, "rslora", _plain(use_rslora=True, scale=8 / 2, targets=SEVEN))
    pattern = {r"layers\.1\.self_attn\.q_proj": 3}
    ranks = {"v_proj": 9}
    six = {"rank_pattern": ranks, "ranks": ranks, "alpha_pattern": pattern, "scale": _by_layer}
    yield both(6, "rank and alpha patterns", _plain(**six))
    yield _config(10, fan_in_fan_out=True)
    eleven = {"layers": [1], "layers_to_transform": [1]}
    yield both(11, "one layer", _plain(**eleven))
    yield both(11, "with layers_pattern", _plain(**eleven, layers_pattern="layers"))
    yield both(11, "full paths of one layer", _plain(layers=[1], target_modules=PATHS[2:]))
    yield _config(13, modules_to_save=[])
    yield _config(15, None, False, target_modules=UNSLOTH)
    yield both(16, "all-linear", _plain(targets=SEVEN, target_modules="all-linear"))
    yield _config(17, target_modules=PATHS)
    yield _config(18, target_modules=["q_proj", "v_proj", "v_projo_proj"])
    yield _config(19, target_modules=["q_proj", "v_proj", "q_proj", "v_proj"])
    yield _config(20, target_modules=["q_proj", "v_proj", "query_key_value", "fc1", "out_proj"])
    yield _beside(24, "added_tokens.json", content=b'{"<pad>": 99999}')
    yield _table(25, EMBED, None)
    yield _table(25, HEAD, None)
    for init in ("gaussian", "orthogonal", "eva", "mica", False):
        yield _config(28, None, False, init_lora_weights=init)
    yield both(28, "converted PiSSA", _plain(r=8, alpha=16, init_lora_weights=True))
    yield _config(29, None, False, **NULLS)
    newer = {"corda_config": None, "eva_config": None, "lora_bias": False, "newer_still": None}
    yield _config(30, None, False, **newer, peft_version="0.19.0")
    old = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    yield _without(31, "PEFT 0.2", None, old | {"enable_lora": None, "merge_weights": False})
    for task in (None, "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM"):
        yield _config(32, None, task is None, task_type=task)
    text = r"model\.model\.layers"
    yield _renamed(33, "new prefix", None, text, "model.model.language_model.layers")
    yield _renamed(33, "old prefix", None, text, "model.language_model.model.layers")
    yield _renamed(34, "no prefix", None, r"^base_model\.model\.", "")
    for name in ("default", "default_0", "lora"):
        yield _renamed(35, name, None, r"\.weight$", f".{name}.weight")
    for part in ("_orig_mod", "module", "_fsdp_wrapped_module"):
        yield _renamed(36, part, None, r"^base_model\.model\.", f"base_model.model.{part}.")
        yield _renamed(36, f"{part} inside", None, r"\.self_attn\.", f".{part}.self_attn.")
    yield both(45, "safetensors only", _plain())
    yield _beside(45, "adapter_model.bin")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        yield _cast(49, dtype)
    yield _beside(50, "training_args.bin", "optimizer.pt", "scheduler.pt")
    yield _beside(51, "tokenizer.json", "chat_template.jinja", content=b"{{ 1/0 }")
    yield _beside(52, "adapters copy.safetensors")
    yield _config(54, base_model_name_or_path="Org/Tiny-Llama")
    yield _config(55, base_model_name_or_path="unsloth/tiny-unsloth-bnb-4bit")
    yield _config(56, base_model_name_or_path="/kaggle/input/../../base")
    yield _config(57, base_model_name_or_path=None)
    yield _config(58, base_model_name_or_path="decapoda-research/tiny-hf")
    yield _config(60, revision=None)
    yield _config(60, revision="unsloth")


def _reject_configs() -> Iterator[Variant]:
    yield Variant(2, "over the limit", _plain(r=65), "rank_exceeds_max")
    yield _config(7, "unsupported_feature:use_dora", use_dora=True)
    yield _config(8, "incomplete_weights", bias="all")
    yield _config(8, "incomplete_weights", bias="lora_only")
    yield _config(9, "unsupported_feature:lora_bias", lora_bias=True)
    tables = ["embed_tokens", "lm_head"]
    yield _config(12, "unsupported_feature:modules_to_save", modules_to_save=tables)
    heads = {"modules_to_save": ["classifier", "score"]}
    yield _config(14, "unsupported_task:SEQ_CLS", task_type="SEQ_CLS", **heads)
    tokens = {"trainable_token_indices": [3]}
    yield _config(26, "unsupported_feature:trainable_token_indices", **tokens)
    experts = {"target_parameters": ["mlp.experts.gate_up_proj"]}
    yield _config(27, "unsupported_feature:target_parameters", **experts)
    for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"):
        yield _config(28, f"requires_modified_base:{init}", init_lora_weights=init)
    values: dict[str, Any] = {"layer_replication": [[0, 2]], "alora_invocation_tokens": [5]}
    for field in NULLS:
        value = values.get(field, {"x": 1} if field.endswith("_config") else True)
        yield _config(29, f"unsupported_feature:{field}", **{field: value})
    yield _config(31, "unsupported_feature:enable_lora", enable_lora=[True, False, True])
    yield _without(41, "MLX", "not_peft_config:mlx", MLX)
    others = ["PREFIX_TUNING", "PROMPT_TUNING", "IA3", "ADALORA", "LOHA", "LOKR"]
    for kind in (*others, "VERA", "OFT", "XLORA"):
        yield _config(42, f"unsupported_peft_type:{kind}", peft_type=kind)
    hub = partial(_hub, raw=json.dumps(ADAPTER_HUB).encode())
    yield _edit(43, "AdapterHub", "not_peft_config", hub)
    yield _without(43, "hand-written", "not_peft_config", {"rank": 8, "alpha": 16, "dropout": 0})
    yield _without(43, "base only", "not_peft_config", {"base_model": "x"})
    for r in (0, True, 16.0, "16"):
        yield _config(44, "bad_config:r", r=r)
    yield _config(44, "bad_config:lora_alpha", lora_alpha="16")
    yield _config(44, "bad_config:lora_alpha", lora_alpha=float("nan"))
    yield _file(44, "no JSON", "bad_config", "adapter_config.json", b"{not json")


def _reject_keys() -> Iterator[Variant]:
    yield _added(7, f"{Q0}.lora_magnitude_vector", (64,), "unsupported_feature:use_dora")
    yield _added(8, f"{Q0}.base_layer.bias", (64,), "unsupported_feature:bias", bias="all")
    yield _added(8, f"{Q0}.bias", (64,), "unsupported_feature:bias")
    yield _added(9, f"{Q0}.lora_B.bias", (64,), "unsupported_feature:lora_bias")
    score = f"{PREFIX}score.weight"
    yield _added(14, score, (2, 64), "unsupported_task:SEQ_CLS", task_type="SEQ_CLS")
    vision = f"{PREFIX}model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    yield _added(20, vision, (4, 64), "unknown_module")
    for fused in ("query_key_value", "W_pack", "c_attn", "Wqkv", "in_proj_qkv", "qkv_proj"):
        both = [fused, "v_proj"]
        yield _renamed(21, fused, "unknown_module", "q_proj", fused, target_modules=both)
    lm_head = f"{PREFIX}lm_head.lora_A.weight"
    yield _added(22, lm_head, (4, 64), "unsupported_module:lm_head")
    embed = f"{PREFIX}model.embed_tokens.lora_embedding_A"
    yield _added(22, embed, (4, 265), "unsupported_module:embed_tokens")

    def head(made: PeftUpload, base: Base) -> None:
        made.tensors[lm_head] = torch.ones(4, 64)
        made.tensors[f"{PREFIX}lm_head.base_layer.weight"] = base.tensors["lm_head.weight"]

    yield _edit(22, "lm_head with its base layer", "unsupported_module:lm_head", head)
    yield _added(23, EMBED, (281, 64), "vocab_mismatch")
    yield _added(23, HEAD, (329, 64), "vocab_mismatch")
    yield _table(25, EMBED, "modified_base_weights", 0.001)
    yield _table(25, HEAD, "modified_base_weights", 0.001)
    yield _renamed(33, "unknown prefix", "unmatched_keys", r"model\.layers", "model.thinker.layers")
    yield _renamed(34, "unknown prefix", "unmatched_keys", r"^base_model", "peft_model")
    yield _renamed(35, "two names", "multiple_adapters", r"0(.*)\.weight$", r"0\1.other.weight")
    megatron = "self_attention.linear_qkv.adapter.linear_in"
    scheme = "foreign_key_scheme"
    yield _renamed(37, "Megatron", f"{scheme}:megatron", r"self_attn.q_proj.lora_A", megatron)
    ours = r".*?(layers\.\d\.)self_attn\.(q|v)_proj(.*)"
    yield _renamed(38, "torchtune", f"{scheme}:torchtune", r".*?(layers.*)self_attn(.*)lora_A",
                   r"\1attn\2lora_a")  # fmt: skip
    yield _renamed(38, "mistral", f"{scheme}:mistral", ours, r"\1attention.w\2\3")

    def mistral(made: PeftUpload, _: Base) -> None:
        made.rename(lambda name: re.sub(ours, r"\1attention.w\2\3", name))
        made.tensors["layers.0.attention_norm.weight"] = torch.ones(64)

    yield _edit(38, "mistral with norms", f"{scheme}:mistral", mistral)
    yield _renamed(39, "kohya", "base_mismatch", r"^", "lora_unet_")
    yield _renamed(39, "diffusers", "base_mismatch", r"model\.layers\.(\d)\.self_attn\.q_proj",
                   r"down_blocks.\1.attentions.0.attn1.to_q")  # fmt: skip
    yield _edit(40, "B dropped", "missing_pair", _drop)
    yield _config(40, "rank_config_mismatch", target_modules=["q_proj", "v_proj"],
                  rank_pattern={"q_proj": 8})  # fmt: skip
    one = "0.self_attn.q_proj.lora_A"
    yield _spoiled(40, "narrow", "shape_mismatch", one, lambda half: half[:, :32])
    for model in (
        "bert.encoder.layer",
        "transformer.h",
        "encoder.block",
        "distilbert.transformer.layer",
    ):
        yield _renamed(59, model, "base_mismatch", r"model\.layers", model)
    yield _spoiled(59, "another width", "base_mismatch", "lora_A", lambda half: half.repeat(1, 2))


def _reject_files() -> Iterator[Variant]:
    yield _weights(45, "pickle", "pickle_not_allowed", pickle.dumps({}), "adapter_model.bin")
    yield _weights(45, "none", "missing_weights", None)
    yield _weights(46, "LFS pointer", "lfs_pointer", LFS)
    yield _weights(47, "five bytes", "corrupt_file", b"\x08\0\0\0\0")
    yield _weights(47, "header too long", "corrupt_file", (1 << 30).to_bytes(8, "little") + b"{}")
    header = b'{"__metadata__":{"format":"pt"}}'
    forty = len(header).to_bytes(8, "little") + header
    assert len(forty) == 40
    yield _weights(48, "40 bytes", "empty_weights", forty)
    yield _spoiled(48, "ZeRO-3", "empty_weights", "", lambda _: torch.empty(0))
    yield _weights(
        48, "443 bytes of pickle", "pickle_not_allowed", b"\0" * 443, "adapter_model.bin"
    )
    yield _spoiled(
        49, "NaN", "non_finite", "1.self_attn.v_proj.lora_B", lambda half: half * torch.nan
    )
    yield _spoiled(
        49, "Inf", "non_finite", "0.self_attn.q_proj.lora_A", lambda half: half * torch.inf
    )
    yield _spoiled(49, "integers", "bad_dtype", "", lambda half: half.to(torch.int8))
    yield _edit(52, "subfolders", "ambiguous_layout", _in_subfolder)
    yield _edit(53, "671 MB", "too_large", _huge)


VARIANTS = [*_load(), *_reject_configs(), *_reject_keys(), *_reject_files()]
