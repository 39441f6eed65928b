"""Every profile, by both Helms, held against Kubernetes' own schemas, and what its parts promise.

Objects of other projects (Prometheus operator, KEDA, Gateway API) have no schema here: their fields
are asserted one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import GatewayConfig
from replica.config import ReplicaConfig
from shared.settings import load

ROOT = Path(__file__).parents[2]
Render = Callable[..., Any]
OUTSIDE = {"store.url": "rediss://:secret-of-ours@store.prod:6379/0"}
PARENT = {"gateway.route.parentRefs": [{"name": "public", "namespace": "ingress"}]}
PROFILES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "default": ([], {}),
    "cpu": (["cpu"], {}),
    "gpu": (["gpu"], {}),
    "nodes": (["gpu", "nodes"], OUTSIDE | PARENT),
    "pools": (
        ["gpu"],
        {"pools": {"qwen": {"base": {"subPath": "qwen"}, "config": {"served_name": "qwen"}}}},
    ),
}
FOREIGN = {"ScaledObject", "ServiceMonitor", "HTTPRoute", "PrometheusRule", "InferencePool"}
VERSIONS = ["1.29", "1.33", "1.37"]


@pytest.fixture(scope="session", params=PROFILES)
def profile(request: pytest.FixtureRequest, any_helm: Any) -> Any:
    files, values = PROFILES[request.param]
    return any_helm.render(values, files)


@pytest.fixture(scope="session")
def nodes(helm: Any) -> Any:
    files, values = PROFILES["nodes"]
    return helm.render(values, files)


def test_every_file_of_a_profile_is_one_that_is_tested() -> None:
    tested = {name for files, _ in PROFILES.values() for name in files}
    assert tested == {path.stem for path in (ROOT / "helm/profiles").glob("*.yaml")}


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_every_object_of_every_profile(profile: Any, version: str) -> None:
    own = [o for o in profile.objects if o["kind"] not in FOREIGN]
    assert len(own) > 10
    for one in own:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_would_notice_a_wrong_object(nodes: Any) -> None:
    broken = nodes.one("Deployment", "-gateway")
    broken = broken | {"spec": broken["spec"] | {"replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_the_programs_read_the_files_of_every_profile(profile: Any, tmp_path: Path) -> None:
    for one in profile.of("ConfigMap"):
        ((name, text),) = one["data"].items()
        if name.endswith(".json"):
            continue  # a dashboard
        (tmp_path / name).write_text(text)
        kind = GatewayConfig if name == "gateway.yaml" else ReplicaConfig
        load(kind, tmp_path / name, {})


def test_helm_lints_with_both_versions(any_helm: Any) -> None:
    done = any_helm.run("lint", "--strict", "helm")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_pool_is_a_statefulset_that_the_gateways_find(helm: Any) -> None:
    volume = {"hostPath": {"path": "/qwen"}}
    pool = {"base": {"volume": volume}, "count": 3, "config": {"served_name": "qwen"}}
    rendered = helm.render({"pools": {"qwen": pool}})
    sets = [o for o in rendered.of("StatefulSet") if "-replica" in o["metadata"]["name"]]
    assert sorted(o["spec"]["replicas"] for o in sets) == [2, 3]
    service = rendered.one("Service", "-replica")  # one for all pools: names differ by the pool's
    for one in sets:
        assert one["spec"]["serviceName"] == service["metadata"]["name"]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
    selectors = [o["spec"]["selector"]["matchLabels"]["loraplex.io/pool"] for o in sets]
    assert len(set(selectors)) == len(selectors)
    mine = rendered.one("StatefulSet", "-replica-qwen")["spec"]["template"]["spec"]
    (base,) = [v for v in mine["volumes"] if v["name"] == "base"]
    assert base == {"name": "base"} | volume  # laid over, not mixed with the other pool's


def test_metrics_that_scaling_asks_for_are_ones_that_replicas_have(nodes: Any) -> None:
    source = (ROOT / "replica/metrics.py").read_text()
    (scaled,) = nodes.of("ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    names = {name for query in queries for name in re.findall(r"((?:vllm:|loraplex_)\w+)", query)}
    assert names == {
        "vllm:num_requests_waiting",
        "loraplex_replica_slots",
        "loraplex_replica_slots_used",
    }
    for name in names:
        assert re.split(r"vllm:|loraplex_replica_", name)[1] in source
    target = scaled["spec"]["scaleTargetRef"]["name"]
    assert target == nodes.of("StatefulSet")[0]["metadata"]["name"]
    pods = re.findall(r'pod=~"([^"]+)"', queries[0])[0]
    assert re.fullmatch(pods, f"{target}-0")
    assert not re.fullmatch(pods, f"{target}-qwen-0")


def test_what_scales_is_not_also_counted(nodes: Any) -> None:
    assert "replicas" not in nodes.one("Deployment", "-gateway")["spec"]
    assert "replicas" not in nodes.one("StatefulSet", "-replica")["spec"]
    (scaler,) = nodes.of("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "lora-loraplex-gateway"
    # The gateways' file says nothing of how many replicas there are: it stays, and so do they.
    config = yaml.safe_load(nodes.one("ConfigMap", "-gateway")["data"]["gateway.yaml"])
    assert "fleet" not in config
    assert config["discovery"]["services"]


def test_only_what_tenants_may_ask_for_is_routed(nodes: Any) -> None:
    (route,) = nodes.of("HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1"]
    service = nodes.one("Service", rule["backendRefs"][0]["name"])
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]


def test_monitors_find_services_and_scrape_where_tenants_cannot_reach(nodes: Any) -> None:
    services = nodes.of("Service")
    for monitor in nodes.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (found,) = [s for s in services if wanted.items() <= s["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in found["spec"]["ports"]}
    assert len(nodes.of("ServiceMonitor")) == 2


def test_an_inference_pool_selects_the_pods_of_its_pool_and_their_port(helm: Any) -> None:
    """By `InferencePoolSpec` of the extension's api/v1/inferencepool_types.go."""
    pools = {"qwen": {"base": {"subPath": "qwen"}, "config": {"served_name": "qwen"}}}
    picker = {"name": "picker", "port": 9002, "failureMode": "FailOpen"}
    rendered = helm.render({"pools": pools, "inferencePool": {"enabled": True, "picker": picker}})
    assert len(rendered.of("InferencePool")) == 2
    for pool in rendered.of("InferencePool"):
        assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
        spec = pool["spec"]
        assert spec.keys() == {"selector", "targetPorts", "endpointPickerRef"}
        assert spec["selector"].keys() == {"matchLabels"}
        served = rendered.one("StatefulSet", pool["metadata"]["name"])["spec"]["template"]
        assert spec["selector"]["matchLabels"].items() <= served["metadata"]["labels"].items()
        [container] = served["spec"]["containers"]
        [port] = container["ports"]
        assert spec["targetPorts"] == [{"number": port["containerPort"]}]
        reference = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
        assert spec["endpointPickerRef"] == reference
    names = [
        pool["spec"]["selector"]["matchLabels"]["loraplex.io/pool"]
        for pool in rendered.of("InferencePool")
    ]
    assert len(set(names)) == 2


def test_the_admin_port_is_closed_to_all_but_those_named(helm: Any, nodes: Any) -> None:
    closed = helm.render({}).one("NetworkPolicy", "-gateway")["spec"]["ingress"]
    assert closed == [{"ports": [{"port": "http"}]}]
    tenants, operators = nodes.one("NetworkPolicy", "-gateway")["spec"]["ingress"]
    assert tenants == {"ports": [{"port": "http"}]}
    assert operators["ports"] == [{"port": "admin"}]
    assert operators["from"]


def test_pods_of_one_kind_spread_over_nodes_and_zones(profile: Any) -> None:
    for workload in [*profile.of("Deployment"), *profile.of("StatefulSet")]:
        if "valkey" in workload["metadata"]["name"]:
            continue
        pod = workload["spec"]["template"]
        keys = []
        for rule in pod["spec"]["topologySpreadConstraints"]:
            keys.append(rule["topologyKey"])
            assert rule["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"keda.enabled": True}, "prometheusUrl"),
        ({"gateway.route.enabled": True}, "parentRefs"),
        ({"inferencePool.enabled": True}, "picker.name"),
        ({"pools": {"Qwen": {"base": {}, "config": {"served_name": "q"}}}}, "Qwen"),
        ({"pools": {"qwen": {"base": {}, "config": {}}}}, "served_name"),
        ({"pools": {"qwen": {"cuont": 1}}}, "cuont"),
        ({"monitoring.serviceMonitor.interval": "soon"}, "interval"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Any, values: dict[str, Any], says: str) -> None:
    done = helm.template(values)
    assert done.returncode != 0
    assert says in done.stderr
