"""The sixty forms in which people upload adapters: each loads and computes right, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, load, pool_pages
from merged_reference import TOKENS, MergedReference
from safetensors.torch import load_file
from variants import VARIANTS, Base, Variant

from replica.engine.adapter_store import AdapterFolder, BadAdapter, Found, Refused
from replica.engine.runner import Runner
from replica.engine.tiny import tiny_model
from shared.ids import AdapterId

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about themselves

MAX_RANK = 64
NAME = AdapterId("upload")
LOADS = [variant for variant in VARIANTS if variant.code is None]
REFUSED = [variant for variant in VARIANTS if variant.code is not None]


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


@pytest.fixture(scope="module")
def base(base_dir: Path) -> Base:
    return Base(tiny_model(base_dir, seed=2), load_file(base_dir / "model.safetensors"))


@pytest.fixture(scope="module")
def runner(base_dir: Path, base: Base) -> Runner:
    return Runner(
        base_dir=base_dir, slots=2, max_rank=MAX_RANK, pages=pool_pages(256, 2), page_tokens=16
    )


@pytest.fixture(scope="module")
def reference(base_dir: Path, base: Base) -> MergedReference:
    return MergedReference(base_dir)


@pytest.fixture
def store(tmp_path: Path, base: Base, base_dir: Path) -> AdapterFolder:
    return AdapterFolder(tmp_path, MAX_RANK, base.config, base_dir=base_dir)


def test_every_row_of_the_table_is_here() -> None:
    assert {variant.row for variant in VARIANTS} == set(range(1, 61))


@pytest.mark.parametrize("variant", LOADS, ids=str)
def test_what_must_load_computes_what_peft_computes(
    variant: Variant,
    base: Base,
    store: AdapterFolder,
    runner: Runner,
    reference: MergedReference,
    tmp_path: Path,
) -> None:
    upload = variant.make(base)
    upload.write(tmp_path / NAME)
    verdict = store.scan()[0]
    assert isinstance(verdict, Found), verdict
    load(runner, 1, store.read(NAME), 256)
    driver = Driver(runner, pages=256, page_tokens=16)
    driver.add("s", TOKENS, 1)
    ours = driver.logits()["s"]
    by_hand = reference.logits(upload.deltas())
    torch.testing.assert_close(ours, by_hand, rtol=0, atol=2e-4)
    assert (by_hand - reference.logits({})).abs().max() > 0.01, "the check must be able to fail"
    if variant.peft:
        torch.testing.assert_close(ours, reference.peft_logits(tmp_path / NAME), rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", REFUSED, ids=str)
def test_what_must_be_refused_is_refused_by_its_reason(
    variant: Variant, base: Base, store: AdapterFolder, tmp_path: Path
) -> None:
    variant.make(base).write(tmp_path / NAME)
    verdict = store.scan()[0]
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == variant.code
    assert verdict.message
    with pytest.raises(BadAdapter) as raised:
        store.read(NAME)
    assert raised.value.code == variant.code
