"""Who is measured for fairness, and on what: a light tenant, a flood, two with weights, engines."""

from __future__ import annotations

from typing import Final

from loadtests.fair_simulation import Tenant
from loadtests.places import Engine

DEEP: Final = 64  # requests of the flood that wait
LIGHT: Final = Tenant(name="light", depth=3, every_s=0.1, output=(4, 16))
NOBODY: Final = Tenant(name="none", depth=0)
ENGINES: Final = {
    "64 places": Engine(replicas=4, capacity=16, prefill_s=0.2, token_s=0.04),
    "128 places": Engine(replicas=4, capacity=32, prefill_s=0.2, token_s=0.04),
    "128 places, slow": Engine(replicas=4, capacity=32, prefill_s=0.8, token_s=0.04),
    "64 places, prompts in turn": Engine(
        replicas=4, capacity=16, prefill_s=0.05, prompt_token_s=0.0002, token_s=0.04
    ),
}
SMALL: Final = Engine(replicas=1, capacity=16)
WEIGHED: Final = (Tenant(name="three", depth=40, weight=3), Tenant(name="one", depth=40))


def flood(engine: Engine) -> Tenant:
    return Tenant(name="flood", depth=engine.replicas * engine.capacity + DEEP)
