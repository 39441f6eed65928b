"""Adapters of an object store: looked at once, served from the disk, never in anybody's way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
import torch
from cutting_proxy import CuttingProxy, cutting_proxy
from s3_server import BUCKET, S3Server, options
from uploads import edit_config

from replica.disk_cache import DiskCache
from replica.engine.adapter_files import largest_bytes
from replica.engine.adapter_store import AdapterFolder, Found, Refused
from replica.engine.bad_adapter import BadAdapter
from replica.engine.model_config import ModelConfig
from replica.object_store import ObjectStore
from replica.remote_folder import RemoteFolder
from replica.verdicts import Verdicts
from shared.clock import monotonic
from shared.ids import AdapterId

ADA, BOB = AdapterId("ada"), AdapterId("bob")

Open = Callable[..., RemoteFolder]


@pytest.fixture
def prefix(s3: S3Server, store: Path, request: pytest.FixtureRequest) -> str:
    """Of this test's own: `ada` and `bob`, and `dora`, which cannot be served."""
    name = request.node.name[:40]
    edit_config(store / "cyd", {"use_dora": True})
    for folder, called in (("ada", "ada"), ("bob", "bob"), ("cyd", "dora")):
        s3.put(store / folder, f"{name}/{called}")
    return str(name)


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[CuttingProxy]:
    with cutting_proxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def open_folder(tiny: Path, tmp_path: Path, proxy: CuttingProxy, prefix: str) -> Iterator[Open]:
    opened: list[RemoteFolder] = []
    model = ModelConfig.from_dir(tiny / "base")

    def start(max_bytes: int = 10 << 20) -> RemoteFolder:
        for folder in opened:
            folder.close()
        opened.clear()
        url = f"s3://{BUCKET}/{prefix}"
        cache = DiskCache(tmp_path / "cache", max_bytes=max_bytes)
        folder = RemoteFolder(
            ObjectStore(url, options=options(proxy.endpoint), clock=monotonic, request_s=0.5),
            cache,
            Verdicts(tmp_path / "cache" / "verdicts", judge="test"),
            AdapterFolder(cache.adapters, 64, model),
            largest_bytes=largest_bytes(model, 64),
            clock=monotonic,
            list_s=0.02,
        )
        opened.append(folder)
        return folder

    yield start
    for folder in opened:
        folder.close()


def settled(folder: RemoteFolder, count: int = 3) -> dict[str, Found | Refused]:
    """The scan once every adapter was looked at."""
    deadline = time.monotonic() + 10
    while len(said := folder.scan()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return {answer.adapter: answer for answer in said}


def test_what_is_read_is_what_was_uploaded(open_folder: Open, store: Path, tiny: Path) -> None:
    folder = open_folder()
    said = settled(folder)
    local = AdapterFolder(store, 64, ModelConfig.from_dir(tiny / "base"))
    ours = {answer.adapter: answer for answer in local.scan()}
    assert said["ada"] == ours["ada"]
    assert said["bob"] == ours["bob"]
    dora = said["dora"]
    assert isinstance(dora, Refused)
    assert dora.reason_code == "unsupported_feature:use_dora"
    host = folder.read(ADA)
    assert torch.equal(host.flat, local.read(ADA).flat)
    assert host.adapter == "ada"


def test_after_a_restart_nothing_is_fetched_again_and_a_dead_store_is_not_felt(
    open_folder: Open, proxy: CuttingProxy
) -> None:
    said = settled(open_folder())
    connections = proxy.connections
    again = open_folder()
    again.scan()
    assert settled(again) == said
    proxy.dead = True
    begun = time.monotonic()
    assert again.read(ADA).digest
    again.scan()
    assert time.monotonic() - begun < 0.3
    assert proxy.connections - connections <= 2, "listings, and nothing more"


def test_an_evicted_adapter_comes_back_with_the_same_digest(open_folder: Open) -> None:
    whole = open_folder()
    settled(whole)
    size = whole.read(ADA).size_bytes
    small = open_folder(max_bytes=size * 4)
    said = settled(small)
    for _ in range(2):
        for name in (ADA, BOB):
            answer = said[name]
            assert isinstance(answer, Found)
            assert small.read(name).digest == answer.digest
            assert small.at_hand(name)


def test_one_flight_for_all_who_want_it(
    open_folder: Open, proxy: CuttingProxy, tmp_path: Path
) -> None:
    warm = open_folder()
    settled(warm)
    warm.close()
    shutil.rmtree(tmp_path / "cache" / "adapters")
    cold = open_folder()
    settled(cold)
    assert not cold.at_hand(ADA)
    proxy.connections = 0
    with ThreadPoolExecutor(8) as pool:
        hosts = list(pool.map(lambda _: cold.read(ADA), range(8)))
    assert len({host.digest for host in hosts}) == 1
    assert proxy.connections <= 4


def test_an_adapter_that_cannot_be_fetched_says_so_and_is_served_once_it_can(
    open_folder: Open, proxy: CuttingProxy
) -> None:
    proxy.refuses = b"/ada/adapter_model"
    folder = open_folder()
    ada = settled(folder)["ada"]
    assert isinstance(ada, Refused)
    assert (ada.reason_code, "tried again" in ada.message) == ("unreachable", True)
    proxy.refuses = None
    deadline = time.monotonic() + 15
    while not isinstance(settled(folder)["ada"], Found):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_store_that_dies_takes_nothing_away(open_folder: Open, proxy: CuttingProxy) -> None:
    folder = open_folder()
    said = settled(folder)
    proxy.dead = True
    for _ in range(20):
        assert settled(folder) == said
        time.sleep(0.01)


def test_new_content_replaces_the_old_once_it_was_looked_at(
    open_folder: Open, s3: S3Server, store: Path, prefix: str
) -> None:
    folder = open_folder()
    old = settled(folder)
    s3.put(store / "bob", f"{prefix}/ada")
    deadline = time.monotonic() + 10
    while (now := settled(folder)["ada"]) == old["ada"]:
        assert isinstance(now, Found), "the old one is served until then"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bob = old["bob"]
    assert isinstance(now, Found)
    assert isinstance(bob, Found)
    assert now.digest == bob.digest


def test_what_the_listing_tells_costs_no_download(
    open_folder: Open, s3: S3Server, prefix: str
) -> None:
    put = obstore.put
    put(s3.bucket, f"{prefix}/pickle/adapter_config.json", b"{}")
    put(s3.bucket, f"{prefix}/pickle/adapter_model.bin", b"x")
    put(s3.bucket, f"{prefix}/void/adapter_config.json", b"{}")
    put(s3.bucket, f"{prefix}/lost/adapter_model.safetensors", b"x")
    codes = {
        name: answer.reason_code
        for name, answer in settled(open_folder(), 6).items()
        if isinstance(answer, Refused)
    }
    assert codes == {
        "dora": "unsupported_feature:use_dora",
        "pickle": "pickle_not_allowed",
        "void": "missing_weights",
        "lost": "missing_config",
    }


def test_a_name_the_store_lacks_is_refused(open_folder: Open) -> None:
    folder = open_folder()
    settled(folder)
    with pytest.raises(BadAdapter, match="adapter_not_found"):
        folder.read(AdapterId("nobody"))
