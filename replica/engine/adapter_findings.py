"""AdapterFindings: every fault of an upload at once, not only the first that a replica would name.

The checks are the replica's own. Each time one finds a fault, what is at fault is taken out of the
copy in memory and the checks go on with the rest; so a later finding never follows from an earlier
one, and what is found first is what a replica says.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from replica.engine.adapter_files import open_config, open_weights, read_config, read_entries
from replica.engine.adapter_notes import notes
from replica.engine.adapter_tensors import AdapterTensors
from replica.engine.bad_adapter import BadAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.peft_config import PeftConfig
from replica.engine.safetensors_header import TensorEntry

FINDINGS_MAX: Final = 50
_UNBOUNDED: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["error", "warning"]
    code: str
    message: str
    param: str | None = None


@dataclass(slots=True)
class Findings:
    """Errors in the order a replica would meet them, then warnings."""

    all: list[Finding] = field(default_factory=list)
    rank: int | None = None  # where the tensors say so
    modules: tuple[str, ...] = ()

    @property
    def servable(self) -> bool:
        return not any(finding.level == "error" for finding in self.all)

    def add(self, bad: BadAdapter) -> bool:
        """Whether there is room for more, and this one is new."""
        finding = Finding("error", bad.code, bad.message, bad.param)
        if finding in self.all or len(self.all) >= FINDINGS_MAX:
            return False
        self.all.append(finding)
        return True


def examine(root: Path, folder: Path, model: ModelConfig | None, max_rank: int) -> Findings:
    """All but the weights' values. Without the base's config names and shapes are not compared."""
    found = Findings()
    raw: dict[str, Any] = {}
    names = sorted(path.name for path in folder.iterdir())
    entries: Mapping[str, TensorEntry] = {}
    config: PeftConfig | None = None
    with ExitStack() as stack:
        try:
            raw = read_config(stack.enter_context(open_config(root, folder)))
            config = _config(raw, names, found)
        except BadAdapter as bad:
            found.add(bad)
        try:
            weights = stack.enter_context(open_weights(root, folder))
            if model is not None and config is not None:
                entries = read_entries(weights, config, model, max_rank)
                _tensors(dict(entries), config, model, max_rank, found)
        except BadAdapter as bad:
            found.add(bad)
    for note in notes(raw, names, entries) if config is not None else []:
        found.all.append(Finding("warning", note.code, note.message, note.param))
    return found


def _config(raw: Mapping[str, Any], names: list[str], found: Findings) -> PeftConfig | None:
    """None when it is no LoRA config at all."""
    left = dict(raw)
    while True:
        try:
            return PeftConfig.of(left, names)
        except BadAdapter as bad:
            foreign = bad.code.startswith(("not_peft_config", "unsupported_peft_type"))
            if not found.add(bad) or foreign or bad.param not in left:
                return None
            del left[bad.param]


def _tensors(
    left: dict[str, TensorEntry],
    config: PeftConfig,
    model: ModelConfig,
    max_rank: int,
    found: Findings,
) -> None:
    r_is_unknown = any(finding.code == "bad_config:r" for finding in found.all)
    while True:
        try:
            tensors = AdapterTensors.of(left, config, model, max_rank)
        except BadAdapter as bad:
            if bad.code == "rank_config_mismatch" and r_is_unknown:
                config, r_is_unknown = replace(config, rank=left[bad.param or ""].shape[0]), False
                continue
            if not found.add(bad):
                return
            named = (*bad.tensors, bad.param or "")
            faulty = {name for name in named if name in left}
            if bad.code == "rank_exceeds_max":
                max_rank = _UNBOUNDED
            elif bad.code == "incomplete_weights":
                config = replace(config, bias=None)
            elif not faulty or not left.keys() - faulty:
                return
            for name in faulty:
                del left[name]
        else:
            found.rank = tensors.rank
            found.modules = tuple(sorted({module for _, module in tensors.pairs}))
            return
