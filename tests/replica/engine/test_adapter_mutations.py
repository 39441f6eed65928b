"""Whatever is done to a good upload: it computes what is written in it, or is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, load, pool_pages
from hypothesis import assume, event, given
from hypothesis import strategies as st
from merged_reference import TOKENS, MergedReference
from peft_upload import PREFIX, PeftUpload, upload
from torch import Tensor

from replica.engine.adapter_store import AdapterFolder, Found, Refused
from replica.engine.model_config import ModelConfig
from replica.engine.runner import Runner
from replica.engine.tiny import tiny_model
from shared.ids import AdapterId

pytestmark = pytest.mark.filterwarnings("ignore")

NAME = AdapterId("upload")
MODULES = ("q_proj", "v_proj", "down_proj")
KEY = re.compile(
    r"((base_model|model|language_model|_orig_mod|module|_fsdp_wrapped_module)\.)*"
    r"layers\.((_orig_mod|module|_fsdp_wrapped_module)\.)*(?P<layer>\d+)"
    r"\.(?P<module>(self_attn|mlp)\.\w+_proj)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight"
)


class Bench:
    """One tiny base, ours and theirs."""

    def __init__(self, folder: Path) -> None:
        self.config: ModelConfig = tiny_model(folder, seed=4)
        self.reference = MergedReference(folder)
        self._runner = Runner(
            base_dir=folder, slots=2, max_rank=16, pages=pool_pages(64, 2), page_tokens=16
        )

    def logits(self, store: AdapterFolder) -> Tensor:
        load(self._runner, 1, store.read(NAME), 64)
        driver = Driver(self._runner, pages=64, page_tokens=16)
        driver.add("s", TOKENS, 1)
        return driver.logits()["s"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("base"))


def as_written(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's arithmetic on what the folder says, every tensor used; fails where one is not."""
    from peft.utils.other import get_pattern_key

    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = KEY.fullmatch(name)
        assert match, f"{name} was accepted and is nobody's"
        path = f"model.layers.{match['layer']}.{match['module']}"
        assert match["half"] not in halves.setdefault(path, {})
        halves[path][match["half"]] = tensor.float()
    deltas = {}
    for path, pair in halves.items():
        rank = pair["A"].shape[0]
        ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        wanted = 8 if config.get("r") is None else config["r"]
        assert rank == ranks.get(get_pattern_key(ranks, path), wanted)
        alpha = 8 if config.get("lora_alpha") is None else config["lora_alpha"]
        alpha = alphas.get(get_pattern_key(alphas, path), alpha)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        deltas[path] = scale * (pair["B"] @ pair["A"])
    return deltas


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=5,
)
FIELDS = [
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"),
    *("layers_to_transform", "use_dora", "fan_in_fan_out", "modules_to_save", "peft_type"),
    *("init_lora_weights", "task_type", "revision", "lora_bias", "layer_replication", "brand_new"),
]
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "r": st.sampled_from([1, 2, 4, 8, 16]),
    "lora_alpha": st.sampled_from([-8, 0.5, 1, 16, 128]),
    "use_rslora": st.booleans(),
    "rank_pattern": st.dictionaries(st.sampled_from(MODULES), st.sampled_from([4, 8])),
    "alpha_pattern": st.dictionaries(
        st.sampled_from([*MODULES, r"layers\.0.*", "proj"]), st.sampled_from([1, 6.5])
    ),
    "target_modules": st.lists(st.sampled_from([*MODULES, "o_proj"])) | st.just(".*proj"),
    "layers_to_transform": st.lists(st.integers(0, 3)) | st.integers(0, 2),
}

OTHER: list[Callable[[str], str]] = [
    lambda name: name.replace("q_proj", "k_proj"),
    lambda name: name.replace("q_proj", "o_proj"),
    lambda name: name.replace("lora_A", "lora_B"),
    lambda name: name.replace("layers.0", "layers.1"),
    lambda name: name.replace("layers.1", "layers.7"),
    lambda name: name.removeprefix(PREFIX),
    lambda name: f"module.{name}",
    lambda name: name.replace(".weight", ".default.weight"),
    lambda name: name.replace("model.layers", "model.language_model.layers"),
    lambda name: name.replace(".weight", ""),
    lambda name: name + "s",
    lambda name: name.upper(),
]
SHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda half: half.t(),
    lambda half: half[:-1],
    lambda half: half[:, :-1],
    lambda half: half[None],
    lambda half: half.flatten(),
    lambda half: half.half(),
    lambda half: half.double(),
    lambda half: half.to(torch.int32),
    lambda half: half * torch.nan,
    lambda half: half * 0,
    lambda half: half.roll(1, 0),
]


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[PeftUpload], None]:
    """One change of the config or the tensors."""
    kind = draw(st.sampled_from(["field", "junk", "rename", "rename all", "shape", "drop", "swap"]))
    field = draw(st.sampled_from(FIELDS))
    value = draw(LIKELY.get(field, JSON) if kind == "field" else JSON)
    change, shape = draw(st.sampled_from(OTHER)), draw(st.sampled_from(SHAPES))
    at, to = draw(st.integers(0, 11)), draw(st.integers(0, 11))

    def mutate(made: PeftUpload) -> None:
        names = sorted(made.tensors)
        one, two = names[at % len(names)], names[to % len(names)]
        assert made.config is not None
        if kind in ("field", "junk"):
            made.config[field] = value
        elif kind == "rename":
            made.tensors[change(one)] = made.tensors.pop(one)
        elif kind == "rename all":
            made.rename(change)
        elif kind == "shape":
            made.tensors[one] = shape(made.tensors[one])
        elif kind == "drop" and len(names) > 1:
            del made.tensors[one]
        elif kind == "swap":
            made.tensors[one], made.tensors[two] = made.tensors[two], made.tensors[one]

    return mutate


@given(st.lists(mutations(), min_size=1, max_size=2))
def test_a_mutated_upload_computes_what_it_says_or_is_refused(
    bench: Bench,
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[Callable[[PeftUpload], None]],
) -> None:
    made = upload(bench.config, targets=MODULES)
    for change in changes:
        change(made)
    root = tmp_path_factory.mktemp("mutated")
    made.write(root / NAME)
    store = AdapterFolder(root, 16, bench.config)
    verdict = store.scan()[0]
    event(verdict.reason_code if isinstance(verdict, Refused) else "loads")
    if isinstance(verdict, Found):
        assert made.config is not None
        config = json.loads(json.dumps(made.config))
        theirs = bench.reference.logits(as_written(config, made.tensors))
        torch.testing.assert_close(bench.logits(store), theirs, rtol=1e-4, atol=5e-4)


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=9), JSON, max_size=4))
def test_any_config_at_all_is_a_verdict_and_never_a_crash(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
) -> None:
    root = tmp_path_factory.mktemp("config")
    made = upload(bench.config)
    assert made.config is not None
    assume(all(not isinstance(value, float) or math.isfinite(value) for value in fields.values()))
    made.config |= fields
    made.write(root / NAME)
    assert isinstance(AdapterFolder(root, 16, bench.config).scan()[0], Found | Refused)
