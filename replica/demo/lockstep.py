"""The yardstick of `loadtests.bench_replica`: transformers and PEFT, all rows in lock-step.

    python -m replica.demo.lockstep BASE ADAPTERS THREADS

`generate` in float32 without HTTP, with one adapter a row through `adapter_names`. Orders come as
JSON lines on standard input: `prompts`, `tokens`, and `adapters`, one a prompt (null: the base
alone). The answers are JSON lines too: how long it took, and the CPU it used, in seconds.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, logging


class Lockstep:
    def __init__(self, base: Path, adapters: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        self._plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._adapters = adapters
        self._adapted: Any = None  # made when first asked for: it slows the plain model down

    def run(self, prompts: list[str], tokens: int, adapters: list[str] | None) -> dict[str, float]:
        model, named = self._plain, {}
        if adapters is not None:
            model, named = self._with(sorted(set(adapters))), {"adapter_names": adapters}
        batch = self._tokenizer(prompts, return_tensors="pt", padding=True)
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            out = model.generate(
                **batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **named
            )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert out.shape[1] - batch["input_ids"].shape[1] == tokens
        return {"wall_s": wall, "cpu_s": cpu}

    def _with(self, names: list[str]) -> Any:
        if self._adapted is None:
            base = AutoModelForCausalLM.from_pretrained(
                self._plain.config.name_or_path, dtype=torch.float32
            )
            first, *others = names
            folder = self._adapters
            self._adapted = PeftModel.from_pretrained(base, folder / first, adapter_name=first)
            for name in others:
                self._adapted.load_adapter(folder / name, adapter_name=name)
            self._adapted.eval()
        return self._adapted


def main() -> None:
    base, adapters, threads = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(int(threads))
    lockstep = Lockstep(Path(base), Path(adapters))
    print("ready on standard input", flush=True)
    for line in sys.stdin:
        print(json.dumps(lockstep.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
