"""Labels are bounded, and a client cannot make series."""

from __future__ import annotations

from scripted import ScriptedReplica

from gateway.metrics import LABELS_MAX, Metrics, Names
from shared.messages import Usage


def test_the_first_names_keep_their_own_and_the_rest_share_one() -> None:
    names = Names(2)
    assert [names.of(name) for name in "abcab"] == ["a", "b", "other", "a", "b"]


def test_series_stay_bounded_whatever_comes() -> None:
    metrics = Metrics()
    for number in range(3 * LABELS_MAX):
        metrics.ended(
            f"t{number % 2}",
            f"a{number}",
            "ok",
            usage=Usage(1, 1),
            queue_s=0.0,
            first_token_s=None,
            total_s=0.1,
        )
    text = metrics.exposition()[0].decode()
    own = {line for line in text.splitlines() if line.startswith("loraplex_gateway_requests_total")}
    assert len(own) <= 4 * 2 * (LABELS_MAX + 1)
    assert 'adapter="other"' in text


async def test_an_unknown_model_makes_no_series(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        for number in range(5):
            assert (await it.chat(f"made-up-{number}")).status_code == 404
        text = (await it.http.get("/metrics")).text
        assert "made-up" not in text
        assert 'rejects_total{reason="model_not_found"} 5.0' in text
