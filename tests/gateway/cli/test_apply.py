"""`loraplex apply`: what differs is shown and done, and done once it is nothing more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedReplica
from typer.testing import CliRunner

from gateway.cli.desired import FleetWish, LimitsWish, changes
from gateway.cli.failure import USAGE, Failure
from gateway.cli.limit_options import LIMITS
from gateway.cli.root import app
from gateway.state.tenants import Limits

KEY = "operators-only-0123456789"
FLEET = """
tenants:
  acme:
    weight: 2
    models: ["*"]
    limits: {requests_per_min: 60, spend_per_day: 5.0}
    adapter_limits: {pirate: {tokens_per_min: 1000}}
  beta:
adapters:
  pirate:
    owner: acme
    access: [beta]
    versions: [{digest: 0123456789ab, path: pirate-1}, {digest: ba9876543210, note: better}]
prices:
  - {input: 0.5, output: 1.5}
  - {tenant: acme, model: pirate, input: 1.0, cached_input: 0.1, output: 2.0}
"""


def run(url: str, *words: str, typed: str = "") -> tuple[int, str]:
    here = {"LORAPLEX_ADMIN_KEY": KEY, "LORAPLEX_GATEWAY": url}
    result = CliRunner().invoke(app, list(words), env=here, input=typed)
    if isinstance(result.exception, Failure):
        return result.exception.code, str(result.exception)
    return result.exit_code, result.stdout


def test_the_limits_of_the_file_are_those_of_the_registry() -> None:
    assert tuple(LimitsWish.model_fields) == LIMITS == Limits.__slots__


async def test_a_file_is_applied_once_and_then_changes_nothing(fleet: Any, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    words = ("apply", "-f", str(file))
    async with fleet(ScriptedReplica("replica-0"), admin={"key": KEY}) as it:

        async def call(*more: str, typed: str = "") -> tuple[int, str]:
            return await asyncio.to_thread(run, it.url, *words, *more, typed=typed)

        registry = it.gateway.registry
        code, shown = await call("--dry-run")
        assert code == 0
        assert registry.adapter("pirate") is None
        code, output = await call()  # `acme` is there already, made by the fixture
        assert (code, output) == (0, shown)
        assert "~ tenant acme\n    weight: 1.0 -> 2.0" in shown
        assert "limits.requests_per_min: none -> 60" in shown
        assert "+ tenant beta" in shown
        assert "+ adapter pirate" in shown
        acme, pirate = registry.tenant("acme"), registry.adapter("pirate")
        assert acme.limits == Limits(requests_per_min=60, spend_per_day=5.0)
        assert acme.adapter_limits == {"pirate": Limits(tokens_per_min=1000)}
        assert (pirate.owner, pirate.access, pirate.current) == ("acme", ("beta",), "ba9876543210")
        assert registry.price("acme", "pirate").output == 2000
        assert registry.price("beta", "pirate").output == 1500
        assert await call() == (0, "nothing to change\n")

        file.write_text(FLEET.replace("requests_per_min: 60, ", "").replace("  beta:\n", ""))
        assert "limits.requests_per_min: 60 -> none" in (await call())[1]
        assert registry.tenant("acme").limits == Limits(spend_per_day=5.0)
        assert registry.tenant("beta") is not None
        code, said = await call("--prune", typed="n\n")
        assert (code, said) == (1, "nothing was changed.")
        code, said = await call("--prune", "--yes", "--json")
        assert json.loads(said) == [{"verb": "-", "kind": "tenant", "name": "beta", "changes": []}]
        assert registry.tenant("beta") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tenants: {a: {wieght: 2}}", "tenants.a.wieght"),
        ("tenants: {a: {limits: {requests_per_min: many}}}", "tenants.a.limits.requests_per_min"),
        ("prices: [{input: 1}]", "prices.0.output"),
        ("tenants: [", "expected"),
        ("just words", "valid dictionary"),
    ],
)
def test_a_file_that_means_nothing_is_refused_by_its_field(
    tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    code, said = run("http://127.0.0.1:1", "apply", "-f", str(file))
    assert code == USAGE
    assert named in said
    assert str(file) in said


limits = st.dictionaries(st.sampled_from(LIMITS[:7]), st.integers(0, 99)).map(
    lambda found: {**dict.fromkeys(LIMITS), **found}
)


@given(
    there=st.dictionaries(st.sampled_from("abc"), limits),
    wish=st.dictionaries(st.sampled_from("abc"), limits),
)
def test_what_is_as_wished_needs_no_change(there: dict[str, Any], wish: dict[str, Any]) -> None:
    """The changes, made, leave nothing to change; and without any difference there are none."""
    rows = {
        name: {"id": name, "limits": found, "version": 1, "adapter_limits": {}}
        for name, found in there.items()
    }
    wanted = FleetWish.model_validate({"tenants": {n: {"limits": w} for n, w in wish.items()}})

    def todo(rows: dict[str, Any]) -> list[Any]:
        return changes(wanted, tenants=[*rows.values()], adapters=[], prices=[], prune=True)

    for change in todo(rows):
        if change.verb == "-":
            del rows[change.name]
        else:
            assert change.body is not None
            rows[change.name] = {**rows.get(change.name, {"id": change.name}), **change.body}
            rows[change.name].setdefault("adapter_limits", {})
            rows[change.name].setdefault("version", 1)
    assert {name: row["limits"] for name, row in rows.items()} == wish
    assert todo(rows) == []
