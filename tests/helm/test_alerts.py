"""The alerts, by Prometheus' own tool, and that each of them is tested and reaches the chart."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load((ROOT / "helm/alerts.yaml").read_text())
ALERTS = {rule["alert"] for group in RULES["groups"] for rule in group["rules"]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
def test_the_alerts_are_right_by_their_own_unit_tests() -> None:
    for command in (
        ["check", "rules", "helm/alerts.yaml"],
        ["test", "rules", "tests/observe/alerts_test.yaml"],
    ):
        done = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_in_the_operators_text_once_with_what_to_do() -> None:
    text = (ROOT / "helm/README.md").read_text()
    rows = re.findall(r"^\| (Loraplex[^|]*) \| ([^|]+) \|$", text, re.MULTILINE)
    named = [name for names, _ in rows for name in names.strip().split(", ")]
    assert sorted(named) == sorted(ALERTS)
    assert all(len(what) > 20 for _, what in rows)


def test_every_alert_has_a_unit_test() -> None:
    tested = (ROOT / "tests/observe/alerts_test.yaml").read_text()
    for name in ALERTS:
        assert f"alertname: {name}, exp_alerts: []" in tested or name == "LoraplexLedgerLost"
        assert re.search(rf"alertname: {name}\n +exp_alerts: \[\{{", tested), name


def test_the_chart_carries_the_rules_and_the_dashboards_as_they_are(helm: Any) -> None:
    rendered = helm.render(
        {"monitoring.rules.enabled": True, "monitoring.dashboards.enabled": True}
    )
    (rules,) = rendered.of("PrometheusRule")
    assert rules["spec"] == RULES
    boards = {}
    for one in rendered.of("ConfigMap"):
        if "-dashboard-" in one["metadata"]["name"]:
            assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
            boards |= one["data"]
    assert boards == {p.name: p.read_text() for p in (ROOT / "helm/dashboards").glob("*.json")}
