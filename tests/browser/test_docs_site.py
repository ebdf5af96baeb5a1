"""The built docs site (`make site`) in a real browser: diagrams, search, both themes, and nothing from elsewhere."""

import http.server
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.browser.conftest import until
from tests.pages import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
SITE = ROOT / "site"
DIAGRAMS = {"architecture/": 2, "tutorials/sql_agent/": 1}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Tests print nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    assert (SITE / "index.html").exists(), "there is no site: make site"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.smoke
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("page", ["", "reference/traces/", "notebooks/first_hour/", *DIAGRAMS])
def test_a_page_is_whole_without_the_network(url: str, watch: Callable[..., Any], page: str, theme: str) -> None:
    seen = watch(theme)
    opened = seen.open(url + page, "article h1")
    until(opened, f"document.querySelectorAll('.diagram svg').length === {DIAGRAMS.get(page, 0)}")
    assert opened.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[theme]
    opened.wait_for_timeout(300)
    seen.is_well(url, "blob:")


@pytest.mark.smoke
def test_every_diagram_is_drawn() -> None:
    """The pages above are those that have some."""
    pages = {
        f"{file.parent.relative_to(SITE)}/" for file in SITE.rglob("*.html") if 'class="diagram"' in file.read_text()
    }
    assert pages == set(DIAGRAMS)


def test_a_click_shows_a_diagram_at_its_own_size(url: str, watch: Callable[..., Any]) -> None:
    page = watch().open(url + "architecture/", ".diagram svg")
    width = "document.querySelector('.diagram svg').getBoundingClientRect().width"
    fits = page.evaluate(width)
    page.locator(".diagram").first.click()
    assert page.evaluate(width) > fits
    page.locator(".diagram").first.click()
    assert page.evaluate(width) == fits


@pytest.mark.smoke
def test_a_search_leads_to_the_page(url: str, watch: Callable[..., Any]) -> None:
    seen = watch()
    page = seen.open(url, "article h1")
    for _ in range(60):  # the page is there before the script that hears the key, and letters alone are its shortcuts
        page.keyboard.press("Control+k")
        page.wait_for_timeout(250)
        if page.evaluate("document.activeElement?.shadowRoot?.activeElement?.matches('input') ?? false"):
            break
    page.keyboard.type("resume a run", delay=20)
    page.get_by_text(re.compile(r"^\d+ results$")).wait_for(timeout=15_000)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{url}how-to/resume/**", timeout=15_000)
    seen.is_well(url, "blob:")
