"""What drivers ask of a runner: steps that get under way, and land."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from replica.core.step import Step
from replica.engine.host_adapter import HostAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.sampler import Drawn


class Flight(Protocol):
    """A step under way."""

    def landed(self) -> bool:
        """Whether it is over: `collect` will not wait."""

    def collect(self) -> Mapping[str, Drawn]:
        """Wait for it: sequence id to what it drew or scored."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that was over before its launch returned."""

    drawn: Mapping[str, Drawn]

    def landed(self) -> bool:
        return True

    def collect(self) -> Mapping[str, Drawn]:
        return self.drawn


class Arrival(Protocol):
    """An adapter on its way into its pages."""

    def query(self) -> bool:
        """Whether it is there. Rows may name its slot only once this has said so."""


class StepRunner(Protocol):
    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched before the one before it is collected."""

    @property
    def config(self) -> ModelConfig: ...

    def launch(self, step: Step) -> Flight: ...

    def logits(self, step: Step) -> Mapping[str, Tensor]:
        """Sequence id to logits [vocab] in float32, for rows that sample; draws nothing."""

    def pages_of(self, adapter: HostAdapter) -> int:
        """How many pages `load` wants for it."""

    def load(self, slot: int, adapter: HostAdapter, pages: Sequence[int]) -> Arrival | None:
        """Put an adapter into pages it owns and name them in a slot; None: it is there."""

    def clear(self, slot: int) -> None: ...
