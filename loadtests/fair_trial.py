"""Is it fair in virtual time? Three questions, asked of the production dispatcher.

- how long a light tenant's first token takes beside a flood 64 deep in the queue, against alone,
  with and without places kept for it (gateway/core/reserve.py); and beside several floods;
- how exactly weights of 3 : 1 are kept;
- whether the gap of served / weight ever passes the VTC bound, among 200 tenants
  (loadtests/fair_simulation.py).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random
from typing import Any, Final

from loadtests.fair_setting import ENGINES, LIGHT, NOBODY, SMALL, WEIGHED, flood
from loadtests.fair_simulation import RESERVE_SHARE, Seen, Simulation, Tenant
from loadtests.places import Engine
from loadtests.stats import percentile

_LONG_S: Final = 600.0


def simulated(seed: int) -> dict[str, Any]:
    """All three."""
    weighed = Simulation(WEIGHED, SMALL, Random(seed)).run(60)
    dice = Random(seed)
    many = [
        Tenant(
            name=f"tenant-{n}",
            depth=dice.randint(2, 12),
            weight=dice.choice([1, 1, 2, 3, 5]),
            prompt=(10, dice.choice([100, 1000, 4000])),
            output=(1, dice.choice([32, 256, 1024])),
        )
        for n in range(200)
    ]
    crowd = Simulation(many, Engine(replicas=16), dice).run(120)
    return {
        "seed": seed,
        "light": {name: _lights(engine, seed) for name, engine in ENGINES.items()},
        "beside_several_floods": {n: _beside(n, seed) for n in ("1", "2", "3", "4")},
        "weights": shares(weighed.tenants["three"], weighed.tenants["one"]),
        "vtc": {
            "tenants": len(many),
            "samples": crowd.samples,
            "widest_gap": round(crowd.widest_gap),
            "bound": round(crowd.bound),
        },
    }


def _lights(engine: Engine, seed: int) -> dict[str, Any]:
    def run(*tenants: Tenant, share: float) -> dict[str, Seen]:
        simulation = Simulation(tenants, engine, Random(seed), reserve_share=share)
        return simulation.run(_LONG_S).tenants

    alone = run(LIGHT, NOBODY, share=RESERVE_SHARE)["light"]
    kept = run(LIGHT, flood(engine), share=RESERVE_SHARE)
    none = run(LIGHT, flood(engine), share=0.0)
    return {
        "engine": asdict(engine),
        "with_reserve": ratio(alone, kept["light"]),
        "without": ratio(alone, none["light"]),
        "flood_served_against_without": round(kept["flood"].served / none["flood"].served, 4),
    }


def _beside(floods: str, seed: int) -> dict[str, Any]:
    """The light tenant's, on the first engine."""
    engine = next(iter(ENGINES.values()))

    def run(*tenants: Tenant) -> Seen:
        simulation = Simulation(tenants, engine, Random(seed), reserve_share=RESERVE_SHARE)
        return simulation.run(_LONG_S).tenants["light"]

    many = [replace(flood(engine), name=f"flood-{n}") for n in range(int(floods))]
    return ratio(run(LIGHT, NOBODY), run(LIGHT, *many))


def ratio(alone: Seen, beside: Seen) -> dict[str, float]:
    first, second = _p_ms(alone, 99), _p_ms(beside, 99)
    return {
        "requests_alone": len(alone.first_tokens_s),
        "requests_beside": len(beside.first_tokens_s),
        "p50_alone_ms": round(_p_ms(alone, 50), 1),
        "p50_beside_ms": round(_p_ms(beside, 50), 1),
        "p99_alone_ms": round(first, 1),
        "p99_beside_ms": round(second, 1),
        "ratio": round(second / first, 3),
    }


def shares(heavy: Seen, light: Seen) -> dict[str, float]:
    found = heavy.served / light.served
    return {"wanted": 3.0, "found": round(found, 3), "off_percent": round(100 * (found / 3 - 1), 2)}


def _p_ms(seen: Seen, q: float) -> float:
    return 1000 * percentile(sorted(seen.first_tokens_s), q)
