"""The listing is what the tenant may use of what the fleet can serve."""

from __future__ import annotations

import openai
import pytest
from scripted import BASE, ScriptedReplica

NAMES = ("shout", "org/pirate:v2", "a b")


async def test_the_base_and_every_adapter_are_listed_with_their_parent(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0", adapters=NAMES)) as it, it.sdk() as sdk:
        listed = [model async for model in sdk.models.list()]
        assert {model.id for model in listed} == {BASE, *NAMES}
        for model in listed:
            extra = model.model_extra
            assert model.object == "model"
            assert model.created > 0
            assert extra["root"] == BASE
            assert extra["parent"] == (None if model.id == BASE else BASE)


@pytest.mark.parametrize(
    "path", ["org/pirate:v2", "org%2Fpirate:v2", "org%2fpirate%3Av2", "a%20b", "shout"]
)
async def test_one_model_may_be_asked_for_raw_or_escaped(fleet, path: str) -> None:
    async with fleet(ScriptedReplica("replica-0", adapters=NAMES)) as it:
        answer = await it.http.get(f"/v1/models/{path}")
        assert answer.status_code == 200
        assert answer.json()["id"] in NAMES
        assert answer.headers["x-request-id"]


async def test_what_a_tenant_may_not_use_is_not_there(fleet) -> None:
    async with (
        fleet(ScriptedReplica("replica-0", adapters=NAMES), models=("shout",)) as it,
        it.sdk() as sdk,
    ):
        assert [model.id async for model in sdk.models.list()] == ["shout"]
        forbidden = await it.http.get("/v1/models/org/pirate:v2")
        unknown = await it.http.get("/v1/models/org/pirate:v9")
        assert forbidden.status_code == unknown.status_code == 404
        assert forbidden.content.replace(b":v2", b":v9") == unknown.content
        with pytest.raises(openai.NotFoundError):
            await sdk.models.retrieve(BASE)


async def test_the_listing_asks_for_a_key(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it, it.sdk("lp-none") as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.models.list()
