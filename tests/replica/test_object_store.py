"""Adapters in a real S3, over networks that break: what comes is whole and of one version."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from cutting_proxy import CuttingProxy, cutting_proxy
from s3_server import BUCKET, S3Server, options

from replica.engine.bad_adapter import BadAdapter
from replica.object_store import ObjectStore, RemoteFile
from shared.clock import monotonic
from shared.ids import AdapterId

WEIGHTS = os.urandom(3_000_000)
URL = f"s3://{BUCKET}/plain"
ADA = AdapterId("ada")


@pytest.fixture(scope="module")
def server(s3: S3Server) -> S3Server:
    for name, content in (
        ("ada/adapter_config.json", b"{}"),
        ("ada/adapter_model.safetensors", WEIGHTS),
        ("ada/checkpoint-5/adapter_config.json", b"{}"),
        ("bob/adapter_model.bin", b"."),
        ("bob/adapter_config.json", b"{}"),
        ("README.md", b"not an adapter"),
        (".hidden/adapter_config.json", b"{}"),
    ):
        obstore.put(s3.bucket, f"plain/{name}", content, use_multipart=False)
    obstore.put(s3.bucket, "elsewhere/eve/adapter_config.json", b"{}", use_multipart=False)
    return s3


@pytest.fixture
def proxy(server: S3Server) -> Iterator[CuttingProxy]:
    with cutting_proxy(server.endpoint) as proxy:
        yield proxy


def store(endpoint: str, **settings: float) -> ObjectStore:
    return ObjectStore(URL, options=options(endpoint), clock=monotonic, **settings)


def weights_of(store: ObjectStore) -> RemoteFile:
    file = store.list()[ADA].weights
    assert file is not None
    return file


def test_a_listing_has_the_folders_below_the_prefix_and_nothing_else(server: S3Server) -> None:
    listed = store(server.endpoint).list()
    assert sorted(listed) == ["ada", "bob"]
    ada, bob = listed[ADA], listed[AdapterId("bob")]
    assert ada.weights is not None
    assert (ada.weights.size_bytes, ada.pickled) == (len(WEIGHTS), False)
    assert (bob.weights, bob.pickled) == (None, True)


def test_a_download_is_the_object(server: S3Server, tmp_path: Path) -> None:
    ours = store(server.endpoint)
    ours.download(weights_of(ours), tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == WEIGHTS


def test_a_broken_download_goes_on_where_it_was(proxy: CuttingProxy, tmp_path: Path) -> None:
    ours = store(proxy.endpoint)
    file = weights_of(ours)
    proxy.cut_after = 1_000_000
    ours.download(file, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == WEIGHTS
    cuts = (1 << 30) - proxy.cuts_left
    assert 2 <= cuts <= 5, "each attempt brings about a third: none begins again"


def test_what_a_stopped_process_left_is_gone_on_from(server: S3Server, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(WEIGHTS[:2_999_000])
    ours = store(server.endpoint)
    ours.download(weights_of(ours), tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == WEIGHTS


def test_a_replaced_object_is_never_a_mixture(server: S3Server, tmp_path: Path) -> None:
    ours = store(server.endpoint)
    obstore.put(server.bucket, "plain/new/adapter_model.safetensors", b"a" * 999)
    file = ours.list()[AdapterId("new")].weights
    assert file is not None
    (tmp_path / "w").write_bytes(b"a" * 500)
    obstore.put(server.bucket, "plain/new/adapter_model.safetensors", b"b" * 999)
    with pytest.raises(BadAdapter, match="changed"):
        ours.download(file, tmp_path / "w")
    obstore.delete(server.bucket, "plain/new/adapter_model.safetensors")
    with pytest.raises(BadAdapter, match="changed"):
        ours.download(file, tmp_path / "w")


def test_no_more_is_taken_than_was_promised(server: S3Server, tmp_path: Path) -> None:
    ours = store(server.endpoint)
    small = dataclasses.replace(weights_of(ours), size_bytes=1000, etag=None)
    with pytest.raises(BadAdapter, match="changed"):
        ours.download(small, tmp_path / "w")
    assert (tmp_path / "w").stat().st_size <= 1000


def test_a_dead_store_is_given_up_in_bounded_time(proxy: CuttingProxy, tmp_path: Path) -> None:
    ours = store(proxy.endpoint, request_s=0.2)
    file = weights_of(ours)
    proxy.dead = True
    begun = time.monotonic()
    with pytest.raises(BadAdapter, match="unreachable"):
        ours.download(file, tmp_path / "w")
    with pytest.raises(BadAdapter, match="unreachable"):
        ours.list()
    assert time.monotonic() - begun < 8


def test_wrong_credentials_and_options_are_said(server: S3Server) -> None:
    wrong = options(server.endpoint) | {"secret_access_key": "no"}
    with pytest.raises(BadAdapter, match="403"):
        ObjectStore(URL, options=wrong, clock=monotonic).list()
    with pytest.raises(ValueError, match="nonsense"):
        ObjectStore(URL, options={"nonsense": "1"}, clock=monotonic)
    with pytest.raises(ValueError, match="s3, "):
        ObjectStore("ftp://x/y", clock=monotonic)


def test_a_folder_is_a_store_too(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "ada"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    ours = ObjectStore(f"file://{tmp_path}/store", clock=monotonic)
    ours.download(weights_of(ours), tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == WEIGHTS
