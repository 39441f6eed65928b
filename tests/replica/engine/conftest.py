"""A tiny base's shape, and an adapter folder for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from uploads import NAME

from replica.engine.model_config import ModelConfig
from replica.engine.tiny import tiny_adapter, tiny_model


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def root(tmp_path: Path, config: ModelConfig) -> Path:
    """One good adapter: rank 4, q and v, as PEFT writes it."""
    tiny_adapter(tmp_path / NAME, config, seed=3)
    return tmp_path
