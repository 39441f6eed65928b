"""`loraplex plan` as it is typed, and its proposal in the simulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from loadtests.__main__ import app

QUICK = (
    *("--zipf", "1.1", "--adapters", "30", "--rate", "20"),
    *("--output-tokens", "8", "--prompt-tokens", "32"),
)


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def data(*arguments: str) -> Any:
    done = plan(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def levels(advice: Sequence[Any]) -> dict[str, str]:
    return {one["topic"]: one["level"] for one in reversed(advice)}


def test_a_plan_for_500_adapters_has_host_places_for_all_before_it_asks_for_slots() -> None:
    told = data("--zipf", "1.1", "--adapters", "500", "--rate", "40", "--budget", "0")
    [pool] = told["pools"]
    assert pool["host_covers"]
    assert pool["replicas"] * pool["host_slots"] >= 500
    topics = [one["topic"] for one in told["advice"]]
    assert topics.index("host") == 0 < topics.index("slots")
    assert told["simulated"] is None
    short = data(
        *("--zipf", "1.1", "--adapters", "500", "--rate", "40", "--budget", "0", "--host-gb", "4")
    )
    assert short["advice"][0]["topic"] == "host"
    assert short["advice"][0]["level"] == "warning"
    assert short["pools"][0]["slots"] <= pool["slots"]


def test_a_proposal_meets_its_target_in_its_own_simulation_and_its_neighbours_say_why(
    tmp_path: Path,
) -> None:
    html = tmp_path / "plan.html"
    file = tmp_path / "plan.json"
    done = plan(*QUICK, "--budget", "2", "--html", str(html), "-o", str(file))
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert told["meets_target"]
    assert told["simulated"]["ttft_p99_ms"] <= 1e3 * told["wish"]["ttft_p99_s"]
    assert not told["simulated"]["refused"]
    first, *others = told["trials"]
    assert (first["change"], first["verdict"]) == ("proposed", "taken")
    assert first["replicas"] == told["pools"][0]["replicas"]
    assert {"one replica more", "half the slots", "half the host memory"} <= {
        trial["change"] for trial in others
    }
    half = next(trial for trial in others if trial["change"] == "half the host memory")
    assert half["adapter_found_in"]["disk"] > first["adapter_found_in"]["disk"] == 0
    assert "disk" in half["verdict"] or half["verdict"] == "misses the target"
    assert levels(told["advice"])["target"] == "ok"
    assert html.read_text().count("<svg") == 3
    assert " ms <-" in done.stdout
    assert "because" in done.stdout
    assert "one replica more:" in done.stderr  # progress
    assert max(map(len, done.stdout.splitlines())) < 200


def test_a_target_that_cannot_be_met_is_said_so() -> None:
    told = data(*QUICK, "--budget", "1", "--ttft-p99-ms", "1", "--replicas", "1")
    assert told["meets_target"] is False
    assert levels(told["advice"])["target"] == "warning"
    assert told["pools"][0]["replicas"] == 1


def test_a_plan_grows_until_it_meets_its_target() -> None:
    """Prefilling takes all of a replica's time, which the mean rate does not tell."""
    slow = ("--machine", "prompt_token_s=0.0006", "--burstiness", "2", "--ttft-p99-ms", "250")
    told = data(*QUICK, "--budget", "2", "--utilisation", "0.9", *slow)
    assert told["meets_target"]
    before = data(*QUICK, "--budget", "0", "--utilisation", "0.9", *slow)
    assert told["pools"][0]["replicas"] >= before["pools"][0]["replicas"]


def test_a_trace_is_planned_for_by_its_busiest_stretch(tmp_path: Path) -> None:
    trace, listed = tmp_path / "t.jsonl", tmp_path / "adapters.json"
    made = ["trace", "generate", "--arrivals", "400", "--adapters", "20", "--rate", "10"]
    crowd = ["--flash-at-s", "10", "--flash-s", "5", "--flash-factor", "9", "-o", str(trace)]
    assert CliRunner().invoke(app, [*made, *crowd]).exit_code == 0
    listed.write_text(json.dumps([{"adapter": "adapter-03", "rank": 64, "size_bytes": 7}]))
    told = data("--trace", str(trace), "--adapter-list", str(listed), "--budget", "0")
    assert told["demand"]["rate_per_s"] > 10
    assert told["demand"]["adapters"] <= 20
    assert told["pools"][0]["max_rank"] == 64
    assert {quota["tenant"] for quota in told["quotas"]} == {f"tenant-{n}" for n in range(10)}


def test_a_base_and_measurements_set_the_machine(tmp_path: Path) -> None:
    config, times = tmp_path / "config.json", tmp_path / "times.json"
    shapes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    shapes |= {"num_key_value_heads": 3, "num_hidden_layers": 30, "vocab_size": 49152}
    config.write_text(json.dumps(shapes))
    times.write_text(json.dumps({"machine": {"step_s": 0.02, "capacity": 4}}))
    told = data(*QUICK, "--budget", "0", "--model-config", str(config), "--measured", str(times),
                "--capacity", "8", "--machine", "row_s=0.001")  # fmt: skip
    machine = told["machine"]
    assert machine["kv_token_bytes"] == 2 * 30 * 2 * 192
    assert (machine["step_s"], machine["capacity"], machine["row_s"]) == (0.02, 8, 0.001)
    assert data(*QUICK, "--budget", "0", "--measured", _kept(told, tmp_path))["machine"] == machine


def _kept(told: Any, folder: Path) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps(told))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--trace F, or --zipf S"),
        (["--zipf", "1.1"], "--rate"),
        (["--trace", "none"], "No such file"),
        ([*QUICK, "--rate", "0"], "rate_per_s"),
        ([*QUICK, "--ranks", "8:x"], "RANK:WEIGHT"),
        ([*QUICK, "--ranks", "0"], "rank lies"),
        ([*QUICK, "--machine", "speed=1"], "step_s"),
        ([*QUICK, "--machine", "step_s=-1"], "step_s"),
        ([*QUICK, "--measured", "none"], "none: No such"),
        ([*QUICK, "--adapter-list", "none"], "none: No such"),
        ([*QUICK, "--model-config", "none"], "none: No such"),
        ([*QUICK, "--utilisation", "2"], "utilisation"),
        ([*QUICK, "--replicas", "0"], "replicas"),
        (["--live", "--watch", "-1"], "--watch"),
    ],
)
def test_a_wrong_plan_ends_with_two_and_says_why(arguments: list[str], says: str) -> None:
    done = plan(*arguments)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
