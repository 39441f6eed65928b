"""The flood beside a light tenant on real replicas: `python -m loadtests.fair_replica --out FILE`.

Two replicas of a tiny base on the CPU, a store and a gateway, each a process. Both tenants have an
adapter of their own. Here a first token also takes longer because a batch is fuller, and because
two cores do all the work, the clients' as well: that is no matter of whose turn it is. So the light
tenant is measured three times: alone, beside one that asks for half of the places only, so that
nobody waits for any, and beside a flood 64 deep.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import orjson
import typer
import uvloop

from loadtests.fair_setting import DEEP
from loadtests.fair_simulation import Seen, Tenant
from loadtests.fair_trial import ratio
from loadtests.live_fleet import LiveFleet, Shape
from shared import tasks
from shared.clock import monotonic

SHAPE: Final = Shape(replicas=2, adapters=2, slots=2, host=2, capacity=16)
PLACES: Final = SHAPE.replicas * SHAPE.capacity
LIGHT: Final = Tenant(name="light", depth=3, every_s=0.1, prompt=(20, 60), output=(4, 16))
FLOODS: Final = {
    "half": Tenant(name="half", depth=PLACES // 2, prompt=(20, 60), output=(32, 128)),
    "flood": Tenant(name="flood", depth=PLACES + DEEP, prompt=(20, 60), output=(32, 128)),
}
_WARM_S: Final = 8.0


async def measure(seconds: float, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fair-") as folder:
        async with LiveFleet(Path(folder), SHAPE) as fleet:
            keys = {name: await fleet.tenant(name) for name in (LIGHT.name, *FLOODS)}

            async def run(*tenants: Tenant) -> dict[str, Seen]:
                seen = {tenant.name: Seen() for tenant in tenants}
                until = monotonic() + _WARM_S + seconds
                asking = [
                    tasks.spawn(
                        _ask(fleet, keys[t.name], t, Random(f"{seed}/{t.name}/{n}"), until, seen),
                        name="client",
                    )
                    for t in tenants
                    for n in range(t.depth)
                ]
                await asyncio.sleep(_WARM_S)
                for one in seen.values():
                    one.first_tokens_s.clear()
                await asyncio.wait(asking)
                for task in asking:
                    task.result()
                return seen

            alone = (await run(LIGHT))["light"]
            found: dict[str, Any] = {"seconds": seconds, "places": PLACES}
            for name, flood in FLOODS.items():
                seen = await run(LIGHT, flood)
                found[name] = ratio(alone, seen["light"]) | {
                    "its_p50_ms": ratio(seen[name], seen[name])["p50_alone_ms"],
                    "its_requests": len(seen[name].first_tokens_s),
                }
            return found


async def _ask(
    fleet: LiveFleet, key: str, tenant: Tenant, dice: Random, until: float, seen: dict[str, Seen]
) -> None:
    """One request after the other, on one connection, until that time."""
    host, port = fleet.url.removeprefix("http://").split(":")
    model = fleet.names[0 if tenant is LIGHT else 1]
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    while monotonic() < until:
        prompt, output = dice.randint(*tenant.prompt), dice.randint(*tenant.output)
        body = orjson.dumps(
            {
                "model": model,
                "prompt": "".join(dice.choices("abcdefgh ", k=prompt)),
                "max_tokens": output,
                "ignore_eos": True,
                "stream": True,
            }
        )
        began = monotonic()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (key.encode(), len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readuntil(b'"text":')
        seen[tenant.name].first_tokens_s.append(monotonic() - began)
        await reader.readuntil(b"\r\n0\r\n\r\n")
        if tenant.every_s:
            await asyncio.sleep(dice.expovariate(1 / tenant.every_s))
    writer.close()


def main(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the figures go, as JSON.")],
    seconds: Annotated[float, typer.Option(min=5, help="Of each of the three phases.")] = 40.0,
    seed: Annotated[int, typer.Option(help="Of all dice.")] = 1,
) -> None:
    """Measure, print and write."""
    found = uvloop.run(measure(seconds, seed))
    out.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    print(out.read_text(), end="")


if __name__ == "__main__":
    typer.run(main)
