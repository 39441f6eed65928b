"""The dispatcher as a configuration describes it: the live gateway's, and the simulator's."""

from __future__ import annotations

from gateway.config import GatewayConfig
from gateway.core.breaker import HealthRules
from gateway.core.dispatcher import Dispatcher, PlacementRules


def dispatcher_of(config: GatewayConfig, *, placement: bool = True) -> Dispatcher:
    """`placement` False: without it, whatever the configuration says."""
    rules: PlacementRules | None = None
    if placement and config.placement.enabled:
        rules = PlacementRules(**config.placement.model_dump(exclude={"enabled", "schedule"}))
    return Dispatcher(
        **config.router.model_dump(),
        **config.queue.model_dump(),
        silence_heartbeats=config.fleet.silence_heartbeats,
        health=HealthRules(**config.health.model_dump()),
        placement=rules,
    )
