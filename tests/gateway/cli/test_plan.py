"""`loraplex up` says what is wrong before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import extra
from gateway.cli.failure import FAILED, USAGE, Failure
from gateway.cli.home import Home
from gateway.cli.plan import Plan, plan
from gateway.cli.root import app
from gateway.config import GatewayConfig
from shared import settings


def make(tmp_path: Path, **changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "home": Home(tmp_path),
        "replicas": 1,
        "base": "demo",
        "adapters": None,
        "port": 0,
        "config": None,
    }
    return plan(**(asked | changes))


def test_the_demo_needs_no_folder(tmp_path: Path) -> None:
    asked = make(tmp_path)
    assert asked.base is None
    assert not asked.external_store
    assert asked.threads >= 1


def test_more_replicas_than_cores_get_a_thread_each(tmp_path: Path) -> None:
    assert make(tmp_path, replicas=64).threads == 1


def test_a_port_in_use_is_a_failure_that_names_the_way_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Failure, match=rf"127.0.0.1:{port}.*--port") as caught:
            make(tmp_path, port=port)
    assert caught.value.code == FAILED


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"replicas": 0}, "--replicas 0"),
        ({"replicas": 65}, "--replicas 65"),
        ({"base": "/nowhere"}, "--base /nowhere: no such folder"),
        ({"adapters": Path("/nowhere")}, "--adapters /nowhere: no such folder"),
        ({"config": Path("/nowhere")}, "--config /nowhere: no such file"),
    ],
)
def test_what_was_asked_wrongly_is_a_usage_error(
    tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(Failure, match=said) as caught:
        make(tmp_path, **asked)
    assert caught.value.code == USAGE


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / name).write_text("")
    with pytest.raises(Failure, match=missing.removeprefix("model")) as caught:
        make(tmp_path, base=str(tmp_path))
    assert caught.value.code == USAGE


def test_a_config_with_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("router: {load_facter: 2}")
    with pytest.raises(Failure, match="load_facter") as caught:
        make(tmp_path, config=config)
    assert caught.value.code == USAGE


def test_a_config_that_names_a_store_keeps_it(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("store: {url: 'redis://elsewhere:6379/0'}\nlisten: {port: 9}")
    asked = make(tmp_path, config=config)
    assert asked.external_store
    assert asked.config.listen.port == 0  # --port wins over the file


def test_the_printed_example_names_no_store_and_no_spool_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(settings.example(GatewayConfig).replace("port: 8080", "port: 0"))
    asked = make(tmp_path, config=config, port=None)
    assert "url" in asked.config.store.model_fields_set
    assert not asked.external_store
    assert asked.spool == tmp_path / "store" / "ledger.spool"


def test_a_spool_of_ones_own_stays(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("store: {spool: /elsewhere/spool}")
    assert make(tmp_path, config=config).spool == Path("/elsewhere/spool")


def test_an_install_without_the_replica_extra_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> object:
        return None if name in ("torch", "jinja2") else object()

    monkeypatch.setattr(extra, "find_spec", found)
    with pytest.raises(Failure) as caught:
        make(tmp_path)
    assert caught.value.code == FAILED
    assert str(caught.value) == (
        "a replica cannot run here without torch, jinja2: pip install 'loraplex[replica]'"
    )
    result = CliRunner().invoke(app, ["replica", "--base", "base"])
    assert isinstance(result.exception, Failure)
