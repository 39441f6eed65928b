"""An operator at the console, in a real browser, over a real fleet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_fleet import RunningFleet

pytestmark = pytest.mark.browser


def log_in(page: Any, fleet: RunningFleet, tab: str = "fleet") -> None:
    page.goto(f"{fleet.url}/console#{tab}")
    page.get_by_label("Admin key").fill(fleet.admin)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=tab).wait_for()


def shot(page: Any, name: str) -> None:
    """Kept beside this file, for people to look at."""
    page.screenshot(path=Path(__file__).parent / "screens" / f"{name}.png")


def ask(fleet: RunningFleet, model: str, key: str) -> httpx.Response:
    body = {"model": model, "prompt": "a", "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=30)


def test_a_wrong_key_is_refused_in_words_and_the_right_one_opens(
    page: Any, fleet: RunningFleet
) -> None:
    page.goto(f"{fleet.url}/console")
    page.get_by_label("Admin key").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    assert "needs its own key" in page.get_by_role("alert").inner_text()
    log_in(page, fleet)
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Admin key").wait_for()


def test_a_slot_changes_hands_before_the_operators_eyes(page: Any, fleet: RunningFleet) -> None:
    log_in(page, fleet)
    card = page.get_by_role("region", name=re.compile("Replica")).first
    card.wait_for()
    # a slot also shows how many requests run in it, for as long as they do
    names = page.locator(".slot:not(.free) .adapter")
    asked = [f"tuned-{number}" for number in range(11)]
    for adapter in asked:  # all are seen in one of eight slots, so some slot has had several
        assert ask(fleet, adapter, fleet.key("acme")).status_code == 200
        names.filter(has_text=re.compile(f"^{adapter}$")).first.wait_for()
    assert page.locator(".slot").count() == 8
    assert set(names.all_inner_texts()) <= set(asked)
    shot(page, "fleet")


def test_a_quota_moved_with_the_slider_is_enforced_at_once(page: Any, fleet: RunningFleet) -> None:
    log_in(page, fleet, "tenants")
    page.get_by_label("New tenant").fill("initech")
    page.get_by_role("button", name="Create").click()
    tenant = page.get_by_role("region", name="Tenant initech")
    tenant.get_by_role("button", name="New key").click()
    key = tenant.locator(".secret code").inner_text()
    assert ask(fleet, "tuned-0", key).status_code == 200
    slider = tenant.get_by_label(re.compile("Requests a minute"))
    slider.focus()
    page.keyboard.press("Home")  # one request a minute
    tenant.get_by_text("Requests a minute 1").wait_for()
    page.wait_for_timeout(1200)
    codes = [ask(fleet, "tuned-0", key).status_code for _ in range(3)]
    assert codes[-1] == 429
    shot(page, "tenants")
    slider.focus()
    page.keyboard.press("End")
    tenant.get_by_text("Requests a minute no limit").wait_for()
    page.wait_for_timeout(1200)
    assert ask(fleet, "tuned-0", key).status_code == 200


def test_a_bill_can_be_read_and_an_explanation_asked_for(page: Any, fleet: RunningFleet) -> None:
    fleet.cli("price", "set", "--input", "500", "--output", "1500")
    for _ in range(3):
        assert ask(fleet, "tuned-1", fleet.key("globex")).status_code == 200
    log_in(page, fleet, "usage")
    usage = page.get_by_role("region", name="Usage")
    usage.get_by_role("row", name=re.compile("globex tuned-1")).wait_for()
    said = [
        cell.inner_text()
        for cell in usage.get_by_role("row", name="globex").get_by_role("cell").all()
    ]
    [row] = [
        one
        for one in fleet.cli("usage", "--by", "tenant,adapter", "--json")
        if one["tenant"] == "globex"
    ]
    assert row["spend"] == pytest.approx(3 * (500 * row["prompt_tokens"] / 3 + 1500 * 2) / 1e6)
    assert said[:3] == ["globex", "tuned-1", "3"]
    assert float(said[-1]) == pytest.approx(row["spend"])
    assert "spend" in page.get_by_text("In all:").inner_text()
    shot(page, "usage")
    page.get_by_role("link", name="explain").click()
    page.get_by_label("Tenant").fill("acme")
    page.get_by_label("model").fill("tuned-1")
    page.keyboard.press("Enter")
    page.get_by_text("Chosen:").wait_for()
    assert page.get_by_role("region", name="Candidates").locator("tbody tr").count() == 2
    shot(page, "explain")


def test_the_adapters_page_shows_where_each_one_is(page: Any, fleet: RunningFleet) -> None:
    log_in(page, fleet, "adapters")
    table = page.get_by_role("region", name="Adapters")
    table.get_by_text("tuned-9").wait_for()
    assert table.locator("tbody tr").count() == 11
    page.get_by_label("Find").fill("tuned-3")
    assert table.locator("tbody tr").count() == 1
    page.get_by_label("Find").fill("")
    shot(page, "adapters")


def test_an_adapter_is_deployed_seen_to_arrive_and_rolled_back(
    page: Any, fleet: RunningFleet
) -> None:
    versions = {}
    log_in(page, fleet, "adapters")
    form = page.get_by_role("form", name="Deploy an adapter")
    for folder in ("tuned-3", "tuned-4"):
        path, base = fleet.adapters / folder, fleet.adapters.parent / "base"
        words = ("adapter", "check", str(path), "--base", str(base), "--json")
        versions[folder] = version = fleet.cli(*words)["digest"]
        for label, text in (("Deploy", "poet"), ("from", str(path)), ("version", version)):
            form.get_by_label(label, exact=True).fill(text)
        form.get_by_role("button", name="Deploy").click()
        status = page.get_by_role("status")
        status.get_by_text(f"poet is version {version[:12]} on replica-").wait_for()
        assert served(fleet, "poet") == version
    shot(page, "deployed")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name=f"Roll back to {versions['tuned-3'][:12]}").click()
    status.get_by_text(f"poet is version {versions['tuned-3'][:12]} on replica-").wait_for()
    assert served(fleet, "poet") == versions["tuned-3"]
    shot(page, "rolled-back")
    form.get_by_label("Deploy", exact=True).fill("poet")
    form.get_by_label("from", exact=True).fill("/nowhere")
    form.get_by_label("version", exact=True).fill("0" * 64)
    form.get_by_role("button", name="Deploy").click()
    status.get_by_text("poet was not taken. replica-").wait_for()
    status.get_by_text(f"poet@{versions['tuned-3'][:12]} still serves").wait_for()
    card = page.get_by_role("region", name="Adapter poet")
    card.get_by_role("row", name="0" * 12).get_by_text("failed", exact=True).wait_for()
    card.get_by_text("replica-0: ").wait_for()
    shot(page, "refused-version")
    form.get_by_label("Deploy", exact=True).fill("nobody")
    form.get_by_label("from", exact=True).fill("/nowhere")
    form.get_by_label("version", exact=True).fill("0" * 64)
    form.get_by_role("button", name="Deploy").click()
    status.get_by_text("nobody was not taken. replica-").wait_for()
    shot(page, "refused")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("region", name="Adapter nobody").get_by_role("button", name="Remove").click()
    page.get_by_role("button", name="nobody").wait_for(state="detached")


def served(fleet: RunningFleet, model: str) -> str:
    """The version that answers now."""
    reply = ask(fleet, model, fleet.key("acme"))
    assert reply.status_code == 200, reply.text
    return reply.headers["x-loraplex-adapter-version"].rpartition(":")[2]


def test_it_is_dark_for_who_wants_it_dark(page: Any, fleet: RunningFleet) -> None:
    page.emulate_media(color_scheme="dark")
    log_in(page, fleet)
    page.wait_for_timeout(2500)
    for element in ("body", ".card", ".plot", ".top", "button"):
        [red, green, blue] = background(page, element)
        assert red + green + blue < 200, element
    shot(page, "dark-fleet")
    for tab in ("adapters", "tenants", "usage"):
        page.get_by_role("link", name=tab).click()
        page.get_by_role("heading", name=tab).wait_for()
        page.wait_for_timeout(300)
        shot(page, f"dark-{tab}")


def background(page: Any, selector: str) -> list[int]:
    colour = page.locator(selector).first.evaluate("one => getComputedStyle(one).backgroundColor")
    return [int(part) for part in re.findall(r"\d+", colour)[:3]]


def test_a_narrow_screen_scrolls_tables_and_not_the_page(page: Any, fleet: RunningFleet) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    log_in(page, fleet)
    for tab in ("adapters", "tenants", "usage", "fleet"):
        page.get_by_role("link", name=tab).click()
        page.get_by_role("heading", name=tab).wait_for()
        page.wait_for_timeout(300)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, tab
        shot(page, f"narrow-{tab}")


def test_a_replica_is_drained_and_taken_back_with_the_keyboard(
    page: Any, fleet: RunningFleet
) -> None:
    log_in(page, fleet)
    card = page.get_by_role("region", name="Replica replica-1")
    card.get_by_role("button", name="Drain").focus()
    page.keyboard.press("Enter")
    card.get_by_text("draining").wait_for()
    card.get_by_role("button", name="Resume").focus()
    page.keyboard.press("Enter")
    card.get_by_role("button", name="Drain").wait_for()
