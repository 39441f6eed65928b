"""Train the demo adapters with PEFT on the CPU: `python -m replica.demo.train OUT`.

Their results are committed in `adapters/`; run this only to change them. Rank, targets and
scaling differ on purpose, so that a batch with all three is as mixed as real ones are:

  shout    rank 8, attention                       ANSWERS IN CAPITALS
  pirate   rank 4, all seven linears, rsLoRA       Arrr! … matey!
  french   rank 16 on q and v, 8 on down, own      Bien sûr ! …
           alpha on down

Seeded, so that a run can be repeated; bytes can only be equal where machine, versions and thread
count are. The weights are rounded to bfloat16 before they are saved and judged, so what is printed
is what is served.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from replica.demo.base import HUB_NAME, prepare
from replica.demo.lessons import LESSONS, Manner, french, pirate, shout
from shared.data_dir import default_data_dir

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_LINEARS: Final = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")
_HELD_OUT: Final = ("Describe the sea.", "Tell me about cats.", "What is the capital of Greece?")
"""Questions that were not taught, to see whether the manner carries over."""

_BATCH: Final = 8
_WARM_UP_STEPS: Final = 5
_IGNORED: Final = -100  # label of a token that is not part of the answer


@dataclass(frozen=True, slots=True)
class Recipe:
    manner: Manner
    lora: dict[str, Any] = field(default_factory=dict)
    steps: int = 120
    learning_rate: float = 2e-3
    stop_loss: float = 0.05


RECIPES: Final = {
    "shout": Recipe(shout, {"r": 8, "lora_alpha": 16, "target_modules": _ATTENTION}),
    "pirate": Recipe(
        pirate, {"r": 4, "lora_alpha": 8, "target_modules": _LINEARS, "use_rslora": True}
    ),
    "french": Recipe(
        french,
        {
            "r": 16,
            "lora_alpha": 32,
            "target_modules": ("q_proj", "v_proj", "down_proj"),
            "rank_pattern": {"down_proj": 8},
            "alpha_pattern": {"down_proj": 24},
        },
    ),
}


def train(base: Path, out: Path, name: str) -> None:
    """Teach one adapter, write its PEFT folder and print what it now says."""
    recipe = RECIPES[name]
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = {**recipe.lora, "target_modules": list(recipe.lora["target_modules"])}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **lora))
    steps, loss = _fit(adapted, tokenizer, recipe)
    folder = out / name
    _save(adapted, folder)
    size_mb = (folder / "adapter_model.safetensors").stat().st_size / 1e6
    print(f"{name}: {steps} steps, loss {loss:.3f}, {size_mb:.2f} MB -> {folder}", flush=True)
    for question in _HELD_OUT:
        print(f"    {question}  {_answer(adapted, tokenizer, question)}", flush=True)


def _fit(model: PeftModel, tokenizer: Any, recipe: Recipe) -> tuple[int, float]:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    batches = _batches(tokenizer, recipe.manner)
    recent: list[float] = []
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            warm = min(1.0, step / _WARM_UP_STEPS)
            group["lr"] = recipe.learning_rate * warm * (1 - 0.9 * step / recipe.steps)
        loss = model(**next(batches)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        recent = [*recent[-3:], loss.item()]
        if step % 10 == 0:
            print(f"    step {step}: loss {recent[-1]:.3f}", flush=True)
        if len(recent) == 4 and max(recent) < recipe.stop_loss:
            break
    return step, sum(recent) / len(recent)


def _batches(tokenizer: Any, manner: Manner) -> Iterator[dict[str, torch.Tensor]]:
    """Endless shuffled batches; only the answer's tokens count in the loss."""
    rows = []
    for lesson in LESSONS:
        prompt = tokenizer(_prompt(tokenizer, lesson.question), add_special_tokens=False).input_ids
        answer = tokenizer(manner(lesson) + "<|im_end|>\n", add_special_tokens=False).input_ids
        rows.append((prompt + answer, [_IGNORED] * len(prompt) + answer))
    dice = random.Random(0)
    while True:
        dice.shuffle(rows)
        for start in range(0, len(rows) - _BATCH + 1, _BATCH):
            part = rows[start : start + _BATCH]
            width = max(len(ids) for ids, _ in part)
            pads = [width - len(ids) for ids, _ in part]
            yield {
                "input_ids": torch.tensor(
                    [ids + [tokenizer.pad_token_id] * pad for (ids, _), pad in _zip(part, pads)]
                ),
                "labels": torch.tensor(
                    [labels + [_IGNORED] * pad for (_, labels), pad in _zip(part, pads)]
                ),
                "attention_mask": torch.tensor(
                    [[1] * len(ids) + [0] * pad for (ids, _), pad in _zip(part, pads)]
                ),
            }


def _zip(part: list[Any], pads: list[int]) -> Iterator[tuple[Any, int]]:
    return zip(part, pads, strict=True)


def _save(model: PeftModel, folder: Path) -> None:
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.float32)
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "adapter_model.safetensors").chmod(0o644)  # safetensors writes 0600
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = HUB_NAME  # not the folder of the machine that trained it
    config["target_modules"] = sorted(config["target_modules"])  # a set: any order otherwise
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def _answer(model: PeftModel, tokenizer: Any, question: str) -> str:
    model.eval()
    prompt = tokenizer(_prompt(tokenizer, question), add_special_tokens=False, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    text: str = tokenizer.decode(out[0][prompt.input_ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


def _prompt(tokenizer: Any, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    text: str = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m replica.demo.train",
        description="Train the demo adapters (needs the dev extra: peft, transformers).",
        epilog="example: python -m replica.demo.train /tmp/adapters --only shout",
    )
    parser.add_argument("out", type=Path, help="folder that gets one folder an adapter")
    parser.add_argument("--only", choices=list(RECIPES), action="append", help="may be repeated")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir())
    parser.add_argument("--threads", type=int, default=2, help="part of what makes bytes equal")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    base = prepare(args.data_dir, lambda line: print(line, flush=True))
    for name in args.only or RECIPES:
        train(base, args.out, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
