"""`loraplex top`: one look, as text."""

from __future__ import annotations

from gateway.cli.top import frame


def test_a_frame_says_who_is_up_how_busy_and_what_is_where() -> None:
    replica = {
        "replica": "replica-0", "state": "up", "leaving": True, "load": 3, "limit": 9,
        "running": 2, "waiting": 1, "slots": 4, "pages_total": 512, "pages_free": 500,
        "tiers": {"gpu": 1, "host": 2, "disk": 5},
    }  # fmt: skip
    adapters = [
        {
            "adapter": f"a{n:02d}", "running": 2 if n == 0 else 0, "pinned": False,
            "in_slots": ["replica-0"] if n == 0 else [], "in_memory": [], "loading": [],
        }
        for n in range(20)
    ]  # fmt: skip
    text = frame({"replicas": [replica], "adapters": adapters})
    assert "1 of 1 replicas up, 2 running, 20 adapters" in text
    assert "up, leaving" in text
    assert "3 of 9" in text
    assert "1 of 4" in text
    assert "12 of 512" in text
    assert "and 8 more" in text


def test_an_empty_fleet_has_a_frame_too() -> None:
    assert "no replicas" in frame({"replicas": [], "adapters": []})
