"""The page in a real browser, on real runs: every view, by mouse and keyboard, in light and dark."""

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.browser.conftest import dashboard, until
from tests.lightning_rl.inspect.runs import open_store, write_run
from tests.lightning_rl.viewer.viewed import add_rollout, turn

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

VIEWS = {
    "runs": ("#/", ".curve svg"),
    "now": ("#/run/quickstart/now", ".account-bar i"),
    "rollouts": ("#/run/quickstart/rollouts", "a.row"),
    "groups": ("#/run/quickstart/groups", "table.list td a"),
    "tasks": ("#/run/quickstart/tasks", "table.list td a"),
    "config": ("#/run/quickstart/config", "table.list td"),
}


def ask(url: str, path: str, **query: Any) -> Any:
    with urllib.request.urlopen(f"{url}api/runs/{path}?{urlencode(query)}") as answer:
        return json.load(answer)


def first(url: str, run: str, **query: Any) -> str:
    """The id of the first rollout that fits."""
    return str(ask(url, f"{run}/rollouts", limit=1, **query)["rollouts"][0]["rollout_id"])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_drawn_without_an_error_and_fits_a_laptop(
    runs: str, watch: Callable[..., Any], view: str, theme: str
) -> None:
    seen = watch(theme)
    address, shows = VIEWS[view]
    page = seen.open(runs + address, shows)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == {
        "light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)",
    }[theme]  # fmt: skip
    seen.is_well(runs)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_fits_a_phone(runs: str, watch: Callable[..., Any], view: str) -> None:
    seen = watch()
    seen.page.set_viewport_size({"width": 400, "height": 800})
    address, shows = VIEWS[view]
    page = seen.open(runs + address, shows)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    seen.is_well(runs)


def test_rollouts_are_filtered_sorted_searched_and_opened_by_keyboard(runs: str, watch: Callable[..., Any]) -> None:
    seen = watch()
    page = seen.open(runs + "#/run/quickstart/rollouts", "a.row")
    page.keyboard.press("/")
    page.keyboard.type("group by")
    until(page, "document.querySelector('.count').textContent !== '' && location.hash.includes('text=group')")
    page.select_option("select[aria-label='mode']", "train")
    page.get_by_role("button", name="reward", exact=True).click()
    until(page, "location.hash.includes('sort=-reward') && location.hash.includes('mode=train')")
    until(page, "document.querySelectorAll('a.row').length > 3")
    assert set(page.locator("a.row .cell-mode").all_inner_texts()) == {"train"}
    address = page.url
    page.locator(".scroller").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    chosen = page.locator("a.row.chosen .cell-rollout_id").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector(".rollout-head")
    assert page.locator("h2").inner_text() == chosen
    page.go_back()
    page.wait_for_selector("a.row")
    assert page.url == address  # the filters are in the address
    assert page.locator("#search").input_value() == "group by"
    seen.is_well(runs)


def test_a_long_table_draws_what_is_seen_alone(runs: str, watch: Callable[..., Any]) -> None:
    page = watch().open(runs + "#/run/quickstart/rollouts", "a.row")
    for _ in range(12):
        page.evaluate("document.querySelector('.scroller').scrollTop += 5000")
        page.wait_for_timeout(120)
    assert page.evaluate("document.querySelector('.scroller').scrollTop") > 20_000
    assert page.locator("a.row").count() < 80


def test_a_rollout_is_read_down_to_its_tokens(runs: str, watch: Callable[..., Any]) -> None:
    seen = watch()
    name = first(runs, "quickstart", mode="train", sort="-advantage")
    page = seen.open(f"{runs}#/run/quickstart/rollout/{name}", ".call")
    assert "SELECT" in page.locator(".message.answer").first.inner_text()
    assert page.locator("svg .node.trained").count() == page.locator("article.call").count()
    page.keyboard.press("4")  # colour by logprob
    until(page, "location.hash.includes('colour=logprob') && document.querySelectorAll('.token.sampled').length > 1")
    token = page.locator(".token.sampled").nth(1)
    token.hover()
    until(page, "document.querySelector('.token-told').innerText.includes('token 1')")
    told = page.locator(".token-told").first.inner_text()
    assert re.search(r"token 1 · id \d+ · trained · sampler -?[\d.e-]+ \(p [\d.]+\) · trainer", told)
    assert "advantage +" in told
    assert "policy version" in told
    token.click()
    assert "token=1" in page.url
    again = seen.open(page.url, ".token.picked")  # a link to this very place
    assert "token 1" in again.locator(".token-told").first.inner_text()
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    assert "token 2" in page.locator(".token-told").first.inner_text()
    seen.is_well(runs)


@pytest.mark.parametrize(
    "colour", ["mask", "advantage", "logprob", "trainer", "difference", "ratio", "entropy", "version"]
)
def test_tokens_are_coloured_by_choice(runs: str, watch: Callable[..., Any], colour: str) -> None:
    seen = watch()
    name = first(runs, "quickstart", mode="train", sort="-advantage")
    page = seen.open(f"{runs}#/run/quickstart/rollout/{name}?colour={colour}", ".token.sampled")
    until(page, "document.querySelector('.legend-place').textContent.length > 3")
    coloured = page.locator(".token.sampled").evaluate_all("all => all.filter(one => one.style.backgroundColor).length")
    equal = colour in ("difference", "ratio")  # this run takes the sampler's logprobs for the trainer's
    assert (coloured > 0) is not equal
    seen.is_well(runs)


def test_a_call_is_copied_as_curl_and_as_json(runs: str, watch: Callable[..., Any]) -> None:
    page = watch().open(f"{runs}#/run/quickstart/rollout/{first(runs, 'quickstart', sort='-calls')}", ".call")
    page.locator("article.call").nth(1).get_by_role("button", name="curl").click()
    page.wait_for_selector("text=copied")
    curl = page.evaluate("navigator.clipboard.readText()")
    assert curl.startswith('curl "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY"')
    body = json.loads(curl.partition(" -d '")[2][:-1].replace("'\\''", "'"))
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    page.locator("article.call").nth(1).get_by_role("button", name="JSON").click()
    until(page, "navigator.clipboard.readText().then(text => text.startsWith('{'))")
    assert json.loads(page.evaluate("navigator.clipboard.readText()"))["number"] == 2


def test_the_calls_of_one_policy_can_be_looked_at_alone(tmp_path: Path, watch: Callable[..., Any]) -> None:
    talk = [
        turn("which steps?", "first this", model="planner", agent="planner", after=0),
        turn("first this", "done", model="executor", agent="worker", after=0),
    ]
    with open_store(tmp_path / "two") as store:
        add_rollout(store, "train-0", talk)
    with dashboard(str(write_run(tmp_path / "two"))) as url:
        seen = watch()
        page = seen.open(url + "#/run/two/rollout/train-0", "article.call")
        assert page.locator("article.call:visible").count() == 2
        chips = page.locator("article.call header .chip.info, article.call header .chip:not(.warn)").all_text_contents()
        assert "executor" in chips  # which its agent's tag does not say
        page.select_option("select[aria-label='model']", "executor")
        assert page.locator("article.call:visible header b").all_text_contents() == ["#2"]
        page.locator("aside svg text", has_text="#1").click()  # which is not among those
        assert page.locator("article.call:visible").count() == 2
        seen.is_well(url)


def test_a_group_and_a_task_stand_side_by_side(runs: str, watch: Callable[..., Any]) -> None:
    seen = watch()
    page = seen.open(runs + "#/run/quickstart/groups", "table.list td a")
    page.locator("table.list td a").first.click()
    page.wait_for_selector(".column .message")
    assert page.locator(".column").count() == 6
    assert page.locator(".strip-item").count() == 16
    page = seen.open(runs + "#/run/quickstart/tasks", "table.list td a")
    page.locator("table.list td a").first.click()
    page.wait_for_selector(".two-columns mark")
    assert "reward 0 → 1" in page.locator(".changed").inner_text()
    assert page.locator("mark.gone").count() + page.locator("mark.come").count() > 0
    seen.is_well(runs)


def test_a_graphs_branches_are_drawn_with_their_causes(runs: str, watch: Callable[..., Any]) -> None:
    seen = watch()
    page = seen.open(f"{runs}#/run/langgraph/rollout/{first(runs, 'langgraph')}", ".forest .node")
    assert page.locator(".forest .node").count() == 6  # three drafts, two ways on, one edited history
    assert page.locator(".forest .edge").count() == 2
    causes = page.locator(".forest text.cause").all_text_contents()
    assert any("edited text" in cause for cause in causes)
    assert re.search(r"calls \d, \d all continue call \d", page.locator("aside").inner_text())
    page.locator(".forest .node").nth(4).focus()
    page.keyboard.press("Enter")
    until(page, "location.hash.includes('call=5')")
    assert page.locator(".waterfall .bar.call").count() == page.locator(".waterfall .bar.engine").count() == 6
    seen.is_well(runs)


def test_images_are_seen_where_the_model_saw_them(runs: str, watch: Callable[..., Any]) -> None:
    seen = watch()
    page = seen.open(f"{runs}#/run/images/rollout/{first(runs, 'images')}", ".image img")
    until(page, "document.querySelectorAll('.image img').length === 3")
    assert page.locator(".image img").evaluate_all("all => all.every(one => one.naturalWidth > 8)")
    assert page.locator(".image img").first.get_attribute("src").startswith("data:image/png;base64,")
    seen.is_well(runs)


def test_curves_of_runs_lie_over_one_another_by_step_and_by_time(runs: str, watch: Callable[..., Any]) -> None:
    seen = watch()
    page = seen.open(runs + "#/", ".curve svg")
    assert page.locator("table.list").first.locator("tbody tr").count() == 3
    assert page.locator(".curve").first.locator("polyline, circle").count() > 2
    page.select_option("select[aria-label='by']", "seconds")
    until(page, "document.querySelector('.axes').textContent.includes(' s')")
    page.select_option("select[aria-label='add a metric']", "actor/grad_norm")
    page.wait_for_selector("text=gradient norm")
    assert page.locator("td.mono", has_text="actor_rollout_ref.model.path").count() == 1  # the configs differ there
    picture = page.locator(".curve svg").first
    picture.hover()
    assert re.search(r"s: ", page.locator(".curve .told").first.inner_text())
    seen.is_well(runs)


def test_the_theme_is_turned_by_a_key_and_keys_are_told(runs: str, watch: Callable[..., Any]) -> None:
    page = watch("light").open(runs + "#/run/quickstart/now", ".tile")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    page.keyboard.press("?")
    assert "search rollouts" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    page.wait_for_selector("a.row")


def test_an_address_that_leads_nowhere_says_so(runs: str, watch: Callable[..., Any]) -> None:
    page = watch().open(runs + "#/run/quickstart/rollout/nothing", "[role=alert]")
    assert "there is no rollout 'nothing'" in page.locator("[role=alert]").inner_text()
    page = watch().open(runs + "#/run/other/rollouts", "[role=alert]")
    assert "there is no run 'other' here" in page.locator("[role=alert]").inner_text()
