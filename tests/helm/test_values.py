"""What the chart's values may be: the schema, held against the settings in the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import (
    DiscoveryConfig,
    ForwardConfig,
    HealthConfig,
    PlacementConfig,
    QueueConfig,
    RouterConfig,
)
from replica.config import ReplicaConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replica.cuont": 2}, "cuont"),
        ({"gateway.count": 0}, "/gateway/count"),
        ({"gateway.service.type": "Ingress"}, "/gateway/service/type"),
        ({"gateway.config.router.load_factor": 0.5}, "load_factor"),
        ({"gateway.config.admin.key": "secret"}, "admin"),
        ({"replica.config.max_lora": 4}, "max_lora"),
        ({"replica.config.dtype": "int3"}, "dtype"),
        ({"replica.config.fleet_token": "secret"}, "fleet_token"),
        ({"replica.config.adapter_store": "s3://bucket"}, "replica.cache"),
        ({"secrets.adminKey": "short"}, "adminKey"),
        ({"tracing.endpoint": "collector:4318"}, "/tracing/endpoint"),
        ({"store.url": "http://x"}, "/store/url"),
        ({"valkey.enabled": False}, "store.url"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Any, values: dict[str, Any], says: str) -> None:
    done = helm.template(values)
    assert done.returncode != 0
    assert says in done.stderr


def test_the_schema_knows_exactly_the_settings_of_the_code() -> None:
    whole = json.loads((ROOT / "helm/values.schema.json").read_text())
    schema, pool = whole["properties"], whole["definitions"]["pool"]
    sections = schema["gateway"]["properties"]["config"]["properties"]
    for name, kind in {
        "router": RouterConfig,
        "placement": PlacementConfig,
        "queue": QueueConfig,
        "forward": ForwardConfig,
        "health": HealthConfig,
        "discovery": DiscoveryConfig,
    }.items():
        own = {"services"} if name == "discovery" else set()  # the chart's
        assert sections[name]["properties"].keys() == kind.model_fields.keys() - own, name
    owned = {"base", "adapters", "name", "host", "port", "fleet_token", "tracing"}
    replica = pool["properties"]["config"]["properties"]
    assert replica.keys() == ReplicaConfig.model_fields.keys() - owned


def test_the_values_file_shows_every_key_of_the_schema() -> None:
    values = yaml.safe_load((ROOT / "helm/values.yaml").read_text())
    schema = json.loads((ROOT / "helm/values.schema.json").read_text())

    def missing(shown: Any, rule: dict[str, Any], at: str) -> list[str]:
        if at.endswith(".config") or shown is None:
            return []  # the code's own examples show these; null is a value
        for link in (rule, *rule.get("allOf", ())):
            if "$ref" in link:
                rule = schema["definitions"][link["$ref"].split("/")[-1]]
        lost = []
        for key, inner in rule.get("properties", {}).items():
            here = f"{at}.{key}"
            lost += [here] if key not in shown else missing(shown[key], inner, here)
        return lost

    assert missing(values, schema, "") == [".global"]
