"""Every view as axe-core judges it: WCAG 2.1 A and AA, and its best practices, in light and dark."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from tests.browser.test_pages import VIEWS, first

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(300)]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
# A row of the long table is a link, so that it opens in a new tab as any link does; axe would have it no row then.
LEFT_OUT = {"aria-allowed-role": {"enabled": False}}


def violations(page: Any) -> list[str]:
    """What axe finds, a line each, with the first place where it stands."""
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    options = {"runOnly": RULES, "rules": LEFT_OUT, "resultTypes": ["violations"]}
    found = page.evaluate("options => axe.run(document, options)", options)["violations"]
    return [f"{each['id']} ({each['impact']}): {each['help']}: {each['nodes'][0]['html']}" for each in found]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_accessible(runs: str, watch: Callable[..., Any], view: str, theme: str) -> None:
    address, shows = VIEWS[view]
    assert violations(watch(theme).open(runs + address, shows)) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("colour", ["mask", "advantage", "logprob", "difference", "entropy", "version"])
def test_a_rollout_in_colour_is_accessible(runs: str, watch: Callable[..., Any], colour: str, theme: str) -> None:
    name = first(runs, "quickstart", mode="train", sort="-advantage")
    page = watch(theme).open(f"{runs}#/run/quickstart/rollout/{name}?colour={colour}", ".token.sampled")
    assert violations(page) == []


def test_the_list_of_keys_is_accessible(runs: str, watch: Callable[..., Any]) -> None:
    page = watch().open(runs + "#/run/quickstart/now", ".account-bar i")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert violations(page) == []
