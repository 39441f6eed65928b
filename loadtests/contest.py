"""Policies compared: the same trace, replicas, prices and faults for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.config import GatewayConfig
from gateway.fleet.deciding import dispatcher_of
from loadtests.faults import Fault
from loadtests.policies import BASELINES, Baseline
from loadtests.policy import Policy
from loadtests.prices import Prices
from loadtests.run import Run
from loadtests.simulator import simulate
from loadtests.trace import Trace

OURS: Final = ("loraplex", "no-placement", "everywhere")
"""The gateway as it is configured; the same, with adapters where requests bring them; and the same,
were every adapter in a slot of every replica: what waiting for a place costs by itself, and so the
least that any placement could reach."""

POLICIES: Final = (*BASELINES, *reversed(OURS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all policies of a contest have in common."""

    trace: Trace
    replicas: int
    prices: Prices
    config: GatewayConfig
    faults: Sequence[Fault] = ()
    warm_up_s: float = 0.0
    skip: float = 0.0  # the first part of the trace, which is left out of the figures


def known(names: str) -> list[str]:
    """Policies by their names, comma between; all when none is named. Raises ValueError."""
    policies = names.split(",") if names else list(POLICIES)
    if unknown := [name for name in policies if name not in POLICIES]:
        raise ValueError(f"{unknown[0]!r} is no policy: {', '.join(POLICIES)}")
    return policies


def contest(setting: Setting, policies: Sequence[str]) -> Iterator[tuple[str, Run]]:
    """One run a policy, in turn."""
    for name in policies:
        yield (
            name,
            simulate(
                setting.trace,
                policy=policy_of(name, setting.config),
                replicas=setting.replicas,
                prices=_prices(name, setting),
                faults=setting.faults,
                warm_up_s=setting.warm_up_s,
            ),
        )


def policy_of(name: str, config: GatewayConfig) -> Policy:
    if name in BASELINES:
        router = config.router
        return Baseline(name, vnodes=router.vnodes, load_factor=router.load_factor)
    return dispatcher_of(config, placement=name != "no-placement")


def _prices(name: str, setting: Setting) -> Prices:
    if name != "everywhere":
        return setting.prices
    adapters = max(1, len({arrival.adapter for arrival in setting.trace}))
    return replace(
        setting.prices, slots=adapters, host_max=adapters, host_load_s=0.0, disk_load_s=0.0
    )


def row(policy: str, figures: dict[str, Any]) -> dict[str, str]:
    """One line of the table for people."""
    found = figures["adapter_found_in"]
    return {
        "policy": policy,
        "TTFT p50 ms": f"{figures['ttft_p50_ms']:.0f}",
        "p99 ms": f"{figures['ttft_p99_ms']:.0f}",
        "in slot": f"{found['gpu']:.1%}",
        "from disk": f"{found['disk']:.2%}",
        "balanced": f"{figures['balanced']:.1%}",
        "refused": str(sum(figures["refused"].values())),
        "cut": str(figures["cut"]),
    }
