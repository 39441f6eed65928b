"""Routing on a real fleet that changes: a replica joins, one is drained, one is killed."""

from __future__ import annotations

from loadtests.live_fleet import Shape
from loadtests.live_routing import asked, changes


async def test_join_drain_and_kill_cost_no_cold_request_and_no_failure() -> None:
    shape = Shape(adapters=16, host=16)
    told = await changes(shape, asked(shape.adapters, requests=80, seed=1), at_once=4)
    join, drain, kill = told["join"], told["drain"], told["kill"]
    assert join["cold"] == 0
    assert join["served"]["replica-3"] >= 10  # it has its share
    assert drain["cold"] == 0
    assert drain["served_after_it_drained"] == 0
    assert join["failed"] == drain["failed"] == 0
    assert kill["failed"] <= 0.005 * kill["requests"]
